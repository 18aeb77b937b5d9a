"""Results of evaluations: names that tell them apart, tables by length, depth and context, figures.

Figures are maps of depth x length, and the loss by context.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from html import escape
from typing import Any

from mtrain_cli.config import plugins
from mtrain_cli.config.sizes import format_size
from mtrain_cli.console import Console
from mtrain_cli.evaluation.results import HELD_OUT_TEXT, NATS, Part, Result, format_score
from mtrain_cli.grouping import grouped
from mtrain_cli.reporting import plots
from mtrain_cli.reporting.plots import Figure, FigureView, Trace
from mtrain_cli.reporting.table import Column, Table
from mtrain_cli.reporting.terminal import print_table, say

Named = Sequence[tuple[str, Sequence[Result]]]  # (run, its results)


# --- names -----


def distinguished(results: Sequence[Result]) -> list[Result]:
    """Return the results, with the settings in which they differ in the names of the attentions.

    Results of one task and attention get the settings that not all of them have: ``dense, seed 2``.
    Where a task has several texts, all names have the text. Results of one length and step that
    still share a name get the beginning of their key: ``dense (3f2a)``.
    """
    names = [result.attention for result in results]
    tasks = grouped(range(len(results)), lambda at: _task(results[at]))
    for group in tasks.values():
        texts = {s for at in group for s in results[at].settings if _is_text(s)}
        for same in grouped(group, names.__getitem__).values():
            recorded = [set(results[at].settings) for at in same if results[at].settings]
            common = set.intersection(*recorded) if recorded else set()
            common -= texts if len(texts) > 1 else set()
            for at in same:
                own = [one for one in results[at].settings if one not in common]
                names[at] = ", ".join([names[at], *own])
    places = [(_task(r), r.length, r.step, name) for r, name in zip(results, names, strict=True)]
    return [
        replace(result, attention=f"{name} ({result.key[:4]})" * (places.count(place) > 1) or name)
        for result, name, place in zip(results, names, places, strict=True)
    ]


def named_settings(results: Sequence[Result]) -> list[str]:
    """Return a line on each name of `distinguished` that has more than the attention."""
    pairs = zip(results, distinguished(results), strict=True)
    lines = [
        f"{named.task}: {named.attention}: {'; '.join(_about(given))}"
        for given, named in pairs
        if given.attention != named.attention
    ]
    return list(dict.fromkeys(lines))


def _about(result: Result) -> tuple[str, ...]:
    return (*result.settings, *filter(None, result.details)) or (f"key {result.key}",)


def _task(result: Result) -> tuple[str, str]:
    """Return what names the rows of a result. The note of lm-eval tells the shots."""
    return result.task, result.note if _kind(result) else ""


def _kind(result: Result) -> str:
    """Return the kind of a result whose package makes its tables; "" for all others."""
    kind = result.task.partition(":")[0]
    return kind if kind in _kinds_with_tables() else ""


@functools.cache
def _kinds_with_tables() -> dict[str, Any]:
    kinds: dict[str, Any] = plugins.load_by_name("mtrain.evaluations")
    return {kind: evaluation for kind, evaluation in kinds.items() if hasattr(evaluation, "tables")}


def _is_text(setting: str) -> bool:
    return setting == HELD_OUT_TEXT or setting.startswith("text ")


# --- tables -----


def evaluation_tables(results: Sequence[Result]) -> list[Table]:
    """Return the tables of results, by the steps of the checkpoints."""
    tables: list[Table] = []
    steps = grouped(distinguished(results), lambda result: result.step)
    for step, own in sorted(steps.items(), key=lambda item: item[0] or 0):
        suffix = "" if len(steps) == 1 else f", step {step}"
        by_kind = grouped(own, _kind)
        created = [*_by_length(by_kind.pop("", []))]
        for kind, group in by_kind.items():
            created += _kinds_with_tables()[kind].tables(group)
        created += _by_part(own)
        tables += [replace(table, title=f"{table.title}{suffix}") for table in created]
    return tables


def show_evaluations(console: Console, results: Sequence[Result]) -> None:
    """Print the tables of results."""
    for table in evaluation_tables(results):
        print_table(console, table)
    if not results:
        say(console, "no results")


def _by_length(results: Sequence[Result]) -> Iterator[Table]:
    for task, own in grouped(results, lambda result: result.task).items():
        keyed = list(dict.fromkeys(r.attention for r in own if r.key_tokens is not None))
        # A row is the last result of each attention at a length.
        rows = [
            {r.attention: r for r in own if r.length == length}
            for length in sorted({result.length for result in own})
        ]
        columns = [
            Column("length", _length),
            *attention_columns(own),
            *(Column(f"{name}\nkey tokens", _key_tokens(name), score_cell) for name in keyed),
            *([Column("key\ntokens", _key_counts)] if keyed else []),
            SAMPLES,
        ]
        notes = "; ".join(dict.fromkeys(result.note for result in own if result.note))
        yield Table(f"{task}, {unit_text(own)}", columns, rows, notes)


def attention_columns(results: Sequence[Result]) -> list[Column]:
    names = dict.fromkeys(result.attention for result in results)
    return [Column(name, lambda row, name=name: row.get(name), score_cell) for name in names]


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


def _samples(row: dict[str, Result]) -> str:
    return ", ".join(map(str, sorted({result.samples for result in row.values()})))


SAMPLES = Column("samples", _samples)


def _by_part(results: Sequence[Result]) -> Iterator[Table]:
    """Yield tables of scores by depth, then of losses by context."""
    parted = [result for result in results if result.parts]
    for is_loss, head, note in (
        (False, "depth", "depth: share of the text before the needle"),
        (True, "earlier tokens", "mean over the tokens with this context"),
    ):
        own = [result for result in parted if (result.unit == NATS) == is_loss]
        for task, group in grouped(own, lambda result: result.task).items():
            columns = [Column(head, _context if is_loss else _depth, words=True)]
            for r in sorted(group, key=lambda result: result.length):
                of_span = {(p.begin, p.end): (p, r.unit) for p in r.parts}.get
                name = f"{format_size(r.length)}\n{r.attention}"
                columns.append(Column(name, of_span, score_cell))
            spans = sorted({(p.begin, p.end) for result in group for p in result.parts})
            yield Table(f"{task} by {head}, {unit_text(group)}", columns, spans, note)


def _depth(span: tuple[int, int]) -> str:
    return f"{span[0]}-{span[1]}%"


def _context(span: tuple[int, int]) -> str:
    return f"{format_size(span[0])} to {format_size(span[1])}"


def score_cell(scored: Result | tuple[Part, str]) -> str:
    part, unit = (scored, scored.unit) if isinstance(scored, Result) else scored
    return format_score(part.score, part.error, unit)


def unit_text(results: Sequence[Result]) -> str:
    unit = results[0].unit
    return f"{unit} per token ± standard error" if unit == NATS else f"{unit} ± standard error"


# --- figures -----


def evaluation_figures(sources: Named) -> list[Figure]:
    """Return the figures of the results of all runs. A figure without results has no views."""
    several = len(sources) > 1
    named = [
        (f"{run}, " if several else "", distinguished(results)) for run, results in sources
    ]  # fmt: skip
    return [_depth_maps(named), _by_context(named)]


def _depth_maps(sources: Named) -> Figure:
    views = []
    for run, results in sources:
        parted = [result for result in results if result.parts and result.unit != NATS]
        groups = grouped(parted, lambda r: (r.task, r.step, r.attention))
        for (task, step, attention), group in groups.items():
            own = {r.length: {(p.begin, p.end): p.score for p in r.parts} for r in group}
            lengths = sorted(own)
            spans = sorted({span for parts in own.values() for span in parts})
            map_ = plots.heat(
                plots.numbers([[own[n].get(span) for n in lengths] for span in spans]),
                [format_size(length) for length in lengths],
                list(map(_depth, spans)),
                "% right",
                "%{x} tokens, depth %{y}: %{z} %",
                zmax=100,
            )
            label = f"{run}{task}, {attention}{_step(step)}"
            axes = plots.axis("tokens", type="category"), plots.downward("depth", type="category")
            views.append(FigureView((label,), [map_], plots.layout(320, *axes)))
    note = "Depth: share of the text before the needle. Empty cells have no question."
    return Figure("depth-map", "Needles by depth and length", (), views, note, together=True)


def _by_context(sources: Named) -> Figure:
    """Draw the loss by context: a line per run, checkpoint, length and attention."""
    losses = [(run, r) for run, results in sources for r in results if r.unit == NATS and r.parts]
    newest = sorted(range(len(losses)), key=lambda at: losses[at][1].step or 0)[-plots.STYLES :]
    lines: list[Trace] = []
    for run, r in (losses[at] for at in sorted(newest)):
        label = f"{run}{format_size(r.length)} {r.attention}{_step(r.step)}"
        ends, scores = [part.end for part in r.parts], [part.score for part in r.parts]
        errors = plots.numbers([1.96 * (part.error or 0.0) for part in r.parts])
        bars = {"type": "data", "array": errors, "thickness": 1}
        lines.append(plots.styled(escape(label), ends, scores, len(lines), error_y=bars))
    ticks = sorted({end for line in lines for end in line["x"]})
    texts = [format_size(end) for end in ticks]
    x = plots.axis("earlier tokens (up to)", type="log", tickvals=ticks, ticktext=texts)
    layout = plots.layout(340 + 8 * len(lines), x, plots.axis("loss, nats per token"))
    views = [FigureView(("loss by context",), lines, layout)] if lines else []
    note = "Bars: 1.96 standard errors over the sequences."
    if len(lines) < len(losses):
        note += f" Shows {len(lines)} of {len(losses)} lines, those of the newest checkpoints."
    return Figure("loss-by-context", "Loss by context", (), views, note, together=True)


def _step(step: int | None) -> str:
    return "" if step is None else f", step {step}"
