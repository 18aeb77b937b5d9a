"""Views (labels, traces, layout) of `mtrain profile step` and `mtrain profile sparsity`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from mtrain_cli.records.step_breakdown import WAITS
from mtrain_cli.reporting.step_tables import short_name

View = tuple[tuple[str, ...], list[dict[str, Any]], dict[str, Any]]
_COLOURS = (
    *("#2f6fb5", "#d97706", "#4d9f6f", "#8c6bb1", "#7fb2e5", "#f7c873"),
    *("#a6d19f", "#d26fa5", "#7a5c3e", "#e6b8a2", "#5b5b5b", "#b8b8b8"),
)
RANKS = 64  # bars per figure
_CELLS = 60_000  # per heat map


def step_views(named: Sequence[tuple[str, dict[str, Any]]]) -> list[View]:
    """Breakdown of one step: all runs side by side, then the ranks of each run."""
    views: list[View] = []
    parts = list(
        dict.fromkeys(
            part for _, document in named for rank in document["ranks"] for part in rank["parts"]
        )
    )
    colours = {part: _COLOURS[i % len(_COLOURS)] for i, part in enumerate(parts)} | {
        WAITS: "#c8352b"
    }
    if len(named) > 1:
        means = [{part: _mean(document["ranks"], part) for part in parts} for _, document in named]
        views.append(
            (
                ("all runs",),
                _stacks([escape(name) for name, _ in named], means, parts, colours),
                _bars(len(named)),
            )
        )
    for name, document in named:
        shown = document["ranks"][:: -(-len(document["ranks"]) // RANKS)]
        places = [f"rank {rank['rank']}" for rank in shown]
        views.append(
            (
                (name,),
                _stacks(places, [rank["parts"] for rank in shown], parts, colours),
                _bars(len(shown)),
            )
        )
    return views


def kernel_views(named: Sequence[tuple[str, dict[str, Any]]]) -> list[View]:
    """The kernels or operators that take most time of a step."""
    views: list[View] = []
    for name, document in named:
        rows = document["top"]
        data = [
            {
                "type": "bar",
                "orientation": "h",
                "x": [_short(row["ms"]) for row in rows],
                "y": [
                    f"{i}. {escape(short_name(row['name'], 34))}" for i, row in enumerate(rows, 1)
                ],
                "marker": {"color": _COLOURS[0]},
                "customdata": [[escape(row["part"]), round(row["calls"])] for row in rows],
                "hovertemplate": "%{y}: %{x:.4g} ms, %{customdata[1]:,} calls, "
                "part %{customdata[0]}<extra></extra>",
                "showlegend": False,
            }
        ]
        views.append(((name,), data, {**_bars(len(rows)), "margin": {"l": 10, "t": 36}}))
    return views


def _mean(ranks: Sequence[dict[str, Any]], part: str) -> float:
    return float(np.mean([rank["parts"].get(part, 0.0) for rank in ranks]))


def _stacks(
    places: Sequence[str],
    rows: Sequence[dict[str, float]],
    parts: Sequence[str],
    colours: dict[str, str],
) -> list[dict[str, Any]]:
    data = []
    for part in parts:
        values = [_short(row.get(part, 0.0)) for row in rows]
        if any(values):
            data.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": part,
                    "x": values,
                    "y": list(places),
                    "marker": {"color": colours[part]},
                    "hovertemplate": f"%{{y}}: {part} %{{x:.4g}} ms<extra></extra>",
                }
            )
    return data


def _bars(count: int) -> dict[str, Any]:
    return {
        "barmode": "stack",
        "height": 170 + 30 * min(count, 24),
        "xaxis": {"title": {"text": "ms per step"}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "automargin": True},
        "margin": {"l": 10},
    }


_QUANTITIES = (
    ("recall, mean of heads", "recall", "mean"),
    ("recall of the worst sampled query", "worst", "min"),
    ("density, mean of heads", "density", "mean"),
)


def sparsity_views(name: str, rows: Sequence[dict[str, Any]]) -> list[View]:
    """Recall and density by layer, one line per pattern and measured step."""
    views: list[View] = []
    groups = sorted({(row["pattern"], row["step"]) for row in rows})
    shown = [
        groups[i]
        for i in np.unique(np.linspace(0, len(groups) - 1, min(len(groups), 12)).astype(int))
    ]
    layers = sorted({row["layer"] for row in rows})
    for title, key, reduction in _QUANTITIES:
        data = []
        for i, (pattern, step) in enumerate(shown):
            mine = [row for row in rows if (row["pattern"], row["step"]) == (pattern, step)]
            by_layer = [[row[key] for row in mine if row["layer"] == layer] for layer in layers]
            y = [
                _short(min(values) if reduction == "min" else sum(values) / len(values))
                if values
                else None
                for values in by_layer
            ]
            look = {
                "line": {"color": _COLOURS[i % len(_COLOURS)]},
                "marker": {"color": _COLOURS[i % len(_COLOURS)], "size": 6},
            }
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": f"{pattern}, step {step}",
                    "x": layers,
                    "y": y,
                    **look,
                }
            )
        layout = {
            "height": 300 + 8 * len(data),
            "xaxis": {"title": {"text": "layer"}, **whole(layers)},
            "showlegend": True,
            "yaxis": {
                "title": {"text": key},
                "rangemode": "tozero",
                "tickformat": ".0%" if key == "density" else "",
            },
            "margin": {"t": 20 + 12 * len(data)},
        }
        views.append(((title, name), data, layout))
    return views


def head_views(name: str, rows: Sequence[dict[str, Any]]) -> list[View]:
    """Maps over layers and heads, for the first and the last measured step."""
    views: list[View] = []
    steps = sorted({row["step"] for row in rows})
    for pattern in dict.fromkeys(row["pattern"] for row in rows):
        for step in dict.fromkeys((steps[-1], steps[0])):
            mine = [row for row in rows if (row["pattern"], row["step"]) == (pattern, step)]
            layers, heads = (sorted({row[key] for row in mine}) for key in ("layer", "head"))
            if not mine or len(layers) * len(heads) > _CELLS:
                continue
            for quantity, key in (
                ("recall", "recall"),
                ("density", "density"),
                ("diagonals", "slashes"),
                ("columns", "columns"),
            ):
                values = {(row["layer"], row["head"]): row[key] for row in mine}
                z = [[_short(values.get((layer, head))) for head in heads] for layer in layers]
                share = key in ("recall", "density")
                trace = {
                    "type": "heatmap",
                    "z": z,
                    "x": heads,
                    "y": layers,
                    "colorscale": "YlGnBu",
                    "reversescale": True,
                    "zmin": 0,
                    "colorbar": {
                        "title": {"text": quantity},
                        "thickness": 14,
                        **({"tickformat": ".0%"} if share else {}),
                    },
                    "hovertemplate": "layer %{y}, head %{x}: "
                    f"%{{z:{'.2%' if share else '.5g'}}}<extra></extra>",
                    **({"zmax": 1} if key == "recall" else {}),
                }
                layout = {
                    "height": 200 + 20 * min(40, len(layers)),
                    "xaxis": {"title": {"text": "head"}, **whole(heads)},
                    "yaxis": {"title": {"text": "layer"}, "autorange": "reversed", **whole(layers)},
                    "margin": {"t": 36},
                }
                views.append(((name, f"{pattern}, step {step}", quantity), [trace], layout))
    return views


def whole(places: Sequence[int]) -> dict[str, Any]:
    """Return ticks at integers only."""
    return (
        {"dtick": 1}
        if max(places, default=0) - min(places, default=0) < 20
        else {"tickformat": "d"}
    )


def _short(value: float | None) -> float | None:
    return None if value is None or not np.isfinite(value) else float(f"{value:.5g}")
