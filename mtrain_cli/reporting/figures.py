"""Figures of a report as plain plotly data. A figure has several views; the reader picks one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from mtrain_cli.parallel.recording import (
    ARRANGE,
    ATTENTION,
    COLUMNS,
    COMPUTING,
    DIRECTIONS,
    GAP,
    INDEX,
    KINDS,
    MERGE,
    PASS,
    RECEIVE,
    WAIT,
)
from mtrain_cli.records.analysis import BINS, CaseAnalysis
from mtrain_cli.records.record_files import LINKS
from mtrain_cli.records.record_sums import EXPOSED, LATE
from mtrain_cli.reporting.breakdown_views import (
    head_views,
    kernel_views,
    sparsity_views,
    step_views,
)
from mtrain_cli.reporting.curves import held_out_views, training_views
from mtrain_cli.reporting.report_source import ReportSource
from mtrain_cli.reporting.sweeps import scaling_views
from mtrain_cli.reporting.tables import fold

# With the library and the training curves, these limits keep a page under 1.5 MB.
HEAT_NUMBERS = 60_000  # over all heat maps of a page
TIMELINE_BARS = 12_000  # over all timelines of a page
TIMELINE_RANKS, TIMELINE_LAYERS = 16, 6

COLOURS = {
    ATTENTION: "#2f6fb5",
    COLUMNS: "#7fb2e5",
    INDEX: "#8c6bb1",
    MERGE: "#4d9f6f",
    ARRANGE: "#a6d19f",
    GAP: "#b8b8b8",
    LATE: "#c8352b",
    EXPOSED: "#f0a030",
}
_LINK_COLOURS = {
    "": "#f0a030",
    "context": "#f0a030",
    "inner": "#f7c873",
    "outer": "#d97706",
    "heads": "#e6b8a2",
}
_LATE_LABEL, _EXPOSED_LABEL = "waiting for late peers", "exposed communication"


@dataclass(frozen=True)
class FigureView:
    """One choice of the reader: a label per selector of the figure, plotly traces and layout."""

    labels: tuple[str, ...]
    data: list[dict[str, Any]]
    layout: dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """A figure of the page.

    selectors: the name of each label of a view
    note: what a reader must know, such as what was left out
    together: whether to show all views side by side, each under its labels, without a choice
    """

    name: str
    title: str
    selectors: tuple[str, ...]
    views: list[FigureView]
    note: str = ""
    together: bool = False


def figures(sources: Sequence[ReportSource]) -> list[Figure]:
    """Return the figures that have anything to show, in the order of the page."""
    cases = [
        (_label(source, case, len(sources)), source, case)
        for source in sources
        for case in source.cases
    ]
    drawn: list[Figure | None] = [scaling_figure(sources)]
    trained = [source for source in sources if source.metrics]
    if trained:
        drawn += [held_out_figure(trained), training_figure(trained), density_figure(trained)]
    recorded = [(source.name, source.step) for source in sources if source.step is not None]
    drawn += step_figures(recorded) if recorded else []
    patterns = [source for source in sources if source.sparsity]
    drawn += sparsity_figures(patterns) if patterns else []
    if cases:
        drawn += [
            breakdown_figure(cases),
            heat_map_figure(cases),
            timeline_figure(cases),
            rank_figure(cases),
            distribution_figure(cases),
            layer_figure(cases),
        ]
    return [figure for figure in drawn if figure is not None and figure.views]


def scaling_figure(sources: Sequence[ReportSource]) -> Figure | None:
    """Draw the throughput of sweeps over the number of GPUs, as figure 6b of MTraining."""
    views = [
        FigureView(*view)
        for source in sources
        if source.swept
        for view in scaling_views(source.name, source.swept)
    ]
    note = (
        "Band: bounds of the fastest line, with all constants at their best or worst; hover for "
        "the bounds of the other lines. Crosses do not fit into memory."
    )
    selectors = ("sweep", "settings", "quantity")
    return Figure("scaling", "Scaling", selectors, views, note) if views else None


Named = Sequence[tuple[str, ReportSource, CaseAnalysis]]


def _label(source: ReportSource, case: CaseAnalysis, sources: int) -> str:
    return f"{source.name}: {case.label}" if sources > 1 else case.label


def breakdown_figure(cases: Named) -> Figure:
    """Draw the bins of all cases side by side, mean over ranks."""
    views = []
    directions = list(dict.fromkeys(name for _, _, case in cases for name in case.directions))
    for which in ("all passes", *directions):
        direction = None if which == "all passes" else which
        has = [
            (label, case)
            for label, _, case in cases
            if direction is None or direction in case.passes
        ]
        data = []
        for name in BINS:
            values = [case.bin_ms(name, direction) for _, case in has]
            if any(values):
                data.append(
                    _bar([_folded(label) for label, _ in has], values, name, horizontal=True)
                )
        layout = {
            "barmode": "stack",
            "height": 160 + 40 * len(has),
            "xaxis": {
                "title": {"text": "ms per iteration"},
                "rangemode": "tozero",
            },
            "yaxis": {"autorange": "reversed", "automargin": True},
            "margin": {"l": 10},
        }
        views.append(FigureView((which,), data, layout))
    title = "Time breakdown of attention"
    note = "Means over workers. Exposed: communication that nothing overlaps, by link."
    return Figure("cases", title, ("passes",), views, note)


_HEATS = (
    ("attention, ms", "attention", "ms"),
    ("whole step, ms", "elapsed", "ms"),
    (f"{_LATE_LABEL}, ms", LATE, "ms"),
    (f"{_EXPOSED_LABEL}, ms", EXPOSED, "ms"),
    ("work: pairs", "pairs", "pairs"),
    ("work: blocks", "blocks", "blocks"),
)


def heat_map_figure(cases: Named) -> Figure:
    tables = [
        (label, name, quantity, unit, getattr(analysis, key))
        for label, _, case in cases
        for name, analysis in case.passes.items()
        for quantity, key, unit in _HEATS
    ]
    tables = [table for table in tables if table[4].any() or table[3] == "ms"]
    side = max(16, int((HEAT_NUMBERS / max(1, len(tables))) ** 0.5))
    views, thinned = [], False
    for label, direction, quantity, unit, table in tables:
        small, folded = fold(table, side)
        thinned |= folded
        workers, steps = (-(-table.shape[axis] // small.shape[axis]) for axis in (0, 1))
        trace = {
            "type": "heatmap",
            "z": _numbers(small),
            "x": _positions(table.shape[1], steps),
            "y": _positions(table.shape[0], workers),
            "colorscale": "YlOrRd" if unit == "ms" else "YlGnBu",
            "reversescale": True,
            "zmin": 0,
            "zmax": float(small.max(initial=0)) or 1.0,
            "colorbar": {"title": {"text": unit}, "thickness": 14},
            "hovertemplate": f"worker %{{y}}, step %{{x}}: %{{z:.4g}} {unit}<extra></extra>",
        }
        layout = {
            "height": 190 + 22 * min(24, max(4, small.shape[0])),
            "xaxis": {"title": {"text": "step of the schedule"}, **_whole(small.shape[1])},
            "yaxis": {
                "title": {"text": "worker"},
                "autorange": "reversed",
                **_whole(small.shape[0]),
            },
        }
        views.append(FigureView((label, direction, quantity), [trace], layout))
    note = "Means over samples."
    if thinned:
        note += f" Larger tables shrink to {side} x {side} cells, each the maximum of its group."
    selectors = ("case", "pass", "quantity")
    return Figure("heat", "Attention by worker and step", selectors, views, note)


def timeline_figure(cases: Named) -> Figure | None:
    """Draw one iteration: the computing stream of each rank, and below it its incoming messages."""
    views, notes = [], []
    budget = TIMELINE_BARS // max(1, len(cases))
    for label, source, case in cases:
        chosen = _spread(case.layers, TIMELINE_LAYERS)
        rows = _rows(source, case, chosen)
        shown = _ranks_shown(case)
        passes = [(layer, d) for layer in chosen for d in case.directions]
        each = budget // max(1, len(passes))
        cut = 0
        for layer, direction in passes:
            mine = (
                (rows["layer"] == layer)
                & (rows["direction"] == DIRECTIONS.index(direction))
                & np.isin(rows["rank"], shown)
            )
            view, left_out = _timeline(
                {name: values[mine] for name, values in rows.items()}, shown, each
            )
            cut += left_out
            if view is not None:
                views.append(FigureView((label, f"layer {layer}, {direction}"), *view))
        remark = f"iteration {case.typical}, with the median time of its passes"
        if len(shown) < len(case.present):
            remark += f"; {len(shown)} of {len(case.present)} ranks"
        if len(chosen) < len(case.layers):
            remark += f"; {len(chosen)} of {len(case.layers)} layers"
        if cut:
            remark += f"; without the {cut:,} shortest phases"
        notes.append(
            f"{label}: {remark}." if len(cases) > 1 else f"{remark[0].upper()}{remark[1:]}."
        )
    note = " ".join(notes[:4]) + (
        f" Likewise for {len(notes) - 4} more cases." if len(notes) > 4 else ""
    )
    return (
        Figure("timeline", "Timeline of one iteration", ("case", "pass"), views, note)
        if views
        else None
    )


def _rows(source: ReportSource, case: CaseAnalysis, layers: Sequence[int]) -> dict[str, np.ndarray]:
    assert source.recorded is not None
    names = (
        "case",
        "iteration",
        "micro",
        "layer",
        "direction",
        "step",
        "rank",
        "phase",
        "link",
        "start_us",
        "dur_us",
        "late_us",
        "peer",
    )
    parts = []
    for batch in source.recorded.batches(names):
        mine = (
            (batch["case"] == case.number)
            & (batch["iteration"] == case.typical)
            & np.isin(batch["layer"], layers)
        )
        if mine.any():
            parts.append({name: batch[name][mine] for name in names})
    rows = {name: np.concatenate([part[name] for part in parts]) for name in names}
    first = rows["micro"] == rows["micro"].min()
    return {name: values[first] for name, values in rows.items()}


def _ranks_shown(case: CaseAnalysis) -> list[int]:
    """Return the ranks named in causes, and others at even distances."""
    blamed = [
        cause.rank for cause in case.causes if cause.rank is not None and cause.rank in case.present
    ][:4]
    rest = [rank for rank in case.present if rank not in blamed]
    return sorted({*blamed, *_spread(rest, TIMELINE_RANKS - len(blamed))})


def _timeline(
    rows: dict[str, np.ndarray], ranks: Sequence[int], most: int
) -> tuple[tuple[list[dict], dict], int] | tuple[None, int]:
    if not len(rows["rank"]):
        return None, 0
    zero = rows["start_us"][rows["phase"] == KINDS.index(PASS)].min(initial=np.inf)
    zero = rows["start_us"].min() if not np.isfinite(zero) else zero
    passes = rows["phase"] == KINDS.index(PASS)
    whole = {name: values[passes] for name, values in rows.items()}
    keep = np.isin(
        rows["phase"], [KINDS.index(kind) for kind in (*COMPUTING, RECEIVE) if kind != GAP]
    ) & (rows["dur_us"] > 0)
    left_out = 0
    if keep.sum() > most:
        candidates = np.flatnonzero(keep)
        longest = candidates[np.argsort(-rows["dur_us"][candidates], kind="stable")[:most]]
        left_out = len(candidates) - len(longest)
        keep[:] = False
        keep[longest] = True
    rows = {name: values[keep] for name, values in rows.items()}
    place = {rank: i for i, rank in enumerate(ranks)}
    y = np.array([place[rank] for rank in rows["rank"].tolist()], float)
    start, duration, late = (
        (rows[name] - base) / 1e3
        for name, base in (("start_us", zero), ("dur_us", 0), ("late_us", 0))
    )
    waits = rows["phase"] == KINDS.index(WAIT)
    late = np.where(waits, np.clip(late, 0, duration), 0)
    # Gaps show as the part of the pass that no phase covers.
    under = np.array([place[rank] for rank in whole["rank"].tolist()], float)
    all_of_it = np.ones(len(under), bool)
    data = [
        _spans(
            whole,
            all_of_it,
            under,
            (whole["start_us"] - zero) / 1e3,
            whole["dur_us"] / 1e3,
            GAP,
            COLOURS[GAP],
        )
    ]
    data[0]["hoverinfo"] = "skip"
    del data[0]["hovertemplate"]
    for kind in (kind for kind in COMPUTING if kind != GAP):
        mine = rows["phase"] == KINDS.index(kind)
        if kind != WAIT:
            data.append(_spans(rows, mine, y, start, duration, kind, COLOURS[kind]))
            continue
        data.append(
            _spans(
                rows,
                mine & (late > 0),
                y,
                start,
                late,
                _LATE_LABEL,
                COLOURS[LATE],
                "for rank %{customdata[1]}",
            )
        )
        for link in sorted(set(rows["link"][mine].tolist())):
            exposed = mine & (rows["link"] == link) & (duration - late > 0)
            name = _exposed_label(LINKS[link])
            colour = _LINK_COLOURS[LINKS[link]]
            data.append(
                _spans(
                    rows,
                    exposed,
                    y,
                    start + late,
                    duration - late,
                    name,
                    colour,
                    "from rank %{customdata[1]}",
                )
            )
    for link in sorted(set(rows["link"][rows["phase"] == KINDS.index(RECEIVE)].tolist())):
        mine = (rows["phase"] == KINDS.index(RECEIVE)) & (rows["link"] == link)
        trace = _spans(
            rows,
            mine,
            y + 0.36,
            start,
            duration,
            f"message, {LINKS[link]}",
            "#5b5b5b" if link % 2 else "#9a8c7a",
            "from %{customdata[1]}",
        )
        data.append({**trace, "width": 0.14, "opacity": 0.8})
    layout = {
        "barmode": "overlay",
        "bargap": 0,
        "height": 150 + 30 * len(ranks),
        "xaxis": {"title": {"text": "ms since the pass started"}},
        "yaxis": {
            "tickvals": list(range(len(ranks))),
            "ticktext": [f"rank {rank}" for rank in ranks],
            "autorange": "reversed",
        },
        "hovermode": "closest",
    }
    return ([trace for trace in data if trace["x"]], layout), left_out


def _spans(
    rows: dict[str, np.ndarray],
    mine: np.ndarray,
    y: np.ndarray,
    start: np.ndarray,
    duration: np.ndarray,
    name: str,
    colour: str,
    more: str = "",
) -> dict[str, Any]:
    peers = rows["peer"][mine].tolist()
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "x": _numbers(duration[mine]),
        "base": _numbers(start[mine], 6),
        "y": _numbers(y[mine]),
        "width": 0.5,
        "marker": {"color": colour},
        "customdata": [
            [step, "several" if peer < 0 else peer]
            for step, peer in zip(rows["step"][mine].tolist(), peers, strict=True)
        ],
        "hovertemplate": f"{name}, step %{{customdata[0]}}: %{{x:.3f}} ms {more}<extra></extra>",
    }


def rank_figure(cases: Named) -> Figure:
    """Draw the bins of every rank as a stacked bar."""
    views = []
    for label, _, case in cases:
        for which in (
            ("all passes", *case.directions) if len(case.directions) > 1 else case.directions
        ):
            chosen = slice(None) if which == "all passes" else [case.directions.index(which)]
            table = case.bins[chosen].sum(0)[case.present]
            data = [
                _bar(case.present, table[:, i], name)
                for i, name in enumerate(BINS)
                if table[:, i].any()
            ]
            layout = {
                "barmode": "stack",
                "height": 380,
                "bargap": 0.15 if len(case.present) < 40 else 0,
                "xaxis": {"title": {"text": "rank"}, **_whole(len(case.present))},
                "yaxis": {"title": {"text": "ms per iteration"}, "rangemode": "tozero"},
            }
            views.append(FigureView((label, which), data, layout))
    return Figure("ranks", "Time breakdown by rank", ("case", "passes"), views)


def distribution_figure(cases: Named) -> Figure:
    """Draw attention time across workers and across steps, as figures 12 and 13 of MTraining."""
    views, thinned = [], False
    for label, _, case in cases:
        for direction, analysis in case.passes.items():
            for scope, axis, table in (
                ("across the workers of a step", "step of the schedule", analysis.across_workers),
                ("across the steps of a worker", "worker", analysis.across_steps),
            ):
                at = np.array(_spread(range(len(table)), 64))
                thinned |= len(at) < len(table)
                low, first, median, third, high = (_numbers(column) for column in table[at].T)
                trace = {
                    "type": "box",
                    "x": at.tolist(),
                    "lowerfence": low,
                    "q1": first,
                    "median": median,
                    "q3": third,
                    "upperfence": high,
                    "marker": {"color": COLOURS[ATTENTION]},
                    "line": {"width": 1.2},
                    "showlegend": False,
                }
                layout = {
                    "height": 340,
                    "xaxis": {"title": {"text": axis}, **_whole(len(at))},
                    "yaxis": {"title": {"text": "ms of attention"}, "rangemode": "tozero"},
                }
                views.append(FigureView((label, direction, scope), [trace], layout))
    note = (
        "Box: quartiles; line: median; whiskers: minimum and maximum, over the samples and the "
        "workers or steps."
    )
    if thinned:
        note += " Shows 64 boxes at even distances."
    selectors = ("case", "pass", "scope")
    return Figure("spread", "Distribution of attention time", selectors, views, note)


def layer_figure(cases: Named) -> Figure | None:
    views = []
    for label, _, case in cases:
        for direction, analysis in case.passes.items():
            if len(analysis.layers) < 2:
                continue
            x = [row["layer"] for row in analysis.layers]
            data = [
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "name": name,
                    "x": x,
                    "y": _numbers(np.array([row[key] for row in analysis.layers])),
                    "line": {"color": colour},
                }
                for name, key, colour in (
                    ("pass, slowest worker", "ms", "#333333"),
                    ("attention", "attention_ms", COLOURS[ATTENTION]),
                    (_LATE_LABEL, "late_ms", COLOURS[LATE]),
                    (_EXPOSED_LABEL, "exposed_ms", COLOURS[EXPOSED]),
                )
            ]
            layout = {
                "height": 340,
                "xaxis": {"title": {"text": "layer"}, **_whole(len(x))},
                "yaxis": {"title": {"text": "ms"}, "rangemode": "tozero"},
            }
            views.append(FigureView((label, direction), data, layout))
    return Figure("layers", "Time by layer", ("case", "pass"), views) if views else None


def training_figure(sources: Sequence[ReportSource]) -> Figure:
    views, note = training_views(sources)
    return Figure(
        "training",
        "Training curves",
        (),
        [FigureView(*view) for view in views],
        note,
        together=True,
    )


def held_out_figure(sources: Sequence[ReportSource]) -> Figure:
    views = [FigureView(*view) for view in held_out_views(sources)]
    return Figure(
        "held-out",
        "Held-out loss",
        (),
        views,
        "Over sequences that are not in the training data.",
        together=True,
    )


def step_figures(named: Sequence[tuple[str, dict[str, Any]]]) -> list[Figure]:
    """Draw the results of `mtrain profile step`."""
    parts, kernels = (
        [FigureView(*view) for view in views]
        for view_of in (step_views, kernel_views)
        for views in (view_of(named),)
    )
    operations = "kernels" if all(document["gpu"] for _, document in named) else "operators"
    return [
        Figure(
            "step",
            "Breakdown of one training step",
            ("run",),
            parts,
            "Means of the recorded steps; parts add up to the step.",
        ),
        Figure(
            "kernels",
            f"Slowest {operations}",
            ("run",),
            kernels,
            "Own time, overlapped or not, mean of ranks.",
        ),
    ]


def sparsity_figures(sources: Sequence[ReportSource]) -> list[Figure]:
    """Draw the results of `mtrain profile sparsity`."""
    several = len(sources) > 1
    layers = [view for source in sources for view in sparsity_views(source.name, source.sparsity)]
    lines = [
        FigureView(labels if several else labels[:1], data, layout)
        for labels, data, layout in layers
    ]
    heads = [
        FigureView(*view) for source in sources for view in head_views(source.name, source.sparsity)
    ]
    note = (
        "Recall: share of dense attention that the pattern keeps, over sampled queries. "
        "Density: share of all causal pairs."
    )
    title = "Recall and density by layer"
    return [
        Figure("sparsity", title, (), lines, note, together=True),
        Figure("heads", "Patterns by layer and head", ("run", "pattern", "quantity"), heads),
    ]


def density_figure(sources: Sequence[ReportSource]) -> Figure | None:
    """Draw the density of every layer over training."""
    views = []
    for source in sources:
        steps = [m for m in source.metrics if m.density_by_layer]
        if not steps:
            continue
        kept = _spread(steps, 300)
        table = np.array([m.density_by_layer for m in kept], float).T
        trace = {
            "type": "heatmap",
            "z": _numbers(table, 4),
            "x": [m.step for m in kept],
            "y": list(range(len(table))),
            "colorscale": "YlGnBu",
            "reversescale": True,
            "zmin": 0,
            "zmax": float(table.max(initial=0)) or 1.0,
            "colorbar": {"title": {"text": "density"}, "thickness": 14, "tickformat": ".0%"},
            "hovertemplate": "step %{x}, layer %{y}: %{z:.2%}<extra></extra>",
        }
        layout = {
            "height": 200 + 14 * min(40, len(table)),
            "xaxis": {"title": {"text": "step"}},
            "yaxis": {"title": {"text": "layer"}, "autorange": "reversed", **_whole(len(table))},
        }
        views.append(FigureView((source.name,), [trace], layout))
    return Figure("density", "Density by layer", ("run",), views) if views else None


def _bar(labels: Sequence[Any], values: Any, name: str, horizontal: bool = False) -> dict[str, Any]:
    first, _, link = name.partition(" ")
    colour = _LINK_COLOURS.get(link, COLOURS[EXPOSED]) if first == EXPOSED else COLOURS[name]
    shown = _exposed_label(link) if first == EXPOSED else _LATE_LABEL if name == LATE else name
    lengths, places = _numbers(np.asarray(values, float)), list(labels)
    x, y = (lengths, places) if horizontal else (places, lengths)
    value, where = ("x", "y") if horizontal else ("y", "x")
    return {
        "type": "bar",
        "name": shown,
        "x": x,
        "y": y,
        "orientation": "h" if horizontal else "v",
        "marker": {"color": colour},
        "hovertemplate": f"%{{{where}}}: {shown} %{{{value}:.4g}} ms<extra></extra>",
    }


def _exposed_label(link: str) -> str:
    return f"exposed ({link} link)" if link else _EXPOSED_LABEL


def _folded(label: str, width: int = 26) -> str:
    """Break a label at spaces into lines of ``width`` characters."""
    lines = [""]
    for word in label.split():
        if lines[-1] and len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "<br>".join(escape(line) for line in lines)


def _whole(count: int) -> dict[str, Any]:
    """Return ticks at integers only."""
    return {"dtick": 1} if count <= 20 else {"tickformat": "d"}


def _positions(size: int, each: int) -> list[Any]:
    if each == 1:
        return list(range(size))
    return [f"{first}-{min(first + each, size) - 1}" for first in range(0, size, each)]


def _spread(items: Sequence[Any], most: int) -> list[Any]:
    """Return all items, or ``most`` of them at even distances, first and last included."""
    if len(items) <= most:
        return list(items)
    return [items[i] for i in np.unique(np.linspace(0, len(items) - 1, max(most, 1)).astype(int))]


def _numbers(values: np.ndarray, digits: int = 5) -> Any:
    """Round to few digits, to keep the page small."""
    array = np.asarray(values, float)
    if array.ndim > 1:
        return [_numbers(row, digits) for row in array]
    return [
        float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in array.tolist()
    ]
