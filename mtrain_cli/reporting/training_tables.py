"""Tables of training runs: metrics of the steps, and held-out losses by context."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from mtrain_cli.config.sizes import format_size
from mtrain_cli.records.metrics import WARM_UP_STEPS, StepMetrics, rate_unit, steady_steps
from mtrain_cli.records.step_remarks import nothing_left_out
from mtrain_cli.reporting.report_source import ReportSource
from mtrain_cli.reporting.table import TOTAL, Column, Table, count, fixed, percent
from mtrain_cli.training.evaluation import losses_by_bucket
from mtrain_cli.training.progress import format_duration


def medians_note(sources: Sequence[ReportSource]) -> str:
    """Return a note on the steps that the medians of `training_row` cover, and on density."""
    note = f"medians without the first {WARM_UP_STEPS} steps, which warm up"
    if any(len(source.metrics) <= WARM_UP_STEPS for source in sources):
        note += "; of a shorter run, the last step"
    for source in sources:
        if remark := next(filter(None, map(nothing_left_out, source.metrics)), ""):
            note += f"; {f'{source.name}: ' * (len(sources) > 1)}{remark}"
    return note


def training_table(sources: Sequence[ReportSource]) -> Table:
    """Return a table with a row per training run."""
    rate = rate_unit([step for source in sources for step in source.metrics])
    # For a single run, a line above the table has the name.
    run = [Column("run", lambda source: source.name, words=True)] if len(sources) > 1 else []
    columns = [
        *run,
        Column("steps", lambda source: source.metrics[-1].step),
        # A step without labels has no loss.
        Column("loss, first", lambda source: next(iter(_losses(source)), None), fixed(3)),
        Column("last", lambda source: next(reversed(_losses(source)), None), fixed(3)),
        Column("s / step", _median("seconds"), "{:.3g}".format, drop=5),
        Column(rate, _median("tokens_per_second_per_gpu"), count),
        Column("MFU", _mfu, percent, drop=4),
        Column("HFU", _median("mfu_executed"), percent),
        Column("density", _median("density"), percent, drop=3),
        Column("targets", _median("targets"), count, drop=1),
        Column("peak GiB", _peak, fixed(1), drop=2),
        Column("tokens", lambda source: source.metrics[-1].tokens or 0, count, drop=6),
        Column("took", _seconds, format_duration, drop=7),
    ]
    note = f"{medians_note(sources)}; took: all steps, no evaluations"
    return Table("Training", columns, sources, note)


def _losses(source: ReportSource) -> list[float]:
    return [step.loss for step in source.metrics if step.loss is not None]


def _steady(source: ReportSource) -> list[StepMetrics]:
    return steady_steps(source.metrics, [restart.step for restart in source.restarts])


def _median(name: str) -> Callable[[ReportSource], float | None]:
    def median(source: ReportSource) -> float | None:
        values = [getattr(step, name) for step in _steady(source)]
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    return median


def _mfu(source: ReportSource) -> float | None:
    """Return the median MFU; None for a sparse run, which may start with dense steps."""
    dense = all(step.mfu_model is not None for step in _steady(source))
    return _median("mfu_model")(source) if dense else None


def _peak(source: ReportSource) -> float | None:
    known = (step.peak_memory_gib for step in source.metrics)
    return max((gib for gib in known if gib is not None), default=None)


def _seconds(source: ReportSource) -> float:
    return sum(step.seconds or 0.0 for step in source.metrics)


def positions_table(sources: Sequence[ReportSource]) -> Table | None:
    """Return a table of held-out losses by context (number of earlier tokens).

    For one run, the table has the first and the last evaluation. For several runs, it has only
    the last evaluation of each run.
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
    # (begin, end, loss in each evaluation); None for all contexts together
    rows: list[tuple[int | None, int, Sequence[float | None]]] = [
        *losses_by_bucket(evaluations), (None, 0, [e.loss for e in evaluations])
    ]  # fmt: skip

    def context(row: tuple[int | None, int, Any]) -> str:
        begin, end, _ = row
        return "all" if begin is None else f"{format_size(begin)} to {format_size(end)}"

    columns = [
        Column("earlier tokens", context),
        Column(
            "tokens",
            lambda row: last.tokens if row[0] is None else tokens.get(row[:2], 0),
            count,
        ),
        *(
            Column(
                "\n".join([*([name] if len(sources) > 1 else []), f"step {e.step}", e.attention]),
                lambda row, i=i: row[2][i],
                fixed(4),
            )
            for i, (name, e) in enumerate(shown)
        ),
    ]
    note = f"nats per token, over {last.sequences} sequences not in the training data"
    title = "Held-out loss by context"
    return Table(title, columns, rows, note, state=lambda row: TOTAL * (row[0] is None))
