"""The table of experts in a recorded step, and its rows."""

from __future__ import annotations

from typing import Any

from mtrain_cli.reporting.expert_step_tables import time_rows, time_table


def rank(number: int, *rows: tuple[int, str, float, float, float]) -> dict[str, Any]:
    names = ("layer", "direction", "router_ms", "experts_ms", "waits_ms")
    return {"rank": number, "experts": [dict(zip(names, row, strict=True)) for row in rows]}


DOCUMENT = {
    "ranks": [
        rank(0, (0, "backward", 0, 6, 1), (0, "forward", 1, 3, 0), (1, "forward", 1, 2, 0)),
        rank(1, (0, "backward", 0, 6, 3), (0, "forward", 1, 1, 2), (1, "forward", 1, 2, 0)),
    ]
}


def test_a_row_has_means_and_the_imbalance_of_the_ranks():
    """Forward: layer 0 has 3 and 1 ms (1.5), layer 1 has 2 and 2 (1)."""
    other = ("b", {"ranks": [{"rank": 0}]})
    assert time_table([("a", DOCUMENT), other]).cells() == [
        ["a", "forward", "1", "2", "0.5", "1.25", "0 (3)"],
        ["a", "backward", "0", "6", "2", "1.00", "0 (6)"],
    ]
    rows = list(time_rows([("a", DOCUMENT)]))
    assert len(rows) == 6
    assert rows[-1] == {
        **{"run": "a", "rank": 1, "layer": 1, "direction": "forward"},
        **{"router_ms": 1.0, "experts_ms": 2.0, "waits_ms": 0.0},
    }


def test_a_step_without_experts_has_no_table():
    assert time_table([("", {"ranks": [{"rank": 0}]})]).rows == []
    assert len(time_table([("", DOCUMENT)]).rows) == 2
