"""The group `mtrain study`, and its folders in `mtrain report`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_extras.studies.cells import Study
from mtrain_extras.studies.tiers import TIERS


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


def test_the_folder_of_a_study_is_shown(tmp_path):
    study = Study(tmp_path / "learning", TIERS["tiny"])
    study.folder.mkdir()
    study.save()
    result = CliRunner().invoke(app, ["report", str(study.folder), "--json"])
    assert json.loads(result.stdout)["tier"] == "tiny"
    assert not (study.folder / "report.html").exists()
    result = CliRunner().invoke(app, ["report", str(study.folder)])
    assert result.exit_code == 0, result.output
    assert "0 of 20 cells are finished." in result.stdout
    assert (study.folder / "report.html").is_file()
    (study.folder / "report.html").unlink()
    assert CliRunner().invoke(app, ["report", str(study.folder), "--no-html"]).exit_code == 0
    assert not (study.folder / "report.html").exists()
    result = CliRunner().invoke(app, ["report", str(study.folder), "--out", "x"])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
    assert "--out x: the page of a study is in its folder" in result.stderr
    for names in (["real-512k-4xh200", study.folder], [study.folder, "real-512k-4xh200"]):
        result = CliRunner().invoke(app, ["report", *map(str, names), "--no-html", "--no-csv"])
        assert (result.exit_code, result.stdout) == (2, "")
        assert " ".join(result.stderr.split()) == (
            f"mtrain: {study.folder}: a report shows a study of `mtrain study learning` alone; "
            f"give mtrain report {study.folder}, or leave it out"
        )
    (study.folder / "study.json").write_text('{"study": "learning", "tier": "z"}')
    result = CliRunner().invoke(app, ["report", str(study.folder)])
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
