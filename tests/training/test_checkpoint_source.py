"""Which checkpoint a path names."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch.manifest import Manifest
from mtrain_cli.launch.run_dir import (
    CheckpointError,
    NoCheckpointError,
    checkpoints_of,
    find_source,
    run_of,
)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run runs/a with complete checkpoints of steps 9 and 10, and an incomplete one."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "a"
    for step in (9, 10):
        (folder / f"checkpoints/step-{step}").mkdir(parents=True)
        Manifest(step, 1, "2", {}, {}).write(folder / f"checkpoints/step-{step}")
    (folder / "checkpoints/step-11").mkdir()
    (folder / "resolved.yaml").write_text("")
    return folder


def test_a_run_and_its_checkpoints_folder_name_all_checkpoints_newest_first(run):
    newest = [run / "checkpoints/step-10", run / "checkpoints/step-9"]
    assert checkpoints_of(run) == checkpoints_of(run / "checkpoints") == newest


def test_any_other_folder_names_itself(run):
    for folder in (run / "checkpoints/step-9", run / "checkpoints/step-11"):
        assert checkpoints_of(folder) == [folder]


def test_each_problem_of_a_checkpoint_is_one_line():
    assert str(CheckpointError("a\nb: full", "c: full")) == "a\\nb: full\nc: full"
    assert str(NoCheckpointError("a\nb: gone", "c: gone")) == "a\\nb: gone\nc: gone"


def test_a_run_without_a_checkpoint_is_refused(tmp_path):
    (tmp_path / "resolved.yaml").write_text("")
    with pytest.raises(NoCheckpointError, match=r"holds no checkpoint$"):
        checkpoints_of(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(NoCheckpointError, match=r"checkpoints: holds no checkpoint$"):
        checkpoints_of(tmp_path)


def test_a_run_is_found_by_name_and_from_its_checkpoints(run):
    assert find_source(Path("a")) == Path("runs/a")
    for source in (run, run / "checkpoints", run / "checkpoints/step-9"):
        assert find_source(source) == source
        assert run_of(source) == run


@pytest.mark.parametrize("name", ["checkpoints/step-7", "checkpoints/step7", "stp", "logs"])
def test_a_checkpoint_that_does_not_exist_is_refused_with_those_that_do(run, name):
    (run / "logs").mkdir()
    with pytest.raises(NoCheckpointError) as caught:
        find_source(run / name)
    assert caught.value.problems == (
        f"{run / name}: no such checkpoint; the run has step-9, step-10",
    )


def test_a_folder_outside_a_run_is_refused_in_one_line(run, tmp_path):
    for source in (tmp_path, Path("b"), run.parent):
        with pytest.raises(ConfigError, match="not a run or a run's checkpoint") as caught:
            find_source(source)
        assert len(caught.value.problems) == 1


def test_the_module_does_not_import_torch():
    code = (
        "import sys, mtrain_cli.launch.run_dir\n"
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
