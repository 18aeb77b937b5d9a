"""A file is replaced as a whole, or stays as it was."""

from __future__ import annotations

import errno

import pytest

from mtrain_cli.config.documents import replace_text, replacing
from mtrain_cli.launch.failures import not_written


def test_a_file_is_replaced_only_when_it_is_complete(tmp_path):
    path = tmp_path / "notes.txt"
    replace_text(path, "old")
    with replacing(path) as draft:
        draft.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_an_error_names_the_file_and_not_its_draft(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as found:
        replace_text(tmp_path / "folder", "x")
    assert (found.value.filename, found.value.filename2) == (str(tmp_path / "folder"), None)
    with pytest.raises(OSError, match="full") as full, replacing(tmp_path / "file"):
        raise OSError(errno.ENOSPC, "full")
    assert full.value.filename == str(tmp_path / "file")
    with pytest.raises(OSError, match="other") as other, replacing(tmp_path / "file"):
        raise OSError(errno.EACCES, "denied", "other")
    assert other.value.filename == "other"


def test_an_error_without_a_number_keeps_its_text(tmp_path):
    path = tmp_path / "file"
    text = "1 requested and 0 written"  # as NumPy reports a full disk
    with pytest.raises(OSError, match=text) as found, replacing(path):
        raise OSError(text)
    assert "->" not in str(found.value)
    assert not_written(found.value, path) == f"{path}: could not be written ({text})"


def test_a_file_stays_if_writing_fails(tmp_path):
    path = tmp_path / "notes.txt"
    replace_text(path, "old")
    with pytest.raises(TypeError), replacing(path) as draft, draft.open("w") as file:
        file.writelines(["ne", 1])
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
