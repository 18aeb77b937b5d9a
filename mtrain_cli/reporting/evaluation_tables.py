"""Tables of evaluations: lengths x tasks, depth x length and loss by context, by attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from mtrain_cli.config.sizes import format_size
from mtrain_cli.console import Console
from mtrain_cli.evaluation.results import NATS, PERCENT, Part, Result, format_score
from mtrain_cli.grouping import grouped
from mtrain_cli.reporting.evaluation_names import distinguished
from mtrain_cli.reporting.table import Column, Table
from mtrain_cli.reporting.terminal_width import print_table, say

RULER, LM_EVAL = "ruler:", "lm-eval:"
_MARK = "@"  # in the name of a task with another haystack, which no mean includes


def evaluation_tables(results: Sequence[Result]) -> list[Table]:
    """Return the tables of results, by the steps of the checkpoints."""
    tables: list[Table] = []
    results = distinguished(results)
    steps = sorted({result.step for result in results}, key=lambda step: step or 0)
    for step in steps:
        own = [result for result in results if result.step == step]
        suffix = "" if len(steps) == 1 else f", step {step}"
        kinds = (_by_length, _ruler, _lm_eval, _depths, _contexts)
        made = (table for kind in kinds for table in kind(own))
        tables += [replace(table, title=f"{table.title}{suffix}") for table in made]
    return tables


def show_evaluations(console: Console, results: Sequence[Result]) -> None:
    """Print the tables of results."""
    for table in evaluation_tables(results):
        print_table(console, table)
    if not results:
        say(console, "no results")


def _by_length(results: Sequence[Result]) -> Iterator[Table]:
    others = (RULER, LM_EVAL)
    tasks = grouped((r for r in results if not r.task.startswith(others)), lambda r: r.task)
    for task, own in tasks.items():
        attentions = list(dict.fromkeys(result.attention for result in own))
        keyed = list(dict.fromkeys(r.attention for r in own if r.key_tokens is not None))
        # A row is the last result of each attention at a length.
        rows = [
            {r.attention: r for r in own if r.length == length}
            for length in sorted({result.length for result in own})
        ]
        columns = [
            Column("length", _length),
            *(Column(name, lambda row, name=name: row.get(name), _score) for name in attentions),
            *(Column(f"{name}\nkey tokens", _key_tokens(name), _score) for name in keyed),
            *([Column("key\ntokens", _key_counts)] if keyed else []),
            Column("samples", lambda row: _samples(row.values())),
        ]
        notes = "; ".join(dict.fromkeys(result.note for result in own if result.note))
        yield Table(f"{task}, {_unit(own)}", columns, rows, notes)


def _length(row: dict[str, Result]) -> str | None:
    length = next(iter(row.values())).length
    return format_size(length) if length else None


def _key_tokens(attention: str) -> Callable[[dict[str, Result]], tuple[Part, str] | None]:
    def scored(row: dict[str, Result]) -> tuple[Part, str] | None:
        result = row.get(attention)
        part = result.key_tokens if result else None
        return (part, result.unit) if result and part else None

    return scored


def _key_counts(row: dict[str, Result]) -> str:
    counts = {result.key_tokens.count for result in row.values() if result.key_tokens}
    return ", ".join(f"{count:,}" for count in sorted(counts))


def _samples(results: Any) -> str:
    return ", ".join(str(count) for count in sorted({result.samples for result in results}))


def _ruler(results: Sequence[Result]) -> Iterator[Table]:
    own = [result for result in results if result.task.startswith(RULER)]
    if not own:
        return
    tasks = list(dict.fromkeys(result.task for result in own))
    averaged = [task for task in tasks if _MARK not in task]
    attentions = list(dict.fromkeys(result.attention for result in own))
    groups = grouped(own, lambda r: (r.length, r.attention))
    order = sorted(groups, key=lambda key: (key[0], attentions.index(key[1])))
    rows = [(*key, {result.task: result for result in groups[key]}) for key in order]
    columns = [
        Column("length", lambda row: format_size(row[0]), words=True),
        Column("attention", lambda row: row[1], words=True),
        *(
            Column(task.removeprefix(RULER), lambda row, task=task: row[2].get(task), _score)
            for task in tasks
        ),
        Column("mean", lambda row: _mean([row[2].get(task) for task in averaged])),
    ]
    note = "new tokens attend to everything, whatever the attention of the prompt"
    left_out = [task.removeprefix(RULER) for task in tasks if _MARK in task]
    note += f"; mean without {', '.join(left_out)}" if left_out else ""
    yield Table(f"RULER, {_unit(own)}", columns, rows, note)


def _mean(found: Sequence[Result | None]) -> str | None:
    present = [result for result in found if result is not None and result.score is not None]
    if not found or len(present) < len(found):
        return None
    mean = sum(result.score or 0.0 for result in present) / len(present)
    errors = [result.error for result in present]
    error = None
    if all(one is not None for one in errors):
        error = math.hypot(*(one or 0.0 for one in errors)) / len(errors)
    return format_score(mean, error, present[0].unit)


def _lm_eval(results: Sequence[Result]) -> Iterator[Table]:
    own = [result for result in results if result.task.startswith(LM_EVAL)]
    if not own:
        return
    attentions = list(dict.fromkeys(result.attention for result in own))
    groups = grouped(own, lambda result: (result.task, result.note)).values()
    # A row is the first result of each attention.
    rows = [{result.attention: result for result in reversed(group)} for group in groups]

    def first(row: dict[str, Result]) -> Result:
        return next(row[name] for name in attentions if name in row)

    def metric(row: dict[str, Result]) -> str:
        result = first(row)
        name = result.task.rpartition(":")[2]
        return f"{name}, %" if result.unit == PERCENT else name

    def task(row: dict[str, Result]) -> str:
        return first(row).task.removeprefix(LM_EVAL).rpartition(":")[0]

    columns = [
        Column("task", task, words=True),
        Column("metric", metric, words=True),
        Column("shots", lambda row: first(row).note, words=True),
        *(Column(name, lambda row, name=name: row.get(name), _score) for name in attentions),
        Column("samples", lambda row: _samples(row.values())),
    ]
    yield Table("lm-eval ± standard error", columns, rows)


def _depths(results: Sequence[Result]) -> Iterator[Table]:
    note = "depth: share of the text before the needle"
    yield from _parts_tables(
        [r for r in results if r.parts and r.unit != NATS], "depth",
        lambda part: f"{part.begin}-{part.end}%", note,
    )  # fmt: skip


def _contexts(results: Sequence[Result]) -> Iterator[Table]:
    note = "mean over the tokens with this context"
    yield from _parts_tables(
        [r for r in results if r.parts and r.unit == NATS], "earlier tokens",
        lambda part: f"{format_size(part.begin)} to {format_size(part.end)}", note,
    )  # fmt: skip


def _parts_tables(
    results: Sequence[Result], head: str, name: Callable[[Part], str], note: str
) -> Iterator[Table]:
    for task, group in grouped(results, lambda result: result.task).items():
        own = sorted(group, key=lambda result: result.length)
        parts = [{(p.begin, p.end): (p, own[0].unit) for p in result.parts} for result in own]
        named = {(p.begin, p.end): name(p) for result in own for p in result.parts}
        columns = [
            Column(head, named.__getitem__, words=True),
            *(
                Column(
                    f"{format_size(result.length)}\n{result.attention}",
                    lambda span, of_result=of_result: of_result.get(span),
                    _score,
                )
                for result, of_result in zip(own, parts, strict=True)
            ),
        ]
        yield Table(f"{task} by {head}, {_unit(own)}", columns, sorted(named), note)


def _score(scored: Result | tuple[Part, str]) -> str:
    part, unit = (scored, scored.unit) if isinstance(scored, Result) else scored
    return format_score(part.score, part.error, unit)


def _unit(results: Sequence[Result]) -> str:
    unit = results[0].unit
    return f"{unit} per token ± standard error" if unit == NATS else f"{unit} ± standard error"
