"""Tables of profiles and simulations in the terminal, and the cells that the page also uses."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mtrain_cli.records.analysis import BINS, CaseAnalysis, Estimate
from mtrain_cli.reporting.terminal_width import new_table

_LEAST = 5e-4  # smaller shares show as <0.1%
CELLS = 32  # most rows and columns of a heat map in the terminal
SHADES = " ░▒▓█"
_COLOURS = ("grey93", "light_yellow3", "gold3", "dark_orange3", "red3")
_TERMS = "late: waiting for late peers; exposed: communication without overlap"
SPARE_OF_SHIPPED = ("waits\nms", "density")  # columns that a narrow terminal drops


# --- cells that the terminal and the page share -----


def ms(value: float) -> str:
    """Format milliseconds with three significant digits, or as an integer from 100."""
    if value == 0 or not np.isfinite(value):
        return "0" if value == 0 else "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def fixed(value: float | None, digits: int) -> str:
    return "-" if value is None or not np.isfinite(value) else f"{value:.{digits}f}"


def spread(value: Estimate) -> str:
    return f"{value.mean:.2f} ±{value.std:.2f}" if value.n > 1 else f"{value.mean:.2f}"


def degree_cells(case: CaseAnalysis) -> list[str]:
    """Return worker imbalance by time and by work, then step imbalance by time and by work."""
    by_time, by_work = case.time, case.work
    return [spread(d) for d in (by_time.worker, by_work.worker, by_time.step, by_work.step)]


def exposed_cells(case: CaseAnalysis) -> list[str]:
    return [f"{link} {ms(value)}" for link, value in case.exposed.items()]


def step_cells(case: CaseAnalysis) -> list[str]:
    """Return percentiles 50 and 95, averaged over passes, and maximum of step times, in ms."""
    passes = case.passes.values()
    p50, p95 = (statistics.fmean(getattr(p, name) for p in passes) for name in ("p50", "p95"))
    return [ms(p50), ms(p95), ms(max(p.longest for p in passes))]


def sparsity_cells(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return recall, worst recall, density, density in the mask, slashes and columns."""

    def mean(name: str) -> float:
        return statistics.fmean(row[name] for row in rows)

    worst = min(row["worst"] for row in rows)
    return [
        *(f"{mean('recall'):.4f}", f"{worst:.3f}", f"{mean('density'):.2%}"),
        *(f"{mean('of_mask'):.2%}", f"{mean('slashes'):.1f}", f"{mean('columns'):.0f}"),
    ]


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


def summary_table(cases: Sequence[CaseAnalysis], names: Sequence[str] = ()) -> Table:
    """Return a table of load balance, with a row per case.

    A cell has several lines, which the heading names.

    names: name of each case's run, if there are several runs.
    """
    bare = " (bare)" if _bare_note(cases) else ""
    headings = (
        "imbalance\nof workers\ntime\nwork",
        "imbalance\nof steps\ntime\nwork",
        "computed\nper step\ntotal",
        "waits ms\nlate peers\nexposed",
        "step ms\np50, p95\nmax",
        f"pass ms\nforward{bare}\nbackward{bare}",
        "n",
    )
    some = any(case.tensor is not None for case in cases)
    only = ", without messages of tensor groups" if some else ""
    caption = (
        f"{_imbalance_note(cases)} 1 is perfect; ms: one layer; waits: per worker and iteration"
        f"{only}{_bare_note(cases)}"
    )
    table = _case_table("Load balance", caption, cases, names, headings)
    for i, case in enumerate(cases):
        worker_time, worker_work, step_time, step_work = degree_cells(case)
        p50, p95, longest = step_cells(case)
        ratio = case.computation
        passes = [
            f"{ms(case.passes[name].duration.mean)}{_bare(case, name)}"
            if name in case.passes
            else ""
            for name in ("forward", "backward")
        ]
        table.add_row(
            *names[i : i + 1],
            case.label + _partial_mark(case, cases),
            f"{worker_time}\n{worker_work}",
            f"{step_time}\n{step_work}",
            f"{ratio.step.mean:.3f}\n{ratio.total.mean:.3f}",
            "\n".join([ms(case.bin_ms("late")), *(exposed_cells(case) or ["0"])]),
            f"{p50}, {p95}\n{longest}",
            "\n".join(passes),
            str(case.samples),
        )
    return table


def bins_table(cases: Sequence[CaseAnalysis], names: Sequence[str] = ()) -> Table:
    """Return a table of shares: each category of `BINS`, divided by the time of all passes."""
    used = [name for name in BINS if any(case.bin_ms(name) > 0 for case in cases)]
    headings = ("ms", *(name.replace(" ", "\n") for name in used))
    caption = f"shares of all passes of an iteration, mean over workers; {_TERMS}"
    table = _case_table("Time breakdown of attention", caption, cases, names, headings)
    for i, case in enumerate(cases):
        whole, shares = _shares(case)
        cells = (
            f"{share:.1%}" if share >= _LEAST else "<0.1%" if share else ""
            for share in (shares[name] for name in used)
        )
        table.add_row(*names[i : i + 1], case.label, ms(whole), *cells)
    return table


def _case_table(
    title: str,
    caption: str,
    cases: Sequence[CaseAnalysis],
    names: Sequence[str],
    headings: Sequence[str],
) -> Table:
    before = ("run", "case") if names else ("case",)
    table = new_table((*before, *headings), len(before), title=title, caption=caption)
    for column in table.columns:
        column.no_wrap = column.header != "case"
    words = (word for case in cases for word in case.label.split())
    table.columns[len(before) - 1].min_width = max([10, *map(len, words)])
    return table


def summary_lines(cases: Sequence[CaseAnalysis], names: Sequence[str] = ()) -> RenderableType:
    """Return the content of `summary_table` and `bins_table` as text that wraps.

    The text replaces the tables in narrow terminals.
    """
    lines: list[RenderableType] = []
    for i, case in enumerate(cases):
        run = f"{names[i]}: " if names else ""
        title = f"{run}{case.label}{_partial_mark(case, cases)}, {case.samples} sample"
        lines.append(Text(title + "s" * (case.samples != 1), style="bold"))
        worker_time, worker_work, step_time, step_work = degree_cells(case)
        ratio = case.computation
        passes = ", ".join(
            f"{direction} {ms(analysis.duration.mean)}{_bare(case, direction)}"
            for direction, analysis in case.passes.items()
        )
        whole, shares = _shares(case)
        parts = ", ".join(f"{bin} {part:.1%}" for bin, part in shares.items() if part >= _LEAST)
        lines += [
            Text(f"  worker imbalance: time {worker_time}, work {worker_work}"),
            Text(f"  step imbalance: time {step_time}, work {step_work}"),
            Text(f"  pass of a layer, ms: {passes}"),
            Text(f"  computed {ratio.step.mean:.1%} per step, {ratio.total.mean:.1%} total"),
            Padding(f"{ms(whole)} ms per iteration: {parts}", (0, 0, 0, 2), expand=False),
        ]
    caption = f"{_imbalance_note(cases)} 1 is perfect; {_TERMS}{_bare_note(cases)}"
    return Group(*lines, Text(caption, style="dim italic"))


def _shares(case: CaseAnalysis) -> tuple[float, dict[str, float]]:
    """Return the time of all passes of an iteration, and the share of each of `BINS` in this time.

    The time is in ms, averaged over ranks.
    """
    whole = float(case.passes_ms[:, case.present].sum(0).mean())
    return whole, {name: case.bin_ms(name) / whole if whole else 0.0 for name in BINS}


def _partial_mark(case: CaseAnalysis, cases: Sequence[CaseAnalysis]) -> str:
    """Return a mark if the case lacks iterations or ranks, but some other case is complete.

    If all cases are incomplete, a remark above the table says so.
    """
    return " (partial)" if case.partial and not all(c.partial for c in cases) else ""


def _imbalance_note(cases: Sequence[CaseAnalysis]) -> str:
    several = any(case.samples > 1 for case in cases)
    over = "mean ± standard deviation over n samples" if several else "of one sample"
    passes = [one for case in cases for one in case.passes.values()]
    if any(one.attention.shape[1] == 1 for one in passes):
        over += "; always 1 across steps if a pass has one step, as with all_gather"
    return f"imbalance degree: max over mean, {over};"


def _bare(case: CaseAnalysis, direction: str) -> str:
    """Return the time of the pass without recording, in brackets, or "" if it is not measured."""
    bare_ms = case.bare_ms(direction)
    return "" if bare_ms is None else f" ({ms(bare_ms)})"


def _bare_note(cases: Sequence[CaseAnalysis]) -> str:
    there = any(_bare(case, direction) for case in cases for direction in case.passes)
    note = "; pass ms: mean of recorded iterations; in brackets (bare): median without recording"
    return note if there else ""


def causes_text(case: CaseAnalysis) -> RenderableType:
    """Return a numbered list of the causes of waits, the costliest first."""
    lines = [f"{i}. {cause.text}" for i, cause in enumerate(case.causes, 1)]
    return Group(*map(Text, lines or [no_causes(case)]))


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
    """Return which ranks a worker of a heat map is with tensor parallelism, else "".

    Ranks of a tensor group compute other heads of the same tokens, each in a context group of its
    own. Workers are places in these context groups.
    """
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
    headings = (
        *("case", "seq", "density", "forward\nms", "backward\nms", "waits\nms"),
        *("worker\nimbalance", "step\nimbalance", "computed"),
    )
    title = f"{document.get('hardware', '')}, {document.get('date', '')}"
    table = new_table(headings, title=title, caption=str(document.get("note") or ""))
    for case in document["cases"]:
        degrees = case.get("time") or {}
        table.add_row(
            str(case["label"]),
            f"{case['seq'] // 1024}K",
            f"{case['density']:.1%}",
            ms(case["forward"]),
            ms(case["backward"]),
            ms(sum(case.get("of_wait", {}).values())) if case.get("by_kind") else "",
            *(f"{degrees[name]:.2f}" if degrees else "" for name in ("worker", "step")),
            fixed(case.get("computation"), 2),
        )
    return table


def sparsity_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Return a table of means over heads, with a row per layer.

    `density in mask` has a column only if it differs from the density.
    """
    masked = any(abs(r["of_mask"] - r["density"]) >= 5e-5 for r in rows)
    headings = ["layer", "recall", "worst", "density", "density in mask", "slashes", "columns"]
    caption = (
        "means over heads; recall: over sampled queries that the pattern does not probe; "
        "worst: recall of the worst query; density: computed share of all causal pairs"
        f"{'; density in mask: computed share of the pairs inside documents' if masked else ''}"
    )
    kept = [i for i, name in enumerate(headings) if masked or name != "density in mask"]
    table = new_table([headings[i] for i in kept], words=0, title=title, caption=caption)
    layers = sorted({r["layer"] for r in rows})
    groups = [(str(layer), [r for r in rows if r["layer"] == layer]) for layer in layers]
    for name, mine in [*groups, ("all", rows)]:
        cells = [name, *sparsity_cells(mine)]
        table.add_row(*(cells[i] for i in kept), end_section=name == str(layers[-1]))
    return table
