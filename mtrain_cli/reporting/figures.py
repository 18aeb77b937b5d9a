"""Collect the figures of a report, and draw the figures of attention, as plain plotly data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

from mtrain_cli.parallel.recording import ATTENTION
from mtrain_cli.records.analysis import BINS, CaseAnalysis, PassAnalysis
from mtrain_cli.records.other_records import by_kind
from mtrain_cli.records.record_sums import EXPOSED, LATE
from mtrain_cli.reporting import plots
from mtrain_cli.reporting.evaluation_figures import evaluation_figures
from mtrain_cli.reporting.expert_figures import expert_figures
from mtrain_cli.reporting.pipeline_page import pipeline_figure
from mtrain_cli.reporting.profile_figures import sparsity_figures, step_figures
from mtrain_cli.reporting.program_figure import program_figure
from mtrain_cli.reporting.report_source import ReportSource, labelled_cases
from mtrain_cli.reporting.sweeps import scaling_figure
from mtrain_cli.reporting.timeline_page import timeline_figure
from mtrain_cli.reporting.training_figures import density_figure, held_out_figure, training_figure

# Most cells in all heat maps of a page together. This limit and those of the other figures keep the
# page, with the plotly library, under 1.5 MB.
HEAT_NUMBERS = 60_000
Cases = Sequence[tuple[str, ReportSource, CaseAnalysis]]  # (label, run, case)


def figures(sources: Sequence[ReportSource]) -> list[plots.Figure]:
    """Return the figures that have something to show, in the order of the page."""
    cases = labelled_cases(sources)
    drawn = [scaling_figure([(source.name, source.swept) for source in sources])]
    trained = [source for source in sources if source.metrics]
    drawn += [held_out_figure(trained), training_figure(trained), density_figure(trained)]
    drawn += expert_figures(sources)
    drawn += evaluation_figures([(source.name, source.results) for source in sources])
    drawn += step_figures([(s.name, s.step) for s in sources if s.step is not None])
    drawn += sparsity_figures([source for source in sources if source.sparsity])
    for kind, named in by_kind([(source.name, source.others) for source in sources]):
        drawn += kind.figures(named)
    drawn += [
        pipeline_figure(sources),
        breakdown_figure(cases),
        heat_map_figure(cases),
        timeline_figure(cases),
        rank_figure(cases),
        distribution_figure(cases),
        layer_figure(cases),
        program_figure([*cases, *((s.name, s, None) for s in sources if not s.cases)]),
    ]
    return [figure for figure in drawn if figure.views]


def _passes(cases: Cases) -> Iterator[tuple[str, str, PassAnalysis]]:
    for label, _, case in cases:
        for direction, analysis in case.passes.items():
            yield label, direction, analysis


def breakdown_figure(cases: Cases) -> plots.Figure:
    """Draw a stacked bar per case with the time of each of `BINS`, averaged over ranks."""
    views = []
    directions = dict.fromkeys(name for _, _, case in cases for name in case.directions)
    for direction in (None, *directions) if cases else ():
        has = [
            (_folded(label), case)
            for label, _, case in cases
            if direction is None or direction in case.passes
        ]
        labels = [label for label, _ in has]
        values = {name: [case.bin_ms(name, direction) for _, case in has] for name in BINS}
        data = [
            _bin(name, plots.numbers(ms), labels, horizontal=True)
            for name, ms in values.items()
            if any(ms)
        ]
        shape = plots.layout(
            160 + 40 * len(has),
            plots.from_zero("ms per iteration"),
            {"autorange": "reversed", "automargin": True},
            barmode="stack",
            margin={"l": 10},
        )
        views.append(plots.FigureView((direction or "all passes",), data, shape))
    note = "Means over workers. Exposed: communication without overlap, by link."
    return plots.Figure("cases", "Time breakdown of attention", ("passes",), views, note)


_HEATS = (
    ("attention, ms", "attention", "ms"),
    ("whole step, ms", "elapsed", "ms"),
    (f"{plots.LATE_LABEL}, ms", LATE, "ms"),
    (f"{plots.EXPOSED_LABEL}, ms", EXPOSED, "ms"),
    ("work: pairs", "pairs", "pairs"),
    ("work: blocks", "blocks", "blocks"),
)


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
            table = case.bins[chosen].sum(0)[ranks]
            bars = zip(BINS, table.T, strict=True)
            data = [_bin(name, plots.numbers(ms), ranks) for name, ms in bars if ms.any()]
            shape = plots.layout(
                380,
                plots.axis("rank", **plots.whole(len(ranks))),
                plots.from_zero("ms per iteration"),
                barmode="stack",
                bargap=0.15 if len(ranks) < 40 else 0,
            )
            views.append(plots.FigureView((label, passes), data, shape))
    return plots.Figure("ranks", "Time breakdown by rank", ("case", "passes"), views)


def distribution_figure(cases: Cases) -> plots.Figure:
    """Draw how attention time varies across workers and steps (MTraining, figures 12 and 13)."""
    views, thinned = [], False
    for label, direction, analysis in _passes(cases):
        for scope, title, table in (
            ("across the workers of a step", "step of the schedule", analysis.across_workers),
            ("across the steps of a worker", "worker", analysis.across_steps),
        ):
            at = plots.evenly(range(len(table)), 64)
            thinned |= len(at) < len(table)
            names = ("lowerfence", "q1", "median", "q3", "upperfence")
            trace = {
                "type": "box",
                "x": at,
                **dict(zip(names, plots.numbers(table[at].T), strict=True)),
                "marker": {"color": plots.COLOURS[ATTENTION]},
                "line": {"width": 1.2},
                "showlegend": False,
            }
            x = plots.axis(title, **plots.whole(len(at)))
            shape = plots.layout(340, x, plots.from_zero("ms of attention"))
            views.append(plots.FigureView((label, direction, scope), [trace], shape))
    note = (
        "Box: quartiles; line: median; whiskers: minimum and maximum, over samples and workers or "
        "steps."
    )
    if thinned:
        note += " Shows 64 evenly spaced boxes."
    selectors = ("case", "pass", "scope")
    return plots.Figure("spread", "Distribution of attention time", selectors, views, note)


_LAYER_LINES = (
    ("pass, slowest worker", "ms", "#333333"),
    ("attention", "attention_ms", plots.COLOURS[ATTENTION]),
    (plots.LATE_LABEL, "late_ms", plots.COLOURS[LATE]),
    (plots.EXPOSED_LABEL, "exposed_ms", plots.COLOURS[EXPOSED]),
)


def layer_figure(cases: Cases) -> plots.Figure:
    views = []
    for label, direction, analysis in _passes(cases):
        rows = analysis.layers
        if len(rows) < 2:
            continue
        layers = [row["layer"] for row in rows]
        data = [
            plots.line(name, layers, [row[key] for row in rows], colour)
            for name, key, colour in _LAYER_LINES
        ]
        shape = plots.layout(
            340, plots.axis("layer", **plots.whole(len(rows))), plots.from_zero("ms")
        )
        views.append(plots.FigureView((label, direction), data, shape))
    return plots.Figure("layers", "Time by layer", ("case", "pass"), views)


def _bin(
    name: str, ms: list[Any], places: Sequence[Any], horizontal: bool = False
) -> dict[str, Any]:
    """Return the bars of one of `BINS`: a bar for each case or rank."""
    kind, _, link = name.partition(" ")
    colour = plots.link_colour(link) if kind == EXPOSED else plots.COLOURS[name]
    label = (
        plots.exposed_label(link) if kind == EXPOSED else plots.LATE_LABEL if name == LATE else name
    )
    x, y = (ms, list(places)) if horizontal else (list(places), ms)
    where, value = ("y", "x") if horizontal else ("x", "y")
    hover = f"%{{{where}}}: {label} %{{{value}:.4g}} ms"
    orientation = "h" if horizontal else "v"
    return plots.bar(x, y, colour, hover, name=label, orientation=orientation)


def _folded(label: str, width: int = 26) -> str:
    """Break a label at spaces into lines of at most ``width`` characters, as HTML."""
    lines = [""]
    for word in label.split():
        if lines[-1] and len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "<br>".join(escape(line) for line in lines)
