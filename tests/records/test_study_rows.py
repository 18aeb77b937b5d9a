"""Rows of a study: ratios, errors by quantity, and damaged summaries."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.records.study_rows import (
    StudyTable,
    StudyValue,
    errors,
    sheet_rows,
    tables_of,
)

VALUES = (
    StudyValue("a", "GiB", 40.0, 50.0),
    StudyValue("b", "GiB", 40.0, 30.0),
    StudyValue("c", "GiB", 40.0, 52.0),
    StudyValue("c", "speed-up", 2.0, 2.0, 1.5, 2.5, 1.9, "a GPU", "why"),
    StudyValue("d", "speed-up", None, 3.0),
    StudyValue("e", "speed-up", 3.0),
)
TABLE = StudyTable("t", "title", "paper", "table 1", "a100_4x8", VALUES, ("left out",))


def test_errors_are_means_by_quantity_over_compared_values():
    memory, speed = errors([TABLE])
    assert (memory.quantity, memory.count, memory.within) == ("GiB", 3, 2)
    assert memory.mean == pytest.approx((0.25 + 0.25 + 0.3) / 3)
    assert memory.worst == pytest.approx(0.3)
    assert (speed.count, speed.mean, speed.within) == (1, 0.0, 1)
    assert errors([]) == []
    apart = replace(VALUES[3], predicted=20.0, counts=False)
    assert errors([replace(TABLE, values=(*VALUES, apart))]) == [memory, speed]


def test_the_worst_error_may_be_too_small_and_nothing_is_a_share_of_0():
    values = [StudyValue("a", "GiB", 10.0, 6.0), StudyValue("b", "GiB", 10.0, 13.0)]
    (found,) = errors([replace(TABLE, values=(*values, StudyValue("c", "GiB", 0.0, 1.0)))])
    assert (found.count, found.worst) == (2, pytest.approx(-0.4))


def test_a_summary_keeps_all_values():
    content = json.loads(json.dumps({"tables": [TABLE.to_json()]}))
    assert tables_of(content, Path("x")) == (TABLE,)
    rows = sheet_rows([TABLE])
    assert [row["ratio"] for row in rows] == [1.25, 0.75, 1.3, 1.0, None, None]
    assert rows[3]["measured_on"] == "a GPU"
    assert rows[0]["where"] == "paper, table 1"


@pytest.mark.parametrize(
    "damage",
    [
        {},
        {"tables": 3},
        {"tables": [{"name": "x"}]},
        {"tables": [TABLE.to_json() | {"values": [{"row": "a", "quantity": "b"}]}]},
        {"tables": [TABLE.to_json() | {"values": [{**vars(VALUES[0]), "predicted": "x"}]}]},
        {"tables": [TABLE.to_json() | {"values": [{**vars(VALUES[0]), "row": 3}]}]},
        {"tables": [TABLE.to_json() | {"values": [{**vars(VALUES[0]), "extra": 3}]}]},
    ],
)
def test_a_damaged_summary_is_one_line(damage):
    with pytest.raises(ConfigError, match=r"^dir: summary\.json holds no tables of a study"):
        tables_of(damage, Path("dir"))
