"""`mtrain report` finds its input, writes files into it, and refuses unreadable input in a line."""

from __future__ import annotations

import csv
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from reporting.training_runs import step as metrics_of
from synthetic_records import Play, recorded_once, ring
from typer.testing import CliRunner

from mtrain_cli import resource_dir
from mtrain_cli.commands.app import app
from mtrain_cli.commands.completion import complete_measured
from mtrain_cli.evaluation.results import Result, ResultsFolder

SLOW = Play(ring(4), lambda _d, r, _s: 2.0 if r == 2 else 1.0, link={"context": 0.2})


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def report(*words: str, code: int = 0) -> str:
    result = CliRunner(env={"COLUMNS": "100", "TERM": "dumb"}).invoke(
        app, ["report", *words], prog_name="mtrain"
    )
    assert result.exit_code == code, (result.output, result.exception)
    return result.stdout if code == 0 else result.stderr


def refused(*words: str) -> str:
    """Return the only line of output."""
    (line,) = report(*words, code=2).splitlines()
    return line


def measured(name: str, **more) -> Path:
    return recorded_once(Path("measurements", name), SLOW, **more)


def trained(name: str, steps: int = 5, wanted: int = 5) -> Path:
    path = Path("runs", name)
    path.mkdir(parents=True)
    (path / "environment.json").write_text(
        json.dumps(
            {"command": ["mtrain", "train"], "host": "there", "versions": {}, "gpus": ["A"] * 2}
        )
    )
    with (path / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            row = metrics_of(step, loss=5.0 / step, density_by_layer=[0.4, 0.6])
            file.write(row.to_json() + "\n")
    from mtrain_cli.composition.compose import compose
    from mtrain_cli.config.resolved_file import save

    save(compose([f"train.steps={wanted}"]), path / "resolved.yaml")
    return path


def test_a_report_is_shown_and_written_into_the_measurement():
    path = measured("one", layers=(0, 1), iterations=2)
    message = report("one")
    assert (
        "rank 2, a straggler: 2.0x the time of the others for the same work "
        "(slow or disturbed device; forward and backward, 5 steps)" in " ".join(message.split())
    )
    assert "1.60 ±0.00" in message
    assert str(path / "report.html") in message
    assert (path / "report.html").stat().st_size < 1.5e6
    assert sorted(p.name for p in (path / "tables").iterdir()) == [
        "causes.csv",
        "layers.csv",
        "steps.csv",
        "summary.csv",
        "time_by_rank.csv",
    ]
    with (path / "tables/summary.csv").open() as file:
        assert [row["direction"] for row in csv.DictReader(file)] == ["both", "forward", "backward"]
    assert max(map(len, message.splitlines())) <= 110


def test_the_newest_run_is_the_default():
    old, new = measured("old"), trained("new")
    for age, file in ((100, old / "summary.json"), (0, new / "metrics.jsonl")):
        os.utime(file, (os.stat(file).st_mtime - age,) * 2)
    assert report("--no-html", "--no-csv").startswith(str(new))
    assert report("latest", "--no-html", "--no-csv").startswith("new: training run")
    os.utime(old / "summary.json")
    assert report("--no-html", "--no-csv").startswith(str(old))


def test_an_empty_folder_shows_a_shipped_profile(folder):
    message = report()
    assert "nothing in runs/ or measurements/ here" in message
    assert "4 x NVIDIA H200" in message
    assert "vertical_slash striped" in message
    assert not list(folder.iterdir())
    # The shipped folder stays unchanged too.
    assert not list((resource_dir("profiles") / "real-512k-4xh200").glob("report.html"))
    assert "figures  mtrain report real-512k-4xh200 --out DIR" in message


def test_a_training_run_is_shown_with_its_profile():
    path = trained("mine", steps=3, wanted=9)
    recorded_once(path / "profile", SLOW)
    said = report("mine")
    assert "mine: training run, 2 x A" in said
    assert "step 3 of 9" in said
    assert "5.000" in said
    assert "1.667" in said
    assert "rank 2, a straggler: 2.0x" in " ".join(said.split())
    page = (path / "report.html").read_text()
    for figure in ("training", "density", "ranks"):
        assert f'id="figure-{figure}"' in page


def test_json_has_the_results_of_evaluations_with_their_names():
    folder = ResultsFolder.open(trained("mine") / "evaluation", "..")
    one = Result("k1", "niah", 512, "dense", "", 3, 2, 50.0, 5.0, "%", settings=("seed 1",))
    two = replace(one, key="k2", length=1024, score=70.0, settings=("seed 2",))
    for result in (one, two):
        folder.add_result(result)
    (found,) = json.loads(report("mine", "--json"))
    shown = [(r["name"], r["settings"], r["key"], r["score"], r["error"]) for r in found["results"]]
    assert shown == [
        ("dense, seed 1", ["seed 1"], "k1", 50.0, 5.0),
        ("dense, seed 2", ["seed 2"], "k2", 70.0, 5.0),
    ]
    assert found["results"][0]["attention"] == "dense"


def test_json_of_losses_that_diverged_is_strict():
    row = {
        "step": 2,
        "loss": float("nan"),
        "tokens": 9,
        "sequences": 1,
        "seconds": 1.0,
        "attention": "dense",
    }
    buckets = [{"begin": 0, "end": 512, "tokens": 9, "loss": float("inf")}]
    (trained("mine") / "evaluations.jsonl").write_text(json.dumps({**row, "buckets": buckets}))

    def refuse(name: str) -> None:
        raise AssertionError(name)

    (found,) = json.loads(report("mine", "--json"), parse_constant=refuse)
    (shown,) = found["evaluations"]
    assert (shown["loss"], shown["buckets"][0]["loss"]) == (None, None)


def test_a_step_has_no_tables_to_write_and_a_legend_of_its_ranks():
    shown = report("step-128k-4xh200", "--out", "page")
    assert "ms per step, mean of 4 ranks; rank: the one of max" in shown
    assert "page/report.html" in shown
    assert "tables" not in shown
    assert [file.name for file in Path("page").iterdir()] == ["report.html"]


def test_json_prints_nothing_else_and_writes_no_files():
    path = measured("one")
    (found,) = json.loads(report("one", "--json"))
    assert found["kind"] == "profile"
    assert found["cases"][0]["time"]["worker"]["mean"] == pytest.approx(1.6)
    assert found["cases"][0]["causes"][0]["rank"] == 2
    assert not (path / "report.html").exists()


def test_two_runs_are_compared_in_the_given_folder():
    measured("one", iterations=2)
    recorded_once(Path("measurements/two"), Play(ring(4)), iterations=2)
    assert refused("one", "two").startswith("mtrain: --out DIR: required for several runs")
    said = " ".join(report("one", "two", "--out", "both").split())
    assert "Compared with one" in said
    assert Path("both/report.html").is_file()
    with Path("both/tables/compare.csv").open() as file:
        rows = {row["what"]: row for row in csv.DictReader(file)}
    assert float(rows["worker imbalance, time"]["ratio"]) == pytest.approx(1 / 1.6, rel=1e-4)
    assert not any(value.startswith("'") for row in rows.values() for value in row.values())
    assert not Path("measurements/one/report.html").exists()


def test_a_folder_that_is_not_a_run_is_refused_in_one_line(folder):
    measured("before")
    Path("empty").mkdir()
    Path("other").mkdir()
    Path("other/notes.txt").write_text("x")
    Path("file.txt").write_text("x")
    kind = "no such run, measurement or shipped profile"
    assert f"{kind} (did you mean before?); allowed: fixed-512k-4xh200, " in refused("befroe")
    assert refused("nothing-like-it").endswith(
        "-4xh200, before, or the folder of a run or measurement"
    )
    assert "(did you mean before?)" in refused("./measurements/befor")
    assert refused("empty").endswith("are missing; contains nothing)")
    assert refused("other").startswith(
        "mtrain: other: not a run, profile or simulation "
        "(summary.json and metrics.jsonl are missing; contains notes"
    )
    assert refused("file.txt").startswith("mtrain: file.txt: not a profile of mtrain")
    del folder


def test_other_schemas_are_refused_in_one_line():
    import pyarrow.parquet as pq

    path = measured("mixed", iterations=2, complete=False)
    part = path / "records/000001.parquet"
    pq.write_table(pq.read_table(part).replace_schema_metadata({"mtrain_schema": "1"}), part)
    assert refused("mixed").startswith(
        "mtrain: measurements/mixed/records/000001.parquet: has schema 1, but its "
        "summary.json has 2"
    )
    path = measured("strange")
    document = json.loads((path / "summary.json").read_text())
    (path / "summary.json").write_text(json.dumps({**document, "cases": []}))
    assert "has rows of case 0, which summary.json does not list" in refused("strange")


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("summary.json", {"clock": "x"}),
        ("summary.json", {"sweep": [{"a": 1}]}),
        ("summary.json", {"predicted": 5}),
        ("summary.json", {"environment": [1]}),
        ("cases", {"cp": -2}),
        ("cases", {"steps": {"forward": "x"}}),
        ("cases", {"workers": 10**7}),
        ("cases", {"workers": 10**13}),
        ("cases", {"padded_seq": [4096]}),
        ("cases", {"iteration_ms": 3}),
        ("records.parquet", {"dur_us": float("inf")}),
        ("records.parquet", {"rank": None}),
        ("records.parquet", {"phase": None}),
    ],
)
def test_wrong_values_are_refused_in_one_line(file, change):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = measured("one")
    if file == "records.parquet":
        table = pq.read_table(path / file)
        ((name, value),) = change.items()
        values = [value, *table[name].to_pylist()[1:]]
        values = pa.array(values, table.schema.field(name).type)
        table = table.set_column(table.schema.get_field_index(name), name, values)
        pq.write_table(table, path / file)
    else:
        document = json.loads((path / "summary.json").read_text())
        (document["cases"][0] if file == "cases" else document).update(change)
        (path / "summary.json").write_text(json.dumps(document))
    line = refused("one")
    assert line.startswith("mtrain: measurements/one")
    assert line.endswith("measure again")


def test_facts_of_other_types_are_left_out():
    path = trained("mine")
    (path / "environment.json").write_text('{"gpus": 3, "versions": [1], "started": [2]}')
    assert "mine: training run" in report("mine")


def test_an_unwritable_folder_is_refused_before_reading():
    measured("one")
    Path("file").write_text("x")
    assert refused("one", "--out", "file/inside").startswith(
        "mtrain: --out file/inside: is not a folder and cannot be created"
    )


def test_names_are_completed():
    measured("one")
    trained("other")
    assert complete_measured("o") == ["one", "other"]
    assert complete_measured("on") == ["one"]
