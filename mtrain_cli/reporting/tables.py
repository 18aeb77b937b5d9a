"""Tables of profiles and simulations, and heat maps for the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from mtrain_cli.grouping import grouped
from mtrain_cli.records.analysis import BINS, DEGREES, CaseAnalysis, Estimate, PassAnalysis
from mtrain_cli.reporting.table import (
    TOTAL,
    Column,
    Lines,
    Map,
    Part,
    Section,
    Table,
    data,
    fixed,
    ms,
    percent,
    spread,
)

_LEAST = 5e-4  # smaller shares show as <0.1%
MAPS = 3  # most heat maps in the terminal; report.html has all
CELLS = 32  # most rows and columns of a heat map in the terminal
SHADES = " ░▒▓█"
_COLOURS = ("grey93", "light_yellow3", "gold3", "dark_orange3", "red3")
_TERMS = "late: waiting for late peers; exposed: communication without overlap"
_FACTS = ("layout", "exchange", "pattern", "kernel", "seq")
_COUNTS = ("workers", "groups", "samples", "iterations", "partial")
_CAUSE = ("ms", "kind", "direction", "rank", "step", "text")


def no_causes(case: CaseAnalysis) -> str:
    """Return the sentence to show if a case has no causes of waits."""
    if case.workers > 1:
        return "No wait costs more than 0.5% of the time."
    if case.groups > 1:
        return "Attention waits for no other worker: each context group has one."
    return "One worker: no waits."


def recording_cost(summary: dict[str, Any]) -> str | None:
    """Return a sentence on the cost of recording; None if the summary does not have the cost."""
    overhead = summary.get("overhead")
    if not isinstance(overhead, int | float):
        return None
    cases = summary.get("cases") or []
    plain = [np.array(times) for case in cases if (times := case.get("iteration_ms"))]
    if not plain or min(map(len, plain)) < 2:
        return "cost unknown: only one iteration with and one without recording"
    noise = max(float((times.max() - times.min()) / np.median(times)) for times in plain)
    variation = f"iterations without recording vary by up to {noise:.1%}"
    return (
        f"cost within noise ({variation})"
        if overhead <= noise
        else f"costs {overhead:.1%} of an iteration ({variation})"
    )


# --- tables -----


@dataclass(frozen=True)
class _Row:
    """A case of a run, or one of its passes."""

    run: str
    case: CaseAnalysis
    mark: str = ""
    direction: str = "both"

    @property
    def analysis(self) -> CaseAnalysis | PassAnalysis:
        return self.case.passes.get(self.direction, self.case)

    @property
    def passes(self) -> list[PassAnalysis]:
        """Return the pass of the row, or all passes of the case."""
        one = self.case.passes.get(self.direction)
        return list(self.case.passes.values()) if one is None else [one]


def _estimate(
    name: str, group: str, key: str, value: Callable[[Any], Estimate], digits: int = 2
) -> tuple[Column, Column]:
    """Return the column of an estimate and, for the CSV file, of its standard deviation."""
    return (
        Column(
            name, lambda row: value(row.analysis), partial(spread, digits=digits), key, group=group
        ),
        Column("", lambda row: value(row.analysis).std, key=f"{key}_std"),
    )


def _degree(kind: str, name: str) -> tuple[Column, Column]:
    def value(analysis: Any) -> Estimate:
        return getattr(getattr(analysis, kind), name)

    return _estimate(kind, f"{name} imbalance", f"{kind}_{name}_id", value)


_IMBALANCE = {(kind, name): _degree(kind, name) for kind in ("time", "work") for name in DEGREES}
_RATIOS = (
    *_estimate("per step", "computation ratio", "computed_step", lambda a: a.computation.step, 3),
    *_estimate("total", "computation ratio", "computed_total", lambda a: a.computation.total, 3),
)
_STEP_MS = (
    Column(
        *("p50", lambda row: statistics.fmean(p.p50 for p in row.passes), ms, "step_ms_p50"),
        group="step ms",
    ),
    Column(
        *("p95", lambda row: statistics.fmean(p.p95 for p in row.passes), ms, "step_ms_p95"),
        group="step ms",
    ),
    Column(
        *("max", lambda row: max(p.longest for p in row.passes), ms, "step_ms_max"),
        group="step ms",
    ),
)


def _rows(cases: Sequence[CaseAnalysis], names: Sequence[str]) -> list[_Row]:
    # If all cases are incomplete, a remark above the table says so.
    marked = not all(case.partial for case in cases)
    return [
        _Row(run, case, " (partial)" * (case.partial and marked))
        for run, case in zip(names or [""] * len(cases), cases, strict=True)
    ]


def _labels(names: Sequence[str]) -> list[Column]:
    run = [Column("run", lambda row: row.run, words=True)] if names else []
    return [*run, Column("case", lambda row: row.case.label + row.mark, words=True)]


def balance_section(cases: Sequence[CaseAnalysis], names: Sequence[str] = ()) -> Section:
    """Return load balance, time breakdown and heat maps.

    names: name of each case's run, if there are several runs.
    """
    runs = names or [""] * len(cases)
    every = [(run, each) for run, case in zip(runs, cases, strict=True) for each in case.with_kinds]
    shown, shown_names = [case for _, case in every], [run for run, _ in every if names]
    maps = [(run, case) for run, case in zip(runs, cases, strict=True) if case.workers > 1]
    more = f"showing {MAPS} of {len(maps)} heat maps; report.html has all, for both passes"
    parts: list[Part] = [summary_table(shown, shown_names), bins_table(shown, shown_names)]
    parts += [Map(heat_map(case, next(iter(case.passes)), name=run)) for run, case in maps[:MAPS]]
    parts += [Lines([more], style="dim")] if len(maps) > MAPS else []
    return Section("Load balance", parts)


def causes_section(cases: Sequence[CaseAnalysis], names: Sequence[str] = ()) -> Section:
    """Return the causes of waits, the costliest first."""
    parts = []
    for i, case in enumerate(cases):
        title = f"{names[i]}, {case.label}" if names else case.label
        lines = [cause.text for cause in case.causes]
        parts.append(
            Lines(lines or [no_causes(case)], f"{title}: why workers wait", bool(lines), 4)
        )
    return Section("Why workers wait", parts)


def summary_table(cases: Sequence[CaseAnalysis], names: Sequence[str] = ()) -> Table:
    """Return a table of load balance, with a row per case.

    names: name of each case's run, if there are several runs.
    """
    bare = " (bare)" if _bare_note(cases) else ""
    some = any(case.tensor is not None for case in cases)
    only = ", without messages of tensor groups" if some else ""
    note = (
        f"{_imbalance_note(cases)} 1 is perfect; computation ratio: share of the time that "
        f"attention kernels take; ms: one layer; waits: per worker and iteration{only}; late "
        f"peers: waiting for them; exposed: communication without overlap{_bare_note(cases)}"
    )
    columns = [
        *_labels(names),
        *(_IMBALANCE[kind, name][0] for name in ("worker", "step") for kind in ("time", "work")),
        *_RATIOS[::2],
        Column("late peers", lambda row: row.case.bin_ms("late"), ms, group="waits ms"),
        Column("exposed", lambda row: row.case.exposed, _links, group="waits ms"),
        *_STEP_MS,
        Column("forward", lambda row: _pass_ms(row.case, "forward"), group=f"pass ms{bare}"),
        Column("backward", lambda row: _pass_ms(row.case, "backward"), group=f"pass ms{bare}"),
        Column("n", lambda row: row.case.samples),
    ]
    return Table("Load balance", columns, _rows(cases, names), note)


def _links(exposed: dict[str, float]) -> str:
    return "\n".join(f"{link} {ms(value)}" for link, value in exposed.items()) or "0"


def _pass_ms(case: CaseAnalysis, direction: str) -> str | None:
    """Return the time of a pass and, in brackets, without recording, if that was measured."""
    if direction not in case.passes:
        return None
    bare = case.bare_ms(direction)
    return ms(case.passes[direction].duration.mean) + ("" if bare is None else f" ({ms(bare)})")


def bins_table(cases: Sequence[CaseAnalysis], names: Sequence[str] = ()) -> Table:
    """Return a table of shares: each category of `BINS`, divided by the time of all passes."""
    used = [name for name in BINS if any(case.bin_ms(name) > 0 for case in cases)]
    columns = [
        *_labels(names),
        Column("ms", lambda row: _passes_ms(row.case), ms),
        *(Column(name, lambda row, name=name: _share(row.case, name), _part) for name in used),
    ]
    note = f"shares of all passes of an iteration, mean over workers; {_TERMS}"
    return Table("Time breakdown of attention", columns, _rows(cases, names), note)


def _passes_ms(case: CaseAnalysis) -> float:
    """Return the time of all passes of an iteration, averaged over ranks, in ms."""
    return float(case.passes_ms[:, case.present].sum(0).mean())


def _share(case: CaseAnalysis, name: str) -> float:
    return case.bin_ms(name) / (_passes_ms(case) or 1)


def _part(share: float) -> str:
    return percent(share) if share >= _LEAST else "<0.1%" if share > 0 else ""


def _imbalance_note(cases: Sequence[CaseAnalysis]) -> str:
    several = any(case.samples > 1 for case in cases)
    over = "mean ± standard deviation over n samples" if several else "of one sample"
    passes = [one for case in cases for one in case.passes.values()]
    if any(one.attention.shape[1] == 1 for one in passes):
        over += "; always 1 across steps if a pass has one step, as with all_gather"
    return f"imbalance degree: max over mean, {over};"


def _bare_note(cases: Sequence[CaseAnalysis]) -> str:
    there = any(case.bare_ms(name) is not None for case in cases for name in case.passes)
    note = "; pass ms: mean of recorded iterations; in brackets (bare): median without recording"
    return note if there else ""


def details(cases: Sequence[tuple[str, CaseAnalysis]]) -> list[Table]:
    """Return the CSV files of the cases of runs."""
    passes = [
        ({"run": run, "case": case.label, "direction": name}, analysis)
        for run, case in cases
        for name, analysis in case.passes.items()
    ]
    causes = [
        {"run": run, "case": case.label, **{name: getattr(cause, name) for name in _CAUSE}}
        for run, case in cases
        for cause in case.causes
    ]
    return [
        _summary(cases),
        data("steps", [row for names, analysis in passes for row in _steps(names, analysis)]),
        data("time_by_rank", [row for run, case in cases for row in _time_by_rank(run, case)]),
        data("layers", [row for names, analysis in passes for row in _layers(names, analysis)]),
        data("causes", causes),
    ]


def _summary(cases: Sequence[tuple[str, CaseAnalysis]]) -> Table:
    """Return summary.csv: per case, a row with the means of both passes, and a row per pass."""
    rows = [
        _Row(run, case, direction=direction)
        for run, case in cases
        for direction in ("both", *case.passes)
    ]
    columns = [
        Column("", lambda row: row.run, key="run"),
        Column("", lambda row: row.case.label, key="case"),
        Column("", lambda row: row.direction, key="direction"),
        *(Column("", lambda row, name=name: row.case.facts.get(name), key=name) for name in _FACTS),
        *(Column("", lambda row, name=name: getattr(row.case, name), key=name) for name in _COUNTS),
        *(column for pair in _IMBALANCE.values() for column in pair),
        *_RATIOS,
        Column("", lambda row: sum(p.duration.mean for p in row.passes), key="pass_ms"),
        Column("", lambda row: _std_of_pass(row), key="pass_ms_std"),
        *_STEP_MS,
    ]
    return Table("", columns, rows, name="summary")


def _std_of_pass(row: _Row) -> float | None:
    return None if row.direction == "both" else row.passes[0].duration.std


def _steps(names: dict[str, Any], analysis: PassAnalysis) -> Iterator[dict[str, Any]]:
    tables = {
        "attention_ms": analysis.attention,
        "step_ms": analysis.elapsed,
        "late_ms": analysis.late,
        "exposed_ms": analysis.exposed,
        "pairs": analysis.pairs,
        "blocks": analysis.blocks,
    }
    for worker, step in np.ndindex(analysis.attention.shape):
        values = {name: float(table[worker, step]) for name, table in tables.items()}
        yield {**names, "worker": worker, "step": step, **values}


def _time_by_rank(run: str, case: CaseAnalysis) -> Iterator[dict[str, Any]]:
    """Yield the time of each category per iteration, in ms: a row per direction and rank."""
    columns = [f"{name.replace(' ', '_')}_ms" for name in BINS]
    for d, direction in enumerate(case.directions):
        for rank in case.present:
            names = {"run": run, "case": case.label, "direction": direction, "rank": rank}
            bins = dict(zip(columns, case.bins[d, rank], strict=True))
            yield {**names, "pass_ms": case.passes_ms[d, rank], **bins}


def _layers(names: dict[str, Any], analysis: PassAnalysis) -> Iterator[dict[str, Any]]:
    """Yield a row per layer: pass_ms of the slowest worker, and times averaged over workers."""
    for layer in analysis.layers:
        means = {name: layer[name] for name in ("attention_ms", "late_ms", "exposed_ms")}
        yield {**names, "layer": int(layer["layer"]), "pass_ms": layer["ms"], **means}


def heat_map(
    case: CaseAnalysis, direction: str, *, cells: int = CELLS, name: str = ""
) -> RenderableType:
    """Return a heat map of attention ms, with a line per worker and a column per step.

    The shades are characters, which a terminal without colors also shows.

    Args:
        cells: largest number of lines, and of columns.
        name: name of the run, if there are several runs.
    """
    whole = case.passes[direction].attention
    workers, steps = whole.shape
    table, folded = fold(whole, cells)
    top = float(table.max(initial=0)) or 1.0
    per_worker, per_step = (-(-whole.shape[axis] // table.shape[axis]) for axis in (0, 1))
    run = f"{name}, " if name else ""
    title = f"{run}{case.label}, {direction}: attention by worker and step"
    lines = [Text(title, style="bold")]
    for first, row in zip(range(0, workers, per_worker), table, strict=True):
        last = min(first + per_worker, workers) - 1
        line = shaded(str(first) if first == last else f"{first}-{last}", row, top)
        line.append(f" {ms(float(whole[first : last + 1].sum(1).max()))}")
        lines.append(line)
    caption = (
        f"{'':>8} steps 0-{steps - 1} across; {SHADES[-1] * 2} = {ms(top)} ms in a step; "
        "right: total ms of the worker"
    )
    if note := _tensor_note(case):
        caption += f"\n{'':>8} {note}"
    if folded:
        caption += f"\n{'':>8} each cell is the maximum of {per_worker} workers x {per_step} steps"
    return Group(*lines, Text(caption, style="dim"))


def _tensor_note(case: CaseAnalysis) -> str:
    """Return which ranks, of other heads, a worker of a heat map is with tensor parallelism."""
    degree = int(case.facts.get("tp") or 1)
    if degree == 1:
        return ""
    which = f"the tensor group of {degree} ranks at place N of a context group"
    if case.groups == degree:
        which = f"the tensor group of ranks {degree} N to {degree} N + {degree - 1}"
    return f"worker N: {which}; mean over {case.groups} context groups"


def shaded(label: str, values: Sequence[float], top: float) -> Text:
    """Return a line of a heat map. top: the value with the darkest shade."""
    line = Text(f"{label:>8} ")
    for value in values:
        level = min(len(SHADES) - 1, int(value / top * (len(SHADES) - 1) + 0.5))
        line.append(SHADES[level] * 2, style=_COLOURS[level])
    return line


def fold(table: np.ndarray, cells: int) -> tuple[np.ndarray, bool]:
    """Shrink a table to at most cells x cells. Each new cell is the maximum of a group of cells.

    Returns:
        The table, and whether the table shrank.
    """
    whole = table.shape
    for axis in (0, 1):
        size = -(-table.shape[axis] // cells)
        table = np.maximum.reduceat(table, np.arange(0, table.shape[axis], max(size, 1)), axis=axis)
    return table, table.shape != whole


def shipped_table(document: dict[str, Any]) -> Table:
    """Return a table of the cases of a shipped profile in the older file format."""

    def degree(name: str) -> Column:
        return Column(
            name, lambda case: (case.get("time") or {}).get(name), fixed(2), group="imbalance"
        )

    columns = [
        Column("case", lambda case: case["label"], words=True),
        Column("seq", lambda case: f"{case['seq'] // 1024}K"),
        Column("density", lambda case: case["density"], percent, drop=2),
        Column("forward", lambda case: case["forward"], ms, group="pass ms"),
        Column("backward", lambda case: case["backward"], ms, group="pass ms"),
        Column(
            "waits ms",
            lambda case: sum(case.get("of_wait", {}).values()) if case.get("by_kind") else None,
            ms,
            drop=1,
        ),
        *map(degree, ("worker", "step")),
        Column("computed", lambda case: case.get("computation"), fixed(2)),
    ]
    title = f"{document.get('hardware', '')}, {document.get('date', '')}"
    return Table(title, columns, document["cases"], str(document.get("note") or ""))


def sparsity_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Return a table of means over heads, with a row per layer."""
    layers = sorted(grouped(rows, lambda row: row["layer"]).items())
    columns = [Column("layer", itemgetter(0)), *_measures(rows)]
    groups = [*layers, ("all", rows)]
    note = f"means over heads; {_measures_note(rows)}"
    return Table(title, columns, groups, note, state=lambda row: TOTAL * (row[0] == "all"))


def _measures(rows: Sequence[dict[str, Any]]) -> list[Column]:
    """Return the columns of rows whose last item is a list of records of heads."""

    def mean(name: str, form: Callable[[float], str]) -> Column:
        label = {"of_mask": "density in mask"}.get(name, name)
        return Column(label, lambda row: statistics.fmean(head[name] for head in row[-1]), form)

    share = "{:.2%}".format
    return [
        mean("recall", fixed(4)),
        Column("worst", lambda row: min(head["worst"] for head in row[-1]), fixed(3)),
        mean("density", share),
        *([mean("of_mask", share)] if _is_masked(rows) else []),
        mean("slashes", fixed(1)),
        mean("columns", fixed(0)),
    ]


def _is_masked(rows: Sequence[dict[str, Any]]) -> bool:
    return any(abs(row["of_mask"] - row["density"]) >= 5e-5 for row in rows)


def _measures_note(rows: Sequence[dict[str, Any]]) -> str:
    inside = "; density in mask: computed share of the pairs inside documents"
    return (
        "recall: over sampled queries that the pattern does not probe; worst: recall of the worst "
        "query; density: computed share of all causal pairs"
        f"{inside if _is_masked(rows) else ''}"
    )


def sparsity_tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """Return a table per pattern, for the first and the last measured step, and one of all steps.

    With at most two steps, the last one says nothing new, so it is left out.
    """
    steps = sorted({row["step"] for row in rows}) or [0]
    found = grouped(rows, lambda row: (row["pattern"], row["step"]))
    patterns = list(dict.fromkeys(row["pattern"] for row in rows))
    tables = [
        sparsity_table(found[pattern, step], f"{pattern}, step {step}")
        for pattern in patterns
        for step in dict.fromkeys((steps[0], steps[-1]))
        if (pattern, step) in found
    ]
    if len(steps) > 2:
        groups = [(p, s, found[p, s]) for p in patterns for s in steps if (p, s) in found]
        columns = [
            Column("pattern", itemgetter(0), words=True, once=True),
            Column("step", itemgetter(1)),
            *_measures(rows),
        ]
        note = f"means over layers and heads; {_measures_note(rows)}"
        tables.append(Table("All steps", columns, groups, note))
    return tables
