"""Tables of a study in the terminal and on a page."""

from __future__ import annotations

import io
from dataclasses import replace

from mtrain_cli.console import Console
from mtrain_cli.records.study_rows import StudyTable, StudyValue
from mtrain_cli.reporting.elements import report_section
from mtrain_cli.reporting.study_tables import show_study, study_sections
from mtrain_cli.reporting.table import Lines, Table

VALUES = (
    StudyValue("<b>a</b>", "GiB", 40.0, 50.0, note="<i>why</i>"),
    StudyValue("<b>a</b>", "speed-up", 2.0, 2.5, 1.5, 3.5, 1.93, "4 x GPU"),
    StudyValue("c", "speed-up", None, 3.0),
    StudyValue("d", "speed-up", 3.0),
)
TABLE = StudyTable("t", "<u>title</u>", "paper", "table 1", "a100_4x8", VALUES, ("left out",))


def test_cells_say_what_is_missing():
    section, errors = study_sections([TABLE])
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
    page = "".join(map(report_section, study_sections([TABLE])))
    for tag in ("<b>", "<i>", "<u>"):
        assert tag not in page
    assert "&lt;u&gt;title" in page
    assert page.count("<table>") == 2


def test_a_terminal_shows_tables_notes_and_errors():
    file = io.StringIO()
    show_study(Console(file=file, width=200), [TABLE])
    text = file.getvalue()
    assert "t: <u>title</u> (paper, table 1; for a100_4x8)" in text
    assert "left out" in text
    assert "mean error" in text


def test_a_table_without_numbers_keeps_its_heading():
    file = io.StringIO()
    show_study(Console(file=file, width=200), [replace(TABLE, values=())])
    assert file.getvalue().startswith("t: <u>title</u> (paper, table 1; for a100_4x8)")
