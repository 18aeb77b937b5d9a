"""Terminal, page and CSV files of a report hold the same cells, for every kind of record."""

from __future__ import annotations

import csv
import html
import io
import re

import pytest
from reporting.every_kind import every_kind

from mtrain_cli.console import Console
from mtrain_cli.reporting.html import write_page
from mtrain_cli.reporting.report_source import ReportSource
from mtrain_cli.reporting.sections import files, own_sections, shared_sections, show_sources
from mtrain_cli.reporting.table import Table
from mtrain_cli.reporting.terminal import print_table

KINDS = (
    *("profile", "two profiles", "step", "two steps", "experts", "pipeline"),
    *("training", "two trainings", "sparsity", "evaluations", "named evaluations", "sweep"),
)


@pytest.fixture(scope="module")
def kinds(tmp_path_factory) -> dict[str, list[ReportSource]]:
    return every_kind(tmp_path_factory.mktemp("kinds"))


def test_all_kinds_are_here(kinds):
    assert set(kinds) == set(KINDS)
    written = {table.name for sources in kinds.values() for table in files(sources)}
    assert written == {
        *("summary", "steps", "time_by_rank", "layers", "causes", "training", "positions"),
        *("evaluations", "experts", "compare", "sweep"),
    }


def shown(sources: list[ReportSource]) -> list[Table]:
    sections = [section for source in sources for section in own_sections(source)]
    sections += shared_sections(sources)
    parts = [part for section in sections for part in section.parts]
    return [part for part in parts if isinstance(part, Table) and part.rows]


def words(text: object) -> list[str]:
    return str(text).split()


def printed(table: Table, width: int | None = None) -> str:
    file = io.StringIO()
    console = Console(file=file, width=width or 80, force_terminal=width is not None)
    print_table(console, table)
    return re.sub(r"\x1b\[[\d;]*m", "", file.getvalue())


@pytest.mark.parametrize("kind", KINDS)
def test_the_terminal_prints_every_cell_of_every_table(kinds, kind):
    tables = shown(kinds[kind])
    assert tables
    file = io.StringIO()
    show_sources(Console(file=file, width=80), kinds[kind])
    whole = file.getvalue().split()
    for table in tables:
        everything = printed(table).split()
        for row in table.cells():
            for cell in row:
                assert set(words(cell)) <= set(everything)
                assert set(words(cell)) <= set(whole), table.title
        for column in table.shown:
            assert set(words(column.heading.replace(",", ""))) <= set(
                " ".join(everything).replace(",", "").split()
            )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [40, 80, 120])
def test_tables_fit_the_terminal_and_say_what_they_lose(kinds, kind, width):
    for table in shown(kinds[kind]):
        text = printed(table, width)
        longest = max(len(word) for row in table.cells() for cell in row for word in words(cell))
        assert max(map(len, text.splitlines())) <= max(width, longest + 4), table.title
        lost = re.search(r"columns dropped to fit: (.*?); widen", " ".join(text.split()))
        dropped = set(lost[1].split(", ")) if lost else set()
        names = {" ".join((c.group or c.name).split()) for c in table.shown}
        assert dropped <= names
        for row in table.rows:
            for column in table.shown:
                if " ".join((column.group or column.name).split()) not in dropped:
                    found = {*text.split(), *(word.rstrip(",") for word in text.split())}
                    assert set(words(column.cell(row))) <= found


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_has_the_tables_of_the_terminal(kinds, kind, tmp_path):
    sources = kinds[kind]
    text = write_page(tmp_path / "report.html", sources).read_text()
    tables = [
        [
            [html.unescape(cell) for cell in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.S)]
            for row in re.findall(r"<tr[^>]*>(.*?)</tr>", table, re.S)
        ]
        for table in re.findall(r"<table>(.*?)</table>", text, re.S)
    ]
    for table in shown(sources):
        rows = [[str(cell) for cell in row] for row in table.cells()]
        assert [[column.heading for column in table.shown], *rows] in tables, table.title


@pytest.mark.parametrize("kind", KINDS)
def test_csv_files_have_the_values_of_the_cells(kinds, kind, tmp_path):
    """A column with a key has the value of each cell in the file that the key belongs to."""
    written = {}
    for table in files(kinds[kind]):
        with table.write(tmp_path).open() as file:
            written[table.name] = list(csv.DictReader(file))
    for table in shown(kinds[kind]):
        for column in table.shown:
            if not column.key:
                continue
            rows = [row for rows in written.values() for row in rows if column.key in row]
            for row in table.rows:
                value = column.value(row)
                value = getattr(value, "mean", value)
                expected = f"{value:.6g}" if isinstance(value, float) else str(value)
                expected = "" if value is None or expected == "nan" else expected
                assert expected in {found[column.key] for found in rows}, (table.title, column)
