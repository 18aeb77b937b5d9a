"""One table for the terminal, for a page and for a CSV file.

A column names its values and their format once. The terminal (`terminal`) and the
page (`elements`) show the formatted cells; a CSV file holds the values.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np

from mtrain_cli.config.documents import replacing
from mtrain_cli.printable import printable
from mtrain_cli.records.imbalance import Estimate

BEST, NOT, TOTAL = "best", "not", "total"  # states of rows


@dataclass(frozen=True)
class Column:
    """One column of a table.

    name: heading on terminal and page; "" for a column that only the CSV file has.
    value: the value of a row; None is unknown.
    format: a value as text.
    key: heading in the CSV file; "" for a column that only terminal and page have.
    words: whether the column holds text, which may wrap. Other columns hold numbers.
    group: heading of consecutive columns, whose cells the terminal stacks in one cell.
    drop: rank in the order in which a narrow terminal drops columns; 0 for never.
    missing: the cell of an unknown value.
    once: whether to leave the cell blank if all columns with ``once`` repeat the row above.
    """

    name: str
    value: Callable[..., Any]
    format: Callable[[Any], Any] = str
    key: str = ""
    words: bool = False
    group: str = ""
    drop: int = 0
    missing: str = "-"
    once: bool = False

    @property
    def heading(self) -> str:
        """Return the heading on a page."""
        return ", ".join(filter(None, (self.group, " ".join(self.name.split()))))

    def cell(self, row: Any) -> Any:
        """Return the cell on terminal and page: text, or a `rich.text.Text` with colors."""
        value = self.value(row)
        return self.missing if value is None else self.format(value)


@dataclass(frozen=True)
class Table:
    """Rows of any type, and the columns that read them.

    note: what a reader must know to read the table.
    name: name of the CSV file; "" if another file has the values in more detail.
    state: the state of a row: `BEST` and `TOTAL` are bold, `NOT` is dim, and a line precedes the
        first `TOTAL`.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Any]
    note: str = ""
    name: str = ""
    state: Callable[[Any], str] = lambda _: ""

    @property
    def shown(self) -> list[Column]:
        """Return the columns of terminal and page."""
        return [column for column in self.columns if column.name]

    def cells(self) -> list[list[Any]]:
        """Return the cells of terminal and page."""
        columns, above = self.shown, None
        rows = [[column.cell(row) for column in columns] for row in self.rows]
        once = [i for i, column in enumerate(columns) if column.once]
        for cells in rows:
            label = [cells[i] for i in once]
            if label == above:
                cells[:] = ["" if i in once else cell for i, cell in enumerate(cells)]
            above = label
        return rows

    def records(self) -> list[dict[str, Any]]:
        """Return the rows of the CSV file, by key."""
        return [{c.key: c.value(row) for c in self.columns if c.key} for row in self.rows]

    def write(self, folder: Path) -> Path:
        """Write the CSV file, with six significant digits."""
        path = folder / f"{self.name}.csv"
        rows = self.records()
        with replacing(path) as draft, draft.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(rows[0])
            writer.writerows([_plain(value) for value in row.values()] for row in rows)
        return path


@dataclass(frozen=True)
class Lines:
    """Sentences of a report.

    indent: spaces before the second line of a sentence that wraps in the terminal.
    style: style in the terminal.
    """

    lines: Sequence[str]
    title: str = ""
    numbered: bool = False
    indent: int = 2
    style: str = ""


@dataclass(frozen=True)
class Section:
    """What a report says about one subject. title: its heading on the page."""

    title: str
    parts: Sequence[Table | Lines]


def _plain(value: Any) -> Any:
    if isinstance(value, Estimate):
        value = value.mean
    if isinstance(value, float | np.floating):
        return f"{value:.6g}" if np.isfinite(value) else ""
    if isinstance(value, str):
        # A spreadsheet would evaluate text that begins like a formula.
        return "'" * value.startswith(("=", "+", "-", "@")) + printable(value)
    return "" if value is None else value


def data(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a table that only a CSV file shows. All rows have the keys of the first one."""
    keys = list(rows[0]) if rows else []
    return Table("", [Column("", itemgetter(key), key=key) for key in keys], rows, name=name)


def text_table(
    heads: Sequence[str],
    rows: Sequence[Sequence[Any]],
    words: int = 1,
    *,
    title: str = "",
    note: str = "",
    spare: Sequence[str] = (),
) -> Table:
    """Return a table of texts.

    words: number of columns with text, which come first. The other columns hold numbers.
    spare: headings of the columns that a narrow terminal drops, in this order.
    """
    drops = {head: place for place, head in enumerate(spare, 1)}
    columns = [
        Column(head, itemgetter(i), lambda cell: cell, words=i < words, drop=drops.get(head, 0))
        for i, head in enumerate(heads)
    ]
    return Table(title, columns, rows, note)


# --- formats -----


def number(value: float, digits: int = 3) -> str:
    """Format a number with ``digits`` significant digits. Format large numbers as integers."""
    return f"{value:.{digits}g}" if abs(value) < 10**digits - 0.5 else f"{value:,.0f}"


def ms(value: float) -> str:
    """Format milliseconds with three significant digits, or as an integer from 100."""
    if value == 0 or not np.isfinite(value):
        return "0" if value == 0 else "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def fixed(digits: int) -> Callable[[float], str]:
    """Return a format with a number of decimal places."""
    return lambda value: f"{value:.{digits}f}" if np.isfinite(value) else "-"


def percent(value: float) -> str:
    """Format a share."""
    return f"{value:.1%}"


def count(value: float) -> str:
    """Format a whole number, with commas."""
    return f"{value:,.0f}"


def spread(value: Estimate, digits: int = 2) -> str:
    """Format an estimate, with its standard deviation if it has several samples."""
    std = f" ±{value.std:.{digits}f}" if value.n > 1 else ""
    return f"{value.mean:.{digits}f}{std}"
