"""Figures of recorded steps and of sparsity have the numbers of their rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mtrain_cli.reporting.profile_figures import RANKS, sparsity_figures, step_figures


def step(ranks: int, scale: float = 1.0) -> dict[str, Any]:
    return {
        "gpu": True,
        "top": [
            {"name": "a & b", "ms": 3 * scale, "part": "attention", "calls": 4.0},
            {"name": "second", "ms": scale, "part": "loss", "calls": 2.0},
        ],
        "ranks": [
            {"rank": r, "parts": {"attention": scale * (r + 1), "loss": scale, "host": 0.0}}
            for r in range(ranks)
        ],
    }


def bars(view) -> dict[str, list[float]]:
    return {trace["name"]: list(trace["x"]) for trace in view.data}


def test_a_step_has_a_bar_of_every_part_and_rank():
    parts, kernels = step_figures([("run", step(2))])
    (view,) = parts.views
    assert bars(view) == {"attention": [1, 2], "loss": [1, 1]}, "parts without time have no bar"
    assert kernels.title == "Slowest kernels"
    (trace,) = kernels.views[0].data
    assert list(trace["x"]) == [3, 1]
    assert "a &amp; b" in trace["y"][0]


def test_several_runs_are_compared_by_means_over_their_ranks():
    parts, _ = step_figures([("<a>", step(3)), ("b", step(1, 10.0))])
    first = parts.views[0]
    assert first.labels == ("all runs",)
    assert bars(first) == {"attention": [2, 10], "loss": [1, 10]}
    assert list(first.data[0]["y"]) == ["&lt;a&gt;", "b"]
    assert [view.labels for view in parts.views[1:]] == [("<a>",), ("b",)]


@pytest.mark.parametrize(("ranks", "every"), [(RANKS, 1), (RANKS + 1, 2), (3 * RANKS, 3)])
def test_ranks_are_thinned_evenly(ranks, every):
    ((view,), _) = (figure.views for figure in step_figures([("run", step(ranks))]))
    assert list(view.data[0]["y"]) == [f"rank {n}" for n in range(0, ranks, every)]


def rows(pattern: str, at: int) -> list[dict[str, Any]]:
    """Two layers and heads; layer 1 keeps less."""
    return [
        {
            "pattern": pattern,
            "step": at,
            "layer": layer,
            "head": head,
            "recall": 0.9 - 0.2 * layer - 0.1 * head,
            "worst": 0.5 - 0.2 * layer - 0.1 * head,
            "density": 0.25 + 0.25 * head,
            "slashes": 3 + head,
            "columns": 10 * layer,
        }
        for layer in (0, 1)
        for head in (0, 1)
    ]


def test_a_layer_shows_the_mean_of_its_heads_and_its_worst_query():
    source = SimpleNamespace(name="run", sparsity=[*rows("p", 1), *rows("p", 5)])
    layers, _ = sparsity_figures([source])  # type: ignore[list-item]
    shown = {view.labels[0]: list(view.data[0]["y"]) for view in layers.views}
    assert shown["recall, mean of heads"] == pytest.approx([0.85, 0.65])
    assert shown["recall of the worst sampled query"] == pytest.approx([0.4, 0.2])
    assert shown["density, mean of heads"] == pytest.approx([0.375, 0.375])
    assert [trace["name"] for trace in layers.views[0].data] == ["p, step 1", "p, step 5"]


def test_heat_maps_are_of_the_last_and_the_first_step_by_layer_and_head():
    source = SimpleNamespace(
        name="run", sparsity=[row for at in (1, 3, 5) for row in rows("p", at)]
    )
    _, heads = sparsity_figures([source])  # type: ignore[list-item]
    assert list(dict.fromkeys(view.labels[1] for view in heads.views)) == ["p, step 5", "p, step 1"]
    found = {view.labels[2]: view.data[0]["z"] for view in heads.views[:4]}
    assert [list(row) for row in found["slashes"]] == [[3, 4], [3, 4]]
    assert [list(row) for row in found["columns"]] == [[0, 0], [10, 10]]
