"""Show how the stages of a pipeline spend a step: a table, and the time line of each stage.

Measured and predicted pipelines have the same rows and the same figure. A prediction plays the
schedule, and a profile has the recorded passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from mtrain_cli.parallel.pipeline_schedule import BACKWARD, FORWARD, Pipeline, Played
from mtrain_cli.records.pipeline_times import PipelineTimes, predicted_pipeline, recorded_step
from mtrain_cli.reporting import plots
from mtrain_cli.reporting.report_source import ReportSource, typical_rows
from mtrain_cli.reporting.table import Column, Table, data, fixed, ms, percent

NOTE = (
    "ms: from the first pass to the end of the last; idle: share of this time without a pass, mean "
    "over stages; played: idle share of the schedule with the mean times of its passes and free "
    "messages; formula: (p - 1) / (v m + p - 1); stage imbalance: work of the busiest stage "
    "divided by the mean; late: waits for other stages that still compute; hops: waits for "
    "messages under way; both per step, of the stage that waits most"
)
BARS = 6_000  # most passes in all time lines of a page together
_PANELS = 6  # most time lines
_LABELS = 40  # most passes of a stage whose micro-batch numbers fit in their bars
_COLOURS = {
    FORWARD: ("#2f6fb5", "#7fb2e5", "#1d4673", "#a9cbee"),
    BACKWARD: ("#d97706", "#f7c873", "#8a4b04", "#fbe2b3"),
}
_COLUMNS = ("case", "iteration", "micro", "direction", "step", "rank", "phase")
_TIMES = ("start_us", "dur_us")


@dataclass(frozen=True)
class _Shown:
    """One pipeline of a report."""

    label: str
    times: PipelineTimes
    source: ReportSource
    case: Any = None


def _found(sources: Sequence[ReportSource]) -> list[_Shown]:

    def label(source: ReportSource, text: object) -> str:
        return f"{source.name}: {text}" if len(sources) > 1 else str(text)

    measured = [
        _Shown(label(source, case.label), case.pipeline, source, case)
        for source in sources
        for case in source.cases
        if case.pipeline is not None
    ]
    predicted = [
        _Shown(label(source, f"{entry.get('label')}, predicted"), times, source)
        for source in sources
        for entry in source.summary.get("predicted") or ()
        if isinstance(entry, dict) and (times := predicted_pipeline(entry.get("pipeline")))
    ]
    return [*measured, *predicted]


def describe(pipeline: Pipeline) -> str:
    """Return a schedule in a few words."""
    virtual = f" x {pipeline.virtual_stages} virtual" * (pipeline.virtual_stages > 1)
    count = pipeline.micro_batches
    micro = f"{count} micro-batch{'es' * (count != 1)}"
    return f"{pipeline.schedule}, {pipeline.stages}{virtual} stages, {micro}"


def pipeline_table(sources: Sequence[ReportSource]) -> Table:
    """Return a table with a row per pipeline."""
    columns = [
        Column("case", lambda shown: shown.label, words=True),
        Column("schedule", lambda shown: describe(shown.times.pipeline), words=True),
        Column("ms", lambda shown: shown.times.makespan, ms),
        Column("idle", lambda shown: shown.times.bubble, percent),
        Column("played", lambda shown: shown.times.timed.played.bubble, percent, drop=3),
        Column("formula", lambda shown: shown.times.pipeline.bubble, percent),
        Column("stage imbalance", lambda shown: shown.times.imbalance, fixed(2)),
        Column("work of each stage, ms", lambda shown: shown.times.work, _listed),
        Column("late ms", lambda shown: shown.times.late, _most, drop=2),
        Column("hops ms", lambda shown: shown.times.hops, _most, drop=1),
    ]
    return Table("Pipeline, one step", columns, _found(sources), NOTE)


def _most(waits: np.ndarray) -> str:
    return ms(float(waits.max()))


def _listed(work: np.ndarray) -> str:
    if len(work) > 8:
        return f"{ms(float(work[0]))}, ..., from {ms(float(work.min()))} to {ms(float(work.max()))}"
    return ", ".join(ms(float(each)) for each in work)


def stages_data(sources: Sequence[ReportSource]) -> Table:
    """Return pipeline.csv: a row per pipeline and stage."""
    rows = [
        {
            "pipeline": shown.label,
            "schedule": times.pipeline.schedule,
            "stages": times.pipeline.stages,
            "virtual_stages": times.pipeline.virtual_stages,
            "micro_batches": times.pipeline.micro_batches,
            "makespan_ms": times.makespan,
            "bubble": times.bubble,
            "formula": times.pipeline.bubble,
            "imbalance": times.imbalance,
            "stage": stage,
            "work_ms": float(times.work[stage]),
            "late_ms": None if times.late is None else float(times.late[stage]),
            "hops_ms": None if times.hops is None else float(times.hops[stage]),
        }
        for shown in _found(sources)
        for times in (shown.times,)
        for stage in range(times.pipeline.stages)
    ]
    return data("pipeline", rows)


def pipeline_figure(sources: Sequence[ReportSource]) -> plots.Figure:
    """Draw the passes of each stage: as recorded, as played with their means, and as predicted."""
    found = _found(sources)
    views: list[plots.FigureView] = []
    left = BARS
    for shown in found:
        pipeline = shown.times.pipeline
        count = 2 * pipeline.micro_batches * (pipeline.last + 1)
        lines = [(shown.label, shown.times.timed.played)]
        if shown.case is not None:
            means = f"{shown.label}, played with the mean times"
            lines = [(f"{shown.label}, recorded", _recorded(shown)), (means, lines[0][1])]
        if count * len(lines) > left or len(views) + len(lines) > _PANELS:
            break
        left -= count * len(lines)
        views += [_view(label, played, pipeline) for label, played in lines if played.spans]
    note = "A bar is one pass of a micro-batch, with its number."
    iterations = dict.fromkeys(shown.case.typical for shown in found if shown.case is not None)
    if len(iterations) == 1:
        note += f" Recorded: iteration {next(iter(iterations))}, in the pipeline of rank 0."
    title = "Time line of a pipeline's stages"
    return plots.Figure("pipeline", title, (), views, note, together=True)


def _recorded(shown: _Shown) -> Played:
    assert shown.source.recorded is not None
    rows = typical_rows(shown.source.recorded, shown.case, (*_COLUMNS, *_TIMES))
    ranks = shown.case.workers * shown.case.groups
    return recorded_step(shown.times.pipeline, rows, ranks // shown.times.pipeline.stages)


def _view(label: str, played: Played, pipeline: Pipeline) -> plots.FigureView:
    data = []
    labelled = 2 * pipeline.micro_batches * pipeline.virtual_stages <= _LABELS
    for kind, colours in _COLOURS.items():
        for part in range(pipeline.virtual_stages):
            mine = [
                span
                for span in played.spans
                if span.action.kind == kind and span.action.virtual_stage // pipeline.stages == part
            ]
            numbers = [span.action.micro_batch for span in mine]
            virtual = ", virtual stage %{customdata[1]}" * (pipeline.virtual_stages > 1)
            name = kind if pipeline.virtual_stages == 1 else f"{kind}, part {part + 1}"
            trace = plots.bar(
                plots.numbers([span.end - span.begin for span in mine]),
                [span.stage for span in mine],
                colours[part % len(colours)],
                f"{kind}, micro-batch %{{customdata[0]}}{virtual}: %{{x:.4g}} ms",
                name=name,
                base=plots.numbers([span.begin for span in mine], 6),
                width=0.7,
                customdata=[
                    [number, span.action.virtual_stage]
                    for number, span in zip(numbers, mine, strict=True)
                ],
            )
            if labelled:
                text = [str(number) for number in numbers]
                trace |= {"text": text, "textposition": "inside", "insidetextanchor": "middle"}
            data.append(trace)
    y = plots.named_rows([f"stage {stage}" for stage in range(pipeline.stages)])
    shape = plots.layout(
        130 + 34 * pipeline.stages,
        plots.from_zero("ms since the first pass"),
        y,
        barmode="overlay",
        bargap=0,
    )
    return plots.FigureView((escape(label),), data, shape)
