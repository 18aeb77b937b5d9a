"""Tables of profiles and simulations."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np

from mtrain_cli.records.analysis import BINS, DEGREES, CaseAnalysis, PassAnalysis
from mtrain_cli.reporting.plots import cell_labels, fold
from mtrain_cli.reporting.table import Column, Lines, Section, Table, data, ms, percent, spread

_FACTS = ("layout", "exchange", "pattern", "kernel", "seq")
_COUNTS = ("workers", "groups", "samples", "iterations", "partial")
_CAUSE = ("ms", "kind", "direction", "rank", "step", "text")
_STEP_TABLES, _CELLS = 3, 12  # most tables of steps in a section, and most rows and columns of one
Named = Sequence[tuple[str, CaseAnalysis]]  # (name of the run, "" for a single run; case)


def recording_cost(summary: dict[str, Any]) -> str | None:
    """Return a sentence on the cost of recording; None if the summary does not have the cost."""
    overhead = summary.get("overhead")
    if not isinstance(overhead, int | float):
        return None
    plain = [case.get("iteration_ms") or [] for case in summary.get("cases") or []]
    if min(map(len, plain), default=0) < 2:
        return "cost unknown: only one iteration with and one without recording"
    noise = max((max(times) - min(times)) / statistics.median(times) for times in plain)
    cost = "cost within noise" if overhead <= noise else f"costs {overhead:.1%} of an iteration"
    return f"{cost} (iterations without recording vary by up to {noise:.1%})"


@dataclass(frozen=True)
class _Row:
    """A case of a run, or one of its passes."""

    run: str
    case: CaseAnalysis
    direction: str = "both"

    @property
    def analysis(self) -> CaseAnalysis | PassAnalysis:
        return self.case.passes.get(self.direction, self.case)

    @property
    def passes(self) -> list[PassAnalysis]:
        """Return the pass of the row, or all passes of the case."""
        one = self.case.passes.get(self.direction)
        return list(self.case.passes.values()) if one is None else [one]


def _estimate(name: str, group: str, key: str, field: str, digits: int) -> tuple[Column, Column]:
    """Return the column of a dotted ``field`` and, for the CSV file, of its standard deviation."""
    value, form = attrgetter(f"analysis.{field}"), partial(spread, digits=digits)
    return (
        Column(name, value, form, key, group=group),
        Column("", lambda row: value(row).std, key=f"{key}_std"),
    )


_IMBALANCE = {
    (kind, name): _estimate(kind, f"{name} imbalance", f"{kind}_{name}_id", f"{kind}.{name}", 2)
    for kind in ("time", "work")
    for name in DEGREES
}
_RATIOS = (
    *_estimate("per step", "computation ratio", "computed_step", "computation.step", 3),
    *_estimate("total", "computation ratio", "computed_total", "computation.total", 3),
)
_LONGEST = Column(
    *("max", lambda row: max(p.longest for p in row.passes), ms, "step_ms_max"), group="step ms"
)


def balance_section(cases: Named) -> Section:
    """Return load balance, time breakdown, and what each worker computes at which step."""
    several = [(run, case) for run, case in cases if case.workers > 1]
    parts: list[Table | Lines] = [summary_table(cases), bins_table(cases)]
    parts += [steps_table(run, case) for run, case in several[:_STEP_TABLES]]
    if len(several) > _STEP_TABLES:
        more = f"{_STEP_TABLES} of {len(several)} cases; report.html has a heat map of each"
        parts.append(Lines([more], style="dim"))
    return Section("Load balance", parts)


def steps_table(run: str, case: CaseAnalysis) -> Table:
    """Return the attention time of the first pass, with a row per worker and a column per step."""
    direction, one_pass = next(iter(case.passes.items()))
    whole = one_pass.attention  # ms [workers, steps]
    folded, sums = fold(whole, _CELLS), fold(whole.sum(1, keepdims=True), _CELLS)[:, 0]
    workers, steps = (cell_labels(range(whole.shape[i]), folded.shape[i]) for i in (0, 1))
    columns = [
        Column("worker", lambda row: workers[row], words=True),
        *(
            Column(f"{'step ' * (i == 0)}{step}", lambda row, i=i: folded[row, i], ms)
            for i, step in enumerate(steps)
        ),
        Column("sum", lambda row: sums[row], ms),
    ]
    across = f"attention ms by worker, steps 0-{whole.shape[1] - 1} across"
    title = ", ".join(filter(None, (run, f"{case.label}, {direction}: {across}")))
    note = "" if folded.shape == whole.shape else "maxima of the workers and steps of a cell"
    return Table(title, columns, range(len(folded)), note)


def causes_section(cases: Named) -> Section:
    """Return the causes of waits, the costliest first."""
    parts = []
    for run, case in cases:
        title = ", ".join(filter(None, (run, case.label)))
        none = "No wait costs more than 0.5% of the time."
        if case.workers == 1:
            none = "No attention waits: each context group has one worker."
        lines = [cause.text for cause in case.causes]
        parts.append(Lines(lines or [none], f"{title}: why workers wait", bool(lines), 4))
    return Section("Why workers wait", parts)


def _labels(cases: Named) -> list[Column]:
    # If all cases are incomplete, a remark above the table says so.
    marked = not all(case.partial for _, case in cases)
    run = [Column("run", lambda row: row.run, words=True)] if any(run for run, _ in cases) else []
    return [
        *run,
        Column(
            "case",
            lambda row: row.case.label + " (partial)" * (row.case.partial and marked),
            words=True,
        ),
    ]


def summary_table(cases: Named) -> Table:
    """Return a table of load balance, with a row per case."""
    over = "of one sample"
    if any(case.samples > 1 for _, case in cases):
        over = "mean ± standard deviation over n samples"
    if any(p.attention.shape[1] == 1 for _, case in cases for p in case.passes.values()):
        over += "; always 1 across steps if a pass has one step, as with all_gather"
    only = ", without messages of tensor groups"
    note = (
        f"imbalance degree: max over mean, {over}; 1 is perfect; computation ratio: share of the "
        "time that attention kernels take; ms: one layer; waits: per worker and iteration"
        f"{only * any(case.tensor is not None for _, case in cases)}; late "
        "peers: waiting for them; exposed: communication without overlap"
    )

    def links(exposed: dict[str, float]) -> str:
        return "\n".join(f"{link} {ms(value)}" for link, value in exposed.items()) or "0"

    def pass_ms(case: CaseAnalysis, direction: str) -> float | None:
        return case.passes[direction].duration.mean if direction in case.passes else None

    columns = [
        *_labels(cases),
        *(_IMBALANCE[kind, name][0] for name in ("worker", "step") for kind in ("time", "work")),
        *_RATIOS[::2],
        Column("late peers", lambda row: row.case.bin_ms("late"), ms, group="waits ms"),
        Column("exposed", lambda row: row.case.exposed, links, group="waits ms"),
        _LONGEST,
        *(
            Column(name, lambda row, name=name: pass_ms(row.case, name), ms, group="pass ms")
            for name in ("forward", "backward")
        ),
        Column("n", lambda row: row.case.samples),
    ]
    return Table("Load balance", columns, [_Row(*pair) for pair in cases], note)


def bins_table(cases: Named) -> Table:
    """Return a table of shares: each category of `BINS`, divided by the time of all passes."""
    used = [name for name in BINS if any(case.bin_ms(name) > 0 for _, case in cases)]

    def whole(case: CaseAnalysis) -> float:
        return float(case.passes_ms[:, case.present].sum(0).mean())

    def share(row: _Row, name: str) -> str:
        part = row.case.bin_ms(name) / (whole(row.case) or 1)
        return percent(part) if part >= 5e-4 else "<0.1%" if part > 0 else ""

    columns = [
        *_labels(cases),
        Column("ms", lambda row: whole(row.case), ms),
        *(Column(name, partial(share, name=name)) for name in used),
    ]
    note = (
        "shares of all passes of an iteration, mean over workers; late: waiting for late peers; "
        "exposed: communication without overlap"
    )
    return Table("Time breakdown of attention", columns, [_Row(*pair) for pair in cases], note)


def details(cases: Named) -> list[Table]:
    """Return the CSV files of cases. In summary.csv, a case has a row for both passes, and each."""
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
    layers = [
        {**names, "layer": int(layer["layer"]), "pass_ms": layer["ms"]}
        | {name: layer[name] for name in ("attention_ms", "late_ms", "exposed_ms")}
        for names, analysis in passes
        for layer in analysis.layers
    ]
    rows = [_Row(run, case, name) for run, case in cases for name in ("both", *case.passes)]
    columns = [
        Column("", lambda row: row.run, key="run"),
        Column("", lambda row: row.case.label, key="case"),
        Column("", lambda row: row.direction, key="direction"),
        *(Column("", lambda row, name=name: row.case.facts.get(name), key=name) for name in _FACTS),
        *(Column("", lambda row, name=name: getattr(row.case, name), key=name) for name in _COUNTS),
        *(column for pair in _IMBALANCE.values() for column in pair),
        *_RATIOS,
        Column("", lambda row: sum(p.duration.mean for p in row.passes), key="pass_ms"),
        _LONGEST,
    ]
    return [
        Table("", columns, rows, name="summary"),
        data("steps", [row for names, analysis in passes for row in _steps(names, analysis)]),
        data("time_by_rank", [row for run, case in cases for row in _time_by_rank(run, case)]),
        data("layers", layers),
        data("causes", causes),
    ]


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
