"""Draw the experts of a model: shares of tokens by layer, step and rank, and a run's routing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mtrain_cli.records.expert_loads import ExpertAnalysis
from mtrain_cli.reporting import plots
from mtrain_cli.reporting.expert_tables import labelled_experts
from mtrain_cli.reporting.plots import Figure, FigureView
from mtrain_cli.reporting.report_source import ReportSource
from mtrain_cli.reporting.training_figures import curves, layers_over_steps

NUMBERS = 20_000  # most cells of all heat maps of one figure
_SIDE = 256  # most experts, layers, steps or ranks on an axis
_CURVES = (
    ("largest load, times the mean", "expert_load", True),
    ("balance loss, 1 = even", "balance_loss", False),
    ("entropy of routing, nats", "router_entropy", False),
    ("z: mean of logsumexp^2", "router_z", False),
)
_DROPPED = ("tokens dropped", "dropped", True)
Loads = Sequence[tuple[str, ReportSource, ExpertAnalysis]]  # (label, run, loads)


def expert_figures(sources: Sequence[ReportSource]) -> list[Figure]:
    """Return the figures of all models with experts."""
    loads = labelled_experts(sources)
    # With dense runs, too, so that a run has the same color in all curves.
    trained = [source for source in sources if source.metrics]
    return [*_routing_figures(trained), _shares(loads), _over_steps(loads), _ranks(loads)]


def _routing_figures(sources: Sequence[ReportSource]) -> list[Figure]:
    dropped = any(step.dropped for source in sources for step in source.metrics)
    quantities = [*_CURVES, *([_DROPPED] if dropped else [])]
    return [
        curves("routing", "Routing", sources, quantities),
        layers_over_steps(
            *("expert-load", "Largest load of an expert by layer"),
            sources,
            "expert_load_by_layer",
            "load",
            "step %{x}, layer %{y}: %{z:.3g} times the mean",
        ),
    ]


def _shares(loads: Loads) -> Figure:
    views = []
    for label, _, each in loads:
        size = max(1, len(each.layers) * each.experts)
        count = max(0, NUMBERS // (size * len(loads)) - 1)
        tables = [(f"mean of {len(each.steps)} steps", each.shares.mean(0))]
        if len(each.steps) == 1:
            tables = [(f"step {each.steps[0]}", each.shares[0])]
        elif count:
            chosen = plots.evenly(range(len(each.steps)), count)
            tables += [(f"step {each.steps[i]}", each.shares[i]) for i in chosen]
        most = max(float(table.max()) for _, table in tables)
        for name, table in tables:
            x, y = ("expert", range(each.experts)), ("layer", each.layers)
            views.append(_view((label, name), table, x, y, "share", most))
    note = f"Share of the layer's tokens that each expert computes.{_folded(loads)}"
    selectors = ("case", "step")
    return Figure("experts", "Tokens by expert and layer", selectors, views, note)


def _over_steps(loads: Loads) -> Figure:
    views = []
    for label, _, each in loads:
        if len(each.steps) < 2:
            continue
        steps = plots.evenly(range(len(each.steps)), _SIDE)
        for i, layer in _some_layers(each, len(steps), len(loads)):
            x = ("recorded step", [str(each.steps[at]) for at in steps])
            y = ("expert", range(each.experts))
            views.append(_view((label, str(layer)), each.shares[steps, i].T, x, y, "share"))
    note = f"Share of the layer's tokens that each expert computes.{_folded(loads)}"
    selectors = ("case", "layer")
    return Figure("experts-steps", "Tokens by expert over steps", selectors, views, note)


def _ranks(loads: Loads) -> Figure:
    views = []
    for label, _, each in loads:
        if len(each.ranks) < 2:
            continue
        for i, layer in _some_layers(each, len(each.ranks), len(loads)):
            x, y = ("expert", range(each.experts)), ("rank", each.ranks)
            views.append(_view((label, str(layer)), each.by_rank[i], x, y, "tokens"))
    note = f"Tokens of each rank, as means over recorded steps.{_folded(loads)}"
    selectors = ("case", "layer")
    return Figure("experts-ranks", "Tokens by expert and rank", selectors, views, note)


def _folded(loads: Loads) -> str:
    size = max((max(each.shares.shape[1:]) for _, _, each in loads), default=0)
    ranks = max((len(each.ranks) for _, _, each in loads), default=0)
    if max(size, ranks) <= _SIDE:
        return ""
    return f" Larger tables shrink to {_SIDE} x {_SIDE} cells, each the maximum of its group."


def _some_layers(each: ExpertAnalysis, cells: int, cases: int) -> list[tuple[int, int]]:
    """Return (place, number) of the layers to draw, so that the cells stay within `NUMBERS`."""
    size = max(1, min(cells, _SIDE) * min(each.experts, _SIDE) * cases)
    return plots.evenly(list(enumerate(each.layers)), max(1, NUMBERS // size))


def _view(
    labels: tuple[str, str],
    table: np.ndarray,
    x: tuple[str, Sequence[Any]],
    y: tuple[str, Sequence[Any]],
    unit: str,
    most: float = 0.0,
) -> FigureView:
    """Return a heat map of shares or tokens."""
    value = "%{z:.2%} of the tokens" if unit == "share" else "%{z:.4g} tokens"
    hover = f"{y[0]} %{{y}}, {x[0]} %{{x}}: {value}"
    return plots.heat_view(labels, table, x, y, unit, hover, side=_SIDE, most=most)
