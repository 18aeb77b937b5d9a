"""A rich console that is safe for untrusted text: no markup, no control characters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
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


def two_columns(rows: Iterable[tuple[str, str | Text]]) -> Table:
    """Return a table without lines: a dim label in the first column, a text in the second."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(label, text if isinstance(text, Text) else Text(text))
    return table
