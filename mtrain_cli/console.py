"""A rich console that is safe for untrusted text: no markup, no control characters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import rich.console
from rich.box import SIMPLE
from rich.console import ConsoleOptions, Group, JustifyMethod, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from mtrain_cli.printable import printable, same_width


class Console(rich.console.Console):
    """rich's console without markup and emoji. Style text with `style` or `rich.text.Text`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:  # type: ignore[override]
        return super().render_str(printable(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # rich adds its own escape codes later, so this replaces only codes in the text.
            yield segment if segment.control else segment._replace(text=same_width(segment.text))


def grid(
    rows: Iterable[Sequence[str | Text]], styles: Sequence[str] = ("dim", ""), title: str = ""
) -> RenderableType:
    """Return rows without lines and headings. Text wraps in all columns but the first.

    styles: the style of each column.
    """
    table = Table.grid(padding=(0, 2, 0, 0))
    for i, style in enumerate(styles):
        table.add_column(style=style, no_wrap=i == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return Group(Text(title, style="bold"), table) if title else table


def full_width(left: Text, middle: RenderableType, right: Text) -> RenderableType:
    """Return a line whose middle part fills the width of the terminal."""
    table = Table.grid(padding=(0, 1), expand=True)
    table.add_column(no_wrap=True)
    table.add_column(ratio=1)
    table.add_column(no_wrap=True, justify="right")
    table.add_row(left, middle, right)
    return table


def columns_table(
    columns: Sequence[tuple[str, bool, int]],
    rows: Sequence[tuple[Sequence[Text], str, bool]],
    padding: int,
) -> RenderableType:
    """Return a table with a line below the headings.

    Args:
        columns: heading, whether it holds text, and width in characters.
        rows: cells, style, and whether a row is a total, which a blank line separates.
        padding: spaces between columns, beyond one.
    """
    table = Table(box=SIMPLE, padding=(0, padding, 0, 0))
    for heading, words, width in columns:
        justify: JustifyMethod = "left" if words else "right"
        table.add_column(Text(heading), justify=justify, width=width, overflow="fold")
    for i, (cells, style, total) in enumerate(rows):
        table.add_row(*cells, style=style)
        if total and i and not rows[i - 1][2]:
            table.rows[i - 1].end_section = True
    return table
