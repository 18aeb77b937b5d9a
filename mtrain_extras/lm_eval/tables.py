"""The table of lm-eval's results: a row per task and metric, a column per attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mtrain_cli.evaluation.results import PERCENT, Result
from mtrain_cli.grouping import grouped
from mtrain_cli.reporting.evaluations import SAMPLES, attention_columns
from mtrain_cli.reporting.table import Column, Table
from mtrain_extras.lm_eval.results import PREFIX


def lm_eval_tables(results: Sequence[Result]) -> Iterator[Table]:
    groups = grouped(results, lambda result: (result.task, result.note)).values()
    # A row is the first result of each attention.
    rows = [{result.attention: result for result in reversed(group)} for group in groups]

    def part(row: dict[str, Result], number: int) -> str:
        result = next(iter(row.values()))
        names = result.task.removeprefix(PREFIX).rpartition(":")
        unit = ", %" if result.unit == PERCENT and number == 2 else ""
        return names[number] + unit

    columns = [
        Column("task", lambda row: part(row, 0), words=True),
        Column("metric", lambda row: part(row, 2), words=True),
        Column("shots", lambda row: next(iter(row.values())).note, words=True),
        *attention_columns(results),
        SAMPLES,
    ]
    yield Table("lm-eval ± standard error", columns, rows)
