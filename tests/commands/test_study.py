"""The group `mtrain study` names its experiments."""

from __future__ import annotations

from typer.testing import CliRunner

from mtrain_cli.commands.app import app


def test_the_group_shows_its_experiments():
    result = CliRunner().invoke(app, ["study", "--help"])
    assert result.exit_code == 0
    assert "learning" in result.stdout
