"""Tables and sentences fit the terminal: words wrap, numbers do not, dropped columns are named."""

from __future__ import annotations

import io

from mtrain_cli.console import Console
from mtrain_cli.reporting.table import BEST, NOT, Column, Table, text_table
from mtrain_cli.reporting.terminal import print_table, say

EXCHANGES = ("ring", "hierarchical_ring", "all_gather (2 parts of the heads)")


HEADS = ("layout", "exchange", "best - worst", "tokens/s/GPU", "waits s", "HFU")
CELLS = ("0.0095 - 0.147", "1,284,949", "0.02 + 0.03 + 0.04", "41.9%")
ROWS = [("striped", exchange, *CELLS) for exchange in EXCHANGES]


def printed(
    width: int, monkeypatch, *, terminal: bool = True, spare: tuple[str, ...] = ("waits s", "HFU")
) -> list[str]:
    if terminal:
        monkeypatch.setenv("COLUMNS", str(width))
    else:
        monkeypatch.delenv("COLUMNS", raising=False)
    file = io.StringIO()
    console = Console(file=file, width=width, color_system=None)
    print_table(console, text_table(HEADS, ROWS, 2, spare=spare))
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


def test_a_row_that_has_no_room_becomes_lines_that_lose_nothing(monkeypatch):
    lines = printed(30, monkeypatch, spare=())
    assert max(map(len, lines)) <= 30
    text = " ".join(" ".join(lines).split())
    for exchange in EXCHANGES:
        assert f"striped, {exchange} best - worst 0.0095 - 0.147, tokens/s/GPU 1,284,949" in text
    assert text.count("HFU 41.9%") == 3
    assert "dropped" not in text


def test_title_and_note_of_a_narrow_table_use_the_width_of_the_terminal(monkeypatch):
    narrow = text_table(
        ["n"], [["1"]], 0, title="a title of seven words for you", note="a note on it all"
    )
    for width, title in ((40, [narrow.title]), (20, ["a title of seven", "words for you"])):
        monkeypatch.setenv("COLUMNS", str(width))
        file = io.StringIO()
        print_table(Console(file=file, width=width, color_system=None), narrow)
        lines = file.getvalue().splitlines()
        assert lines[: len(title)] == title
        assert lines[-1] == narrow.note
        assert max(map(len, map(str.rstrip, lines))) <= width


def test_columns_of_a_group_stand_below_each_other():
    columns = [
        Column("case", lambda row: row, words=True),
        Column("time", lambda _: 1.5, group="imbalance of workers"),
        Column("work", lambda _: None, group="imbalance of workers"),
    ]
    file = io.StringIO()
    print_table(Console(file=file), Table("", columns, ["one"]))
    lines = [line.split() for line in file.getvalue().splitlines() if line.strip()]
    assert lines[:4] == [["imbalance"], ["of"], ["workers"], ["time"]]
    assert lines[4] == ["case", "work"]
    assert lines[6:] == [["one", "1.5"], ["-"]]
    assert [column.heading for column in columns[1:]] == [
        "imbalance of workers, time",
        "imbalance of workers, work",
    ]


def test_names_that_repeat_the_row_above_are_blank_but_not_in_lines_of_their_own(monkeypatch):
    columns = [
        Column("run", lambda row: row[0], words=True, once=True),
        Column("value", lambda row: row[1]),
    ]
    table = Table("", columns, [("a" * 9, 1), ("a" * 9, 2), ("b", 3)])
    assert table.cells() == [["a" * 9, "1"], ["", "2"], ["b", "3"]]
    monkeypatch.setenv("COLUMNS", "8")
    file = io.StringIO()
    print_table(Console(file=file, width=8), table)
    assert file.getvalue().count("a" * 9) == 2


def test_names_of_wide_characters_are_not_broken(monkeypatch):
    name = "実験一番目"  # each character is two columns wide
    table = text_table(("run", "n", "spare"), [[name, "1", "22"]], spare=("spare",))
    for width in (18, 24, 80):
        monkeypatch.setenv("COLUMNS", str(width))
        file = io.StringIO()
        print_table(Console(file=file, width=width), table)
        assert sum(name in line for line in file.getvalue().splitlines()) == 1
        assert ("22" in file.getvalue()) == (width > 18)


def test_states_of_rows_have_styles():
    states = {"fast": BEST, "large": NOT}
    table = Table("", [Column("n", str, words=True)], list(states), state=states.__getitem__)
    file = io.StringIO()
    print_table(Console(file=file, force_terminal=True, color_system="standard", width=80), table)
    assert "\x1b[1mfast" in file.getvalue()
    assert "\x1b[2mlarge" in file.getvalue()
