"""A manifest proves that a checkpoint is complete, and names what is not."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mtrain_cli.launch.manifest import (
    NAME,
    FileEntry,
    Manifest,
    ManifestError,
    checksum,
    committed_steps,
    incomplete_after,
    plain_name,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a checkpoint of step 3 with two files."""
    checkpoint = tmp_path / "step-3"
    checkpoint.mkdir()
    for name, content in (("small", b"abc"), ("large", b"0123456789")):
        (checkpoint / name).write_bytes(content)
    files = {name: checksum(checkpoint / name) for name in ("small", "large")}
    Manifest(3, 2, "2.11", files, {"tokens": 96}).write(checkpoint)
    return checkpoint


def test_a_manifest_is_read_back_and_finds_no_problem(folder):
    manifest = Manifest.read(folder)
    assert (manifest.step, manifest.workers, manifest.trainer) == (3, 2, {"tokens": 96})
    assert manifest.files["small"] == FileEntry(3, 891568578)  # crc32 of "abc"
    assert manifest.problems(folder) == []


def test_each_damaged_file_is_named_by_the_worker_that_checks_it(folder):
    manifest = Manifest.read(folder)
    (folder / "large").write_bytes(b"0123456780")
    (folder / "small").unlink()
    assert manifest.problems(folder, 0, 2) == ["large was altered (its checksum differs)"]
    assert manifest.problems(folder, 1, 2) == ["small is missing"]
    (folder / "large").write_bytes(b"0")
    assert manifest.problems(folder)[0] == "large has 1 bytes instead of 10"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 4}, "was altered"),
        ({"schema": 9}, "schema 9"),
        ({"files": {"../other": {"bytes": 0, "crc32": 0}}}, "was altered"),
        ({"files": 7}, "cannot be read"),
    ],
)
def test_a_changed_manifest_is_refused(folder, changes, message):
    body = json.loads((folder / NAME).read_text())
    (folder / NAME).write_text(json.dumps(body | changes))
    with pytest.raises(ManifestError, match=message):
        Manifest.read(folder)


def test_a_manifest_that_names_files_outside_its_folder_is_refused(folder):
    Manifest(3, 2, "2.11", {"../other": FileEntry(0, 0)}).write(folder)
    with pytest.raises(ManifestError, match="not in this folder"):
        Manifest.read(folder)


def test_only_folders_with_a_manifest_count_newest_first(folder):
    for name in ("step-20", "step-5", "step-7.partial"):
        (folder.parent / name).mkdir()
    for name in ("step-20", "step-7.partial"):
        (folder.parent / name / NAME).touch()
    assert committed_steps(folder.parent) == [20, 3]
    assert committed_steps(folder.parent / "missing") == []


@pytest.mark.parametrize(
    ("name", "plain"),
    [("a.bin", True), ("", False), ("..", False), ("a/b", False), ("a\\b", False), (3, False)],
)
def test_a_plain_name_has_no_folder(name, plain):
    assert plain_name(name) is plain


@pytest.mark.parametrize("descending", [False, True])
def test_newer_folders_without_a_manifest_are_incomplete(folder, descending, monkeypatch):
    def listed(parent: Path) -> list[Path]:
        return sorted(map(parent.joinpath, os.listdir(parent)), reverse=descending)

    monkeypatch.setattr(Path, "iterdir", listed)
    for name in ("step-12", "step-5", "step-2", "step-7.tmp-1", "other"):
        (folder.parent / name).mkdir()
    assert incomplete_after(folder) == [folder.parent / "step-5", folder.parent / "step-12"]
    (folder.parent / "step-5" / NAME).touch()
    assert incomplete_after(folder) == [folder.parent / "step-12"]
    assert incomplete_after(folder.parent / "other") == []
