"""Sweeps: every point once; impossible points are rows; an interrupted sweep resumes."""

from __future__ import annotations

import json

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.simulation import scenario as scenarios
from mtrain_cli.simulation.scenario import PairSource, Scenario
from mtrain_cli.simulation.sweep import Sweep, points, shared_remarks
from mtrain_cli.simulation.sweep_axes import axes

LINE = ("seq=1k,32k", "nodes=1,2", "density=0.1")


def scenario_of(settings: tuple[str, ...], density: float | None, columns: int | None) -> Scenario:
    pairs = PairSource("local", density or 0.05, 64 if columns is None else columns)
    config = compose(["model=tiny", *settings, *pairs.sparsity()])
    return Scenario(config, pairs.problem(config))


def make(layouts=("striped",), exchanges=("ring",)) -> Sweep:
    return Sweep(
        points(axes(LINE), layouts, exchanges),
        lambda n: load_cluster("a100_4x8", nodes=n),
        scenario_of,
        None,
        "about",
    )


def test_axes_and_points():
    swept = axes(LINE)
    assert swept == {"seq": ["1k", "32k"], "nodes": ["1", "2"], "density": ["0.1"]}
    found = points(swept, ("zigzag", "striped"), ("ring", "all_gather"))
    assert len(found) == 16
    assert len({(tuple(p.values.items()), p.layout, p.exchange) for p in found}) == 16
    assert [p.inputs[0] for p in found] == [("seq=1k",)] * 8 + [("seq=32k",)] * 8, (
        "settings are outermost"
    )


def test_the_number_of_points_is_limited():
    with pytest.raises(ConfigError, match="6000 configurations to sweep"):
        points(
            {"seed": [str(i) for i in range(1000)]},
            ("zigzag", "striped"),
            ("ring", "all_gather", "ulysses"),
        )


def test_an_interrupted_sweep_resumes(tmp_path, monkeypatch):
    journal, evaluated = tmp_path / "sweep.jsonl", []
    evaluate = scenarios.evaluate
    monkeypatch.setattr(
        scenarios, "evaluate", lambda *a, **k: evaluated.append(a) or evaluate(*a, **k)
    )
    told: list[int] = []
    rows = list(make().rows(journal, told.append))
    assert told == [0, 1, 2, 3, 4]
    assert [row["workers"] for row in rows] == [8, 16, 8, 16]
    # Eight blocks for sixteen workers.
    assert "are too few for 16 workers" in rows[1]["cannot"]
    assert [row["density"] > 0.09 for row in rows if "cannot" not in row] == [True] * 3
    assert len(evaluated) == 3
    lines = journal.read_text().splitlines()
    assert len(lines) == 4
    journal.write_text("\n".join([*lines[:2], lines[2][:30]]))
    assert list(make().rows(journal, told.append)) == rows
    assert len(evaluated) == 5, "the two that were lost"
    assert list(make().rows(None, told.append)) == rows
    assert len(evaluated) == 8
    # Another cluster or option makes another sweep.
    other = Sweep(make().points, make().cluster_of, scenario_of, None, "other")
    list(other.rows(journal, told.append))
    assert len(evaluated) == 11
    assert json.loads(lines[0])["seconds"]["low"] < json.loads(lines[0])["seconds"]["high"]


def test_remarks_that_hold_for_all_rows_are_given_once():
    rows = [
        {"n": 1, "remarks": ["both", "one"]},
        {"n": 2, "cannot": "so it is"},
        {"n": 3, "remarks": ["three", "both"]},
    ]
    assert shared_remarks(rows) == (
        ["both"],
        [
            {"n": 1, "remarks": ["one"]},
            {"n": 2, "cannot": "so it is"},
            {"n": 3, "remarks": ["three"]},
        ],
    )
    assert shared_remarks(rows[1:2]) == ([], rows[1:2])
    assert shared_remarks(rows[:1]) == (["both", "one"], [{"n": 1}])
