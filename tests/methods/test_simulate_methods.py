"""`mtrain simulate methods`: its table and its JSON."""

from __future__ import annotations

import json

from commands.typed_line import simulate

METHODS = "methods model=qwen7b seq=32k --cluster h100_4x8 --workers 8"


def test_the_table_of_methods_marks_formulas():
    result = simulate(METHODS)
    assert result.exit_code == 0, result.output
    rows = [line.split()[0] for line in result.output.splitlines() if " data x " in line]
    assert [row for row in rows if row.endswith("*")] == ["DP*", "TP*"]
    assert {"ZeRO-1", "ZeRO-3", "PP", "Ulysses", "ring", "zigzag"} <= set(rows)
    assert "*: a formula, as mtrain lacks this method" in " ".join(result.output.split())


def test_json_of_methods_has_bytes():
    result = simulate(METHODS, "--json")
    document = json.loads(result.output)
    assert (document["kind"], document["workers"], document["seq"]) == ("methods", 8, 32768)
    rows = {row["name"]: row for row in document["methods"]}
    assert rows["DP"]["formula"]
    assert not rows["ZeRO-3"]["formula"]
    assert rows["ZeRO-3"]["optimizer"] * 7 < rows["DP"]["optimizer"]


def test_a_key_that_the_methods_do_not_use_is_refused():
    result = simulate("methods model=tiny seq=16k density=5%")
    assert result.exit_code == 2
    assert result.stderr == "mtrain: density: has no effect on the methods; leave it out\n"
