"""The console prints text literally: no markup, no emoji, no control codes of others."""

from __future__ import annotations

import io
import re

import pytest
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from mtrain_cli.console import Console

MARKUP = "[/red][bold]a :smile: \x1b]0;title\x07\x1b[31mred\r\b\u202ename"


@pytest.mark.parametrize("renderable", [MARKUP, Text(MARKUP), "table"])
def test_only_mtrain_sets_colours(renderable):
    if renderable == "table":
        renderable = Table(MARKUP, title=MARKUP, caption=MARKUP)
        renderable.add_row(MARKUP)
    file = io.StringIO()
    Console(file=file, width=200, force_terminal=True, color_system="256", highlight=False).print(
        renderable, style="red"
    )
    text = file.getvalue()
    assert "\x1b[" in text
    assert set(re.findall(r"\x1b(?!\[[\d;]*m)", text)) == set()
    assert "\x1b[31mred" not in text.replace("\x1b[31m[/red]", "")
    assert not set(text) & set("\x07\r\b\u202e")


def test_progress_bars_still_move_the_cursor():
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None)
    with Progress(console=console, auto_refresh=False) as progress:
        progress.add_task("work", total=2)
        progress.refresh()
        progress.refresh()
    assert "\x1b[1A" in file.getvalue() or "\x1b[2K" in file.getvalue()
    assert "\ufffd" not in file.getvalue()
