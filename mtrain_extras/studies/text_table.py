"""A table of texts with what it shows, in sentences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtrain_cli.console import Console
from mtrain_cli.reporting.table import Lines, Section, text_table
from mtrain_cli.reporting.terminal import print_section


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
