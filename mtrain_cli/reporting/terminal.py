"""Print reports in the terminal."""

from __future__ import annotations

import os
from collections.abc import Sequence

from mtrain_cli.config.sizes import with_count
from mtrain_cli.console import Console
from mtrain_cli.reporting.report_source import ReportSource
from mtrain_cli.reporting.run_files import attention_lines
from mtrain_cli.reporting.sections import own_sections, shared_sections
from mtrain_cli.reporting.terminal_width import print_section, say

PIPED = 100  # characters of a line that does not go to a terminal


def make_console() -> Console:
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED
    return console


def show_sources(console: Console, sources: Sequence[ReportSource]) -> None:
    """Print the tables of all sources, some heat maps, and why workers wait."""
    for source in sources:
        about = filter(None, (source.where, source.facts.get("started"), _samples(source)))
        line = f"{source.name}: {', '.join([source.kind, *about])}"
        say(console, line, indent=2, style="bold")
        for line in attention_lines(source.settings):
            say(console, f"  {line}", indent=4, style="dim")
        for remark in source.remarks:
            say(console, f"  {remark}", indent=2, style="yellow")
        for section in own_sections(source):
            print_section(console, section)
    for section in shared_sections(sources):
        print_section(console, section)


def _samples(source: ReportSource) -> str:
    if not source.cases:
        return ""
    most = max(source.cases, key=lambda case: case.samples)
    layers = max(1, len(most.layers))
    of_layers = f" of {layers} layers" * (layers > 1)
    times = with_count(most.samples // layers, "sample")
    return f"{times}{of_layers}{' of each case' * (len(source.cases) > 1)}"
