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
    result = CliRunner().invoke(app, ["study", "nope"])
    assert result.exit_code == 2
    assert "No such command 'nope'" in result.output
