"""Reports in the terminal."""

from __future__ import annotations

import io

from reporting.test_hostile_names import source_named
from test_console import MARKUP

from mtrain_cli.console import Console
from mtrain_cli.reporting.terminal import show_sources


def test_a_terminal_shows_names_literally(tmp_path):
    sources = [source_named(tmp_path / "a", MARKUP), source_named(tmp_path / "b", "b")]
    file = io.StringIO()
    show_sources(Console(file=file, width=200), sources)
    text = file.getvalue()
    assert "[/red][bold]a :smile:" in text
    assert not set(text) & set("\x1b\x07\r\b\u202e")
