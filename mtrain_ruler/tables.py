"""The table of RULER's results: a row per length and attention, a column per task."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mtrain_cli.config.sizes import format_size
from mtrain_cli.evaluation.results import Result, format_score
from mtrain_cli.grouping import grouped
from mtrain_cli.reporting.evaluations import score_cell, unit_text
from mtrain_cli.reporting.table import Column, Table

PREFIX = "ruler:"
_MARK = "@"  # in the name of a task with another haystack, which no mean includes


def ruler_tables(results: Sequence[Result]) -> Iterator[Table]:
    tasks = list(dict.fromkeys(result.task for result in results))
    averaged = [task for task in tasks if _MARK not in task]
    attentions = list(dict.fromkeys(result.attention for result in results))
    groups = grouped(results, lambda r: (r.length, r.attention))
    order = sorted(groups, key=lambda key: (key[0], attentions.index(key[1])))
    rows = [(*key, {result.task: result for result in groups[key]}) for key in order]
    columns = [
        Column("length", lambda row: format_size(row[0]), words=True),
        Column("attention", lambda row: row[1], words=True),
        *(
            Column(task.removeprefix(PREFIX), lambda row, task=task: row[2].get(task), score_cell)
            for task in tasks
        ),
        Column("mean", lambda row: _mean([row[2].get(task) for task in averaged])),
    ]
    note = "new tokens attend to everything, whatever the attention of the prompt"
    left_out = [task.removeprefix(PREFIX) for task in tasks if _MARK in task]
    note += f"; mean without {', '.join(left_out)}" if left_out else ""
    yield Table(f"RULER, {unit_text(results)}", columns, rows, note)


def _mean(results: Sequence[Result | None]) -> str | None:
    """Return the mean over tasks with its error; None if a task has no score."""
    scored = [(r.score, r.error, r.unit) for r in results if r is not None and r.score is not None]
    if not results or len(scored) < len(results):
        return None
    mean = math.fsum(score for score, *_ in scored) / len(scored)
    errors = [error for _, error, _ in scored if error is not None]
    error = math.hypot(*errors) / len(errors) if len(errors) == len(scored) else None
    return format_score(mean, error, scored[0][2])
