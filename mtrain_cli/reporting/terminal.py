"""Print reports in the terminal."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

from mtrain_cli.console import Console
from mtrain_cli.reporting import comparison
from mtrain_cli.reporting.report_source import ReportSource
from mtrain_cli.reporting.run_settings import attention_lines
from mtrain_cli.reporting.sections import own_sections, shared_sections
from mtrain_cli.reporting.study_tables import show_study
from mtrain_cli.reporting.terminal_width import limit, print_section, say

PIPED = 100  # characters of a line that does not go to a terminal


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
        for line in attention_lines(source.settings):
            say(console, f"  {line}", indent=4, style="dim")
        for remark in source.remarks:
            say(console, f"  {remark}", indent=2, style="yellow")
        for section in own_sections(source):
            print_section(console, section)
        if source.study:
            show_study(console, source.study)
    for line in comparison.incomparable(sources):
        say(console, f"warning: {line}", indent=2, style="yellow")
    for section in shared_sections(sources):
        print_section(console, section)


def _numbered(console: Console, sources: Sequence[ReportSource]) -> list[ReportSource]:
    """Return the sources, with numbers instead of names if the names are too long for tables."""
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
