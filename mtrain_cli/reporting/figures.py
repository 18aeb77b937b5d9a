"""Collect the figures of a report, and draw the figures of attention, as plain plotly data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mtrain_cli.records.analysis import BINS, CaseAnalysis, PassAnalysis
from mtrain_cli.records.record_files import by_kind
from mtrain_cli.records.record_sums import EXPOSED, LATE
from mtrain_cli.reporting import plots
from mtrain_cli.reporting.evaluations import evaluation_figures
from mtrain_cli.reporting.experts import expert_figures
from mtrain_cli.reporting.pipeline_page import pipeline_figure
from mtrain_cli.reporting.program_figure import program_figure
from mtrain_cli.reporting.report_source import ReportSource, labelled_cases
from mtrain_cli.reporting.sparsity import sparsity_figure
from mtrain_cli.reporting.step_tables import step_figure
from mtrain_cli.reporting.sweeps import scaling_figure
from mtrain_cli.reporting.training import density_figure, held_out_figure, training_figure

# Most cells in all heat maps of a page together. This limit and those of the other figures keep the
# page, with the plotly library, under 1.5 MB.
HEAT_NUMBERS = 60_000
Cases = Sequence[tuple[str, ReportSource, CaseAnalysis]]  # (label, run, case)
_HEATS = (
    ("attention, ms", "attention", "ms"),
    ("whole step, ms", "elapsed", "ms"),
    (f"{plots.LATE_LABEL}, ms", LATE, "ms"),
    (f"{plots.EXPOSED_LABEL}, ms", EXPOSED, "ms"),
    ("work: pairs", "pairs", "pairs"),
    ("work: blocks", "blocks", "blocks"),
)


def figures(sources: Sequence[ReportSource]) -> list[plots.Figure]:
    """Return the figures that have something to show, in the order of the page."""
    cases = labelled_cases(sources)
    trained = [source for source in sources if source.metrics]
    drawn = [
        scaling_figure([(source.name, source.swept) for source in sources]),
        held_out_figure(trained),
        training_figure(trained),
        density_figure(trained),
        *expert_figures(sources),
        *evaluation_figures([(source.name, source.results) for source in sources]),
        step_figure([(s.name, s.step) for s in sources if s.step is not None]),
        sparsity_figure([(s.name, s.sparsity) for s in sources if s.sparsity]),
    ]
    for kind, named in by_kind([(source.name, source.others) for source in sources]):
        drawn += kind.figures(named)
    drawn += [
        pipeline_figure(sources),
        heat_map_figure(cases),
        rank_figure(cases),
        program_figure(cases),
    ]
    return [figure for figure in drawn if figure.views]


def _passes(cases: Cases) -> Iterator[tuple[str, str, PassAnalysis]]:
    for label, _, case in cases:
        for direction, analysis in case.passes.items():
            yield label, direction, analysis


def heat_map_figure(cases: Cases) -> plots.Figure:
    tables = [
        ((label, direction, quantity), unit, table)
        for label, direction, analysis in _passes(cases)
        for quantity, key, unit in _HEATS
        if (table := getattr(analysis, key)).any() or unit == "ms"
    ]
    side = max(16, int((HEAT_NUMBERS / max(1, len(tables))) ** 0.5))
    views = [
        plots.heat_view(
            labels,
            table,
            ("step of the schedule", range(table.shape[1])),
            ("worker", range(len(table))),
            unit,
            f"worker %{{y}}, step %{{x}}: %{{z:.4g}} {unit}",
            side=side,
            colorscale="YlOrRd" if unit == "ms" else "YlGnBu",
        )
        for labels, unit, table in tables
    ]
    note = "Means over samples."
    if any(max(table.shape) > side for _, _, table in tables):
        note += f" Larger tables shrink to {side} x {side} cells, each the maximum of its group."
    selectors = ("case", "pass", "quantity")
    return plots.Figure("heat", "Attention by worker and step", selectors, views, note)


def rank_figure(cases: Cases) -> plots.Figure:
    """Draw a stacked bar per rank with the time of each of `BINS`."""
    views = []
    for label, _, case in cases:
        ranks = case.present
        choices = {name: [i] for i, name in enumerate(case.directions)}
        if len(choices) > 1:
            choices = {"all passes": list(range(len(choices))), **choices}
        for passes, chosen in choices.items():
            bars = zip(BINS, case.bins[chosen].sum(0)[ranks].T, strict=True)
            shape = plots.layout(
                380,
                plots.axis("rank", **plots.whole(len(ranks))),
                plots.from_zero("ms per iteration"),
                barmode="stack",
                bargap=0.15 if len(ranks) < 40 else 0,
            )
            data = [_bin(name, ms, ranks) for name, ms in bars if ms.any()]
            views.append(plots.FigureView((label, passes), data, shape))
    return plots.Figure("ranks", "Time breakdown by rank", ("case", "passes"), views)


def _bin(name: str, ms: Any, ranks: Sequence[int]) -> plots.Trace:
    """Return the bars of one of `BINS`: a bar for each rank."""
    kind, _, link = name.partition(" ")
    label, colour = name, plots.COLOURS[kind]
    if kind == EXPOSED:
        label, colour = plots.exposed_label(link), plots.link_colour(link)
    elif name == LATE:
        label = plots.LATE_LABEL
    hover, more = f"%{{x}}: {label} %{{y:.4g}} ms", {"name": label, "orientation": "v"}
    return plots.bar(list(ranks), plots.numbers(ms), colour, hover, **more)
