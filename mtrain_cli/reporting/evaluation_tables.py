"""Tables of evaluations: lengths x tasks, depth x length and loss by context, by attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mtrain_cli.config.sizes import format_size
from mtrain_cli.console import Console
from mtrain_cli.evaluation.results import NATS, PERCENT, Part, Result, format_score
from mtrain_cli.reporting.evaluation_names import distinguished
from mtrain_cli.reporting.terminal_width import TextTable, say

RULER, LM_EVAL = "ruler:", "lm-eval:"
_MARK = "@"  # in the name of a task with another haystack, which no mean includes


def evaluation_tables(results: Sequence[Result]) -> list[TextTable]:
    """Return the tables of results, by the steps of the checkpoints."""
    tables: list[TextTable] = []
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
    for each in evaluation_tables(results):
        each.print(console)
    if not results:
        say(console, "no results")


def _by_length(results: Sequence[Result]) -> Iterator[TextTable]:
    others = (RULER, LM_EVAL)
    for task in dict.fromkeys(r.task for r in results if not r.task.startswith(others)):
        own = [result for result in results if result.task == task]
        attentions = list(dict.fromkeys(result.attention for result in own))
        keyed = list(dict.fromkeys(r.attention for r in own if r.key_tokens is not None))
        rows = []
        for length in sorted({result.length for result in own}):
            found = [_find(own, length, attention) for attention in attentions]
            cells = [_cell(result) for result in found]
            if keyed:
                cells += [
                    _part(result.key_tokens, result.unit) if result else "-"
                    for result in (_find(own, length, attention) for attention in keyed)
                ]
                counts = {r.key_tokens.count for r in found if r and r.key_tokens}
                cells.append(", ".join(f"{count:,}" for count in sorted(counts)))
            samples = ", ".join(str(n) for n in sorted({r.samples for r in found if r}))
            rows.append([format_size(length) if length else "-", *cells, samples])
        heads = ["length", *attentions]
        if keyed:
            heads += [f"{name}\nkey tokens" for name in keyed] + ["key\ntokens"]
        notes = "; ".join(dict.fromkeys(result.note for result in own if result.note))
        yield TextTable(f"{task}, {_unit(own)}", (*heads, "samples"), rows, note=notes)


def _ruler(results: Sequence[Result]) -> Iterator[TextTable]:
    own = [result for result in results if result.task.startswith(RULER)]
    if not own:
        return
    tasks = list(dict.fromkeys(result.task for result in own))
    attentions = list(dict.fromkeys(result.attention for result in own))
    averaged = [task for task in tasks if _MARK not in task]
    rows = []
    for length in sorted({result.length for result in own}):
        for attention in attentions:
            found = {
                task: _find([r for r in own if r.task == task], length, attention) for task in tasks
            }
            if not any(found.values()):
                continue
            mean = _mean([found[task] for task in averaged])
            cells = [_cell(found[task]) for task in tasks]
            rows.append([format_size(length), attention, *cells, mean])
    heads = ("length", "attention", *(task.removeprefix(RULER) for task in tasks), "mean")
    note = "new tokens attend to everything, whatever the attention of the prompt"
    left_out = [task.removeprefix(RULER) for task in tasks if _MARK in task]
    note += f"; mean without {', '.join(left_out)}" if left_out else ""
    yield TextTable(f"RULER, {_unit(own)}", heads, rows, words=2, note=note)


def _mean(found: Sequence[Result | None]) -> str:
    if not found or any(result is None or result.score is None for result in found):
        return "-"
    present = [result for result in found if result is not None]
    mean = sum(result.score or 0.0 for result in present) / len(present)
    errors = [result.error for result in present]
    error = None
    if all(one is not None for one in errors):
        error = math.hypot(*(one or 0.0 for one in errors)) / len(errors)
    return format_score(mean, error, present[0].unit)


def _lm_eval(results: Sequence[Result]) -> Iterator[TextTable]:
    own = [result for result in results if result.task.startswith(LM_EVAL)]
    if not own:
        return
    attentions = list(dict.fromkeys(result.attention for result in own))
    rows = []
    for task, note in dict.fromkeys((result.task, result.note) for result in own):
        found = [
            next((r for r in own if (r.task, r.note, r.attention) == (task, note, attention)), None)
            for attention in attentions
        ]
        name, _, metric = task.removeprefix(LM_EVAL).rpartition(":")
        present = [result for result in found if result is not None]
        label = f"{metric}, %" if present[0].unit == PERCENT else metric
        samples = ", ".join(str(n) for n in sorted({result.samples for result in present}))
        rows.append([name, label, note, *(_cell(result) for result in found), samples])
    heads = ("task", "metric", "shots", *attentions, "samples")
    yield TextTable("lm-eval ± standard error", heads, rows, words=3)


def _depths(results: Sequence[Result]) -> Iterator[TextTable]:
    note = "depth: share of the text before the needle"
    yield from _parts_tables(
        [r for r in results if r.parts and r.unit != NATS], "depth",
        lambda part: f"{part.begin}-{part.end}%", note,
    )  # fmt: skip


def _contexts(results: Sequence[Result]) -> Iterator[TextTable]:
    note = "mean over the tokens with this context"
    yield from _parts_tables(
        [r for r in results if r.parts and r.unit == NATS], "earlier tokens",
        lambda part: f"{format_size(part.begin)} to {format_size(part.end)}", note,
    )  # fmt: skip


def _parts_tables(
    results: Sequence[Result], head: str, name: Callable[[Part], str], note: str
) -> Iterator[TextTable]:
    for task in dict.fromkeys(result.task for result in results):
        own = sorted((r for r in results if r.task == task), key=lambda result: result.length)
        spans = sorted({(part.begin, part.end) for result in own for part in result.parts})
        named = {(p.begin, p.end): name(p) for result in own for p in result.parts}
        rows = []
        for span in spans:
            parts = [
                next((p for p in result.parts if (p.begin, p.end) == span), None) for result in own
            ]
            cells = [_part(part, own[0].unit) for part in parts]
            rows.append([named[span], *cells])
        heads = (head, *(f"{format_size(r.length)}\n{r.attention}" for r in own))
        yield TextTable(f"{task} by {head}, {_unit(own)}", heads, rows, note=note)


def _find(results: Sequence[Result], length: int, attention: str) -> Result | None:
    found = [r for r in results if r.length == length and r.attention == attention]
    return found[-1] if found else None


def _cell(result: Result | None) -> str:
    return "-" if result is None else format_score(result.score, result.error, result.unit)


def _part(part: Part | None, unit: str) -> str:
    return "-" if part is None else format_score(part.score, part.error, unit)


def _unit(results: Sequence[Result]) -> str:
    unit = results[0].unit
    return f"{unit} per token ± standard error" if unit == NATS else f"{unit} ± standard error"
