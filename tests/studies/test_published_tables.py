"""Published tables: ratios, errors by quantity, damaged summaries, and the tables as shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.reporting.elements import report_section
from mtrain_cli.reporting.table import Lines, Table
from mtrain_extras.studies.published_tables import (
    StudyTable,
    StudyValue,
    errors,
    sheet_rows,
    study_sections,
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


SHOWN = (
    StudyValue("<b>a</b>", "GiB", 40.0, 50.0, note="<i>why</i>"),
    StudyValue("<b>a</b>", "speed-up", 2.0, 2.5, 1.5, 3.5, 1.93, "4 x GPU"),
    StudyValue("c", "speed-up", None, 3.0),
    StudyValue("d", "speed-up", 3.0),
)
MARKED = StudyTable("t", "<u>title</u>", "paper", "table 1", "a100_4x8", SHOWN, ("left out",))


def test_cells_say_what_is_missing():
    section, errors = study_sections([MARKED])
    table, notes = section.parts
    assert isinstance(table, Table)
    assert table.cells() == [
        ["<b>a</b>", "GiB", "40", "50", "", "1.25", "not measured"],
        ["", "speed-up", "2", "2.5", "1.5 - 3.5", "1.25", "1.93 (4 x GPU)"],
        ["c", "speed-up", "figure only", "3", "", "", "not measured"],
        ["d", "speed-up", "3", "-", "", "", "not measured"],
    ]
    assert isinstance(notes, Lines)
    assert notes.lines == ["<b>a</b>: <i>why</i>", "left out"]
    assert isinstance(errors.parts[1], Table)
    assert errors.parts[1].cells()[0] == ["GiB", "1", "25.0%", "+25.0%", "1 of 1"]
    assert study_sections([]) == []


def test_a_page_escapes_what_a_file_holds():
    page = "".join(map(report_section, study_sections([MARKED])))
    for tag in ("<b>", "<i>", "<u>"):
        assert tag not in page
    assert "&lt;u&gt;title" in page
    assert page.count("<table>") == 2


def test_a_table_without_numbers_keeps_its_heading():
    section, _ = study_sections([replace(MARKED, values=())])
    assert section.parts[0].lines == ["t: <u>title</u> (paper, table 1; for a100_4x8)"]
