"""The group `mtrain study`: the name of a table stands for a command."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from mtrain_cli.commands.app import app


@pytest.mark.parametrize("words", [["table3"], ["published"], ["burst"]])
def test_a_name_shows_the_help_of_published(words):
    result = CliRunner().invoke(app, ["study", *words, "--help"])
    assert result.exit_code == 0
    assert "--calibration" in result.stdout


def test_the_group_shows_its_commands_and_refuses_others():
    result = CliRunner().invoke(app, ["study", "--help"])
    assert result.exit_code == 0
    for name in ("learning", "published", "list"):
        assert name in result.stdout


@pytest.mark.parametrize(
    ("word", "nearest"), [("burst-tabel1", "burst-table1"), ("learnin", "learning")]
)
def test_another_name_is_answered_with_commands_and_tables(word, nearest):
    result = CliRunner().invoke(app, ["study", word])
    assert result.exit_code == 2
    begin = f"mtrain: {word}: no such command or published table (did you mean {nearest}?); "
    assert result.output.startswith(f"{begin}allowed: ")
    assert len(result.output.splitlines()) == 1
    for name in ("learning", "list", "burst-table2", "table3", "magi", "all"):
        assert f", {name}" in result.output.replace("allowed: ", ", ")
