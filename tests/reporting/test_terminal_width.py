"""Tables and sentences fit the terminal: words wrap, numbers do not, dropped columns are named."""

from __future__ import annotations

import io

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from mtrain_cli.reporting.terminal_width import new_table, number, print_table, say

EXCHANGES = ("ring", "hierarchical_ring", "all_gather (2 parts of the heads)")


def table() -> Table:
    result = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for name in ("layout", "exchange"):
        result.add_column(name)
    for name in ("best - worst", "tokens/s/GPU", "waits s", "HFU"):
        result.add_column(name, justify="right")
    for exchange in EXCHANGES:
        result.add_row(
            "striped", exchange, "0.0095 - 0.147", "1,284,949", "0.02 + 0.03 + 0.04", "41.9%"
        )
    return result


def printed(
    width: int, monkeypatch, *, terminal: bool = True, spare: tuple[str, ...] = ("waits s", "HFU")
) -> list[str]:
    if terminal:
        monkeypatch.setenv("COLUMNS", str(width))
    else:
        monkeypatch.delenv("COLUMNS", raising=False)
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None)
    print_table(console, table(), spare)
    say(console, "note   " + "as long as a sentence of many words is " * 5, 7)
    return file.getvalue().splitlines()


def test_columns_are_dropped_in_order_and_named(monkeypatch):
    for width in range(64, 140):
        lines = printed(width, monkeypatch)
        assert max(map(len, lines)) <= width
        text = "\n".join(lines)
        assert text.count("0.0095 - 0.147") == text.count("1,284,949") == 3
        # The line below names exactly the dropped columns.
        assert ("0.02 + 0.03 + 0.04" in text) != ("dropped to fit: waits s" in text)
        assert ("41.9%" in text) != (", HFU;" in text)
        for word in ("ring", "hierarchical_ring", "all_gather", "(2", "heads)"):
            assert word in text.split()
    assert "waits s" in "\n".join(printed(90, monkeypatch)).split("note")[0]
    assert "41.9%" in "\n".join(printed(66, monkeypatch))


def test_a_pipe_gets_every_column_and_one_line_per_sentence(monkeypatch):
    lines = printed(40, monkeypatch, terminal=False)
    assert (
        sum("all_gather (2 parts of the heads)" in line and "41.9%" in line for line in lines) == 1
    )
    assert len([line for line in lines if "sentence" in line]) == 1
    # If no column may be dropped, a line is too long rather than cut.
    assert (
        sum(
            "1,284,949" in line and "0.0095 - 0.147" in line
            for line in printed(30, monkeypatch, spare=())
        )
        == 3
    )


def test_title_and_caption_of_a_narrow_table_use_the_width_of_the_terminal(monkeypatch):
    narrow = new_table(["n"], 0, title="a title of seven words for you", caption="a note on it all")
    narrow.add_row("1")
    for width, title in ((40, [narrow.title]), (20, ["a title of seven", "words for you"])):
        monkeypatch.setenv("COLUMNS", str(width))
        file = io.StringIO()
        print_table(Console(file=file, width=width, color_system=None), narrow)
        lines = file.getvalue().splitlines()
        assert lines[: len(title)] == title
        assert lines[-1] == narrow.caption
        assert max(map(len, map(str.rstrip, lines))) <= width
    assert narrow.title, "a table may be printed twice"


def test_numbers_have_no_exponent():
    assert [number(v) for v in (0.01234, 9.876, 999.4, 999.6, 5130.0)] == [
        "0.0123",
        "9.88",
        "999",
        "1,000",
        "5,130",
    ]
    assert [number(v, 4) for v in (2293.4, 12_345.0)] == ["2293", "12,345"]
