"""The figures of experts have the recorded shares, and stay small."""

from __future__ import annotations

import numpy as np
import pytest
from records.test_expert_loads import TOKENS, loads, profile
from reporting.test_expert_tables import with_experts
from reporting.training_runs import trained

from mtrain_cli.reporting import expert_figures
from mtrain_cli.reporting.figures import figures
from mtrain_cli.reporting.report_source import open_source


def drawn(sources, name):
    (figure,) = [figure for figure in figures(sources) if figure.name == name]
    return figure


def test_heat_maps_show_shares_by_layer_step_and_rank(tmp_path):
    source = open_source(profile(tmp_path, loads(), loads(TOKENS[::-1], step=5)))
    figure = drawn([source], "experts")
    assert [view.labels for view in figure.views] == [
        ("one", "mean of 2 steps"),
        ("one", "step 1"),
        ("one", "step 5"),
    ]
    mean, first, _ = (np.array(view.data[0]["z"]) for view in figure.views)
    assert first[0] == pytest.approx([12 / 24, 4 / 24, 2 / 24, 6 / 24], rel=1e-3)
    assert mean[0] == pytest.approx((first[0] + 0.25) / 2, rel=1e-3)
    assert {view.data[0]["zmax"] for view in figure.views} == {0.5}
    steps = drawn([source], "experts-steps")
    assert [view.labels[1] for view in steps.views] == ["0", "1"]
    assert np.array(steps.views[0].data[0]["z"]).T[0] == pytest.approx(first[0])
    assert steps.views[0].data[0]["x"] == ["1", "5"]
    ranks = drawn([source], "experts-ranks")
    assert ranks.views[0].data[0]["z"][0] == pytest.approx([5.5, 1.5, 2.5, 2.5])


def test_a_single_step_has_no_figure_over_steps(tmp_path):
    source = open_source(profile(tmp_path, loads()))
    assert [view.labels[1] for view in drawn([source], "experts").views] == ["step 1"]
    assert "experts-steps" not in {figure.name for figure in figures([source])}


def test_routing_is_drawn_over_steps_and_layers(tmp_path):
    source = with_experts("run", tmp_path)
    titles = [view.labels[0] for view in drawn([source], "routing").views]
    assert titles[-1] == "tokens dropped"
    assert len(titles) == 5
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


def test_large_tables_shrink_and_few_are_drawn(tmp_path, monkeypatch):
    source = open_source(profile(tmp_path, loads(), loads(step=2), loads(step=3)))
    monkeypatch.setattr(expert_figures, "NUMBERS", 20)
    monkeypatch.setattr(expert_figures, "_SIDE", 2)
    figure = drawn([source], "experts")
    assert len(figure.views) == 2
    assert figure.views[0].data[0]["x"] == ["0-1", "2-3"]
    assert "2 x 2 cells" in figure.note
