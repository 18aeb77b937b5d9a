"""The page of `mtrain study learning`, which a browser shows without a network."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path

from mtrain_cli import __version__
from mtrain_cli.config.sizes import format_size
from mtrain_cli.learning.cells import Study
from mtrain_cli.learning.outcomes import (
    DEPTHS,
    LONG_LOSS,
    LOSS,
    MEASURES,
    PLACES,
    Compared,
    Measured,
    Summary,
)
from mtrain_cli.learning.t_interval import interval
from mtrain_cli.reporting import elements, plots
from mtrain_cli.reporting.learning_tables import label, remarks, tables
from mtrain_cli.reporting.plots import Figure, FigureView

PAGE = "report.html"
_TITLE = "Does sparse training lose anything?"


def write_page(study: Study, summary: Summary) -> Path:
    """Write the page of a study to its folder, and return its path."""
    path = study.folder / PAGE
    drawn = [figure for figure in figures(summary) if figure.views]
    tier = summary.tier
    facts = [
        ("tier", tier.name),
        ("model", " ".join(word.removeprefix("model.") for word in tier.model)),
        ("sequences", f"{format_size(tier.base_seq)}, then {format_size(tier.long_seq)}"),
        ("seeds", ", ".join(map(str, tier.seeds))),
        ("folder", str(study.folder.resolve())),
    ]
    head = f"<h1>{_TITLE} <small>tier {escape(tier.name)}</small></h1>"
    header = f"{head}{elements.remarks(remarks(summary))}{elements.definition_list(facts)}"
    body = [
        f'<div class="headers"><header>{header}</header></div>',
        *(
            elements.section(
                each.title,
                elements.table(each.heads, each.rows, words=range(each.words)),
                each.note,
            )
            for each in tables(summary)
        ),
        *map(elements.figure, drawn),
        elements.section("Cells", _cells(summary)),
        f"<footer>written by mtrain {escape(__version__)}</footer>",
    ]
    elements.write(path, _TITLE, body, drawn)
    return path


def figures(summary: Summary) -> list[Figure]:
    """Return the figures of a study."""
    return [_frontier(summary), _by_context(summary), _by_depth(summary)]


def _frontier(summary: Summary) -> Figure:
    """Draw the loss against the density and against the seconds of training."""
    views = []
    for measure in (LOSS, LONG_LOSS):
        for title, facts in (("density", "density"), ("seconds of training", "seconds")):
            points = [
                plots.line(
                    escape(label(each)),
                    [getattr(each, facts)],
                    [each.mean[measure].mean],
                    plots.PALETTE[number % len(plots.PALETTE)],
                    mode="markers",
                    marker={
                        "color": plots.PALETTE[number % len(plots.PALETTE)],
                        "size": 10,
                        "symbol": "circle" if number < len(plots.PALETTE) else "diamond",
                    },
                    error_y={
                        "type": "data", "array": plots.numbers([_half(each, measure)]),
                        "thickness": 1,
                    },
                )
                for number, each in enumerate(summary.compared)
                if measure in each.mean and each.variant.is_trained
            ]  # fmt: skip
            if points:
                axes = plots.from_zero(title), plots.axis("nats per token")
                layout = plots.layout(340 + 8 * len(points), *axes)
                views.append(FigureView((f"{MEASURES[measure]} against {title}",), points, layout))
    note = "Bars: 95 % t-interval over seeds."
    return Figure("frontier", "Loss against density and time", (), views, note, together=True)


def _by_context(summary: Summary) -> Figure:
    """Draw the loss by context, and its difference from dense."""
    lines: list[plots.Trace] = []
    for number, each in enumerate(summary.compared):
        own = _of(summary, each)
        spans = sorted({span for one in own for span in one.buckets})
        over = [
            interval([one.buckets[span] for one in own if span in one.buckets]) for span in spans
        ]
        lines.append(
            plots.line(
                escape(label(each)),
                [end for _, end in spans],
                [float("nan") if one is None else one.mean for one in over],
                plots.PALETTE[number % len(plots.PALETTE)],
                line={
                    "color": plots.PALETTE[number % len(plots.PALETTE)],
                    "dash": "solid" if number < len(plots.PALETTE) else "dot",
                },
            )
        )
    ticks = sorted({end for line in lines for end in line["x"]})
    x = plots.axis(
        "earlier tokens (up to)", type="log", tickvals=ticks,
        ticktext=[format_size(end) for end in ticks],
    )  # fmt: skip
    layout = plots.layout(360 + 8 * len(lines), x, plots.axis("nats per token"))
    views = [FigureView(("loss by context",), lines, layout)] if ticks else []
    note = "Mean over seeds. The table above has the numbers."
    return Figure("loss-by-context", "Loss by context", (), views, note, together=True)


def _by_depth(summary: Summary) -> Figure:
    """Draw a map per variant and attention: depth of the needle x place of the question."""
    views = []
    for each in summary.compared:
        own = _of(summary, each)
        grid = [[_mean_at(own, place, at) for place in PLACES] for at in range(DEPTHS)]
        map_ = plots.heat(
            plots.numbers(grid),
            [MEASURES[place].removeprefix("asked ") for place in PLACES],
            [f"{100 * at // DEPTHS}-{100 * (at + 1) // DEPTHS}%" for at in range(DEPTHS)],
            "% found",
            "%{x}, depth %{y}: %{z} %",
            zmax=100,
        )
        axes = plots.axis("asked", type="category"), plots.downward("depth", type="category")
        views.append(FigureView((label(each),), [map_], plots.layout(320, *axes)))
    note = "Depth: share of the text before the needle. Empty cells have no question."
    return Figure("needles", "Needles by depth and place", (), views, note, together=True)


def _cells(summary: Summary) -> str:
    rows = [
        [
            key, str(done.steps), f"{done.seconds:.1f}", f"{done.step_seconds:.3g}",
            f"{done.density:.3f}", shlex.join(done.command) or "-",
        ]
        for key, done in summary.done.items()
    ]  # fmt: skip
    heads = ("cell", "steps", "seconds", "seconds a step", "density", "command")
    return elements.table(heads, rows, words=(0, 5))


def _of(summary: Summary, compared: Compared) -> list[Measured]:
    return [
        one
        for one in summary.measured
        if (one.cell.name, one.attention) == (compared.variant.name, compared.attention)
    ]


def _mean_at(measured: Sequence[Measured], place: str, at: int) -> float:
    found = [one.depths[place, at] for one in measured if (place, at) in one.depths]
    return sum(found) / len(found) if found else float("nan")


def _half(compared: Compared, measure: str) -> float:
    over = compared.mean[measure]
    return 0.0 if over.high is None else over.high - over.mean
