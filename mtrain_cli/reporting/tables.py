"""Tables of a report: rich tables for the terminal, and sheets of plain rows for CSV and HTML."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from mtrain_cli.config.sizes import format_size
from mtrain_cli.records.analysis import BINS, CaseAnalysis, Estimate, PassAnalysis
from mtrain_cli.records.metrics import StepMetrics
from mtrain_cli.reporting.report_source import ReportSource
from mtrain_cli.training.evaluation import losses_by_bucket

NOISE = (
    "Noise: twice the standard error of the difference, from the spread over iterations; "
    "smaller differences are not significant"
)
SAME = 5e-4  # a smaller difference shows as a ratio of 1.000
_LEAST = 5e-4  # a smaller share shows as <0.1%
ONE_WORKER = "One worker: no waits."
NO_CAUSES = "No wait costs more than 0.5% of the time."
CELLS = 32  # rows and columns of a heat map in the terminal
SHADES = " ░▒▓█"
_COLOURS = ("grey93", "light_yellow3", "gold3", "dark_orange3", "red3")


@dataclass(frozen=True)
class Sheet:
    """One CSV file, with unrounded numbers."""

    name: str
    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]

    def write(self, folder: Path) -> Path:
        path = folder / f"{self.name}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(self.columns)
            writer.writerows([_cell(value) for value in row] for row in self.rows)
        return path


def _cell(value: Any) -> Any:
    if isinstance(value, float | np.floating):
        return "" if not np.isfinite(value) else f"{value:.6g}"
    return "" if value is None else value


# --- terminal -----


def summary_table(cases: Sequence[CaseAnalysis], names: Sequence[str] = ()) -> Table:
    """One row per case: time on the first line, work on the second.

    names: the run of each case, if there are several runs.
    """
    caption = (
        f"{_imbalance_note(cases)} 1 is perfect; ms of one layer, waits of one iteration of a "
        f"worker{_bare_note(cases)}"
    )
    table = _table("Load balance", caption)
    if names:
        table.add_column("run", no_wrap=True)  # users copy it to show the run again
    table.add_column("case", min_width=_longest_word(cases))
    for heading in (
        "imbalance\nof workers\ntime\nwork",
        "imbalance\nof steps\ntime\nwork",
        "computed\nper step\ntotal",
        "waits ms\nlate peers\nexposed",
        "step ms\np50, p95\nmax",
        "pass ms\nforward\nbackward"
        if not _bare_note(cases)
        else "pass ms\nforward (bare)\nbackward (bare)",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("n", justify="right")
    for i, case in enumerate(cases):
        steps = list(case.passes.values())
        p50, p95 = (statistics.fmean(getattr(p, name) for p in steps) for name in ("p50", "p95"))
        links = "\n".join(f"{link} {ms(value)}" for link, value in case.exposed.items())
        table.add_row(
            *((names[i],) if names else ()),
            case.label + (" (partial)" if case.partial else ""),
            f"{spread(case.time.worker)}\n{spread(case.work.worker)}",
            f"{spread(case.time.step)}\n{spread(case.work.step)}",
            f"{case.computation.step.mean:.3f}\n{case.computation.total.mean:.3f}",
            f"{ms(case.bin_ms('late'))}\n{links or '0'}",
            f"{ms(p50)}, {ms(p95)}\n{ms(max(p.longest for p in steps))}",
            "\n".join(
                f"{ms(case.passes[name].duration.mean)}{_bare(case, name)}"
                if name in case.passes
                else ""
                for name in ("forward", "backward")
            ),
            str(case.samples),
        )
    return table


def _bare(case: CaseAnalysis, direction: str) -> str:
    """Return the time of the pass without recording, in brackets; empty if not measured."""
    bare_ms = case.bare_ms(direction)
    return "" if bare_ms is None else f" ({ms(bare_ms)})"


def _bare_note(cases: Sequence[CaseAnalysis]) -> str:
    """Return the caption on `_bare`; empty if no case has it."""
    there = any(case.bare_ms(direction) is not None for case in cases for direction in case.passes)
    return (
        "; pass ms: mean of recorded iterations, in brackets bare: median without recording"
        if there
        else ""
    )


def _longest_word(cases: Sequence[CaseAnalysis]) -> int:
    """Return the characters of the longest word in a label, since names do not wrap."""
    return max([10, *(len(word) for case in cases for word in case.label.split())])


def bins_table(cases: Sequence[CaseAnalysis], names: Sequence[str] = ()) -> Table:
    """Return the shares of the bins in the time of the passes, mean over ranks."""
    table = _table(
        "Time breakdown of attention",
        "shares of all passes of an iteration, mean over workers; late: waiting for late peers; "
        "exposed: communication that nothing overlaps",
    )
    used = [name for name in BINS if any(case.bin_ms(name) > 0 for case in cases)]
    if names:
        table.add_column("run", no_wrap=True)  # users copy it to show the run again
    table.add_column("case", min_width=_longest_word(cases))
    table.add_column("ms", justify="right", no_wrap=True)
    for name in used:
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)
    for i, case in enumerate(cases):
        whole = float(case.passes_ms[:, case.present].sum(0).mean())
        shares = [case.bin_ms(name) / whole if whole else 0.0 for name in used]
        run = (names[i],) if names else ()
        table.add_row(
            *run,
            case.label,
            ms(whole),
            *(
                f"{share:.1%}" if share >= _LEAST else "" if not share else "<0.1%"
                for share in shares
            ),
        )
    return table


def summary_lines(cases: Sequence[CaseAnalysis], names: Sequence[str] = ()) -> RenderableType:
    """Return `summary_table` and `bins_table` as sentences that wrap, for narrow terminals."""
    lines: list[RenderableType] = []
    for i, case in enumerate(cases):
        name = f"{names[i]}: " if names else ""
        lines.append(
            Text(
                f"{name}{case.label}{' (partial)' if case.partial else ''}, "
                f"{case.samples} sample{'s' * (case.samples != 1)}",
                style="bold",
            )
        )
        for degree in ("worker", "step"):
            time, work = (spread(getattr(degrees, degree)) for degrees in (case.time, case.work))
            lines.append(Text(f"  {degree} imbalance: time {time}, work {work}"))
        passes = ", ".join(
            f"{direction} {ms(analysis.duration.mean)}{_bare(case, direction)}"
            for direction, analysis in case.passes.items()
        )
        lines.append(Text(f"  pass of a layer, ms: {passes}"))
        ratio = case.computation
        lines.append(
            Text(f"  computed {ratio.step.mean:.1%} per step, {ratio.total.mean:.1%} total")
        )
        whole = float(case.passes_ms[:, case.present].sum(0).mean())
        parts = [
            f"{bin} {case.bin_ms(bin) / whole:.1%}"
            for bin in BINS
            if whole and case.bin_ms(bin) >= _LEAST * whole
        ]
        lines.append(
            Padding(f"{ms(whole)} ms per iteration: {', '.join(parts)}", (0, 0, 0, 2), expand=False)
        )
    caption = (
        f"{_imbalance_note(cases)} 1 is perfect; late: waiting for late peers; "
        f"exposed: communication that nothing overlaps{_bare_note(cases)}"
    )
    return Group(*lines, Text(caption, style="dim italic"))


def causes_text(case: CaseAnalysis) -> RenderableType:
    """Return why workers wait, the costliest cause first."""
    if case.workers == 1:
        return Text(ONE_WORKER)
    if not case.causes:
        return Text(NO_CAUSES)
    return Group(*(Text(f"{i}. {cause.text}") for i, cause in enumerate(case.causes, 1)))


def heat_map(
    case: CaseAnalysis, direction: str, *, cells: int = CELLS, name: str = ""
) -> RenderableType:
    """Return a map of attention ms: workers down, steps across.

    The shades also show without colours. name: the run, if there are several.
    """
    whole = case.passes[direction].attention
    table, folded = fold(whole, cells)
    top = float(table.max(initial=0)) or 1.0
    lines = []
    per_worker, per_step = (
        -(-whole.shape[0] // table.shape[0]),
        -(-whole.shape[1] // table.shape[1]),
    )
    for i, row in enumerate(table):
        first = i * per_worker
        last = min(first + per_worker, len(whole)) - 1
        line = Text(f"{first if first == last else f'{first}-{last}':>8} ")
        for value in row:
            level = min(len(SHADES) - 1, int(value / top * (len(SHADES) - 1) + 0.5))
            line.append(SHADES[level] * 2, style=_COLOURS[level])
        line.append(f" {ms(float(whole[first : last + 1].sum(1).max()))}")
        lines.append(line)
    caption = (
        f"{'':>8} steps 0-{whole.shape[1] - 1} across; {SHADES[-1] * 2} = {ms(top)} ms in a step; "
        "right: total ms of the worker"
    )
    if folded:
        caption += f"\n{'':>8} each cell is the maximum of {per_worker} workers x {per_step} steps"
    run = f"{name}, " if name else ""
    return Group(
        Text(f"{run}{case.label}, {direction}: attention by worker and step", style="bold"),
        *lines,
        Text(caption, style="dim"),
    )


def fold(table: np.ndarray, cells: int) -> tuple[np.ndarray, bool]:
    """Shrink a table to at most cells x cells: each cell is the maximum of a group of neighbours.

    Also returns whether it shrank.
    """
    whole = table.shape
    for axis in (0, 1):
        size = -(-table.shape[axis] // cells)
        table = np.maximum.reduceat(table, np.arange(0, table.shape[axis], max(size, 1)), axis=axis)
    return table, table.shape != whole


TRAINING = (
    "steps",
    "loss, first",
    "last",
    "s / step",
    "tokens/s/GPU",
    "MFU",
    "HFU",
    "density",
    "peak GiB",
)


def training_table(sources: Sequence[ReportSource]) -> Table:
    """One row per training run."""
    table = _table("Training", "medians of all steps but the first")
    several = len(sources) > 1  # a single run is named in the line above
    for heading in (*(("run",) if several else ()), *TRAINING):
        # Break it here; a narrow terminal would break it anywhere.
        shown = heading.replace("s/GPU", "s\n/GPU")
        table.add_column(shown, justify="left" if heading == "run" else "right", overflow="fold")
    for source in sources:
        table.add_row(*((Text(source.name),) if several else ()), *training_row(source))
    return table


def positions_table(sources: Sequence[ReportSource]) -> Table | None:
    """Return held-out losses by context, that is the number of earlier tokens.

    One run: its first and last evaluation. Several runs: the last of each.
    """
    evaluated = [source for source in sources if source.evaluations]
    if not evaluated:
        return None
    shown = [(source.name, source.evaluations[-1]) for source in evaluated]
    if len(evaluated) == 1 and len(evaluated[0].evaluations) > 1:
        shown.insert(0, (evaluated[0].name, evaluated[0].evaluations[0]))
    last = shown[-1][1]
    tokens = {(b.begin, b.end): b.tokens for b in last.buckets}
    table = _table(
        "Held-out loss by context",
        f"nats per token, over {last.sequences} sequences not in the training data",
    )
    for heading in ("earlier tokens", "tokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, evaluation in shown:
        run = f"{name}\n" if len(sources) > 1 else ""
        table.add_column(
            f"{run}step {evaluation.step}\n{evaluation.attention}", justify="right", overflow="fold"
        )
    for begin, end, losses in losses_by_bucket([evaluation for _, evaluation in shown]):
        cells = [_number(loss, 4) for loss in losses]
        table.add_row(
            f"{format_size(begin)} to {format_size(end)}",
            f"{tokens.get((begin, end), 0):,}",
            *cells,
        )
    table.add_row(
        "all",
        f"{last.tokens:,}",
        *(_number(evaluation.loss, 4) for _, evaluation in shown),
        style="bold",
    )
    return table


def training_row(source: ReportSource) -> list[str]:
    """Return the cells in the order of `TRAINING`.

    Medians skip the first step, which also compiles and fills caches.
    """
    steps = source.metrics
    rest = steps[1:] or steps

    def median(name: str) -> float | None:
        values = [value for value in (getattr(step, name) for step in rest) if value is not None]
        return statistics.median(values) if values else None

    # The MFU of the dense first steps of a sparse run does not describe the run.
    mfu = median("mfu_model") if all(step.mfu_model is not None for step in rest) else None
    hfu, density = median("mfu_executed"), median("density")
    speed, seconds = median("tokens_per_second_per_gpu"), median("seconds")
    # A step without labels has no loss.
    losses: list[float | None] = [step.loss for step in steps if step.loss is not None] or [None]
    peak = [step.peak_memory_gib for step in steps if step.peak_memory_gib is not None]
    return [
        str(steps[-1].step),
        _number(losses[0], 3),
        _number(losses[-1], 3),
        "-" if seconds is None else f"{seconds:.3g}",
        "-" if speed is None else f"{speed:,.0f}",
        "-" if mfu is None else f"{mfu:.1%}",
        "-" if hfu is None else f"{hfu:.1%}",
        "-" if density is None else f"{density:.1%}",
        f"{max(peak):.1f}" if peak else "-",
    ]


# Columns that a narrow terminal drops, in this order.
SPARE_OF_TRAINING = ("peak GiB", "density", "MFU", "s / step")
SPARE_OF_COMPARISON = ("first",)
SPARE_OF_SHIPPED = ("waits\nms", "density")


def shipped_table(document: dict[str, Any]) -> Table:
    """Return the cases of a shipped profile of the older kind."""
    table = _table(
        f"{document.get('hardware', '')}, {document.get('date', '')}",
        str(document.get("note") or ""),
    )
    for heading in (
        "case",
        "seq",
        "density",
        "forward\nms",
        "backward\nms",
        "waits\nms",
        "worker\nimbalance",
        "step\nimbalance",
        "computed",
    ):
        table.add_column(heading, justify="left" if heading == "case" else "right", overflow="fold")
    for case in document["cases"]:
        degrees = case.get("time") or {}
        table.add_row(
            str(case["label"]),
            f"{case['seq'] // 1024}K",
            f"{case['density']:.1%}",
            ms(case["forward"]),
            ms(case["backward"]),
            ms(sum(case.get("of_wait", {}).values())) if case.get("by_kind") else "",
            f"{degrees['worker']:.2f}" if degrees else "",
            f"{degrees['step']:.2f}" if degrees else "",
            _number(case.get("computation"), 2),
        )
    return table


def sparsity_table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    """Return means over heads; "of mask" has a column only where it differs from the density."""
    masked = any(abs(r["of_mask"] - r["density"]) >= 5e-5 for r in rows)
    caption = (
        "means over heads; recall: over sampled queries that the pattern does not probe; "
        "worst: of the worst query; density: of all causal pairs"
    )
    table = Table(
        title=title,
        title_justify="left",
        caption=caption + ("; of mask: of the pairs inside documents" if masked else ""),
        caption_justify="left",
        box=SIMPLE,  # without borders it fits 60 columns
        padding=(0, 1, 0, 0),
    )
    for column in (
        "layer",
        "recall",
        "worst",
        "density",
        *(("of mask",) if masked else ()),
        "slashes",
        "columns",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    groups: list[tuple[str, list[dict[str, Any]]]] = [
        (str(layer), [r for r in rows if r["layer"] == layer])
        for layer in sorted({r["layer"] for r in rows})
    ]
    for name, mine in [*groups, ("all", list(rows))]:
        table.add_row(
            name,
            f"{statistics.fmean(r['recall'] for r in mine):.4f}",
            f"{min(r['worst'] for r in mine):.3f}",
            f"{statistics.fmean(r['density'] for r in mine):.2%}",
            *((f"{statistics.fmean(r['of_mask'] for r in mine):.2%}",) if masked else ()),
            f"{statistics.fmean(r['slashes'] for r in mine):.1f}",
            f"{statistics.fmean(r['columns'] for r in mine):.0f}",
            end_section=name == groups[-1][0],
        )
    return table


def compare_table(sources: Sequence[ReportSource]) -> Table | None:
    """Compare every run with the first; None if they share no figure."""
    rows = comparison(sources)
    if not rows:
        return None
    table = _table(f"Compared with {sources[0].name}", f"{NOISE[0].lower()}{NOISE[1:]}")
    for heading in ("run", "case", "what", "first", "this", "difference", "noise"):
        table.add_column(
            heading,
            justify="left" if heading in ("run", "case", "what") else "right",
            overflow="fold",
        )
    above = ("", "")
    for row in rows:
        name = ("", "") if (row.run, row.case) == above else (row.run, row.case)
        above = (row.run, row.case)
        table.add_row(
            *map(
                Text,
                (
                    *name,
                    row.what,
                    f"{row.first:.4g}",
                    f"{row.other:.4g}",
                    row.difference,
                    row.spread,
                ),
            )
        )
    return table


def incomparable(sources: Sequence[ReportSource]) -> list[str]:
    """Return warnings about facts other than settings that differ between runs.

    Missing facts are not compared.
    """
    warnings = []
    for fact, value_of in (("workers", _workers_of), ("machines", _machine_of)):
        values = [(source.name, value_of(source)) for source in sources]
        known = [(name, value) for name, value in values if value]
        if len({value for _, value in known}) > 1:
            listed = "; ".join(f"{name}: {value}" for name, value in known)
            warnings.append(
                f"the runs differ in {fact} ({listed}): settings alone do not explain their times"
            )
    return warnings


def _workers_of(source: ReportSource) -> str:
    candidates = [
        source.summary.get("workers"),
        (source.step or {}).get("workers"),
        source.settings.get("topology.workers"),
    ]
    # `auto` means one worker per GPU, or two processes on a CPU.
    gpus = len(source.facts.get("gpus") or [])
    return next(
        (str(value) for value in candidates if isinstance(value, int)),
        str(gpus or 2) if "auto" in candidates else "",
    )


def _machine_of(source: ReportSource) -> str:
    """Return GPU model and host; for a prediction, its cluster."""
    if isinstance(source.summary.get("cluster"), dict):
        return source.where
    gpus, host = source.facts.get("gpus") or [], source.facts.get("host")
    return f"{gpus[0] if gpus else 'CPU'} of {host}" if host else ""


def recording_cost(summary: dict[str, Any]) -> str | None:
    """Return the cost of recording, from a profile's summary; None if it has none."""
    overhead = summary.get("overhead")
    if not isinstance(overhead, int | float):
        return None
    plain = [
        np.array(times)
        for case in summary.get("cases") or []
        if (times := case.get("iteration_ms"))
    ]
    if not plain or min(map(len, plain)) < 2:
        return "cost unknown: only one iteration with and one without recording"
    noise = max(float((times.max() - times.min()) / np.median(times)) for times in plain)
    variation = f"iterations without recording vary by up to {noise:.1%}"
    return (
        f"cost within noise ({variation})"
        if overhead <= noise
        else f"costs {overhead:.1%} of an iteration ({variation})"
    )


@dataclass(frozen=True)
class RatioComparison:
    """One figure of a run and of the first run.

    noise: half the width of the band around 1 in which the ratio may lie by chance
    """

    run: str
    case: str
    what: str
    first: float
    other: float
    noise: float

    @property
    def ratio(self) -> float:
        return self.other / self.first

    @property
    def verdict(self) -> str:
        if not np.isfinite(self.noise):
            return "too few samples to tell"
        if abs(self.ratio - 1) < SAME:
            return "equal"
        if abs(self.ratio - 1) <= self.noise:
            return "within noise"
        return "more" if self.ratio > 1 else "less"

    @property
    def difference(self) -> str:
        """The change if it exceeds the noise, else why not."""
        if self.verdict in ("more", "less"):
            return f"{self.ratio:.2f}x" if self.ratio >= 2 else f"{self.ratio - 1:+.1%}"
        return "unknown" if not np.isfinite(self.noise) else self.verdict

    @property
    def spread(self) -> str:
        return f"±{self.noise:.1%}" if np.isfinite(self.noise) else "too few samples"


def comparison(sources: Sequence[ReportSource]) -> list[RatioComparison]:
    """Compare the figures that later runs share with the first run.

    Compares cases with equal labels, or the only case of each run.
    """
    first = sources[0]
    rows: list[RatioComparison] = []
    for other in sources[1:]:
        pairs = [(a, b) for a in first.cases for b in other.cases if a.label == b.label]
        if not pairs and len(first.cases) == len(other.cases) == 1:
            pairs = [(first.cases[0], other.cases[0])]
        for a, b in pairs:
            label = a.label if a.label == b.label else f"{b.label} vs. {a.label}"
            rows += _compared(other.name, label, _figures(a), _figures(b))
        if first.metrics and other.metrics:
            rows += _compared(
                other.name, "training", _training_figures(first), _training_figures(other)
            )
    return rows


def _compared(
    run: str, case: str, first: dict[str, Estimate], other: dict[str, Estimate]
) -> list[RatioComparison]:
    rows = []
    for what in first.keys() & other.keys():
        a, b = first[what], other[what]
        if a.n and b.n and a.mean > 0:
            rows.append(
                RatioComparison(
                    run, case, what, a.mean, b.mean, 2 * float(np.hypot(a.error, b.error)) / a.mean
                )
            )
    return sorted(rows, key=lambda row: list(first).index(row.what))


def _figures(case: CaseAnalysis) -> dict[str, Estimate]:
    return {
        **{f"{name} ms": p.duration for name, p in case.passes.items()},
        "worker imbalance, time": case.time.worker,
        "step imbalance, time": case.time.step,
        "worker imbalance, work": case.work.worker,
        "step imbalance, work": case.work.step,
        "computation ratio, per step": case.computation.step,
        "computation ratio, total": case.computation.total,
        "iteration ms": case.iteration_ms,
    }


def _training_figures(source: ReportSource) -> dict[str, Estimate]:
    """Return the figures of a training run; the last loss is the mean of the last 10% of steps."""
    metrics: Sequence[StepMetrics] = source.metrics
    rest = metrics[1:] or metrics
    ends = metrics[-max(1, len(metrics) // 10) :]
    final = [m.loss for m in ends if m.loss is not None]
    held_out = [source.evaluations[-1].loss] if source.evaluations else []
    return {
        "loss, last tenth of the steps": Estimate.of(np.array(final)),
        "held-out loss, last": Estimate.of(np.array(held_out)),
        "s / step": Estimate.of(np.array([m.seconds for m in rest])),
        "tokens/s/GPU": _rate(rest),
    }


def _rate(steps: Sequence[StepMetrics]) -> Estimate:
    """Return tokens of all steps over their time; a mean of rates would underweight slow steps."""
    rates = np.array([m.tokens_per_second_per_gpu for m in steps])
    seconds = np.array([m.seconds for m in steps])
    mean = (
        float((rates * seconds).sum() / seconds.sum())
        if len(steps) and seconds.sum() > 0
        else float("nan")
    )
    return replace(Estimate.of(rates), mean=mean)


# --- sheets -----


def sheets(sources: Sequence[ReportSource]) -> list[Sheet]:
    """Return one sheet per kind of table that has rows."""
    makers = (
        summary_sheet,
        steps_sheet,
        bins_sheet,
        layers_sheet,
        causes_sheet,
        training_sheet,
        positions_sheet,
        compare_sheet,
    )
    return [sheet for make in makers if (sheet := make(sources)).rows]


def summary_sheet(sources: Sequence[ReportSource]) -> Sheet:
    """One row per case and direction; `both` is the mean of forward and backward."""
    columns = [
        "run",
        "case",
        "direction",
        "layout",
        "exchange",
        "pattern",
        "kernel",
        "seq",
        "workers",
        "groups",
    ]
    columns += ["samples", "iterations", "partial"]
    for kind in ("time", "work"):
        columns += [
            f"{kind}_{degree}_id{end}"
            for degree in ("worker", "step", "total", "critical")
            for end in ("", "_std")
        ]
    columns += [
        "computed_step",
        "computed_step_std",
        "computed_total",
        "computed_total_std",
        "pass_ms",
        "pass_ms_std",
    ]
    columns += ["step_ms_p50", "step_ms_p95", "step_ms_max"]
    rows = []
    for source, case in _cases(sources):
        facts = case.facts
        about = [facts.get(key) for key in ("layout", "exchange", "pattern", "kernel", "seq")]
        both: list[tuple[str, CaseAnalysis | PassAnalysis]] = [("both", case), *case.passes.items()]
        for name, analysis in both:
            row: list[Any] = [
                source.name,
                case.label,
                name,
                *about,
                case.workers,
                case.groups,
                case.samples,
                case.iterations,
                case.partial,
            ]
            for degrees in (analysis.time, analysis.work):
                for one in (degrees.worker, degrees.step, degrees.total, degrees.critical):
                    row += [one.mean, one.std]
            for one in (analysis.computation.step, analysis.computation.total):
                row += [one.mean, one.std]
            if isinstance(analysis, CaseAnalysis):
                row += [sum(p.duration.mean for p in case.passes.values()), None, None, None, None]
            else:
                row += [
                    analysis.duration.mean,
                    analysis.duration.std,
                    analysis.p50,
                    analysis.p95,
                    analysis.longest,
                ]
            rows.append(tuple(row))
    return Sheet("summary", tuple(columns), rows)


def steps_sheet(sources: Sequence[ReportSource]) -> Sheet:
    """One row per case, direction, worker and step."""
    columns = (
        "run",
        "case",
        "direction",
        "worker",
        "step",
        "attention_ms",
        "step_ms",
        "late_ms",
        "exposed_ms",
        "pairs",
        "blocks",
    )
    rows: list[tuple[Any, ...]] = []
    for source, case in _cases(sources):
        for name, analysis in case.passes.items():
            tables = (
                analysis.attention,
                analysis.elapsed,
                analysis.late,
                analysis.exposed,
                analysis.pairs,
                analysis.blocks,
            )
            workers, steps = analysis.attention.shape
            for worker in range(workers):
                for step in range(steps):
                    rows.append(
                        (
                            source.name,
                            case.label,
                            name,
                            worker,
                            step,
                            *(float(t[worker, step]) for t in tables),
                        )
                    )
    return Sheet("steps", columns, rows)


def bins_sheet(sources: Sequence[ReportSource]) -> Sheet:
    """One row per case, direction and rank: ms of an iteration; the bins add up to pass_ms."""
    rows = []
    for source, case in _cases(sources):
        for d, name in enumerate(case.directions):
            for rank in case.present:
                rows.append(
                    (
                        source.name,
                        case.label,
                        name,
                        rank,
                        float(case.passes_ms[d, rank]),
                        *map(float, case.bins[d, rank]),
                    )
                )
    names = tuple(f"{name.replace(' ', '_')}_ms" for name in BINS)
    return Sheet("time_by_rank", ("run", "case", "direction", "rank", "pass_ms", *names), rows)


def layers_sheet(sources: Sequence[ReportSource]) -> Sheet:
    """One row per layer: ms of the slowest worker's pass, and means over workers."""
    rows = [
        (
            s.name,
            c.label,
            name,
            int(row["layer"]),
            row["ms"],
            row["attention_ms"],
            row["late_ms"],
            row["exposed_ms"],
        )
        for s, c in _cases(sources)
        for name, analysis in c.passes.items()
        for row in analysis.layers
    ]
    return Sheet(
        "layers",
        ("run", "case", "direction", "layer", "pass_ms", "attention_ms", "late_ms", "exposed_ms"),
        rows,
    )


def causes_sheet(sources: Sequence[ReportSource]) -> Sheet:
    rows = [
        (s.name, case.label, c.ms, c.kind, c.direction, c.rank, c.step, c.text)
        for s, case in _cases(sources)
        for c in case.causes
    ]
    return Sheet("causes", ("run", "case", "ms", "kind", "direction", "rank", "step", "text"), rows)


def training_sheet(sources: Sequence[ReportSource]) -> Sheet:
    names = (
        "step",
        "loss",
        "lr",
        "tokens",
        "tokens_per_second_per_gpu",
        "mfu_model",
        "mfu_executed",
        "density",
        "peak_memory_gib",
        "seconds",
    )
    rows = [
        (source.name, *(getattr(m, name) for name in names))
        for source in sources
        for m in source.metrics
    ]
    return Sheet("training", ("run", *names), rows)


def positions_sheet(sources: Sequence[ReportSource]) -> Sheet:
    """One row per run, evaluation and bucket."""
    rows = [
        (source.name, e.step, e.attention, bucket.begin, bucket.end, bucket.tokens, bucket.loss)
        for source in sources
        for e in source.evaluations
        for bucket in e.buckets
    ]
    return Sheet("positions", ("run", "step", "attention", "begin", "end", "tokens", "loss"), rows)


def compare_sheet(sources: Sequence[ReportSource]) -> Sheet:
    rows = [
        (r.run, r.case, r.what, r.first, r.other, r.ratio, r.noise, r.verdict)
        for r in comparison(sources)
    ]
    return Sheet(
        "compare", ("run", "case", "what", "first", "this", "ratio", "noise", "verdict"), rows
    )


# --- words -----


def _cases(sources: Sequence[ReportSource]) -> list[tuple[ReportSource, CaseAnalysis]]:
    return [(source, case) for source in sources for case in source.cases]


def _table(title: str, caption: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )


def _imbalance_note(cases: Sequence[CaseAnalysis]) -> str:
    several = any(case.samples > 1 for case in cases)
    over = "mean ± standard deviation over n samples" if several else "of one sample"
    return f"imbalance degree: max over mean, {over};"


def spread(value: Estimate) -> str:
    return f"{value.mean:.2f} ±{value.std:.2f}" if value.n > 1 else f"{value.mean:.2f}"


def ms(value: float) -> str:
    """Format milliseconds with three digits."""
    if value == 0 or not np.isfinite(value):
        return "0" if value == 0 else "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None or not np.isfinite(value) else f"{value:.{digits}f}"
