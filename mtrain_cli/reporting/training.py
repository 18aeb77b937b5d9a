"""Training runs in a report: table of the steps, curves, held-out losses by context, density."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from html import escape
from operator import itemgetter
from typing import Any

import numpy as np
import pandas

from mtrain_cli.config.sizes import format_size
from mtrain_cli.records.metrics import (
    WARM_UP_STEPS,
    StepMetrics,
    nothing_left_out,
    rate_unit,
    steady_steps,
)
from mtrain_cli.reporting import plots
from mtrain_cli.reporting.plots import Figure, FigureView, Trace, axis, layout
from mtrain_cli.reporting.report_source import ReportSource
from mtrain_cli.reporting.table import TOTAL, Column, Table, count, fixed, percent
from mtrain_cli.training.evaluation import Evaluation, losses_by_bucket
from mtrain_cli.training.progress import format_duration

POINTS, POINTS_OF_ALL = 1500, 6000  # most points per curve, and per quantity over all runs
_SMOOTHED = ("loss", "grad_norm", "tokens_per_second_per_gpu", "seconds")
RATE = "tokens/s"  # its title also says whether it is per GPU or per worker
Quantity = tuple[str, str, bool]  # title, field of `StepMetrics`, whether the axis starts at zero
_CURVES: tuple[Quantity, ...] = (
    ("loss, nats", "loss", False),
    ("learning rate", "lr", True),
    ("gradient norm", "grad_norm", False),
    (RATE, "tokens_per_second_per_gpu", True),
    ("seconds per step", "seconds", True),
    ("MFU, share of peak FLOP/s", "mfu_model", True),
    ("HFU, share of peak FLOP/s", "mfu_executed", True),
    ("density", "density", True),
    ("blocks cut by row_cap", "index_cut", True),
    ("peak memory, GiB", "peak_memory_gib", True),
)
_EARLIER = "earlier tokens (up to)"
_LOG_FROM = 30.0  # If max / min of the gradient norm exceeds this, the axis is logarithmic.


# --- tables -----


def training_table(sources: Sequence[ReportSource]) -> Table:
    """Return a table with a row per training run."""
    rate = rate_unit([step for source in sources for step in source.metrics])

    def known(source: ReportSource, name: str) -> list[Any]:
        return [v for step in source.metrics if (v := getattr(step, name)) is not None]

    def steady(source: ReportSource) -> list[StepMetrics]:
        return steady_steps(source.metrics, [restart.step for restart in source.restarts])

    def median(name: str) -> Callable[[ReportSource], float | None]:
        def of(source: ReportSource) -> float | None:
            values = [v for step in steady(source) if (v := getattr(step, name)) is not None]
            return statistics.median(values) if values else None

        return of

    def mfu(source: ReportSource) -> float | None:
        """Return the median MFU; None for a sparse run, which may start with dense steps."""
        dense = all(step.mfu_model is not None for step in steady(source))
        return median("mfu_model")(source) if dense else None

    columns = [
        # For a single run, a line above the table has the name.
        *([Column("run", lambda s: s.name, words=True)] if len(sources) > 1 else []),
        Column("steps", lambda s: s.metrics[-1].step),
        # A step without labels has no loss.
        Column("loss, first", lambda s: next(iter(known(s, "loss")), None), fixed(3)),
        Column("last", lambda s: next(reversed(known(s, "loss")), None), fixed(3)),
        Column("s / step", median("seconds"), "{:.3g}".format, drop=5),
        Column(rate, median("tokens_per_second_per_gpu"), count),
        Column("MFU", mfu, percent, drop=4),
        Column("HFU", median("mfu_executed"), percent),
        Column("density", median("density"), percent, drop=3),
        Column("targets", median("targets"), count, drop=1),
        Column(
            "peak GiB", lambda s: max(known(s, "peak_memory_gib"), default=None), fixed(1), drop=2
        ),
        Column("tokens", lambda s: s.metrics[-1].tokens or 0, count, drop=6),
        Column("took", lambda s: sum(known(s, "seconds")), format_duration, drop=7),
    ]
    note = (
        f"medians without the first {WARM_UP_STEPS} steps, which warm up, or of the last step; "
        "took: all steps, no evaluations"
    )
    for source in sources:
        if remark := next(filter(None, map(nothing_left_out, source.metrics)), ""):
            note += f"; {f'{source.name}: ' * (len(sources) > 1)}{remark}"
    return Table("Training", columns, sources, note)


def positions_table(sources: Sequence[ReportSource]) -> Table | None:
    """Return a table of held-out losses by context (number of earlier tokens).

    One run shows its first and its last evaluation. Several runs show only their last ones.
    """
    evaluated = [source for source in sources if source.evaluations]
    if not evaluated:
        return None
    shown = [(source.name, source.evaluations[-1]) for source in evaluated]
    if len(evaluated) == 1 and len(evaluated[0].evaluations) > 1:
        shown.insert(0, (evaluated[0].name, evaluated[0].evaluations[0]))
    evaluations = [evaluation for _, evaluation in shown]
    last = evaluations[-1]
    tokens = {(b.begin, b.end): b.tokens for b in last.buckets}
    # (range of earlier tokens, tokens, loss in each evaluation)
    rows: list[tuple[str, int, Sequence[float | None]]] = [
        (f"{format_size(begin)} to {format_size(end)}", tokens.get((begin, end), 0), losses)
        for begin, end, losses in losses_by_bucket(evaluations)
    ]
    rows.append(("all", last.tokens, [e.loss for e in evaluations]))

    def heading(name: str, e: Evaluation) -> str:
        return "\n".join([*([name] if len(sources) > 1 else []), f"step {e.step}", e.attention])

    columns = [
        Column("earlier tokens", itemgetter(0)),
        Column("tokens", itemgetter(1), count),
        *(
            Column(heading(*one), lambda row, i=i: row[2][i], fixed(4))
            for i, one in enumerate(shown)
        ),
    ]
    note = f"nats per token, over {last.sequences} sequences not in the training data"
    title = "Held-out loss by context"
    return Table(title, columns, rows, note, state=lambda row: TOTAL * (row[0] == "all"))


# --- figures -----


def smoothed(values: Sequence[float | None], window: int) -> list[float | None]:
    """Return the exponential moving average over about ``window`` steps, with bias correction.

    If a value is None or not finite, its average is None and later averages ignore the value.
    """
    series = pandas.Series(values, dtype=float).replace([np.inf, -np.inf], np.nan)
    means = series.ewm(span=window, ignore_na=True).mean().where(series.notna())
    return [None if np.isnan(mean) else mean for mean in means]


def training_figure(sources: Sequence[ReportSource]) -> Figure:
    """Draw the quantities of `_CURVES`, each in a view with a curve per run."""
    return curves("training", "Training curves", sources, _CURVES)


def curves(
    name: str, title: str, sources: Sequence[ReportSource], quantities: Sequence[Quantity]
) -> Figure:
    """Draw quantities of training steps, each in a view with a curve per run."""
    points = min(POINTS, POINTS_OF_ALL // max(1, len(sources)))
    views = [view for curve in quantities if (view := _quantity(sources, *curve, points))]
    notes = []
    if any("opacity" in trace for view in views for trace in view.data):
        notes.append("Bold: moving average over 1/30 of the steps (5 to 100); thin: every step.")
    if any(source.restarts for source in sources):
        notes.append("Dashed: the run restarted after it lost a worker.")
    if any(source.rollbacks for source in sources):
        notes.append("Dotted: the run went back to this step after a spike.")
    if any(len(source.metrics) > points for source in sources):
        notes.append(f"Long curves show {points} steps.")
    return Figure(name, title, (), views, " ".join(notes), together=True)


def _quantity(
    sources: Sequence[ReportSource], title: str, key: str, zero: bool, points: int
) -> FigureView | None:
    """Return the view of one quantity; None if no run has the quantity."""
    if title == RATE:
        title = rate_unit([step for source in sources for step in source.metrics])
    data: list[Trace] = []
    shapes: list[Trace] = []
    finite: list[float] = []
    for source, colour in _coloured(sources):
        values = [getattr(m, key) for m in source.metrics]
        finite += [value for value in values if value is not None and math.isfinite(value)]
        if any(value is not None for value in values):
            data += _curve(source, values, colour, points, smooth=key in _SMOOTHED)
        common = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
        for dash, found in (("dash", source.restarts), ("dot", source.rollbacks)):
            style = {"color": colour, "width": 1.8, "dash": dash}
            shapes += [{**common, "x0": r.step, "x1": r.step, "line": style} for r in found]
    if not data:
        return None
    least, most = min((v for v in finite if v > 0), default=1.0), max(finite, default=1.0)
    scale: Trace = {"rangemode": "tozero"} if zero or key == "grad_norm" else {}
    if key == "grad_norm" and most / least > _LOG_FROM:
        scale = {"type": "log"}
    several = len(sources) > 1
    margin = {"t": 20 + 22 * len(sources) if several else 20}
    more = {"showlegend": several, "shapes": shapes, "margin": margin}
    return FigureView((title,), data, layout(290, axis("step"), axis(title, **scale), **more))


def _coloured(sources: Sequence[ReportSource]) -> list[tuple[ReportSource, str]]:
    return [(source, plots.PALETTE[i % len(plots.PALETTE)]) for i, source in enumerate(sources)]


def _curve(
    source: ReportSource, values: list[Any], colour: str, most: int, *, smooth: bool
) -> list[Trace]:
    """Return the curve of a run."""
    at = plots.evenly(range(len(values)), most)
    name, steps = escape(source.name), [source.metrics[i].step for i in at]

    def trace(values: Sequence[Any], width: int, **more: Any) -> Trace:
        style = {"mode": "lines", "legendgroup": name, "line": {"color": colour, "width": width}}
        return plots.line(name, steps, [values[i] for i in at], colour, **style, **more)

    if not smooth or len(values) < 10:
        return [trace(values, 2)]
    means = smoothed(values, min(100, max(5, len(values) // 30)))
    return [trace(values, 1, opacity=0.35, showlegend=False), trace(means, 2, hoverinfo="skip")]


def held_out_figure(sources: Sequence[ReportSource]) -> Figure:
    """Draw held-out loss over steps, and by context (earlier tokens) at the last evaluation."""
    evaluated = [(source, colour) for source, colour in _coloured(sources) if source.evaluations]
    several = len(evaluated) > 1
    over_steps: list[Trace] = []
    by_context: list[Trace] = []
    ends: set[int] = set()
    for source, colour in evaluated:
        steps = [(e.step, e.loss) for e in source.evaluations]
        over_steps += [_losses(source.name, steps, colour)] if len(steps) > 1 else []
        shown = [(source.evaluations[-1], colour)]
        if len(steps) > 1 and not several:
            shown.insert(0, (source.evaluations[0], "#9a9a9a"))
        for e, shade in shown:
            losses = [(b.end, b.loss) for b in e.buckets if b.loss is not None]
            name = source.name if several else f"step {e.step}"
            by_context.append(_losses(name, losses, shade))
            ends |= {b.end for b in e.buckets}
    ticks = {"tickvals": sorted(ends), "ticktext": list(map(format_size, sorted(ends)))}
    views = []
    for label, data, x in (
        ("all tokens, over steps", over_steps, axis("step")),
        ("by context, last evaluation", by_context, axis(_EARLIER, type="log", **ticks)),
    ):
        more = {"showlegend": len(data) > 1, "margin": {"t": 20 + 10 * len(data)}}
        shape = layout(300 + 8 * len(data), x, axis("loss, nats per token"), **more)
        views += [FigureView((label,), data, shape)] if data else []
    note = "Held-out sequences are not in the training data."
    return Figure("held-out", "Held-out loss", (), views, note, together=True)


def _losses(name: str, losses: Sequence[tuple[int, float | None]], colour: str) -> Trace:
    return plots.line(escape(name), [x for x, _ in losses], [loss for _, loss in losses], colour)


def layers_over_steps(
    name: str, title: str, sources: Sequence[ReportSource], key: str, unit: str, hover: str
) -> Figure:
    """Draw a heat map of a quantity, by layer and step of training, in a view per run.

    key: field of `StepMetrics` with a value per layer. The last layer is the model's last.
    """
    views = []
    for source in sources:
        rows = [(m.step, values) for m in source.metrics if (values := getattr(m, key))]
        rows = plots.evenly([row for row in rows if len(row[1]) == len(rows[-1][1])], 300)
        if not rows:
            continue
        table = np.array([values for _, values in rows], float).T
        of_model = source.settings.get("model.num_layers")
        first = max(0, of_model - len(table)) if isinstance(of_model, int) else 0
        x, y = ("step", [step for step, _ in rows]), ("layer", range(first, first + len(table)))
        views.append(plots.heat_view((source.name,), table, x, y, unit, hover))
    return Figure(name, title, ("run",), views)
