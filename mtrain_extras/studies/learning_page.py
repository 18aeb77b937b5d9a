"""The page of `mtrain study learning`, which a browser shows without a network."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from html import escape
from pathlib import Path

from mtrain_cli import __version__
from mtrain_cli.config.sizes import format_size
from mtrain_cli.launch.run_dir import RUN
from mtrain_cli.records.metrics import METRICS_FILE, read_readable_metrics
from mtrain_cli.reporting import elements, plots
from mtrain_cli.reporting.plots import Figure, FigureView
from mtrain_extras.studies.cells import Study
from mtrain_extras.studies.learning_tables import label, remarks, tables
from mtrain_extras.studies.outcomes import (
    DEPTHS,
    LONG_LOSS,
    LOSS,
    MEASURES,
    NEEDLES,
    PLACES,
    Compared,
    Measured,
    Summary,
    dense_of,
)
from mtrain_extras.studies.tiers import DENSE, Cell

PAGE = "report.html"
_POINTS = 50  # of a line of losses by step
_TITLE = "Does sparse training lose anything?"
_BELOW = {"orientation": "v", "y": -0.3, "yanchor": "top", "x": 0}
# Of the variants that have the same color, in turn: symbol and dash with the training's attention.
_SYMBOLS, _DASHES = ("circle", "square"), ("solid", "longdash")
_DENSE_DASHES = ("dot", "dashdot")  # with dense attention in the measurement


def write_page(study: Study, summary: Summary) -> Path:
    """Write the page of a study to its folder, and return its path."""
    path = study.folder / PAGE
    drawn = [each for each in (*figures(summary), loss_by_step(study, summary)) if each.views]
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
                f'<div class="sentences">{drawn_table}</div>' if drawn_table else "",
                each.note,
            )
            for each in tables(summary)
            for drawn_table in [elements.table(each.heads, each.rows, words=range(each.words))]
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
    views = []
    for measure in (LOSS, LONG_LOSS, NEEDLES):
        unit = "points from dense" if measure == NEEDLES else "nats above dense"
        for title, fact in (("density", "density"), ("seconds of training", "seconds")):
            points = [
                _point(summary, each, getattr(each, fact), measure)
                for each in summary.compared
                if measure in each.difference and each.variant.is_trained
            ]
            if points:
                axes = plots.from_zero(title), plots.axis(unit, zeroline=True)
                layout = plots.layout(_height(points), *axes, legend=_BELOW)
                views.append(FigureView((f"{MEASURES[measure]} against {title}",), points, layout))
    note = (
        "Bars: 95 % t-interval over seeds, paired. Dense is at 0. Filled: measured with the "
        "attention of the training. Open: with dense attention."
    )
    return Figure(
        "frontier", "Loss and needles against density and time", (), views, note, together=True
    )


def _point(summary: Summary, each: Compared, x: float, measure: str) -> plots.Trace:
    over = each.difference[measure]
    half = 0.0 if over.high is None else over.high - over.mean
    colour, turn = _colour(summary, each.variant.name)
    symbol = _SYMBOLS[turn] + ("-open" if _is_dense_beside_own(each) else "")
    bars = {"type": "data", "array": plots.numbers([half]), "thickness": 1}
    return plots.line(
        escape(label(each)), [x], [over.mean], colour,
        mode="markers", marker={"color": colour, "size": 10, "symbol": symbol}, error_y=bars,
    )  # fmt: skip


def _colour(summary: Summary, name: str) -> tuple[str, int]:
    """Return the color of a variant, and how many variants before it have the same."""
    names = [variant.name for variant in summary.tier.variants]
    turn, at = divmod(names.index(name), len(plots.PALETTE))
    return plots.PALETTE[at], turn % len(_SYMBOLS)


def _is_dense_beside_own(each: Compared) -> bool:
    return bool(each.variant.words) and each.attention == DENSE


def _height(traces: Sequence[plots.Trace]) -> int:
    return max(400 + 20 * len(traces), 42 * len(traces) + 40)


def _by_context(summary: Summary) -> Figure:
    drawn: dict[str, list[plots.Trace]] = {"nats per token": [], "nats above dense": []}
    for each in summary.compared:
        own = _of(summary, each)
        dense = [dense_of(summary.measured, one.cell.seed) for one in own]
        pairs = [(one, other) for one, other in zip(own, dense, strict=True) if other is not None]
        spans = sorted({span for one in own for span in one.buckets})
        lines: dict[str, Sequence[Sequence[float | None]]] = {
            "nats per token": [[one.buckets.get(span) for one in own] for span in spans],
            "nats above dense": [
                [
                    one.buckets[span] - other.buckets[span]
                    for one, other in pairs
                    if span in one.buckets and span in other.buckets
                ]
                for span in spans
            ],
        }
        for title, values in lines.items():
            colour, turn = _colour(summary, each.variant.name)
            dashes = _DENSE_DASHES if _is_dense_beside_own(each) else _DASHES
            drawn[title].append(
                plots.line(
                    escape(label(each)), [end for _, end in spans], list(map(_mean, values)),
                    colour, line={"color": colour, "dash": dashes[turn]},
                )
            )  # fmt: skip
    views = []
    for title, traces in drawn.items():
        ticks = sorted({end for trace in traces for end in trace["x"]})
        x = plots.axis(
            "earlier tokens (up to)", type="log", tickvals=ticks,
            ticktext=[format_size(end) for end in ticks],
        )  # fmt: skip
        layout = plots.layout(_height(traces), x, plots.axis(title), legend=_BELOW)
        views += [FigureView((title,), traces, layout)] if ticks else []
    note = (
        "Mean over seeds; differences are from the dense cell of the same seed. Dotted: measured "
        "with dense attention, but trained with another."
    )
    return Figure("loss-by-context", "Loss by context", (), views, note, together=True)


def _mean(values: Sequence[float | None]) -> float:
    found = [value for value in values if value is not None]
    return sum(found) / len(found) if found else float("nan")


def _by_depth(summary: Summary) -> Figure:
    views = []
    for each in summary.compared:
        own = _of(summary, each)
        grid = [
            [_mean([one.depths.get((place, at)) for one in own]) for place in PLACES]
            for at in range(DEPTHS)
        ]
        map_ = plots.heat(
            plots.numbers(grid),
            [MEASURES[place].removeprefix("asked ") for place in PLACES],
            [f"{100 * at // DEPTHS}-{100 * (at + 1) // DEPTHS}%" for at in range(DEPTHS)],
            "% found",
            "%{x}, depth %{y}: %{z} %",
            zmax=100,
        )
        axes = (
            plots.axis("asked", type="category"),
            plots.downward("depth", type="category", automargin=True),
        )
        views.append(FigureView((label(each),), [map_], plots.layout(320, *axes)))
    note = "Depth: share of the text before the needle. Empty cells have no question."
    return Figure("needles", "Needles by depth and place", (), views, note, together=True)


def loss_by_step(study: Study, summary: Summary) -> Figure:
    """Draw the loss of training, as MTraining's figure 6a, from the metrics that cells keep."""
    width = max(1, summary.tier.steps // _POINTS)
    losses: dict[str, dict[int, dict[int, float]]] = {}  # by variant, seed and step
    for variant in summary.tier.variants:
        for seed in summary.tier.seeds:
            cell = Cell(seed, variant)
            file = study.path(cell) / RUN / METRICS_FILE
            if variant.is_trained and cell.key in summary.done and file.is_file():
                own = {row.step: row.loss for row in read_readable_metrics(file)[0]}
                whole = {step: loss for step, loss in own.items() if loss is not None}
                losses.setdefault(variant.name, {})[seed] = whole
    drawn: dict[str, list[plots.Trace]] = {"nats per token": [], "nats above dense": []}
    for name, seeds in losses.items():
        above = {
            seed: {step: loss - dense[step] for step, loss in own.items() if step in dense}
            for seed, own in seeds.items()
            if (dense := losses.get(DENSE, {}).get(seed))
        }
        for title, runs in zip(drawn, (seeds.values(), above.values()), strict=True):
            steps = sorted(set.intersection(*map(set, runs))) if runs else []
            blocks = [steps[at : at + width] for at in range(0, len(steps), width)]
            means = [_mean([run[step] for run in runs for step in block]) for block in blocks]
            colour, turn = _colour(summary, name)
            look = {"mode": "lines", "line": {"color": colour, "dash": _DASHES[turn]}}
            ends = [block[-1] for block in blocks]
            drawn[title] += [plots.line(escape(name), ends, means, colour, **look)] * bool(blocks)
    views = [
        FigureView(
            (title,), traces,
            plots.layout(_height(traces), plots.axis("step"), plots.axis(title), legend=_BELOW),
        )
        for title, traces in drawn.items()
        if traces
    ]  # fmt: skip
    note = (
        f"Mean over seeds and {width} steps; differences are from the dense cell of the same seed, "
        "which has the same batches, except dense-again."
    )
    return Figure("loss-by-step", "Loss of training by step", (), views, note, together=True)


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
