"""Figures of training: curves, held-out losses, marks where a run or its learning rate restarts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

from mtrain_cli.config.sizes import format_size
from mtrain_cli.records.metrics import StepMetrics
from mtrain_cli.reporting.report_source import ReportSource
from mtrain_cli.training.evaluation import Evaluation

View = tuple[tuple[str, ...], list[dict[str, Any]], dict[str, Any]]  # labels, traces, layout
POINTS, POINTS_OF_ALL = 1500, 6000  # per curve, and per quantity over all runs
COLOURS = ("#2f6fb5", "#d97706", "#4d9f6f", "#c8352b", "#8c6bb1", "#7a5c3e", "#d26fa5", "#5b5b5b")
# From short to long context.
_BUCKETS = ("#c6dbef", "#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#d97706", "#c8352b")
_SMOOTHED = ("loss", "grad_norm", "tokens_per_second_per_gpu", "seconds")
# Title, field of a step, whether the axis starts at zero.
_CURVES = (
    ("loss, nats", "loss", False),
    ("learning rate", "lr", True),
    ("gradient norm", "grad_norm", False),
    ("tokens/s/GPU", "tokens_per_second_per_gpu", True),
    ("seconds per step", "seconds", True),
    ("MFU, share of peak FLOP/s", "mfu_model", True),
    ("HFU, share of peak FLOP/s", "mfu_executed", True),
    ("density", "density", True),
    ("peak memory, GiB", "peak_memory_gib", True),
)
_LOG_FROM = 30.0  # max over min of the gradient norm beyond which the axis is logarithmic


def smoothed(values: Sequence[float | None], window: int) -> list[float | None]:
    """Return the exponential moving average over about ``window`` steps, unbiased at the start.

    None stays None.
    """
    keep = 1 - 2 / (window + 1)
    mean, weight = 0.0, 0.0
    averages: list[float | None] = []
    for value in values:
        if value is None or not math.isfinite(value):
            averages.append(None)
            continue
        mean, weight = keep * mean + (1 - keep) * value, keep * weight + (1 - keep)
        averages.append(mean / weight)
    return averages


def window_of(steps: int) -> int:
    """Return the smoothing window: 1/30 of the steps, 5 to 100."""
    return min(100, max(5, steps // 30))


def rate_restarts(metrics: Sequence[StepMetrics]) -> list[int]:
    """Return the steps where the learning rate rises after a fall, not the first warm-up."""
    restarts, fell, rising = [], False, False
    for before, now in itertools.pairwise(metrics):
        if before.lr is None or now.lr is None:
            continue
        if now.lr > before.lr * (1 + 1e-6):
            if fell and not rising:
                restarts.append(now.step)
            rising = True
        elif now.lr < before.lr * (1 - 1e-6):
            fell, rising = True, False
    return restarts


def training_views(sources: Sequence[ReportSource]) -> tuple[list[View], str]:
    """Return one view per quantity, and the note below the figure."""
    views: list[View] = []
    thinned = raw_shown = marked = False
    points = min(POINTS, POINTS_OF_ALL // max(1, len(sources)))
    for title, key, from_zero in _CURVES:
        data: list[dict[str, Any]] = []
        every: list[float] = []
        for source, colour in zip(sources, _colours(sources), strict=True):
            values = [getattr(m, key) for m in source.metrics]
            if all(value is None for value in values):
                continue
            every += [value for value in values if value is not None and math.isfinite(value)]
            lines, cut = _curve(source, values, colour, most=points, smooth=key in _SMOOTHED)
            thinned |= cut
            raw_shown |= len(lines) > 1
            data += lines
        if not data:
            continue
        scale = (
            _scale(every) if key == "grad_norm" else {"rangemode": "tozero"} if from_zero else {}
        )
        shapes = [
            shape
            for source, colour in zip(sources, _colours(sources), strict=True)
            for shape in _marks(source, key, colour)
        ]
        marked |= bool(shapes)
        layout = {
            "height": 290,
            "xaxis": {"title": {"text": "step"}},
            "yaxis": {"title": {"text": title}, **scale},
            "showlegend": len(sources) > 1,
            "shapes": shapes,
            "margin": {"t": 20 + 22 * len(sources) if len(sources) > 1 else 20},
        }
        views.append(((title,), data, layout))
    notes = []
    if raw_shown:
        notes.append("Bold: moving average over 1/30 of the steps (5 to 100); thin: every step.")
    if marked:
        notes.append(
            "Dotted: the learning rate restarts. Dashed: the run restarted after it lost a worker."
        )
    if thinned:
        notes.append(f"Long curves show {points} steps.")
    return views, " ".join(notes)


def _colours(sources: Sequence[ReportSource]) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(len(sources))]


def _curve(
    source: ReportSource, values: list[Any], colour: str, *, most: int, smooth: bool
) -> tuple[list[dict[str, Any]], bool]:
    """Return the curve of a run, if smoothed also its average, and whether points were dropped."""
    steps = [m.step for m in source.metrics]
    at = np.unique(np.linspace(0, len(steps) - 1, min(most, len(steps))).astype(int)).tolist()
    common = {
        "type": "scatter",
        "mode": "lines",
        "name": escape(source.name),
        "legendgroup": escape(source.name),
        "x": [steps[i] for i in at],
    }
    thick = {"color": colour, "width": 2}
    dropped = len(at) < len(steps)
    if not smooth or len(steps) < 10:
        return [{**common, "y": [_short(values[i]) for i in at], "line": thick}], dropped
    means = smoothed(values, window_of(len(steps)))
    thin = {
        **common,
        "y": [_short(values[i]) for i in at],
        "line": {"color": colour, "width": 1},
        "opacity": 0.35,
        "showlegend": False,
    }
    bold = {**common, "y": [_short(means[i]) for i in at], "line": thick, "hoverinfo": "skip"}
    return [thin, bold], dropped


def _marks(source: ReportSource, key: str, colour: str) -> list[dict[str, Any]]:
    """Return vertical lines: restarts of the run in every figure, of the learning rate in some."""
    rates = rate_restarts(source.metrics) if key in ("loss", "lr", "grad_norm") else []
    steps = [(step, "dot") for step in rates] + [
        (restart.step, "dash") for restart in source.restarts
    ]
    line = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
    return [
        {**line, "x0": step, "x1": step, "line": {"color": colour, "width": 1.8, "dash": dash}}
        for step, dash in steps
    ]


def _scale(values: Sequence[float]) -> dict[str, Any]:
    """Return a log axis if the values span a wide range, else one from zero."""
    least, most = min((v for v in values if v > 0), default=1.0), max(values, default=1.0)
    return log_ticks(least, most) if most / least > _LOG_FROM else {"rangemode": "tozero"}


def log_ticks(least: float, most: float) -> dict[str, Any]:
    """Return a log axis with ticks such as 0.02 or 20k.

    Ticks are at 1, 2 and 5 times a power of ten; over more than three decades, at powers only.
    """
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(max(most, least * 1.01)))
    steps = (1, 2, 5) if high - low <= 3 else (1,)
    ticks = [step * 10.0**power for power in range(low, high + 1) for step in steps]
    ticks = [tick for tick in ticks if least / 2.5 <= tick <= most * 2.5]
    return {"type": "log", "tickvals": ticks, "ticktext": [_tick(tick) for tick in ticks]}


def _tick(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}" if value >= 1e-4 else f"{value:.0e}"


def held_out_views(sources: Sequence[ReportSource]) -> list[View]:
    """Held-out loss over steps, by context at the last evaluation, and over steps by context."""
    evaluated = [source for source in sources if source.evaluations]
    if not evaluated:
        return []
    colours = dict(zip((source.name for source in sources), _colours(sources), strict=False))
    views: list[View] = []
    if any(len(source.evaluations) > 1 for source in evaluated):
        data = [
            _line(
                source.name,
                [e.step for e in source.evaluations],
                [e.loss for e in source.evaluations],
                colours[source.name],
            )
            for source in evaluated
        ]
        views.append((("all tokens, over steps",), data, _layout("step", len(evaluated))))
    last = [(source, source.evaluations[-1]) for source in evaluated]
    data = []
    for source, evaluation in last:
        if len(evaluated) == 1 and len(source.evaluations) > 1:
            data.append(
                _by_context(f"step {source.evaluations[0].step}", source.evaluations[0], "#9a9a9a")
            )
        name = source.name if len(evaluated) > 1 else f"step {evaluation.step}"
        data.append(_by_context(name, evaluation, colours[source.name]))
    ends = sorted({bucket.end for _, evaluation in last for bucket in evaluation.buckets})
    ticks = {"type": "log", "tickvals": ends, "ticktext": [format_size(end) for end in ends]}
    views.append(
        (
            ("by context, last evaluation",),
            data,
            _layout("earlier tokens (up to)", len(data), ticks),
        )
    )
    for source in evaluated:
        if len(source.evaluations) > 1:
            run = f", {source.name}" if len(evaluated) > 1 else ""
            data = _over_steps(source.evaluations)
            views.append(((f"by context, over steps{run}",), data, _layout("step", len(data))))
    return views


def _by_context(name: str, evaluation: Evaluation, colour: str) -> dict[str, Any]:
    there = [bucket for bucket in evaluation.buckets if bucket.loss is not None]
    return _line(name, [bucket.end for bucket in there], [bucket.loss for bucket in there], colour)


def _over_steps(evaluations: Sequence[Evaluation]) -> list[dict[str, Any]]:
    """Return a line per range of context, the longest in the warmest colour."""
    spans = sorted({(b.begin, b.end) for e in evaluations for b in e.buckets if b.loss is not None})
    data = []
    for i, span in enumerate(spans):
        losses = [
            (e.step, b.loss)
            for e in evaluations
            for b in e.buckets
            if (b.begin, b.end) == span and b.loss is not None
        ]
        colour = _BUCKETS[-1 - min(len(spans) - 1 - i, len(_BUCKETS) - 1)]
        data.append(
            _line(
                f"{format_size(span[0])} to {format_size(span[1])}",
                [s for s, _ in losses],
                [loss for _, loss in losses],
                colour,
            )
        )
    return data


def _line(name: str, x: Sequence[int], y: Sequence[Any], colour: str) -> dict[str, Any]:
    look = {"line": {"color": colour}, "marker": {"color": colour, "size": 6}}
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": escape(name),
        "x": list(x),
        "y": [_short(value) for value in y],
        **look,
    }


def _layout(axis: str, entries: int, ticks: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "height": 300 + 8 * entries,
        "xaxis": {"title": {"text": axis}, **(ticks or {})},
        "yaxis": {"title": {"text": "loss, nats per token"}},
        "showlegend": entries > 1,
        "margin": {"t": 20 + 10 * entries},
    }


def _short(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.5g}")
