"""Figures of what `mtrain profile sparsity` finds about attention itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from html import escape
from typing import Any

import numpy as np

from mtrain_cli.config.sizes import format_size
from mtrain_cli.reporting import plots
from mtrain_cli.reporting.plots import Figure, FigureView, Trace, axis, fold, layout
from mtrain_extras.studies.attention import findings as attention_findings
from mtrain_extras.studies.attention import tables as attention_tables
from mtrain_extras.studies.attention.files import MAPS, AttentionFiles, HeadMap, RopeRow
from mtrain_extras.studies.attention.findings import mean, overlap_label

_MAP_NUMBERS = 250_000  # most cells in all maps of a page together
_HEATS = 24  # most heat maps, or curves of heads, of one kind
_MAPS = 12  # most maps
_DARKEST, _LIGHTEST = 0.995, 0.01  # shares of a map's cells below the ends of its color scale
_SMALLEST, _LOG_3 = 1e-30, math.log10(3)
_TICKS = 5  # most labels along a side of a map
Named = Sequence[tuple[str, AttentionFiles]]  # (name of a run, its results)


def attention_figures(named: Named) -> list[Figure]:
    """Draw largest keys, overlap of checkpoints, maps and scores by distance."""
    several, findings = len(named) > 1, attention_findings

    def figure(name: str, title: str, selectors: str, views, finding, note: str = "") -> Figure:
        drawn = [view for run, files in named for view in views(files, run)]
        told = _found(named, finding)
        return Figure(name, title, tuple(selectors.split()), drawn, note, finding=told)

    top_keys = figure(
        *("top-keys", "Attention of the largest keys", ""),
        lambda files, run: _top_lines(files, run if several else ""),
        findings.largest_keys,
        "Share of attention that the k largest keys of a query hold, for queries that see more "
        "than k keys. Means over heads, samples and queries.",
    )
    return [
        replace(top_keys, together=True),
        figure(
            *("top-heads", "Attention of the largest keys by layer and head", "run step keys"),
            *(_top_heads, findings.heads_of_largest_keys),
        ),
        figure(
            *("top-samples", "Attention of the largest keys by step and sample", "run keys"),
            *(_top_samples, findings.samples_of_largest_keys),
        ),
        figure(
            *("overlap", "Overlap of checkpoints", "run what"),
            *(_overlap_matrices, findings.overlaps),
            "Jaccard index of what two checkpoints choose for the same input: intersection / "
            "union. Means over layers, heads and samples.",
        ),
        figure(
            *("overlap-layers", "Overlap of checkpoints by layer", "run what"),
            *(_overlap_lines, findings.overlaps_of_layers),
        ),
        maps_figure(named),
        figure(
            *("rope", "Mean score by distance of query and key", "run step head"),
            *(_rope_curves, findings.rotary_prediction),
            "Predicted: score of the mean query and the mean key, turned by the distance. Distance "
            f"0 is left out. Bins of equal logarithmic width. At most {_HEATS} heads.",
        ),
        figure(
            *("rope-heads", "Scores by layer and head", "run step quantity"),
            *(_rope_heads, findings.variance),
            "Slash, vertical, both: share of the variance of scores that the distance, the key, "
            "and the sum of both explain. Rest: 1 - both.",
        ),
    ]


def _found(named: Named, say: Callable[[AttentionFiles], str]) -> str:
    found = [(name, text) for name, files in named if (text := say(files))]
    return " ".join(text if len(named) == 1 else f"{name}: {text}" for name, text in found)


def _top_lines(files: AttentionFiles, run: str) -> Iterator[FigureView]:
    rows = files.top_keys
    steps, layers = (sorted({getattr(row, key) for row in rows}) for key in ("step", "layer"))
    counts = sorted({row.k for row in rows})
    choices: list[tuple[str, str, list[int], Callable[[Any], bool]]] = []
    if len(steps) > 1:
        choices.append(("by step", "step", steps, lambda _: True))
    if len(layers) > 1:
        title = f"by layer, step {steps[-1]}"
        choices.append((title, "layer", layers, lambda row: row.step == steps[-1]))
    for title, key, places, chosen in choices:
        data = []
        for k, colour in zip(counts, itertools.cycle(plots.PALETTE), strict=False):
            mine = [row for row in rows if row.k == k and chosen(row)]
            y = [mean(row.mean for row in mine if getattr(row, key) == at) for at in places]
            data.append(plots.line(f"top {k}", places, y, colour))
        more = plots.whole(places[-1] - places[0] + 1) if key == "layer" else {}
        shape = layout(
            320,
            axis(key, **more),
            plots.from_zero("share of attention", tickformat=".0%"),
            showlegend=True,
        )
        yield FigureView((f"{title}, {run}" if run else title,), data, shape)


def _heat(
    values: dict[tuple[int, int], float | None], x: str, y: str, unit: str, digits: str = ".2%"
) -> tuple[list[Trace], dict[str, Any]]:
    most = max((value for value in values.values() if value is not None), default=0.0)
    ys, xs = (sorted({place[at] for place in values}) for at in (0, 1))
    trace = plots.heat(
        plots.numbers([[values.get((row, column)) for column in xs] for row in ys]),
        [str(column) for column in xs],
        [str(row) for row in ys],
        unit,
        f"{y} %{{y}}, {x} %{{x}}: %{{z:{digits}}}",
        zmax=most if most > 0 else 1.0,
    )
    shape = layout(
        200 + 20 * min(40, len(ys)),
        axis(x, type="category"),
        plots.downward(y, type="category"),
        margin={"t": 36},
    )
    return [trace], shape


def _grouped(
    rows: Sequence[Any], y: str, x: str, value: str
) -> dict[tuple[int, int], float | None]:
    groups: dict[tuple[int, int], list[float | None]] = {}
    for row in rows:
        groups.setdefault((getattr(row, y), getattr(row, x)), []).append(getattr(row, value))
    return {place: mean(values) for place, values in groups.items()}


def _last_first(rows: Sequence[Any]) -> list[int]:
    steps = sorted({row.step for row in rows})
    return list(dict.fromkeys([*steps[-1:], *steps[:1]]))


def _top_heads(files: AttentionFiles, run: str) -> Iterator[FigureView]:
    for step in _last_first(files.top_keys):
        for k in sorted({row.k for row in files.top_keys})[:_HEATS]:
            mine = [row for row in files.top_keys if (row.step, row.k) == (step, k)]
            values = _grouped(mine, "layer", "head", "mean")
            labels = (run, f"step {step}", f"top {k}")
            yield FigureView(labels, *_heat(values, "head", "layer", "share"))


def _top_samples(files: AttentionFiles, run: str) -> Iterator[FigureView]:
    if len({row.sample for row in files.top_keys}) < 2:
        return
    for k in sorted({row.k for row in files.top_keys})[:_HEATS]:
        mine = [row for row in files.top_keys if row.k == k]
        values = _grouped(mine, "sample", "step", "mean")
        yield FigureView((run, f"top {k}"), *_heat(values, "step", "sample", "share"))


def _overlap_matrices(files: AttentionFiles, run: str) -> Iterator[FigureView]:
    for kind in list(dict.fromkeys(map(overlap_label, files.overlap)))[:_HEATS]:
        mine = [row for row in files.overlap if overlap_label(row) == kind]
        values = _grouped(mine, "first", "second", "jaccard")
        values |= {(second, first): value for (first, second), value in values.items()}
        values |= {(step, step): 1.0 for step, _ in values}
        labels = (run, kind)
        yield FigureView(labels, *_heat(values, "step", "step", "overlap", ".3f"))


def _overlap_lines(files: AttentionFiles, run: str) -> Iterator[FigureView]:
    rows = files.overlap
    steps = sorted({row.first for row in rows} | {row.second for row in rows})
    layers = sorted({row.layer for row in rows})
    pairs = plots.evenly(list(itertools.pairwise(steps)), len(plots.PALETTE))
    for kind in list(dict.fromkeys(map(overlap_label, rows)))[:_HEATS] if len(layers) > 1 else ():
        data = []
        for (first, second), colour in zip(pairs, plots.PALETTE, strict=False):
            mine = [
                row
                for row in rows
                if (row.first, row.second) == (first, second) and overlap_label(row) == kind
            ]
            y = [mean(row.jaccard for row in mine if row.layer == layer) for layer in layers]
            data.append(plots.line(f"steps {first} and {second}", layers, y, colour))
        x = axis("layer", **plots.whole(layers[-1] - layers[0] + 1))
        shape = layout(320, x, axis("Jaccard index", range=[0, 1.02]), showlegend=True)
        yield FigureView((run, kind), data, shape)


def maps_figure(named: Named) -> Figure:
    """Draw |A| beside |dL/dS| of each map (MTraining, figures 2c and 2d)."""
    maps = [(name, each) for name, files in named for each in files.maps]
    left_out = len(maps) > _MAPS
    if left_out:
        ends = {name: attention_tables.first_and_last(files.maps) for name, files in named}
        maps = [(n, each) for n, each in maps if each.sample == 0 and each.step in ends[n]]
        maps = plots.evenly(maps, _MAPS)
    # Half of the cells are above the diagonal and take almost no space.
    side = max(32, int((_MAP_NUMBERS / max(1, len(maps))) ** 0.5))
    views, shrank = [], False
    for name, each in maps:
        data, shape, folded = _map(each, side)
        shrank |= folded
        views.append(FigureView((name, each.label), data, shape))
    note = (
        "Mean over the pairs of each cell that the mask allows. Colors are logarithmic and do not "
        f"tell the smallest {_LIGHTEST:.0%} and the largest {1 - _DARKEST:.1%} of the cells apart. "
        "S: scores divided by sqrt(head_dim)."
    )
    if shrank:
        note += f" Maps shrink to {side} x {side} cells, each the maximum of its group."
    if left_out:
        note += f" At most {_MAPS} maps, of the first and the last step; {MAPS} has all."
    return Figure(
        "maps",
        "Attention and its gradient",
        ("run", "map"),
        views,
        note,
        finding=_found(named, attention_findings.maps),
    )


def _map(each: HeadMap, side: int) -> tuple[list[Trace], dict[str, Any], bool]:
    data, annotations, shrank = [], [], False
    for at, (title, values) in enumerate((("|A|", each.attention), ("|dL/dS|", each.gradient))):
        z = fold(np.where(np.isnan(values), -np.inf, values), side)
        shrank |= z.shape != values.shape
        width = each.width * -(-len(values) // len(z))
        logs = np.where(z > 0, np.log10(np.maximum(z, _SMALLEST)), np.nan)
        low, high = _scale(logs)
        powers = list(range(math.floor(low), math.ceil(high) + 1))
        starts = [width * number for number in range(len(z))]
        number = at + 1
        data.append(
            plots.heat(
                plots.numbers(np.round(logs, 2), 4),
                starts,
                starts,
                title,
                f"query %{{y}}, key %{{x}}: {title} = 10^%{{z}}",
                zmin=low,
                zmax=high,
                xaxis=f"x{number}" if at else "x",
                yaxis=f"y{number}" if at else "y",
                colorbar={
                    "thickness": 12,
                    "x": 0.45 + 0.55 * at,
                    "tickvals": [power + half for power in powers for half in (0, _LOG_3)],
                    "ticktext": [f"{lead}e{power}" for power in powers for lead in (1, 3)],
                },
            )
        )
        centre = 0.225 + 0.55 * at
        annotations.append(
            {
                "text": title,
                "x": centre,
                "y": 1.0,
                "xref": "paper",
                "yref": "paper",
                "yanchor": "bottom",
                "showarrow": False,
            }
        )
    ticks = _ticks(each.width * len(each.attention))
    x = {"domain": [0, 0.45], **axis("key", **ticks)}
    y = plots.downward("query", **ticks)
    shape = layout(520, x, y, margin={"t": 36}, annotations=annotations)
    shape["xaxis2"] = {**x, "domain": [0.55, 1.0], "anchor": "y2"}
    shape["yaxis2"] = {**y, "anchor": "x2"}
    return data, shape, shrank


def _scale(logs: np.ndarray) -> tuple[float, float]:
    """Return the ends of the color scale of a map. logs: base-10 logarithms; NaN for no value."""
    known = logs[np.isfinite(logs)]
    if not len(known):
        return -1.0, 0.0
    low, high = (float(np.quantile(known, share)) for share in (_LIGHTEST, _DARKEST))
    return low, max(high, low + 0.1)


def _ticks(tokens: int) -> dict[str, Any]:
    step = 1 << max(0, (tokens // _TICKS).bit_length() - 1)
    step = step if tokens // step <= _TICKS else 2 * step
    places = list(range(0, tokens + 1, step))
    return {"tickvals": places, "ticktext": [format_size(place) for place in places]}


def _rope_curves(files: AttentionFiles, run: str) -> Iterator[FigureView]:
    for step in _last_first(files.rope):
        mine = [row for row in files.rope if (row.step, row.sample) == (step, 0)]
        for row in plots.evenly(mine, _HEATS):
            yield FigureView((run, f"step {step}", _head(row)), *_curves(row))


def _head(row: RopeRow) -> str:
    r2 = "" if row.r2 is None else f", R² {row.r2:.3f}"
    return f"layer {row.layer}, head {row.head}{r2}"


def _curves(row: RopeRow) -> tuple[list[Trace], dict[str, Any]]:
    data = []
    for name, values, colour in (
        ("measured", row.measured, plots.PALETTE[0]),
        ("predicted", row.predicted, plots.PALETTE[1]),
    ):
        places = [(at, y) for at, y in zip(row.distances, values, strict=False) if at > 0]
        x, y = [at for at, _ in places], [value for _, value in places]
        data.append(plots.line(name, x, y, colour, mode="lines"))
    powers = [1 << n for n in range(0, max(row.distances, default=1).bit_length() + 1, 2)]
    ticks = {"tickvals": powers, "ticktext": [format_size(power) for power in powers]}
    x_axis = axis("distance, tokens", type="log", **ticks)
    return data, layout(360, x_axis, axis("mean score"), showlegend=True)


def _rope_heads(files: AttentionFiles, run: str) -> Iterator[FigureView]:
    quantities = (
        *(("R²", "r2"), ("slash", "slash"), ("vertical", "vertical")),
        *(("both", "both"), ("rest", "rest")),
    )
    for step in _last_first(files.rope):
        mine = [row for row in files.rope if row.step == step]
        for title, key in quantities:
            values = _grouped(mine, "layer", "head", key)
            labels = (run, f"step {step}", title)
            yield FigureView(labels, *_heat(values, "head", "layer", escape(title), ".3f"))
