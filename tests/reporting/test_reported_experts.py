"""Reports show the experts of profiles and of training runs, in tables, CSV files and the page."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from records.test_expert_loads import TOKENS, loads, profile
from reporting.training_runs import step, trained
from synthetic_records import Play, facts_of, ring, rows_of, write

from mtrain_cli.console import Console
from mtrain_cli.records.expert_loads import LOADS
from mtrain_cli.reporting.comparison import comparison
from mtrain_cli.reporting.experts import expert_table, routing_table
from mtrain_cli.reporting.html import write_page
from mtrain_cli.reporting.report_source import ReportSource, open_source
from mtrain_cli.reporting.sections import figures, files, show_sources


def with_experts(name: str, folder: Path, load: float = 2.0) -> ReportSource:
    """Return a training run of a model with four experts."""
    metrics = tuple(
        step(
            n,
            balance_loss=1.0 + n / 100,
            router_z=4.0,
            expert_load=load + n / 100,
            expert_load_by_layer=[1.5, load + n / 100],
            router_entropy=1.3,
        )
        for n in range(1, 21)
    )
    settings = {"model.moe.experts": 4, "model.num_layers": 3}
    return replace(trained(name, folder, settings=settings), metrics=metrics)


def shown(folder: Path, sources: list[ReportSource], width: int = 140) -> str:
    with (folder / "out").open("w") as file:
        show_sources(Console(file=file, width=width), sources)
    return (folder / "out").read_text()


def test_the_table_has_degrees_times_and_the_what_if(tmp_path):
    table = expert_table([open_source(profile(tmp_path, loads(), loads(step=2)))])
    (row,) = table.cells()
    assert dict(zip([column.heading for column in table.shown], row, strict=True)) == {
        "case": "one",
        "ep": "1",
        "worker imbalance": "1.00 ±0.00",
        "step imbalance": "1.50 ±0.58",
        "largest load": "1.50 ±0.58",
        "if dealt over 2 / 4 / 8": "1.17 / 1.50 / -",
        "worker imbalance, by time": "1.50",
        "ms forward / backward": "2 / 4",
        "n": "4",
    }


def test_the_routing_of_a_run_is_its_first_and_last_step(tmp_path):
    table = routing_table([with_experts("run", tmp_path), trained("dense", tmp_path)])
    (row,) = table.cells()
    assert row[:7] == ["run", "1.010", "1.200", "2.01", "2.20", "1.300", "1.300"]
    assert row[7:] == ["1.386", "4.000"], "even: the logarithm of 4"
    headings = [column.heading for column in table.shown]
    assert headings[1:3] == ["balance loss, first", "balance loss, last"]


def test_the_csv_file_has_the_share_and_load_of_each_expert(tmp_path):
    source = open_source(profile(tmp_path, loads(), loads(step=2)))
    (file,) = (table for table in files([source]) if table.name == "experts")
    assert len(file.rows) == 2 * 4
    assert file.rows[0]["share"] == pytest.approx(0.5)
    assert file.rows[0]["load"] == pytest.approx(2.0)


def test_runs_with_experts_compare_with_each_other_and_with_dense_runs(tmp_path):
    first, other = with_experts("a", tmp_path), with_experts("b", tmp_path, 4.0)
    ratios = {row.what: row.ratio for row in comparison([first, other])}
    assert ratios["largest expert load, last tenth"] == pytest.approx(4.195 / 2.195)
    assert ratios["routing entropy, last tenth"] == 1.0
    dense = trained("dense", tmp_path)
    for pair in ([first, dense], [dense, first]):
        assert "loss, last tenth of the steps" in {row.what for row in comparison(pair)}
        assert not [row for row in comparison(pair) if "expert" in row.what]
        write_page(tmp_path / "both.html", pair)
        assert "Routing" in shown(tmp_path, pair)


def test_profiles_with_experts_compare(tmp_path):
    uneven = TOKENS * [[[1, 1, 1, 1]], [[4, 1, 1, 1]]]
    a = open_source(profile(tmp_path / "a", loads()))
    b = open_source(profile(tmp_path / "b", loads(uneven)))
    ratios = {row.what: row.ratio for row in comparison([a, b])}
    assert ratios["experts: step imbalance"] == pytest.approx((2 + 16 / 7) / 2 / 1.5)
    assert ratios["experts: worker imbalance"] == 1.0
    plain = write(tmp_path / "c", [rows_of(Play(ring(2)))], [facts_of(ring(2), label="one")])
    whats = {row.what for row in comparison([a, open_source(plain)])}
    assert whats
    assert not [what for what in whats if "expert" in what]


def test_a_profile_without_loads_or_with_a_damaged_file_still_shows(tmp_path):
    assert open_source(profile(tmp_path / "old")).experts == ()
    folder = profile(tmp_path / "a", loads())
    source = open_source(folder)
    assert json.loads(json.dumps([each.to_json() for each in source.experts]))
    (folder / "experts" / "000000.parquet").unlink()
    (folder / LOADS).write_bytes(b"no")
    damaged = open_source(folder)
    assert damaged.experts == ()
    assert "loads of experts are not shown" in " ".join(damaged.remarks)
    assert damaged.cases


def drawn(sources, name):
    (figure,) = [figure for figure in figures(sources) if figure.name == name]
    return figure


def test_heat_maps_show_shares_by_layer(tmp_path):
    source = open_source(profile(tmp_path, loads(), loads(TOKENS[::-1], step=5)))
    figure = drawn([source], "experts")
    (view,) = figure.views
    assert view.labels == ("one", "mean of 2 steps")
    first = np.array([12 / 24, 4 / 24, 2 / 24, 6 / 24])
    assert view.data[0]["z"][0] == pytest.approx((first + 0.25) / 2, rel=1e-3)


def test_routing_is_drawn_over_steps_and_layers(tmp_path):
    source = with_experts("run", tmp_path)
    titles = [view.labels[0] for view in drawn([source], "routing").views]
    assert len(titles) == 4
    (view,) = drawn([source], "expert-load").views
    assert view.data[0]["y"] == [1, 2], "the first of three layers is dense"
    assert view.data[0]["z"][1][0] == pytest.approx(2.01)
    dense = {figure.name for figure in figures([trained("dense", tmp_path)])}
    assert not {"routing", "expert-load", "experts"} & dense
    (curve,) = drawn([trained("dense", tmp_path), source], "routing").views[0].data
    colours = {
        trace["name"]: trace["line"]["color"]
        for trace in drawn([trained("dense", tmp_path), source], "training").views[0].data
    }
    assert (curve["name"], curve["line"]["color"]) == ("run", colours["run"])
