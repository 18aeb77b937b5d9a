"""rich's console for text that may hold anybody's names: brackets are no markup in it, and control characters never reach the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from mtrain_cli.printable import printable, same_width


class Console(rich.console.Console):
    """Takes what rich's takes. Styles are given by ``style`` or `rich.text.Text`, not in brackets."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"markup": False, "emoji": False, **options})

    def render_str(self, text: str, **options: Any) -> Text:  # type: ignore[override]
        return super().render_str(printable(text), **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            # Without control codes of rich's own. Styles become codes only after this.
            yield segment if segment.control else segment._replace(text=same_width(segment.text))
