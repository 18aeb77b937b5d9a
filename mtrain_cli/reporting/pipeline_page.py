"""How the stages of a pipeline spend a step: a table, a CSV file and a figure of the schedule.

Measured and predicted pipelines have the same rows. The figure plays the schedule with the mean
times of its passes; the recorded passes are in `trace.json`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mtrain_cli.parallel.pipeline_schedule import BACKWARD, FORWARD, Pipeline, Played
from mtrain_cli.records.pipeline_times import PipelineTimes, predicted_pipeline
from mtrain_cli.reporting import plots
from mtrain_cli.reporting.report_source import ReportSource, label_of
from mtrain_cli.reporting.table import Column, Table, data, fixed, ms, percent

NOTE = (
    "ms: from the first pass to the end of the last; idle: share of this time without a pass, mean "
    "over stages; played: idle share of the schedule with the mean times of its passes and free "
    "messages; formula: (p - 1) / (v m + p - 1); stage imbalance: work of the busiest stage "
    "divided by the mean; late: waits for other stages that still compute; hops: waits for "
    "messages under way; both per step, of the stage that waits most"
)
BARS = 6_000  # most passes in all figures of a page together
_PANELS = 6  # most figures
_LABELS = 40  # most passes of a stage whose micro-batch numbers fit in their bars
_COLOURS = {
    FORWARD: ("#2f6fb5", "#7fb2e5", "#1d4673", "#a9cbee"),
    BACKWARD: ("#d97706", "#f7c873", "#8a4b04", "#fbe2b3"),
}


def _pipelines(sources: Sequence[ReportSource]) -> list[tuple[str, PipelineTimes]]:
    """Return (label, times) of each measured pipeline, then of each predicted one."""
    measured = [
        (label_of(source, case.label, sources), case.pipeline)
        for source in sources
        for case in source.cases
        if case.pipeline is not None
    ]
    predicted = [
        (label_of(source, f"{entry.get('label')}, predicted", sources), times)
        for source in sources
        for entry in source.summary.get("predicted") or ()
        if isinstance(entry, dict) and (times := predicted_pipeline(entry.get("pipeline")))
    ]
    return [*measured, *predicted]


def describe(pipeline: Pipeline) -> str:
    """Return a schedule in a few words."""
    virtual = f" x {pipeline.virtual_stages} virtual" * (pipeline.virtual_stages > 1)
    micro = f"{pipeline.micro_batches} micro-batch{'es' * (pipeline.micro_batches != 1)}"
    return f"{pipeline.schedule}, {pipeline.stages}{virtual} stages, {micro}"


def pipeline_table(sources: Sequence[ReportSource]) -> Table:
    """Return a table with a row per pipeline."""

    def most(waits: np.ndarray) -> str:
        return ms(float(waits.max()))

    columns = [
        Column("case", lambda row: row[0], words=True),
        Column("schedule", lambda row: describe(row[1].pipeline), words=True),
        Column("ms", lambda row: row[1].makespan, ms),
        Column("idle", lambda row: row[1].bubble, percent),
        Column("played", lambda row: row[1].timed.played.bubble, percent, drop=3),
        Column("formula", lambda row: row[1].pipeline.bubble, percent),
        Column("stage imbalance", lambda row: row[1].imbalance, fixed(2)),
        Column("work of each stage, ms", lambda row: row[1].work.tolist(), _listed),
        Column("late ms", lambda row: row[1].late, most, drop=2),
        Column("hops ms", lambda row: row[1].hops, most, drop=1),
    ]
    return Table("Pipeline, one step", columns, _pipelines(sources), NOTE)


def _listed(work: list[float]) -> str:
    if len(work) > 8:
        return f"{ms(work[0])}, ..., from {ms(min(work))} to {ms(max(work))}"
    return ", ".join(map(ms, work))


def stages_data(sources: Sequence[ReportSource]) -> Table:
    """Return pipeline.csv: a row per pipeline and stage."""
    rows = [
        {
            "pipeline": label,
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
        for label, times in _pipelines(sources)
        for stage in range(times.pipeline.stages)
    ]
    return data("pipeline", rows)


def pipeline_figure(sources: Sequence[ReportSource]) -> plots.Figure:
    """Draw the passes of each stage, as the schedule plays them with their mean times."""
    views: list[plots.FigureView] = []
    left = BARS
    for label, times in _pipelines(sources)[:_PANELS]:
        left -= len(times.timed.played.spans)
        if left < 0:
            break
        views.append(_view(label, times.timed.played, times.pipeline))
    note = "A bar is one pass of a micro-batch, with its number and its mean time."
    title = "Time line of a pipeline's stages"
    return plots.Figure("pipeline", title, (), views, note, together=True)


def _view(label: str, played: Played, pipeline: Pipeline) -> plots.FigureView:
    data = []
    parts = pipeline.virtual_stages
    virtual = ", virtual stage %{customdata[1]}" * (parts > 1)
    for kind, part in ((kind, part) for kind in _COLOURS for part in range(parts)):
        spans = [
            span
            for span in played.spans
            if span.action.kind == kind and span.action.virtual_stage // pipeline.stages == part
        ]
        numbers = [span.action.micro_batch for span in spans]
        trace = plots.bar(
            plots.numbers([span.end - span.begin for span in spans]),
            [span.stage for span in spans],
            _COLOURS[kind][part % 4],
            f"{kind}, micro-batch %{{customdata[0]}}{virtual}: %{{x:.4g}} ms",
            name=kind if parts == 1 else f"{kind}, part {part + 1}",
            base=plots.numbers([span.begin for span in spans], 6),
            width=0.7,
            customdata=[[span.action.micro_batch, span.action.virtual_stage] for span in spans],
        )
        if 2 * pipeline.micro_batches * parts <= _LABELS:
            text = list(map(str, numbers))
            trace |= {"text": text, "textposition": "inside", "insidetextanchor": "middle"}
        data.append(trace)
    shape = plots.layout(
        130 + 34 * pipeline.stages,
        plots.from_zero("ms since the first pass"),
        plots.named_rows([f"stage {stage}" for stage in range(pipeline.stages)]),
        barmode="overlay",
        bargap=0,
    )
    return plots.FigureView((label,), data, shape)
