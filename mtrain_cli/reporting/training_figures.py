"""Draw training: curves with marks at restarts, held-out losses, and density by layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from typing import Any

import numpy as np

from mtrain_cli.config.sizes import format_size
from mtrain_cli.records.metrics import StepMetrics, rate_unit
from mtrain_cli.reporting import plots
from mtrain_cli.reporting.plots import Figure, FigureView, Trace, axis, layout
from mtrain_cli.reporting.report_source import ReportSource
from mtrain_cli.training.evaluation import Evaluation

POINTS, POINTS_OF_ALL = 1500, 6000  # most points per curve, and per quantity over all runs
# Colors of ranges of context, from short to long.
_BUCKETS = ("#c6dbef", "#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#d97706", "#c8352b")
_SMOOTHED = ("loss", "grad_norm", "tokens_per_second_per_gpu", "seconds")
RATE = "tokens/s"  # its title also says whether it is per GPU or per worker
# (title, field of `StepMetrics`, whether the axis starts at zero)
_CURVES = (
    ("loss, nats", "loss", False),
    ("learning rate", "lr", True),
    ("gradient norm", "grad_norm", False),
    (RATE, "tokens_per_second_per_gpu", True),
    ("seconds per step", "seconds", True),
    ("MFU, share of peak FLOP/s", "mfu_model", True),
    ("HFU, share of peak FLOP/s", "mfu_executed", True),
    ("density", "density", True),
    ("peak memory, GiB", "peak_memory_gib", True),
)
_DIPS = (
    "Density: computed pairs / causal pairs of the whole sequence. It dips in steps whose "
    "sequences have several documents or padding, since their mask allows fewer pairs."
)
_LOG_FROM = 30.0  # If max / min of the gradient norm exceeds this, the axis is logarithmic.


def smoothed(values: Sequence[float | None], window: int) -> list[float | None]:
    """Return the exponential moving average over about ``window`` steps, with bias correction.

    If a value is None or not finite, its average is None and later averages ignore the value.
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
    """Return the smoothing window: 1/30 of the steps, but at least 5 and at most 100."""
    return min(100, max(5, steps // 30))


def rate_restarts(metrics: Sequence[StepMetrics]) -> list[int]:
    """Return the steps at which the learning rate starts to rise again after a decrease."""
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


def training_figure(sources: Sequence[ReportSource]) -> Figure:
    """Draw the quantities of `_CURVES`, each in a view with a curve per run."""
    return curves("training", "Training curves", sources, _CURVES)


def curves(
    name: str,
    title: str,
    sources: Sequence[ReportSource],
    quantities: Sequence[tuple[str, str, bool]],
) -> Figure:
    """Draw quantities of training steps, each in a view with a curve per run.

    quantities: title, field of `StepMetrics` and whether the axis starts at zero, of each.
    """
    points = min(POINTS, POINTS_OF_ALL // max(1, len(sources)))
    views = [
        view for curve in quantities if (view := _quantity(sources, *curve, points)) is not None
    ]
    notes = []
    if any("opacity" in trace for view in views for trace in view.data):
        notes.append("Bold: moving average over 1/30 of the steps (5 to 100); thin: every step.")
    if any(view.layout["shapes"] for view in views):
        notes.append(
            "Dotted: the learning rate restarts. Dashed: the run restarted after it lost a worker."
        )
    if any(len(source.metrics) > points for source in sources):
        notes.append(f"Long curves show {points} steps.")
    if any(key == "density" for _, key, _ in quantities):
        notes.append(_density_note(sources))
    return Figure(name, title, (), views, " ".join(filter(None, notes)), together=True)


def _density_note(sources: Sequence[ReportSource]) -> str:
    for source in sources:
        own = [step.density for step in source.metrics if step.density]
        if source.settings.get("data.document_mask") and own and min(own) < 0.95 * max(own):
            return _DIPS
    return ""


def _quantity(
    sources: Sequence[ReportSource], title: str, key: str, zero: bool, points: int
) -> FigureView | None:
    """Return the view of one quantity; None if no run has the quantity."""
    if title == RATE:
        title = rate_unit([step for source in sources for step in source.metrics])
    data: list[Trace] = []
    shapes: list[Trace] = []
    every: list[float] = []
    for source, colour in _coloured(sources):
        shapes += _marks(source, key, colour)
        values = [getattr(m, key) for m in source.metrics]
        if any(value is not None for value in values):
            every += [value for value in values if value is not None and math.isfinite(value)]
            data += _curve(source, values, colour, most=points, smooth=key in _SMOOTHED)
    if not data:
        return None
    scale = _scale(every) if key == "grad_norm" else {"rangemode": "tozero"} if zero else {}
    several = len(sources) > 1
    margin = {"t": 20 + 22 * len(sources) if several else 20}
    more = {"showlegend": several, "shapes": shapes, "margin": margin}
    return FigureView((title,), data, layout(290, axis("step"), axis(title, **scale), **more))


def _coloured(sources: Sequence[ReportSource]) -> list[tuple[ReportSource, str]]:
    return [(source, plots.PALETTE[i % len(plots.PALETTE)]) for i, source in enumerate(sources)]


def _curve(
    source: ReportSource, values: list[Any], colour: str, *, most: int, smooth: bool
) -> list[Trace]:
    """Return the curve of a run."""
    count = len(values)
    at = plots.evenly(range(count), most)

    def trace(values: Sequence[Any], width: int, **more: Any) -> Trace:
        name, style = escape(source.name), {"color": colour, "width": width}
        return {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "legendgroup": name,
            "x": [source.metrics[i].step for i in at],
            "y": plots.numbers([values[i] for i in at]),
            "line": style,
            **more,
        }

    if not smooth or count < 10:
        return [trace(values, 2)]
    means = smoothed(values, window_of(count))
    return [trace(values, 1, opacity=0.35, showlegend=False), trace(means, 2, hoverinfo="skip")]


def _marks(source: ReportSource, key: str, colour: str) -> list[Trace]:
    """Return vertical lines at restarts of the run and, for some keys, of the learning rate."""
    rates = rate_restarts(source.metrics) if key in ("loss", "lr", "grad_norm") else []
    steps = [(step, "dot") for step in rates] + [(r.step, "dash") for r in source.restarts]
    common = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
    return [
        {**common, "x0": step, "x1": step, "line": {"color": colour, "width": 1.8, "dash": dash}}
        for step, dash in steps
    ]


def _scale(values: Sequence[float]) -> dict[str, Any]:
    least, most = min((v for v in values if v > 0), default=1.0), max(values, default=1.0)
    return log_ticks(least, most) if most / least > _LOG_FROM else {"rangemode": "tozero"}


def log_ticks(least: float, most: float) -> dict[str, Any]:
    """Return a logarithmic axis with ticks such as 0.02 or 20k.

    Ticks are at 1, 2 and 5 times powers of ten. Over more than three decades, ticks are only at
    powers of ten.
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


def held_out_figure(sources: Sequence[ReportSource]) -> Figure:
    """Draw held-out loss over steps, by context at the last evaluation, and by context over steps.

    Context is the number of earlier tokens.
    """
    evaluated = [(source, colour) for source, colour in _coloured(sources) if source.evaluations]
    several = len(evaluated) > 1
    views = []
    if any(len(source.evaluations) > 1 for source, _ in evaluated):
        data = [
            _losses(source.name, [(e.step, e.loss) for e in source.evaluations], colour)
            for source, colour in evaluated
        ]
        views.append(_held_out("all tokens, over steps", data, "step"))
    data = []
    for source, colour in evaluated:
        first, last = source.evaluations[0], source.evaluations[-1]
        if not several and first is not last:
            data.append(_by_context(f"step {first.step}", first, "#9a9a9a"))
        data.append(_by_context(source.name if several else f"step {last.step}", last, colour))
    if data:
        ends = sorted({b.end for source, _ in evaluated for b in source.evaluations[-1].buckets})
        ticks = {"type": "log", "tickvals": ends, "ticktext": [format_size(end) for end in ends]}
        views.append(
            _held_out("by context, last evaluation", data, "earlier tokens (up to)", **ticks)
        )
    for source, _ in evaluated:
        if len(source.evaluations) > 1:
            run = f", {source.name}" if several else ""
            data = _over_steps(source.evaluations)
            views.append(_held_out(f"by context, over steps{run}", data, "step"))
    note = "Held-out sequences are not in the training data."
    return Figure("held-out", "Held-out loss", (), views, note, together=True)


def _held_out(label: str, data: list[Trace], x: str, **ticks: Any) -> FigureView:
    more = {"showlegend": len(data) > 1, "margin": {"t": 20 + 10 * len(data)}}
    y = axis("loss, nats per token")
    return FigureView((label,), data, layout(300 + 8 * len(data), axis(x, **ticks), y, **more))


def _losses(name: str, losses: Sequence[tuple[int, float | None]], colour: str) -> Trace:
    return plots.line(escape(name), [x for x, _ in losses], [loss for _, loss in losses], colour)


def _by_context(name: str, evaluation: Evaluation, colour: str) -> Trace:
    losses = [(bucket.end, bucket.loss) for bucket in evaluation.buckets if bucket.loss is not None]
    return _losses(name, losses, colour)


def _over_steps(evaluations: Sequence[Evaluation]) -> list[Trace]:
    """Return one plotted line per range of context length, the longest in the warmest color."""
    losses: dict[tuple[int, int], list[tuple[int, float | None]]] = {}
    for e in evaluations:
        for b in e.buckets:
            if b.loss is not None:
                losses.setdefault((b.begin, b.end), []).append((e.step, b.loss))
    longest_first = []
    for number, (begin, end) in enumerate(sorted(losses, reverse=True)):
        turn, at = divmod(number, len(_BUCKETS))
        colour = _BUCKETS[-1 - at]
        trace = _losses(f"{format_size(begin)} to {format_size(end)}", losses[begin, end], colour)
        longest_first.append({**trace, **plots.stroke(colour, turn)})
    return longest_first[::-1]


def density_figure(sources: Sequence[ReportSource]) -> Figure:
    """Draw a heat map of the density, by layer and step of training."""
    hover = "step %{x}, layer %{y}: %{z:.2%}"
    drawn = layers_over_steps(
        "density", "Density by layer", sources, "density_by_layer", "density", hover
    )
    return replace(drawn, note=_density_note(sources))


def layers_over_steps(
    name: str, title: str, sources: Sequence[ReportSource], key: str, unit: str, hover: str
) -> Figure:
    """Draw a heat map of a quantity, by layer and step of training, in a view per run.

    Args:
        key: field of `StepMetrics` with a value per layer. The last layer is the model's last.
    """
    views = []
    for source in sources:
        has = [m for m in source.metrics if getattr(m, key)]
        kept = plots.evenly(
            [m for m in has if len(getattr(m, key)) == len(getattr(has[-1], key))], 300
        )
        if not kept:
            continue
        table = np.array([getattr(m, key) for m in kept], float).T
        first = _first_layer(source, len(table))
        x, y = ("step", [m.step for m in kept]), ("layer", range(first, first + len(table)))
        views.append(plots.heat_view((source.name,), table, x, y, unit, hover))
    return Figure(name, title, ("run",), views)


def _first_layer(source: ReportSource, layers: int) -> int:
    of_model = source.settings.get("model.num_layers")
    return of_model - layers if isinstance(of_model, int) and of_model > layers else 0
