"""The tables of results: RULER's has a column per task, InfiniteBench's a row per task."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from mtrain_cli.config.sizes import format_size
from mtrain_cli.evaluation.results import Result, format_score
from mtrain_cli.grouping import grouped
from mtrain_cli.reporting.evaluations import score_cell, unit_text
from mtrain_cli.reporting.table import Column, Table
from mtrain_extras.ruler.infinitebench import TASKS
from mtrain_extras.studies import published

PREFIX, INFINITEBENCH_PREFIX = "ruler:", "infinitebench:"
_PAPER, _MEAN = "table2", "Avg."  # published scores of InfiniteBench, and their column of means
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
        Column("mean", lambda row: mean_score([row[2].get(task) for task in averaged])),
    ]
    note = "new tokens attend to everything, whatever the attention of the prompt"
    left_out = [task.removeprefix(PREFIX) for task in tasks if _MARK in task]
    note += f"; mean without {', '.join(left_out)}" if left_out else ""
    yield Table(f"RULER, {unit_text(results)}", columns, rows, note)


def mean_score(results: Sequence[Result | None]) -> str | None:
    """Return the mean over tasks with its error; None if a task has no score."""
    scored = [(r.score, r.error, r.unit) for r in results if r is not None and r.score is not None]
    if not results or len(scored) < len(results):
        return None
    mean = math.fsum(score for score, *_ in scored) / len(scored)
    errors = [error for _, error, _ in scored if error is not None]
    error = math.hypot(*errors) / len(errors) if len(errors) == len(scored) else None
    return format_score(mean, error, scored[0][2])


def infinitebench_tables(results: Sequence[Result]) -> Iterator[Table]:
    paper = published.read(_PAPER)
    scores = {row.name: {v.quantity: v.value for v in row.values} for row in paper.rows}
    of_paper = {
        column.tasks: " / ".join(f"{own[quantity]:.1f}" for own in scores.values())
        for quantity, column in paper.scores.items()
    }
    several = paper.scores[_MEAN].tasks
    attentions = dict.fromkeys(result.attention for result in results)
    rows: list[tuple[Any, ...]] = []
    for length, own in sorted(grouped(results, lambda r: r.length).items()):
        by_task = grouped(own, lambda r: r.task.removeprefix(INFINITEBENCH_PREFIX))
        of_task = {task: {r.attention: r for r in by_task.get(task, ())} for task in TASKS}
        for task in filter(of_task.get, TASKS):
            cells = {name: score_cell(result) for name, result in of_task[task].items()}
            note = by_task[task][0].note
            rows.append((length, task, TASKS[task].name, cells, note, of_paper.get((task,))))
        means = {name: mean_score([of_task[t].get(name) for t in several]) for name in attentions}
        if any(means.values()):
            rows.append((length, f"mean of {len(several)}", _MEAN, means, "", of_paper[several]))
    columns = [
        Column("length", lambda row: format_size(row[0]), words=True, once=True),
        Column("task", lambda row: row[1], words=True),
        Column("name", lambda row: row[2], words=True, drop=1),
        *(Column(name, lambda row, name=name: row[3].get(name)) for name in attentions),
        Column("cut", lambda row: row[4], words=True),
        Column("published", lambda row: row[5], missing=""),
    ]
    note = (
        "new tokens attend to everything, whatever the attention of the prompt; cut prompts keep "
        f"their first and their last half; published: {' / '.join(scores)} ({paper.paper}, "
        f"{paper.where}, {paper.title.partition(', ')[2]}; not predicted: needs a trained model)"
    )
    yield Table(f"InfiniteBench, {unit_text(results)}", columns, rows, note)
