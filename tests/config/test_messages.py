"""The lines about wrong command lines are those of messages.txt.

In this file, a command line begins with ``$``, and the lines about it follow. After an intended
change, record them with ``python tests/config/test_messages.py``.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from pathlib import Path

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError

RECORDED = Path(__file__).with_name("messages.txt")
COMMAND_LINES = [
    line.removeprefix("$ ")
    for line in RECORDED.read_text(encoding="utf-8").splitlines()
    if line.startswith("$ ")
]


def lines_about(command_line: str) -> list[str]:
    """Return the recorded form of a command line and of the lines about it."""
    try:
        compose(shlex.split(command_line))
    except ConfigError as error:
        return [f"$ {command_line}", *error.problems]
    return [f"$ {command_line}"]


def make_folder(folder: Path) -> None:
    """Make the folder and the file that command lines name."""
    (folder / "docs").mkdir()
    (folder / "README.md").touch()


def test_lines_about_wrong_command_lines_are_as_recorded(tmp_path, monkeypatch):
    make_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NOT_A_VARIABLE", raising=False)
    assert len(COMMAND_LINES) > 250
    written = [line for one in COMMAND_LINES for line in lines_about(one)]
    assert written == RECORDED.read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("command_line", ["mask=sliding_window", "sparsity=moba model=tiny_moe"])
def test_a_right_command_line_has_no_lines(command_line):
    assert lines_about(command_line) == [f"$ {command_line}"]


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"  # as tests/conftest.py does
    os.chdir(tempfile.mkdtemp())
    make_folder(Path())
    content = [line for one in COMMAND_LINES for line in lines_about(one)]
    RECORDED.write_text("\n".join(content) + "\n", encoding="utf-8")
