"""Tables of `mtrain study`: published values beside predicted and measured ones."""

from __future__ import annotations

from collections.abc import Sequence

from mtrain_cli.console import Console
from mtrain_cli.records.study_rows import TARGET, StudyTable, StudyValue, errors
from mtrain_cli.reporting.table import Column, Lines, Section, Table, number, percent
from mtrain_cli.reporting.terminal import print_section

NOTE = (
    "predicted: for the paper's cluster, with nothing fitted to the paper. best - worst: all "
    "constants at their best or worst bound. ratio: predicted / published. measured: a profile "
    "that ships with mtrain, on other hardware than the paper's."
)


def _bounds(value: StudyValue) -> str:
    if value.low is None or value.high is None:
        return ""
    return f"{number(value.low, 4)} - {number(value.high, 4)}"


def _measured(value: StudyValue) -> str:
    if value.measured is None:
        return "not measured"
    return f"{number(value.measured, 4)} ({value.measured_on})"


def _four(value: float) -> str:
    return number(value, 4)


_COLUMNS = (
    Column("row", lambda value: value.row, words=True, once=True),
    Column("quantity", lambda value: value.quantity, words=True),
    Column("published", lambda value: value.published, _four, missing="figure only"),
    Column("predicted", lambda value: value.predicted, _four),
    Column("best - worst", _bounds, drop=1),
    Column("ratio", lambda value: value.ratio, "{:.2f}".format, missing=""),
    Column("measured", _measured, drop=2),
)
_ERRORS = (
    Column("quantity", lambda error: error.quantity, words=True),
    Column("values", lambda error: error.count),
    Column("mean error", lambda error: error.mean, percent),
    Column("largest", lambda error: error.worst, "{:+.1%}".format),
    Column(f"within {TARGET:.0%}", lambda error: f"{error.within} of {error.count}"),
)


def study_sections(tables: Sequence[StudyTable]) -> list[Section]:
    """Return the tables with their notes, and the errors of all of them; [] without tables."""
    sections = []
    for table in tables:
        title = f"{table.name}: {table.title} ({table.paper}, {table.where}; for {table.cluster})"
        of_rows = [f"{value.row}: {value.note}" for value in table.values if value.note]
        notes = Lines(list(dict.fromkeys([*of_rows, *table.remarks])))
        shown = (
            Table(title, _COLUMNS, table.values) if table.values else Lines([title], style="bold")
        )
        sections.append(Section(title, [shown, notes]))
    found = Table("Errors", _ERRORS, errors(tables))
    return [*sections, Section("Errors", [Lines([NOTE], style="dim"), found])] if tables else []


def show_study(console: Console, tables: Sequence[StudyTable]) -> None:
    """Print the tables, what they leave out, and the errors of all of them."""
    for section in study_sections(tables):
        print_section(console, section)
