"""`mtrain study`: names of tables as commands, files that a report shows, and mistakes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_extras.studies import published


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*words: str):
    return CliRunner().invoke(app, ["study", *words], env={"COLUMNS": "200"})


def test_the_list_is_also_json():
    found = json.loads(run("list", "--json").stdout)
    (masks,) = [table for table in found["tables"] if table["name"] == "magi-masks"]
    assert masks["paper"].startswith(found["groups"]["magi"])
    assert masks["what"] in run("list").stdout
    assert sorted(masks) == ["name", "paper", "what", "where"]
    assert [table["name"] for table in found["tables"]] == published.names()


def test_a_table_becomes_files_that_a_report_shows():
    found = run("magi-masks", "--out", "masks")
    assert found.exit_code == 0, found.output
    assert "redundant messages %" in found.stdout
    assert "figure only" in found.stdout
    summary = json.loads(Path("masks/summary.json").read_text())
    assert summary["kind"] == "study"
    assert summary["tables"][0]["name"] == "magi-masks"
    rows = list(csv.DictReader(Path("masks/study.csv").read_text().splitlines()))
    assert [row["row"] for row in rows] == ["causal, 4 workers", "sliding window 1K, 4 workers"]
    shown = CliRunner().invoke(app, ["report", "masks"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    assert "redundant messages %" in shown.stdout
    assert "redundant messages %" in Path("masks/report.html").read_text()
    as_json = CliRunner().invoke(app, ["report", "masks", "--json"])
    assert json.loads(as_json.stdout) == summary
    damaged = {**summary, "tables": 3}
    Path("masks/summary.json").write_text(json.dumps(damaged))
    refused = CliRunner().invoke(app, ["report", "masks"])
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)


def test_a_table_without_numbers_says_why():
    found = run("fig12", "--no-files")
    assert found.exit_code == 0
    assert "Neither the figure nor the text has numbers" in found.stdout
    assert not list(Path().iterdir())


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("published", "tabel3"), "tabel3: no such published table"),
        (("published", ""), "'': is empty; give a value"),
        (("table3", "--out", "x", "--no-files"), "--out x: --no-files writes no files"),
        (("table3", "--out", "other"), "--out other: holds another measurement"),
        (("table3", "--out", "file"), "--out file: is a file; give a folder"),
        (("table3", "--calibration", "nope"), "--calibration nope: no such calibration"),
    ],
)
def test_a_mistake_is_one_line(words, problem):
    Path("file").write_text("")
    Path("other").mkdir()
    Path("other/summary.json").write_text(json.dumps({"schema": 2, "kind": "imbalance"}))
    found = run(*words)
    assert found.exit_code == 2
    assert problem in found.output
    assert "Traceback" not in found.output
    assert len(found.output.strip().splitlines()) == 1


def test_shipped_profiles_hold_the_measured_degrees():
    from mtrain_extras.studies.published import read
    from mtrain_extras.studies.study_published import _measured

    rows = {row.name: row for row in read("table3").rows}
    value, where = _measured(rows["with zigzag"], "worker degree")
    assert value == pytest.approx(1.34, abs=0.005)  # docs/benchmarks.md, "How well balanced is it?"
    assert where == "4 x NVIDIA H200"
    assert _measured(rows["dense"], "worker degree") is None
    assert _measured(rows["with zigzag"], "speed-up") is None
