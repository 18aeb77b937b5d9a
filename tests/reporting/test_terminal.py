"""Reports in the terminal."""

from __future__ import annotations

import io

import pytest
from reporting.test_hostile_names import source_named
from reporting.training_runs import trained
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


@pytest.mark.parametrize("exchange", ["group_cast (auto)", MARKUP])
def test_a_terminal_names_mask_layout_and_exchange_of_a_run(tmp_path, exchange):
    settings = {
        "mask.kind": "sliding_window",
        "mask.window": 64,
        "topology.layout": "balanced (auto)",
        "topology.exchange": exchange,
    }
    file = io.StringIO()
    show_sources(Console(file=file, width=200), [trained("a", tmp_path, settings=settings)])
    lines = file.getvalue().splitlines()
    assert lines[1] == "  mask: kind sliding_window, window 64"
    assert lines[2].startswith("  workers: layout balanced (auto), exchange ")
    assert exchange == MARKUP or lines[2].endswith(exchange)
    assert not set(file.getvalue()) & set("\x1b\x07\r\b\u202e")
