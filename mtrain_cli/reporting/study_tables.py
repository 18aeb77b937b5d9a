"""Show the tables of `mtrain study`: published values beside predicted and measured ones."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from mtrain_cli.console import Console
from mtrain_cli.records.study_rows import TARGET, StudyTable, StudyValue, errors
from mtrain_cli.reporting import elements
from mtrain_cli.reporting.table import number, text_table
from mtrain_cli.reporting.terminal_width import print_table, say

HEADS = ("row", "quantity", "published", "predicted", "best - worst", "ratio", "measured")
WORDS = (0, 1)  # columns that hold text
SPARE = ("best - worst", "measured")  # columns that a narrow terminal drops
ERROR_HEADS = ("quantity", "values", "mean error", "largest", f"within {TARGET:.0%}")
NOTE = (
    "predicted: for the paper's cluster, with nothing fitted to the paper. best - worst: all "
    "constants at their best or worst bound. ratio: predicted / published. measured: a profile "
    "that ships with mtrain, on other hardware than the paper's."
)


def cells(table: StudyTable) -> list[list[str]]:
    """Return the cells of a table, a row per value. A row's name stands at its first value."""
    rows, last = [], None
    for value in table.values:
        name = "" if value.row == last else value.row
        last = value.row
        rows.append(
            [
                name,
                value.quantity,
                "figure only" if value.published is None else number(value.published, 4),
                _or_dash(value.predicted),
                "" if value.low is None else f"{_or_dash(value.low)} - {_or_dash(value.high)}",
                "" if value.ratio is None else f"{value.ratio:.2f}",
                _measured(value),
            ]
        )
    return rows


def _or_dash(value: float | None) -> str:
    return "-" if value is None else number(value, 4)


def _measured(value: StudyValue) -> str:
    if value.measured is None:
        return "not measured"
    return f"{number(value.measured, 4)} ({value.measured_on})"


def error_cells(tables: Sequence[StudyTable]) -> list[list[str]]:
    """Return the cells of the errors by quantity."""
    return [
        [
            error.quantity,
            str(error.count),
            f"{error.mean:.1%}",
            f"{error.worst:+.1%}",
            f"{error.within} of {error.count}",
        ]
        for error in errors(tables)
    ]


def heading(table: StudyTable) -> str:
    """Name a table, its place in the paper and the cluster of the predictions."""
    return f"{table.name}: {table.title} ({table.paper}, {table.where}; for {table.cluster})"


def show_study(console: Console, tables: Sequence[StudyTable]) -> None:
    """Print the tables, what they leave out, and the errors of all of them."""
    for table in tables:
        say(console, heading(table), style="bold")
        if table.values:
            print_table(console, text_table(HEADS, cells(table), 2, spare=SPARE))
        for line in notes(table):
            say(console, line, indent=2)
        console.print()
    say(console, NOTE, style="dim")
    if found := error_cells(tables):
        print_table(console, text_table(ERROR_HEADS, found))


def notes(table: StudyTable) -> list[str]:
    """Return the remarks of a table and the notes of its rows, without repeats."""
    of_rows = [f"{value.row}: {value.note}" for value in table.values if value.note]
    return list(dict.fromkeys([*of_rows, *table.remarks]))


def study_section(tables: Sequence[StudyTable]) -> str:
    """Return the section of a page with all tables, or "" without tables."""
    content = ""
    for table in tables:
        shown = elements.table(HEADS, cells(table), WORDS)
        lines = "".join(f"<li>{escape(line)}</li>" for line in notes(table))
        content += f"<h3>{escape(heading(table))}</h3>{shown}<ul>{lines}</ul>"
    if content:
        content += f"<h3>Errors</h3>{elements.table(ERROR_HEADS, error_cells(tables))}"
    return elements.section("Published tables", content, NOTE)
