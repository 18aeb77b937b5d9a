"""Figures of evaluations: depth x length maps, loss by context, and scores over checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from mtrain_cli.config.sizes import format_size
from mtrain_cli.evaluation.results import NATS, Result
from mtrain_cli.reporting import plots
from mtrain_cli.reporting.evaluation_names import distinguished
from mtrain_cli.reporting.plots import Figure, FigureView

Named = Sequence[tuple[str, Sequence[Result]]]  # (run, its results)


def evaluation_figures(sources: Named) -> list[Figure]:
    """Return the figures of the results of all runs. A figure without results has no views."""
    sources = [(run, distinguished(results)) for run, results in sources]
    return [_depth_maps(sources), _by_context(sources), _over_steps(sources)]


def _depth_maps(sources: Named) -> Figure:
    views = []
    for run, results in sources:
        found = [result for result in results if result.parts and result.unit != NATS]
        for task, step, attention in dict.fromkeys((r.task, r.step, r.attention) for r in found):
            own = {
                r.length: {(part.begin, part.end): part.score for part in r.parts}
                for r in found
                if (r.task, r.step, r.attention) == (task, step, attention)
            }
            lengths = sorted(own)
            spans = sorted({span for parts in own.values() for span in parts})
            map_ = plots.heat(
                plots.numbers([[_number(own[n].get(span)) for n in lengths] for span in spans]),
                [format_size(length) for length in lengths],
                [f"{begin}-{end}%" for begin, end in spans],
                "% right",
                "%{x} tokens, depth %{y}: %{z} %",
                zmax=100,
            )
            name = f"{run}, " if len(sources) > 1 else ""
            label = f"{name}{task}, {attention}{_step(step)}"
            axes = plots.axis("tokens", type="category"), plots.downward("depth", type="category")
            views.append(FigureView((label,), [map_], plots.layout(320, *axes)))
    note = "Depth: share of the text before the needle. Empty cells have no question."
    return Figure("depth-map", "Needles by depth and length", (), views, note, together=True)


def _by_context(sources: Named) -> Figure:
    """Draw the loss by context: a line per run, checkpoint, length and attention."""
    found = [
        (run, result)
        for run, results in sources
        for result in results
        if result.unit == NATS and result.parts
    ]
    newest = sorted(range(len(found)), key=lambda at: found[at][1].step or 0)[-plots.STYLES :]
    lines: list[plots.Trace] = []
    for run, result in (found[at] for at in sorted(newest)):
        name = f"{run}, " if len(sources) > 1 else ""
        label = f"{name}{format_size(result.length)} {result.attention}{_step(result.step)}"
        ends, scores = [p.end for p in result.parts], [p.score for p in result.parts]
        spread = [1.96 * part.error if part.error else 0.0 for part in result.parts]
        bars = {"type": "data", "array": plots.numbers(spread), "thickness": 1}
        lines.append(plots.styled(escape(label), ends, scores, len(lines), error_y=bars))
    ticks = sorted({end for line in lines for end in line["x"]})
    x = plots.axis(
        "earlier tokens (up to)", type="log", tickvals=ticks,
        ticktext=[format_size(end) for end in ticks],
    )  # fmt: skip
    layout = plots.layout(340 + 8 * len(lines), x, plots.axis("loss, nats per token"))
    views = [FigureView(("loss by context",), lines, layout)] if lines else []
    note = "Bars: 1.96 standard errors over the sequences."
    if len(lines) < len(found):
        note += (
            f" Shows {len(lines)} of {len(found)} lines, those of the newest checkpoints. The "
            "tables have all."
        )
    return Figure("loss-by-context", "Loss by context", (), views, note, together=True)


def _over_steps(sources: Named) -> Figure:
    views = []
    for run, results in sources:
        for unit in dict.fromkeys(result.unit for result in results if result.unit):
            lines: list[plots.Trace] = []
            own = [r for r in results if r.unit == unit and r.step is not None]
            kinds = dict.fromkeys((r.task, r.length, r.attention) for r in own)
            for number, kind in enumerate(kinds):
                found = sorted(
                    (r for r in own if (r.task, r.length, r.attention) == kind),
                    key=lambda result: result.step or 0,
                )
                if len(found) > 1:
                    task, length, attention = kind
                    label = f"{task} {format_size(length) if length else ''} {attention}"
                    steps, scores = [r.step for r in found], [r.score for r in found]
                    spread = [1.96 * r.error if r.error else 0.0 for r in found]
                    bars = {"type": "data", "array": plots.numbers(spread), "thickness": 1}
                    lines.append(plots.styled(escape(label), steps, scores, number, error_y=bars))
            if lines:
                name = f"{run}, " if len(sources) > 1 else ""
                layout = plots.layout(340, plots.axis("step"), plots.axis(unit))
                views.append(FigureView((f"{name}{unit}",), lines, layout))
    note = "Bars: 1.96 standard errors over the samples."
    return Figure("scores-over-steps", "Scores of checkpoints", (), views, note, together=True)


def _number(value: float | None) -> float:
    return float("nan") if value is None else value


def _step(step: int | None) -> str:
    return "" if step is None else f", step {step}"
