"""Figures of `mtrain profile step` and `mtrain profile sparsity`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from mtrain_cli.records.step_breakdown import WAITS
from mtrain_cli.reporting import plots
from mtrain_cli.reporting.plots import Figure, FigureView, Trace, axis, layout
from mtrain_cli.reporting.report_source import ReportSource
from mtrain_cli.reporting.step_tables import short_name

_COLOURS = (
    *("#2f6fb5", "#d97706", "#4d9f6f", "#8c6bb1", "#7fb2e5", "#f7c873"),
    *("#a6d19f", "#d26fa5", "#7a5c3e", "#e6b8a2", "#5b5b5b", "#b8b8b8"),
)
RANKS = 64  # most bars in a figure
_CELLS = 60_000  # most cells in a heat map
Named = Sequence[tuple[str, dict[str, Any]]]  # (name of a run, content of its summary.json)


def step_figures(named: Named) -> list[Figure]:
    """Draw the parts of recorded steps, and the slowest kernels or operators."""
    note = "Means over the recorded steps. The parts add up to the step."
    title = "Breakdown of one training step"
    operations = "kernels" if all(document["gpu"] for _, document in named) else "operators"
    kernels = [FigureView((name,), *_kernels(document["top"])) for name, document in named]
    return [
        Figure("step", title, ("run",), _step_views(named), note),
        Figure(
            "kernels",
            f"Slowest {operations}",
            ("run",),
            kernels,
            "Self time, including overlapped time; mean over ranks.",
        ),
    ]


def _step_views(named: Named) -> list[FigureView]:
    parts = list(
        dict.fromkeys(
            part for _, document in named for rank in document["ranks"] for part in rank["parts"]
        )
    )

    def view(label: str, places: list[str], rows: Sequence[dict[str, float]]) -> FigureView:
        data = []
        for i, part in enumerate(parts):
            values = plots.numbers([row.get(part, 0.0) for row in rows])
            colour = "#c8352b" if part == WAITS else _COLOURS[i % len(_COLOURS)]
            if any(values):
                hover = f"%{{y}}: {part} %{{x:.4g}} ms"
                data.append(plots.bar(values, places, colour, hover, name=part))
        return FigureView((label,), data, _bars(len(places)))

    views = []
    if len(named) > 1:
        means = [
            {
                part: float(np.mean([rank["parts"].get(part, 0.0) for rank in document["ranks"]]))
                for part in parts
            }
            for _, document in named
        ]
        views.append(view("all runs", [escape(name) for name, _ in named], means))
    for name, document in named:
        shown = document["ranks"][:: -(-len(document["ranks"]) // RANKS)]
        places = [f"rank {rank['rank']}" for rank in shown]
        views.append(view(name, places, [rank["parts"] for rank in shown]))
    return views


def _kernels(rows: Sequence[dict[str, Any]]) -> tuple[list[Trace], dict[str, Any]]:
    trace = plots.bar(
        plots.numbers([row["ms"] for row in rows]),
        [f"{i}. {escape(short_name(row['name'], 34))}" for i, row in enumerate(rows, 1)],
        _COLOURS[0],
        "%{y}: %{x:.4g} ms, %{customdata[1]:,} calls, part %{customdata[0]}",
        customdata=[[escape(row["part"]), round(row["calls"])] for row in rows],
        showlegend=False,
    )
    return [trace], {**_bars(len(rows)), "margin": {"l": 10, "t": 36}}


def _bars(count: int) -> dict[str, Any]:
    x, y = plots.from_zero("ms per step"), {"autorange": "reversed", "automargin": True}
    return layout(170 + 30 * min(count, 24), x, y, barmode="stack", margin={"l": 10})


_QUANTITIES = (
    ("recall, mean of heads", "recall", np.mean),
    ("recall of the worst sampled query", "worst", np.min),
    ("density, mean of heads", "density", np.mean),
)
_MAPS = (
    *(("recall", "recall"), ("density", "density")),
    *(("slashes", "slashes"), ("columns", "columns")),
)


def sparsity_figures(sources: Sequence[ReportSource]) -> list[Figure]:
    """Draw recall and density by layer, and heat maps over layers and heads."""
    layers = [view for source in sources for view in _by_layer(source, len(sources) > 1)]
    heads = [view for source in sources for view in _by_head(source)]
    note = (
        "Recall: share of dense attention that the pattern keeps, over sampled queries. "
        "Density: share of all causal pairs."
    )
    title = "Recall and density by layer"
    return [
        Figure("sparsity", title, (), layers, note, together=True),
        Figure("heads", "Patterns by layer and head", ("run", "pattern", "quantity"), heads),
    ]


def _by_layer(source: ReportSource, several: bool) -> list[FigureView]:
    rows = source.sparsity
    shown = plots.evenly(sorted({(row["pattern"], row["step"]) for row in rows}), 12)
    layers = sorted({row["layer"] for row in rows})
    views = []
    for title, key, mean_of in _QUANTITIES:
        data = []
        for i, (pattern, step) in enumerate(shown):
            values: dict[int, list[float]] = {layer: [] for layer in layers}
            for row in rows:
                if (row["pattern"], row["step"]) == (pattern, step):
                    values[row["layer"]].append(row[key])
            y = [mean_of(values[layer]) if values[layer] else None for layer in layers]
            name = f"{pattern}, step {step}"
            data.append(plots.line(name, layers, y, _COLOURS[i % len(_COLOURS)]))
        shape = layout(
            300 + 8 * len(data),
            axis("layer", **_integers(layers)),
            plots.from_zero(key, tickformat=".0%" if key == "density" else ""),
            showlegend=True,
            margin={"t": 20 + 12 * len(data)},
        )
        views.append(FigureView((title, source.name) if several else (title,), data, shape))
    return views


def _by_head(source: ReportSource) -> list[FigureView]:
    views: list[FigureView] = []
    steps = sorted({row["step"] for row in source.sparsity})
    patterns = dict.fromkeys(row["pattern"] for row in source.sparsity)
    for pattern, step in ((p, s) for p in patterns for s in dict.fromkeys((steps[-1], steps[0]))):
        mine = [row for row in source.sparsity if (row["pattern"], row["step"]) == (pattern, step)]
        layers, heads = (sorted({row[key] for row in mine}) for key in ("layer", "head"))
        if not mine or len(layers) * len(heads) > _CELLS:
            continue
        for quantity, key in _MAPS:
            values = {(row["layer"], row["head"]): row[key] for row in mine}
            table = np.array([[values.get((layer, h)) for h in heads] for layer in layers], float)
            number = ".2%" if key in ("recall", "density") else ".5g"
            view = plots.heat_view(
                (source.name, f"{pattern}, step {step}", quantity),
                table,
                ("head", heads),
                ("layer", layers),
                quantity,
                f"layer %{{y}}, head %{{x}}: %{{z:{number}}}",
                most=1.0 if key == "recall" else 0.0,
            )
            views.append(view)
    return views


def _integers(places: Sequence[int]) -> dict[str, Any]:
    return plots.whole(places[-1] - places[0] + 1)
