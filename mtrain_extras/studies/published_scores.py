"""Published scores of trained models, beside the results of `mtrain eval` on a model of yours."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain_extras.studies.published import PublishedTable, ScoreColumn
from mtrain_extras.studies.published_tables import StudyTable, StudyValue

if TYPE_CHECKING:
    from mtrain_cli.evaluation.results import Result


def scored_table(
    table: PublishedTable, folder: Path | None, results: Sequence[Result]
) -> StudyTable:
    """Return a table of scores with the means of results in ``folder``, or without them."""
    values = []
    for row in table.rows:
        own = [r for r in results if r.attention == row.attention]
        for value in row.values:
            column = table.scores[value.quantity]
            scores = _scores(own, table.evaluation, column)
            count = f"{len(scores)} of {column.results} results"
            values.append(
                StudyValue(
                    row.name, value.quantity, value.value,
                    measured=statistics.fmean(scores) if scores else None,
                    measured_on=f"{folder}, {count}" if scores else "",
                    note="" if value is not row.values[0] else row.note,
                    counts=False,
                )
            )  # fmt: skip
    facts = table.name, table.title, table.paper, table.where, table.cluster
    return StudyTable(*facts, tuple(values), table.remarks)


def _scores(results: Sequence[Result], evaluation: str, column: ScoreColumn) -> list[float]:
    """Return the scores of a column: the last of each task and length.

    Tasks with another haystack (`@`) do not count. A column of named tasks takes their longest.
    """
    chosen: dict[tuple[str, int], Result] = {}
    for result in sorted(results, key=lambda result: result.length):
        kind, _, task = result.task.partition(":")
        fits = task in column.tasks if column.tasks else "@" not in task
        if kind == evaluation and fits and column.length in (None, result.length):
            chosen[task, 0 if column.tasks else result.length] = result
    return [result.score for result in chosen.values() if result.score is not None]
