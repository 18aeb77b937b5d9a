"""Tables and sentences at the width of the terminal: a pipe gets every column and one line a sentence."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence

from rich.table import Table

from mtrain_cli.console import Console

_WIDEST = 400  # characters


def number(value: float, digits: int = 3) -> str:
    """With so many digits, and never as 1.28e+03."""
    return f"{value:.{digits}g}" if abs(value) < 10**digits - 0.5 else f"{value:,.0f}"


def limit(console: Console) -> int | None:
    """Characters of a line; None for a pipe or a file, where nobody said any."""
    return console.width if console.is_terminal or "COLUMNS" in os.environ else None


def say(console: Console, line: str, indent: int = 0, style: str | None = None) -> None:
    """A sentence, broken between words; the lines after the first are indented."""
    width = limit(console)
    if width is not None:
        line = textwrap.fill(
            line, max(width, 2 * indent), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
        )  # fmt: skip
    console.print(line, style=style, soft_wrap=True)


def print_table(console: Console, table: Table, spare: Sequence[str] = ()) -> None:
    """A table whose words may wrap and whose numbers never do. Where that is still too wide columns are left out, and a line tells which.

    spare: headings of what can be left out, in this order.
    """
    wide = Console(file=console.file, highlight=False, width=_WIDEST)
    width = limit(console)
    shown, needed, left_out = fitted(table, width, spare)
    wide.width = max(console.width if width is None else width, needed)
    wide.print(shown)
    if left_out:
        say(console, without(left_out), style="dim")


def fitted(
    table: Table, width: int | None, spare: Sequence[str] = ()
) -> tuple[Table, int, list[str]]:
    """-> the table as `print_table` shows it at that width, the characters that it needs, and the headings of what is left out."""
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
    """What is said below a table that has lost columns."""
    names = ", ".join(" ".join(name.split()) for name in left_out)
    return f"for want of width without: {names}; a wider terminal or --json has them"


def _narrow(table: Table, left_out: Sequence[str], width: int) -> tuple[Table, int]:
    """-> the same without some of the columns, with headings that are broken where they read well and words wrapped, and its characters."""
    found = Table(
        title=table.title, title_justify=table.title_justify, caption=table.caption, caption_justify=table.caption_justify, box=table.box,
        padding=0,
    )  # fmt: skip
    kept = [column for column in table.columns if column.header not in left_out]
    columns = [[str(cell) for cell in column.cells] for column in kept]
    headings = [
        _broken(str(column.header), cells) for column, cells in zip(kept, columns, strict=True)
    ]
    lines = [
        [line for text in (heading, *cells) for line in text.splitlines()]
        for heading, cells in zip(headings, columns, strict=True)
    ]
    widths = [max(map(len, of), default=0) for of in lines]
    words = [max((len(word) for line in of for word in line.split()), default=0) for of in lines]
    least = [
        w if c.justify == "right" else word for w, word, c in zip(widths, words, kept, strict=True)
    ]
    between = len(kept) + 1  # a space on either side of each
    # The widest column of words gives way first.
    while sum(widths) + between > width and (
        wider := [i for i, w in enumerate(widths) if w > least[i]]
    ):
        widths[max(wider, key=lambda i: widths[i])] -= 1
    for column, heading, of_column in zip(kept, headings, widths, strict=True):
        found.add_column(heading, justify=column.justify, width=of_column)
    # The cells themselves, not their words: they keep their colours.
    for row, cells in zip(
        table.rows, zip(*(column.cells for column in kept), strict=True), strict=True
    ):
        found.add_row(*cells, style=row.style, end_section=row.end_section)
    return found, sum(widths) + between


def _broken(heading: str, cells: Sequence[str]) -> str:
    """A heading no wider than its cells, as far as its words allow."""
    if "\n" in heading:
        return heading
    heading = heading.replace("s/GPU", "s\n/GPU")
    of_cells = max((len(line) for cell in cells for line in cell.splitlines()), default=0)
    width = max([of_cells, *map(len, heading.split()), 1])
    broken: list[str] = []
    for line in heading.splitlines():
        broken += textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""]
    return "\n".join(broken)
