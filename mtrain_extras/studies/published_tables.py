"""Published values beside predicted and measured ones: their files, tables and page.

This module does not import torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import Any

from mtrain_cli.config.documents import is_number
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.grouping import grouped
from mtrain_cli.reporting import elements
from mtrain_cli.reporting.table import Column, Lines, Section, Table, number, percent

PAGE = "report.html"
STUDY, STUDY_ROWS = "study", "study.csv"  # kind in summary.json, and the file beside it
TARGET = 0.25  # the largest error that counts as agreement


@dataclass(frozen=True)
class StudyValue:
    """One published number, and what mtrain predicts and has measured for it.

    row, quantity: where the number stands in the table.
    published: None if the paper shows the number in a figure only.
    predicted: None if mtrain cannot predict it.
    low, high: bounds of the prediction; None without bounds.
    measured: value that a shipped profile holds; None if nothing was measured.
    measured_on: hardware of the measured value.
    note: what is known about a deviation.
    counts: whether the mean errors count the value.
    """

    row: str
    quantity: str
    published: float | None
    predicted: float | None = None
    low: float | None = None
    high: float | None = None
    measured: float | None = None
    measured_on: str = ""
    note: str = ""
    counts: bool = True

    @property
    def ratio(self) -> float | None:
        """The prediction divided by the published value."""
        if not self.published or self.predicted is None:
            return None
        return self.predicted / self.published


@dataclass(frozen=True)
class StudyTable:
    """A published table with all its values.

    where: section and table of the paper.
    cluster: for which mtrain predicts the values; "" for scores, which it does not predict.
    remarks: sentences about the whole table, such as numbers that are left out.
    """

    name: str
    title: str
    paper: str
    where: str
    cluster: str
    values: tuple[StudyValue, ...]
    remarks: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class StudyError:
    """How far predictions of one quantity are from published values, as shares.

    mean: mean absolute error. worst: the error with the largest size.
    within: number of values within `TARGET`.
    """

    quantity: str
    count: int
    mean: float
    worst: float
    within: int


def errors(tables: Iterable[StudyTable]) -> list[StudyError]:
    """Return the errors by quantity, in the order of the values."""
    compared = [v for table in tables for v in table.values if v.counts and v.ratio is not None]
    groups = grouped(compared, lambda value: value.quantity)
    off = {key: [v.ratio - 1 for v in own if v.ratio is not None] for key, own in groups.items()}
    return [
        StudyError(
            *(quantity, len(own), statistics.fmean(map(abs, own)), max(own, key=abs)),
            sum(abs(error) <= TARGET for error in own),
        )
        for quantity, own in off.items()
    ]


def tables_of(summary: Mapping[str, Any], folder: Path) -> tuple[StudyTable, ...]:
    """Return the tables in the summary of a study.

    Raises:
        ConfigError: the summary is damaged.
    """
    try:
        return tuple(map(_table, summary["tables"]))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ConfigError(
            f"{folder}: summary.json holds no tables of a study; run `mtrain study` again"
        ) from None


def _table(content: Mapping[str, Any]) -> StudyTable:
    values = tuple(_value(**each) for each in content["values"])
    texts = {key: str(content[key]) for key in ("name", "title", "paper", "where", "cluster")}
    return StudyTable(**texts, values=values, remarks=tuple(map(str, content["remarks"])))


def _value(**fields: Any) -> StudyValue:
    value = StudyValue(**fields)
    numbers = value.published, value.predicted, value.low, value.high, value.measured
    if not all(isinstance(text, str) for text in (value.row, value.quantity, value.note)):
        raise ValueError("a name is not text")
    if not all(number is None or is_number(number) for number in numbers):
        raise ValueError("a value is not a number")
    return value


def sheet_rows(tables: Sequence[StudyTable]) -> list[dict[str, Any]]:
    """Return one row per value, for a CSV file."""
    return [
        {"table": table.name, "where": f"{table.paper}, {table.where}", "cluster": table.cluster}
        | asdict(value)
        | {"ratio": value.ratio}
        for table in tables
        for value in table.values
    ]


# --- shown -----

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
    """Return the tables with their notes, and the errors of all that mtrain predicts."""
    sections = []
    for table in tables:
        place = f"; for {table.cluster}" if table.cluster else ""
        title = f"{table.name}: {table.title} ({table.paper}, {table.where}{place})"
        of_rows = [f"{value.row}: {value.note}" for value in table.values if value.note]
        notes = Lines(list(dict.fromkeys([*of_rows, *table.remarks])))
        columns = _COLUMNS if table.cluster else (*_COLUMNS[:3], _COLUMNS[-1])
        shown = (
            Table(title, columns, table.values) if table.values else Lines([title], style="bold")
        )
        sections.append(Section(title, [shown, notes]))
    if any(table.cluster for table in tables):
        found = Table("Errors", _ERRORS, errors(tables))
        sections.append(Section("Errors", [Lines([NOTE], style="dim"), found]))
    return sections


def write_page(folder: Path, tables: Sequence[StudyTable]) -> Path:
    """Write the page of the tables to their folder, and return its path."""
    path = folder / PAGE
    sections = map(elements.report_section, study_sections(tables))
    elements.write(path, folder.name, [f"<h1>{escape(folder.name)}</h1>", *sections], [])
    return path
