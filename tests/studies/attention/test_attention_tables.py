"""Tables of attention have the means of their rows, and say what they show."""

from __future__ import annotations

import io

from studies.attention.test_attention_findings import files

from mtrain_cli.console import Console
from mtrain_extras.studies.attention import findings as attention_findings
from mtrain_extras.studies.attention.files import AttentionFiles
from mtrain_extras.studies.attention.tables import tables


def test_tables_have_a_row_per_layer_and_one_for_all():
    top, overlap, maps, rope = tables(files())
    assert top.heads == ("step", "layer", "top 4", "top 16")
    assert top.rows[:3] == [
        ["10", "0", "0.2150", "0.5150"],
        ["10", "1", "0.3150", "0.6150"],
        ["10", "all", "0.2650", "0.5650"],
    ]
    assert overlap.heads == ("steps", "columns of p", "top 4 keys", "top 16 keys")
    assert overlap.rows[-1] == ["10 and 30", "0.9000", "0.5000", "0.9000"]
    assert maps.rows[0][0] == "step 5, layer 0, head 0"
    assert maps.rows[0][-1] == "1.000"
    assert rope.rows[-1] == ["5", "all", "0.7250", "0.3500", "0.2500", "0.5500", "-"]


def test_text_of_a_narrow_table_does_not_wrap_at_its_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    console = Console(file=io.StringIO())
    for table in tables(files()):
        table.print(console)
    lines = console.file.getvalue().splitlines()
    for table in tables(files()):
        assert {table.title, table.note, table.finding} <= set(lines)
    assert attention_findings.largest_keys(files()) in lines


def test_without_results_there_are_no_tables():
    assert tables(AttentionFiles()) == []
