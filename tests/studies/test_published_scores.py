"""Published scores: which results of `mtrain eval` stand beside a row."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from studies.test_study_published import run

from mtrain_cli.evaluation.results import ABOUT, RESULTS, Result
from mtrain_extras.studies.published import read
from mtrain_extras.studies.published_scores import scored_table

ONE = Result("k", "ruler:vt", 16384, "dense", "", 10, 2, 40.0, None, "%")


def measured(name: str, results) -> dict[tuple[str, str], tuple[float, str]]:
    table = scored_table(read(name), Path("runs/own"), results)
    values = [value for value in table.values if value.measured is not None]
    return {(value.row, value.quantity): (value.measured, value.measured_on) for value in values}


def test_scores_stand_beside_rows_of_their_inference_and_length():
    results = [
        replace(ONE, score=1.0),  # measured again below
        ONE,
        replace(ONE, task="ruler:fwe", score=60.0),
        replace(ONE, task="ruler:niah_single_2@book.txt", score=99.0),
        replace(ONE, attention="vertical_slash", length=32768, score=7.0),
        replace(ONE, task="lm-eval:vt", score=99.0),
    ]
    assert measured("llama-ruler", results) == {
        **{
            (f"{training}, dense inference", column): (50.0, f"runs/own, 2 of {count} results")
            for training in ("dense", "MTraining")
            for column, count in (("16K", 13), ("Avg.", 78))
        },
        **{
            (f"{training}, MInference", column): (7.0, f"runs/own, 1 of {count} results")
            for training in ("dense", "MTraining")
            for column, count in (("32K", 13), ("Avg.", 78))
        },
    }


def test_infinitebench_takes_the_longest_of_each_task():
    task = replace(ONE, task="infinitebench:code_debug")
    other = replace(task, task="infinitebench:passkey", score=99.0)  # not in the paper
    found = measured("table2", [replace(task, length=32768, score=20.0), task, other])
    assert found["dense, dense inference", "Code.Debug"] == (20.0, "runs/own, 1 of 1 results")
    assert found["dense, dense inference", "Avg."] == (20.0, "runs/own, 1 of 5 results")
    assert {column for _, column in found} == {"Code.Debug", "Avg."}


def test_a_published_table_of_scores_shows_results_and_no_prediction(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("own").mkdir()
    Path("own", ABOUT).write_text('{"model": "m"}')
    Path("own", RESULTS).write_text(json.dumps(asdict(ONE)) + "\n")
    shown = run("table1", "--results", "own", "--no-files")
    assert shown.exit_code == 0, shown.output
    assert "not predicted" in shown.stdout
    assert "40 (own, 1 of 13 results)" in shown.stdout
    assert "Errors" not in shown.stdout
    assert "; for " not in shown.stdout
    values = json.loads(run("table1", "--json", "--no-files").stdout)["tables"][0]["values"]
    assert [value["published"] for value in values][:2] == [72.51, 67.83]
    assert {value["predicted"] for value in values} == {value["measured"] for value in values}


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("table3", "--results", "."), "these tables hold no scores; give one of llama-ruler, "),
        (("table1", "--results", "gone"), "--results gone: no such folder"),
        (("table1", "--results", "."), "--results .: holds no results of `mtrain eval ruler`"),
    ],
)
def test_results_that_no_table_compares_are_refused(words, problem, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused = run(*words)
    assert (refused.exit_code, len(refused.output.strip().splitlines())) == (2, 1)
    assert problem in refused.output
