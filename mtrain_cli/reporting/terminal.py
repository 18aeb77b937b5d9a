"""Print tables and sentences in the width of the terminal.

A pipe or a file has no width. Output to a pipe or a file has all columns, and lines do not wrap.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from rich.cells import cell_len
from rich.text import Text

from mtrain_cli.console import Console, columns_table
from mtrain_cli.reporting.table import BEST, NOT, TOTAL, Section, Table

PIPED = 100  # characters of a line that does not go to a terminal
_STYLES = {BEST: "bold", TOTAL: "bold", NOT: "dim"}


def make_console() -> Console:
    """Return the console of a report, which wraps lines to `PIPED` without a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = PIPED
    return console


def limit(console: Console) -> int | None:
    """Return the number of characters per line; None for a pipe or file without COLUMNS."""
    return console.width if console.is_terminal or "COLUMNS" in os.environ else None


def say(console: Console, line: str, indent: int = 0, style: str | None = None) -> None:
    """Print a sentence, wrapped between words.

    indent: spaces before every line but the first.
    """
    width = limit(console)
    if width is not None:
        wrapper = textwrap.TextWrapper(
            max(width, 2 * indent), break_long_words=False, break_on_hyphens=False
        )
        wrapper.subsequent_indent = " " * indent
        line = wrapper.fill(line)
    console.print(line, style=style, soft_wrap=True)


def print_section(console: Console, section: Section) -> None:
    """Print the tables that have rows, and the sentences of a section."""
    for part in section.parts:
        if isinstance(part, Table):
            if part.rows:
                print_table(console, part)
        else:
            if part.title:
                say(console, part.title, indent=2, style="bold")
            for i, line in enumerate(part.lines, 1):
                number = f"  {i}. " if part.numbered else "  " * bool(part.title)
                say(console, f"{number}{line}", part.indent, part.style or None)
            if part.title:
                console.print()


def print_table(console: Console, table: Table) -> None:
    """Print a table with its title and its note. Text may wrap; numbers never wrap.

    A table that is too wide loses the columns that it may lose, and a line below names them. If it
    is still too wide, each row becomes lines of headings and cells.
    """
    width = limit(console)
    if table.title:
        say(console, table.title, style="table.title")
    dropped: list[str] = []
    stacks = _stacks(table, narrow=False)
    widths, padding = [stack.width for stack in stacks], 1
    if width is not None and _total(widths, 1) > width:
        stacks, padding = _stacks(table, narrow=True), 0
        rest = sorted((stack for stack in stacks if stack.drop), key=lambda stack: stack.drop)
        while _total([stack.least for stack in stacks]) > width and rest:
            stacks.remove(rest[0])
            dropped.append(rest.pop(0).name)
        widths = [stack.width for stack in stacks]
        if _total([stack.least for stack in stacks]) > width:
            stacks, dropped = [], []
        while stacks and _total(widths) > width:
            # The widest column of text shrinks first.
            shrinkable = [i for i, stack in enumerate(stacks) if widths[i] > stack.least]
            widths[max(shrinkable, key=widths.__getitem__)] -= 1
    if stacks:
        _print_columns(console, table, stacks, widths, padding)
    else:
        _print_rows(console, table)
    if table.note:
        say(console, table.note, style="table.caption")
    if dropped:
        say(
            console,
            f"columns dropped to fit: {', '.join(dropped)}; widen the terminal or use --json to "
            "see them",
            style="dim",
        )


def _total(widths: Sequence[int], padding: int = 0) -> int:
    return sum(widths) + (1 + padding) * len(widths) + 1


@dataclass(frozen=True, eq=False)
class _Stack:
    """One column of the terminal: a column of a table, or the columns of a group.

    width, least: number of characters, and the smallest one: numbers and words do not break.
    """

    name: str
    heading: str
    cells: list[Text]
    words: bool
    drop: int
    width: int
    least: int


def _text(cell: object) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))


def _stacks(table: Table, *, narrow: bool) -> list[_Stack]:
    """Return the columns of the terminal. narrow: whether headings break."""
    columns = table.shown
    cells = [list(map(_text, row)) for row in table.cells()]
    stacks = []
    for _, numbers in groupby(range(len(columns)), lambda i: columns[i].group or i):
        at = list(numbers)
        joined = [Text("\n").join(row[i] for i in at) for row in cells]
        lines = [line for cell in joined for line in cell.plain.split("\n")]
        first, names = columns[at[0]], [columns[i].name for i in at]
        top, *below = [first.group, *names] if first.group else names
        if narrow or first.group:
            top = _broken(top, max(map(cell_len, [*lines, *below]), default=0))
        heading = "\n".join([top, *below])
        lines += heading.split("\n")
        width = max(map(cell_len, lines))
        longest = max((cell_len(word) for line in lines for word in line.split()), default=0)
        name = " ".join((first.group or first.name).split())
        drop, least = max(columns[i].drop for i in at), longest if first.words else width
        stacks.append(_Stack(name, heading, joined, first.words, drop, width, least))
    return stacks


def _broken(heading: str, widest: int) -> str:
    """Break a heading into lines no wider than the widest cell of the column, or longest word."""
    if "\n" in heading:
        return heading
    heading = heading.replace("tokens/s/", "tokens/s\n/")
    width = max([widest, *map(len, heading.split()), 1])
    wrap = partial(textwrap.wrap, width=width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(part for line in heading.splitlines() for part in wrap(line) or [""])


def _print_columns(
    console: Console, table: Table, stacks: list[_Stack], widths: Sequence[int], padding: int
) -> None:
    columns = [(s.heading, s.words, width) for s, width in zip(stacks, widths, strict=True)]
    rows = [
        (cells, _STYLES.get(state, ""), state == TOTAL)
        for state, *cells in zip(
            map(table.state, table.rows), *(stack.cells for stack in stacks), strict=True
        )
    ]
    wide = Console(
        file=console.file,
        highlight=False,
        force_terminal=console.is_terminal,
        color_system=console.color_system,
    )
    wide.width = max(console.width, _total(widths, padding))
    wide.print(columns_table(columns, rows, padding))


def _print_rows(console: Console, table: Table) -> None:
    """Print a row as lines: its names, a line per group, and a line with all other columns."""
    for row in table.rows:
        names: list[str] = []
        parts: dict[str, list[str]] = {}
        for column in table.shown:
            cell = ", ".join(_text(column.cell(row)).plain.split("\n"))
            if column.words and not column.group:
                names += [cell] * bool(cell)
            elif cell:
                name = " ".join(column.name.split())
                parts.setdefault(column.group, []).append(f"{name} {cell}")
        say(console, ", ".join(names), 2, "bold")
        for group, texts in parts.items():
            line = f"  {group}: {', '.join(texts)}" if group else f"  {', '.join(texts)}"
            say(console, line, 4, _STYLES.get(table.state(row)))
    console.print()
