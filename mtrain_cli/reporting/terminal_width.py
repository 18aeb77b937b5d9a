"""Fit tables and text to the width of the terminal.

A pipe or a file has no width. Output to a pipe or a file has all columns, and lines do not wrap.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

from rich.box import SIMPLE
from rich.table import Table

from mtrain_cli.console import Console

_WIDEST = 400  # characters


def number(value: float, digits: int = 3) -> str:
    """Format a number with ``digits`` significant digits. Format large numbers as integers."""
    return f"{value:.{digits}g}" if abs(value) < 10**digits - 0.5 else f"{value:,.0f}"


@dataclass(frozen=True)
class TextTable:
    """One table of a report, as text, for the terminal and the page.

    words: number of columns with text, which come first.
    note: what a reader must know to read the table.
    finding: what the table shows, in sentences.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: int = 1
    note: str = ""
    finding: str = ""

    def print(self, console: Console) -> None:
        """Print the table with its title and its note."""
        note = self.note or None
        shown = new_table(self.heads, self.words, title=self.title, caption=note, rows=self.rows)
        print_table(console, shown)


def new_table(
    headings: Sequence[str],
    words: int = 1,
    *,
    title: str | None = None,
    caption: str | None = None,
    rows: Sequence[Sequence[str]] = (),
) -> Table:
    """Return a table without borders.

    words: number of columns with text, which come first. The other columns hold numbers.
    """
    table = Table(
        title=title,
        title_justify="left",
        caption=caption,
        caption_justify="left",
        box=SIMPLE,
        padding=(0, 1, 0, 0),
    )
    for i, heading in enumerate(headings):
        table.add_column(heading, justify="left" if i < words else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def limit(console: Console) -> int | None:
    """Return the number of characters per line; None for a pipe or file without COLUMNS."""
    return console.width if console.is_terminal or "COLUMNS" in os.environ else None


def say(console: Console, line: str, indent: int = 0, style: str | None = None) -> None:
    """Print a sentence, wrapped between words.

    indent: spaces before every line but the first.
    """
    width = limit(console)
    if width is not None:
        line = textwrap.fill(
            line,
            max(width, 2 * indent),
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
    console.print(line, style=style, soft_wrap=True)


def print_table(console: Console, table: Table, spare: Sequence[str] = ()) -> None:
    """Print a table. Text may wrap; numbers never wrap. Title and caption use the whole width.

    A table that is still too wide loses columns. A line below the table names these columns.

    Args:
        spare: headings of the columns that the table may lose, in the order of their loss.
    """
    wide = Console(file=console.file, highlight=False, width=_WIDEST)
    width = limit(console)
    shown, needed, left_out = fitted(table, width, spare)
    wide.width = max(console.width if width is None else width, needed)
    # rich would wrap title and caption to the width of the table.
    shown, shown.title, shown.caption = copy(shown), None, None
    if table.title:
        style = "table.title" if table.title_style is None else str(table.title_style)
        say(console, str(table.title), style=style)
    wide.print(shown)
    if table.caption:
        say(console, str(table.caption), style="table.caption")
    if left_out:
        say(console, without(left_out), style="dim")


def fitted(
    table: Table, width: int | None, spare: Sequence[str] = ()
) -> tuple[Table, int, list[str]]:
    """Return the table that `print_table` shows, its width, and the headings of lost columns."""
    whole = Console(width=_WIDEST).measure(table).maximum
    left_out: list[str] = []
    if width is None or whole <= width:
        return table, whole, left_out
    there = [column.header for column in table.columns]
    shown, needed = _narrow(table, left_out, width)
    for name in (name for name in spare if name in there):
        if needed <= width:
            break
        left_out.append(name)
        shown, needed = _narrow(table, left_out, width)
    return shown, needed, left_out


def without(left_out: Sequence[str]) -> str:
    """Return the line below a table that lost columns."""
    names = ", ".join(" ".join(name.split()) for name in left_out)
    return f"columns dropped to fit: {names}; widen the terminal or use --json to see them"


def _narrow(table: Table, left_out: Sequence[str], width: int) -> tuple[Table, int]:
    """Return the table without the columns ``left_out``, its text wrapped, and its width."""
    narrow = Table(
        title=table.title,
        title_justify=table.title_justify,
        caption=table.caption,
        caption_justify=table.caption_justify,
        box=table.box,
        padding=0,
    )
    kept = [column for column in table.columns if column.header not in left_out]
    columns = [[str(cell) for cell in column.cells] for column in kept]
    headings = [
        _broken(str(column.header), cells) for column, cells in zip(kept, columns, strict=True)
    ]
    lines = [
        [line for text in (heading, *cells) for line in text.splitlines()]
        for heading, cells in zip(headings, columns, strict=True)
    ]
    widths = [max(map(len, texts), default=0) for texts in lines]
    words = [
        max((len(word) for line in texts for word in line.split()), default=0) for texts in lines
    ]
    least = [
        w if c.justify == "right" else word for w, word, c in zip(widths, words, kept, strict=True)
    ]
    between = len(kept) + 1  # one space between columns, and at both ends
    # Shrink the widest column of text first.
    while sum(widths) + between > width and (
        wider := [i for i, w in enumerate(widths) if w > least[i]]
    ):
        widths[max(wider, key=lambda i: widths[i])] -= 1
    for column, heading, of_column in zip(kept, headings, widths, strict=True):
        narrow.add_column(heading, justify=column.justify, width=of_column)
    # Copy the cells instead of their text: cells have colours.
    for row, cells in zip(
        table.rows, zip(*(column.cells for column in kept), strict=True), strict=True
    ):
        narrow.add_row(*cells, style=row.style, end_section=row.end_section)
    return narrow, sum(widths) + between


def _broken(heading: str, cells: Sequence[str]) -> str:
    """Break a heading into lines no wider than the widest cell of the column, or longest word."""
    if "\n" in heading:
        return heading
    heading = heading.replace("tokens/s/", "tokens/s\n/")
    of_cells = max((len(line) for cell in cells for line in cell.splitlines()), default=0)
    width = max([of_cells, *map(len, heading.split()), 1])
    broken: list[str] = []
    for line in heading.splitlines():
        broken += textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""]
    return "\n".join(broken)
