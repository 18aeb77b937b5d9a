"""A file is replaced as a whole, or stays as it was."""

from __future__ import annotations

import pytest

from mtrain_cli.config.atomic_files import replace_text, replacing


def test_a_file_is_replaced_only_when_it_is_complete(tmp_path):
    path = tmp_path / "notes.txt"
    replace_text(path, "old")
    with replacing(path) as draft:
        draft.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_stays_if_writing_fails(tmp_path):
    path = tmp_path / "notes.txt"
    replace_text(path, "old")
    with pytest.raises(TypeError), replacing(path) as draft, draft.open("w") as file:
        file.writelines(["ne", 1])
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
