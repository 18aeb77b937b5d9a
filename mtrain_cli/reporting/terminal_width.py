"""Print tables and text in the width of the terminal.

A pipe or a file has no width. Output to a pipe or a file has all columns, and lines do not wrap.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.cells import cell_len
from rich.text import Text

from mtrain_cli.console import Console, columns_table
from mtrain_cli.reporting.table import BEST, NOT, TOTAL, Lines, Map, Section, Table, text_table

_STYLES = {BEST: "bold", TOTAL: "bold", NOT: "dim"}


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

    @property
    def section(self) -> Section:
        """The table and its finding as a section."""
        table = text_table(self.heads, self.rows, self.words, title=self.title, note=self.note)
        return Section(self.title, [table, Lines([self.finding] * bool(self.finding))])

    def print(self, console: Console) -> None:
        """Print the table with its title, its note and its finding."""
        print_section(console, self.section)


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


def print_section(console: Console, section: Section) -> None:
    """Print the tables that have rows, the sentences and the heat maps of a section."""
    for part in section.parts:
        if isinstance(part, Table):
            if part.rows:
                print_table(console, part)
        elif isinstance(part, Map):
            console.print(part.drawn)
            console.print()
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
    stacks = _stacks(table, narrow=False)
    widths = [stack.width for stack in stacks]
    dropped: list[str] = []
    if width is None or _total(widths, 1) <= width:
        _print_columns(console, table, stacks, widths, 1)
    else:
        stacks = _stacks(table, narrow=True)
        rest = sorted((stack for stack in stacks if stack.drop), key=lambda stack: stack.drop)
        while _total(_narrowest(stacks)) > width and rest:
            stacks.remove(rest[0])
            dropped.append(rest.pop(0).name)
        if _total(_narrowest(stacks)) > width:
            _print_rows(console, table)
            dropped = []
        else:
            _print_columns(console, table, stacks, _widths(stacks, width), 0)
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
    """One column of the terminal: a column of a table, or the columns of a group."""

    name: str
    heading: str
    cells: list[Text]
    words: bool
    drop: int

    @property
    def width(self) -> int:
        return max(cell_len(line) for text in self._texts for line in text.split("\n"))

    @property
    def longest_word(self) -> int:
        return max((cell_len(word) for text in self._texts for word in text.split()), default=0)

    @property
    def _texts(self) -> list[str]:
        return [self.heading, *(cell.plain for cell in self.cells)]


def _text(cell: object) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))


def _stacks(table: Table, *, narrow: bool) -> list[_Stack]:
    """Return the columns of the terminal. narrow: whether headings break."""
    columns = table.shown
    cells = [list(map(_text, of_row)) for of_row in table.cells()]
    stacks = []
    for _, numbers in groupby(range(len(columns)), lambda i: columns[i].group or i):
        at = list(numbers)
        joined = [Text("\n").join(of_row[i] for i in at) for of_row in cells]
        lines = [line for cell in joined for line in cell.plain.split("\n")]
        first, names = columns[at[0]], [columns[i].name for i in at]
        top, *below = [first.group, *names] if first.group else names
        if narrow or first.group:
            top = _broken(top, max(map(cell_len, [*lines, *below]), default=0))
        name = " ".join((first.group or first.name).split())
        drop = max(columns[i].drop for i in at)
        stacks.append(_Stack(name, "\n".join([top, *below]), joined, first.words, drop))
    return stacks


def _broken(heading: str, widest: int) -> str:
    """Break a heading into lines no wider than the widest cell of the column, or longest word."""
    if "\n" in heading:
        return heading
    heading = heading.replace("tokens/s/", "tokens/s\n/")
    width = max([widest, *map(len, heading.split()), 1])
    broken: list[str] = []
    for line in heading.splitlines():
        broken += textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) or [""]
    return "\n".join(broken)


def _narrowest(stacks: Sequence[_Stack]) -> list[int]:
    return [stack.longest_word if stack.words else stack.width for stack in stacks]


def _widths(stacks: Sequence[_Stack], width: int) -> list[int]:
    """Return the widths of columns that together fit. The widest column of text shrinks first."""
    widths, least = [stack.width for stack in stacks], _narrowest(stacks)
    while _total(widths) > width:
        wider = [i for i, of_stack in enumerate(widths) if of_stack > least[i]]
        widths[max(wider, key=lambda i: widths[i])] -= 1
    return widths


def _print_columns(
    console: Console, table: Table, stacks: list[_Stack], widths: Sequence[int], padding: int
) -> None:
    columns = [
        (stack.heading, stack.words, width) for stack, width in zip(stacks, widths, strict=True)
    ]
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
        pairs = [
            (column, ", ".join(_text(column.cell(row)).plain.split("\n"))) for column in table.shown
        ]
        named = [cell for column, cell in pairs if column.words and not column.group]
        say(console, ", ".join(filter(None, named)), 2, "bold")
        parts: dict[str, list[str]] = {}
        for column, cell in pairs:
            if cell and (column.group or not column.words):
                name = " ".join(column.name.split())
                parts.setdefault(column.group, []).append(f"{name} {cell}")
        for group, texts in parts.items():
            line = f"  {group}: {', '.join(texts)}" if group else f"  {', '.join(texts)}"
            say(console, line, 4, _STYLES.get(table.state(row)))
    console.print()
