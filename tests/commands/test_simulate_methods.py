"""`mtrain simulate methods` prints a table or JSON, and names formulas."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from mtrain_cli.commands.app import app

WORDS = [
    "simulate",
    "methods",
    "model=qwen7b",
    "seq=32k",
    "--cluster",
    "h100_4x8",
    "--workers",
    "8",
]


def test_the_table_marks_formulas():
    result = CliRunner().invoke(app, WORDS, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    rows = [line.split()[0] for line in result.output.splitlines() if " data x " in line]
    assert [row for row in rows if row.endswith("*")] == ["DP*", "TP*"]
    assert {"ZeRO-1", "ZeRO-3", "PP", "Ulysses", "ring", "zigzag"} <= set(rows)
    assert "*: a formula, because mtrain does not have this method" in " ".join(
        result.output.split()
    )


def test_json_has_bytes():
    result = CliRunner().invoke(app, [*WORDS, "--json"])
    document = json.loads(result.output)
    assert (document["kind"], document["workers"], document["seq"]) == ("methods", 8, 32768)
    rows = {row["name"]: row for row in document["methods"]}
    assert rows["DP"]["formula"]
    assert not rows["ZeRO-3"]["formula"]
    assert rows["ZeRO-3"]["optimizer"] * 7 < rows["DP"]["optimizer"]
