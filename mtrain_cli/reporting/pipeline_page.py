"""How the stages of a pipeline spend a step: a table, and a figure of the schedule.

The figure plays the schedule with the mean times of its passes; `trace.json` has the recorded ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mtrain_cli.parallel.pipeline_schedule import BACKWARD, FORWARD, Pipeline
from mtrain_cli.records.pipeline_times import PipelineTimes, predicted_pipeline
from mtrain_cli.reporting import plots
from mtrain_cli.reporting.report_source import ReportSource, label_of
from mtrain_cli.reporting.table import Column, Table, fixed, ms, percent

NOTE = (
    "ms: from the first pass to the end of the last; idle: share of this time without a pass, mean "
    "over stages; played: idle share of the schedule with the mean times of its passes and free "
    "messages; formula: (p - 1) / (v m + p - 1); stage imbalance: work of the busiest stage "
    "divided by the mean; late: waits for other stages that still compute; hops: waits for "
    "messages under way; both per step, of the stage that waits most"
)
BARS = 6_000  # most passes in all figures of a page together
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


def pipeline_table(sources: Sequence[ReportSource]) -> Table:
    """Return a table with a row per pipeline."""

    def schedule(pipeline: Pipeline) -> str:
        virtual = f" x {pipeline.virtual_stages} virtual" * (pipeline.virtual_stages > 1)
        count = pipeline.micro_batches
        micro = f"{count} micro-batch{'es' * (count != 1)}"
        return f"{pipeline.schedule}, {pipeline.stages}{virtual} stages, {micro}"

    def most(waits: np.ndarray) -> str:
        return ms(float(waits.max()))

    columns = [
        Column("case", lambda row: row[0], words=True),
        Column("schedule", lambda row: schedule(row[1].pipeline), words=True),
        Column("ms", lambda row: row[1].makespan, ms),
        Column("idle", lambda row: row[1].bubble, percent),
        Column("played", lambda row: row[1].timed.played.bubble, percent, drop=3),
        Column("formula", lambda row: row[1].pipeline.bubble, percent),
        Column("stage imbalance", lambda row: row[1].imbalance, fixed(2)),
        Column("work of each stage, ms", lambda row: ", ".join(map(ms, row[1].work)), drop=4),
        Column("late ms", lambda row: row[1].late, most, drop=2),
        Column("hops ms", lambda row: row[1].hops, most, drop=1),
    ]
    return Table("Pipeline, one step", columns, _pipelines(sources), NOTE)


def pipeline_figure(sources: Sequence[ReportSource]) -> plots.Figure:
    """Draw the passes of each stage, as the schedule plays them with their mean times."""
    views: list[plots.FigureView] = []
    left = BARS
    for label, times in _pipelines(sources):
        left -= len(times.timed.played.spans)
        if left < 0:
            break
        views.append(_view(label, times))
    note = "A bar is one pass of a micro-batch, with its mean time."
    title = "Time line of a pipeline's stages"
    return plots.Figure("pipeline", title, (), views, note, together=True)


def _view(label: str, times: PipelineTimes) -> plots.FigureView:
    data = []
    stages, parts = times.pipeline.stages, times.pipeline.virtual_stages
    for kind, part in ((kind, part) for kind in _COLOURS for part in range(parts)):
        spans = [
            span
            for span in times.timed.played.spans
            if span.action.kind == kind and span.action.virtual_stage // stages == part
        ]
        numbers = [span.action.micro_batch for span in spans]
        trace = plots.bar(
            plots.numbers([span.end - span.begin for span in spans]),
            [span.stage for span in spans],
            _COLOURS[kind][part % 4],
            f"{kind}, micro-batch %{{customdata}}: %{{x:.4g}} ms",
            name=kind if parts == 1 else f"{kind}, part {part + 1}",
            base=plots.numbers([span.begin for span in spans], 6),
            width=0.7,
            customdata=numbers,
        )
        data.append(trace | {"text": list(map(str, numbers)), "textposition": "inside"})
    shape = plots.layout(
        130 + 34 * stages,
        plots.from_zero("ms since the first pass"),
        plots.downward("stage", **plots.whole(stages)),
        barmode="overlay",
        bargap=0,
    )
    return plots.FigureView((label,), data, shape)
