"""Print reports in the terminal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.padding import Padding

from mtrain_cli.console import Console
from mtrain_cli.reporting import comparison, tables, training_tables
from mtrain_cli.reporting.evaluation_tables import show_evaluations
from mtrain_cli.reporting.expert_tables import show_experts
from mtrain_cli.reporting.pipeline_page import SPARE_OF_PIPELINES, pipeline_table
from mtrain_cli.reporting.program_figure import program_table
from mtrain_cli.reporting.report_source import ReportSource
from mtrain_cli.reporting.run_settings import attention_lines
from mtrain_cli.reporting.step_tables import show_step, side_by_side
from mtrain_cli.reporting.study_tables import show_study
from mtrain_cli.reporting.sweeps import LEGEND, SPARE, sweep_table, why_not
from mtrain_cli.reporting.terminal_width import limit, print_table, say

# Widths in characters.
PIPED = 100  # of tables that do not go to a terminal
NARROW = 98  # below this, text replaces the tables of cases
WIDEST = 400
FIGURES = 3  # most heat maps; report.html has all


def make_console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED
    return console


def show_sources(console: Console, sources: Sequence[ReportSource]) -> None:
    """Print the tables of all sources, some heat maps, and why workers wait."""
    whole, sources = sources, _numbered(console, sources)
    for given, source in zip(whole, sources, strict=True):
        number = "" if source.name == given.name else f"{source.name} "
        say(console, f"{number}{given.name}: {source.kind}{_about(source)}", indent=2, style="bold")
        _show_source(console, source)
    for line in comparison.incomparable(sources):
        say(console, f"warning: {line}", indent=2, style="yellow")
    recorded = [(source.name, source.step) for source in sources if source.step is not None]
    if len(recorded) > 1:
        print_table(console, side_by_side(recorded))
    if trained := [source for source in sources if source.metrics]:
        table = training_tables.training_table(trained)
        print_table(console, table, training_tables.SPARE_OF_TRAINING)
    if (positions := training_tables.positions_table(sources)) is not None:
        print_table(console, positions)
    show_experts(console, sources)
    if (pipelines := pipeline_table(sources)) is not None:
        print_table(console, pipelines, SPARE_OF_PIPELINES)
    _show_cases(console, sources)
    if (compared := comparison.compare_table(sources)) is not None:
        print_table(console, compared, comparison.SPARE_OF_COMPARISON)


def _show_source(console: Console, source: ReportSource) -> None:
    for line in attention_lines(source.settings):
        say(console, f"  {line}", indent=4, style="dim")
    for remark in source.remarks:
        say(console, f"  {remark}", indent=2, style="yellow")
    if source.shipped is not None:
        print_table(console, tables.shipped_table(source.shipped), tables.SPARE_OF_SHIPPED)
        command = f"recorded by {source.shipped.get('command', '')}"
        console.print(command, style="dim", soft_wrap=True)
    if source.step is not None:
        show_step(console, source.step)
    if source.steps:
        print_table(console, sweep_table(source.steps), SPARE)
        say(console, LEGEND, style="dim")
        for reason in why_not(source.steps):
            say(console, f"impossible: {reason}", style="dim")
    if source.sparsity:
        show_sparsity(console, source.sparsity)
    if source.results:
        show_evaluations(console, source.results)
    if source.study:
        show_study(console, source.study)
    for kind, records in source.others:
        kind.show(console, records)


def _show_cases(console: Console, sources: Sequence[ReportSource]) -> None:
    cases = [(source.name, case) for source in sources for case in source.cases]
    if not cases:
        return
    shown = [(name, each) for name, case in cases for each in case.with_kinds]
    names = [name for name, _ in shown] if len(sources) > 1 else []
    measured = [case for _, case in shown]
    both = tables.summary_table(measured, names), tables.bins_table(measured, names)
    wide = console.options.update(width=WIDEST)
    needed = max(console.measure(table, options=wide).minimum for table in both)
    if needed > console.width and limit(console) is None:
        console.width = needed
    if max(needed, NARROW) > console.width:
        console.print(tables.summary_lines(measured, names))
        console.print()
    else:
        for table in both:
            console.print(table)
    maps = [(name, case) for name, case in cases if case.workers > 1]
    for name, case in maps[:FIGURES]:
        first = next(iter(case.passes))
        console.print(tables.heat_map(case, first, name=name if names else ""))
        console.print()
    if len(maps) > FIGURES:
        more = f"showing {FIGURES} of {len(maps)} heat maps; report.html has all, for both passes"
        console.print(more, style="dim", soft_wrap=True)
    if len(cases) == 1:
        source = next(source for source in sources if source.cases)
        if (steps := program_table(source, measured[0])) is not None:
            print_table(console, steps)
    for name, case in cases:
        run = f"{name}, " if names else ""
        say(console, f"{run}{case.label}: why workers wait", indent=2, style="bold")
        console.print(Padding(tables.causes_text(case), (0, 0, 1, 2)))


def show_sparsity(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Print a table per pattern, for the first and the last measured step."""
    steps = sorted({row["step"] for row in rows})
    for pattern in dict.fromkeys(row["pattern"] for row in rows):
        for step in dict.fromkeys((steps[0], steps[-1])):
            mine = [row for row in rows if (row["pattern"], row["step"]) == (pattern, step)]
            if mine:
                print_table(console, tables.sparsity_table(mine, f"{pattern}, step {step}"))


def _numbered(console: Console, sources: Sequence[ReportSource]) -> list[ReportSource]:
    """Return the sources, with numbers instead of names if the names are too long for tables.

    A line above each source's tables shows its number and its name.
    """
    width = limit(console)
    if (
        width is None
        or len(sources) == 1
        or max(len(source.name) for source in sources) <= width // 4
    ):
        return list(sources)
    return [replace(source, name=f"({i})") for i, source in enumerate(sources, 1)]


def _about(source: ReportSource) -> str:
    facts = source.facts
    parts = [source.where, facts.get("started"), *([_samples(source)] if source.cases else [])]
    return "".join(f", {part}" for part in parts if part)


def _samples(source: ReportSource) -> str:
    most = max(source.cases, key=lambda case: case.samples)
    layers = len(most.layers)
    times = most.samples // max(1, layers)
    what, rest = ("iteration", f" of {layers} layers") if layers > 1 else ("sample", "")
    return f"{times} {what}{'s' * (times != 1)}{rest}{' of each case' * (len(source.cases) > 1)}"
