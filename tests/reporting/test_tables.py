"""Tables for the terminal and CSV have the numbers of the analysis, and fit."""

from __future__ import annotations

import io

import numpy as np
import pytest
from synthetic_records import Play, facts_of, recorded_once, ring, rows_of, write

from mtrain_cli.console import Console
from mtrain_cli.reporting import tables
from mtrain_cli.reporting.plots import fold
from mtrain_cli.reporting.report_source import ReportSource, open_source
from mtrain_cli.reporting.sections import show_sources
from mtrain_cli.reporting.table import Table, ms
from mtrain_cli.reporting.terminal import print_table

VARIATION = "iterations without recording vary by up to 18.2%"


def printed(table: Table, width: int = 100) -> str:
    file = io.StringIO()
    print_table(Console(file=file, width=width, force_terminal=True, color_system=None), table)
    return file.getvalue()


def heavy(_direction: str, rank: int, step: int) -> float:
    return 3.0 if (rank, step) == (1, 2) else 1.0


@pytest.fixture
def source(tmp_path) -> ReportSource:
    return open_source(
        recorded_once(
            tmp_path / "one",
            Play(ring(4), heavy, link={"context": 0.3}),
            layers=(0, 1),
            iterations=2,
        )
    )


def test_the_summary_has_every_figure_in_100_columns(source):
    (case,) = source.cases
    text = printed(tables.summary_table([("", case)]))
    assert max(map(len, text.splitlines())) <= 100
    for value in (case.time.worker, case.work.worker, case.time.step):
        assert f"{value.mean:.2f} ±{value.std:.2f}" in text
    assert f"{case.computation.total.mean:.3f}" in text
    assert f"context {ms(case.exposed['context'])}" in text
    assert "…" not in text


def test_a_case_is_marked_as_partial_only_beside_complete_cases(tmp_path):
    """If all cases lack iterations, the remark of the report says so once."""
    (partial,) = open_source(
        recorded_once(tmp_path / "a", Play(ring(4)), complete=False, wanted=2)
    ).cases
    (whole,) = open_source(recorded_once(tmp_path / "b", Play(ring(4)))).cases
    for cases, marks in (([partial], 0), ([partial, partial], 0), ([partial, whole], 1)):
        assert (
            printed(tables.summary_table([("", case) for case in cases])).count("(partial)")
            == marks
        )


def cells(table: Table) -> dict[str, list[str]]:
    """Return the cells of each column by the heading of the page."""
    rows = [list(map(str, row)) for row in table.cells()]
    return {column.heading: [row[i] for row in rows] for i, column in enumerate(table.shown)}


def test_waits_for_late_peers_and_exposed_communication_are_apart(tmp_path):
    # Rank 1 starts 1.5 ms late. Messages take 3 ms and overlap with 1 ms of computation. So rank 0
    # waits 0.5 ms for rank 1 and 3 ms for the link; rank 1 waits only 0.5 ms, for the link.
    rows = rows_of(Play(ring(2), link={"context": 3.0}, starts={1: 1.5}), directions=("forward",))
    (case,) = open_source(write(tmp_path, [rows], [facts_of(ring(2))])).cases
    summary = cells(tables.summary_table([("", case)]))
    assert summary["waits ms, late peers"] == ["0.25"]
    assert summary["waits ms, exposed"] == ["context 1.75"]
    shares = cells(tables.bins_table([("", case)]))
    assert (shares["ms"], shares["late"], shares["exposed context"]) == (["4"], ["6.2%"], ["43.8%"])


def test_every_table_of_several_runs_names_the_run(tmp_path):
    sources = [
        open_source(recorded_once(tmp_path / name, Play(ring(2), times)))
        for name, times in (("left", heavy), ("right", rising))
    ]
    cases = [(source.name, source.cases[0]) for source in sources]
    for table in (tables.summary_table, tables.bins_table):
        assert cells(table(cases))["run"] == ["left", "right"]
        assert "run" not in cells(table([("", cases[0][1])]))
    file = io.StringIO()
    show_sources(Console(file=file, width=120), sources)
    for name in ("left", "right"):
        assert f"{name}, dense striped ring: why workers wait" in file.getvalue()


def rising(direction: str, rank: int, step: int) -> float:
    return (1.0 + rank + step) * (3 if direction == "backward" else 1)


def test_shares_of_the_bins_add_up(source):
    line = next(
        line
        for line in printed(tables.bins_table([("", source.cases[0])])).splitlines()
        if "%" in line
    )
    shares = [float(word.removesuffix("%")) for word in line.split() if word.endswith("%")]
    assert sum(shares) == pytest.approx(100, abs=0.3)


def test_each_worker_and_step_has_its_time_in_the_terminal(source):
    (case,) = source.cases
    times = next(iter(case.passes.values())).attention
    table = tables.steps_table("", case)
    shown = [[column.value(row) for column in table.columns[1:-1]] for row in table.rows]
    np.testing.assert_allclose(shown, times)
    assert [table.columns[-1].value(row) for row in table.rows] == pytest.approx(times.sum(1))
    lines = printed(table).splitlines()
    assert f"forward: attention ms by worker, steps 0-{times.shape[1] - 1} across" in lines[0]
    section = tables.balance_section([(str(n), case) for n in range(5)])
    assert section.parts[-1].lines == ["3 of 5 cases; report.html has a heat map of each"]


def test_a_table_of_many_workers_shows_maxima_and_the_largest_sum(tmp_path):
    (case,) = open_source(recorded_once(tmp_path, Play(ring(16), heavy))).cases
    times = next(iter(case.passes.values())).attention
    table = tables.steps_table("", case)
    assert (len(table.rows), len(table.columns)) == (8, 10)
    assert table.columns[0].cell(0) == "0-1"
    assert table.columns[2].value(0) == times[:2, 2:4].max()
    assert table.columns[-1].value(0) == pytest.approx(times[:2].sum(1).max())


@pytest.mark.parametrize(
    ("shape", "folded"),
    [((4, 4), (4, 4)), ((33, 5), (17, 5)), ((128, 100), (32, 25)), ((1, 1), (1, 1))],
)
def test_folding_keeps_the_maximum(shape, folded):
    table = np.random.default_rng(0).random(shape)
    small = fold(table, 32)
    assert small.shape == folded
    assert small.max() == table.max()
    rows, columns = (-(-a // b) for a, b in zip(shape, folded, strict=True))
    assert small[0, 0] == table[:rows, :columns].max()


@pytest.mark.parametrize(
    ("overhead", "plain", "message"),
    [
        (-0.14, [100, 120], f"cost within noise ({VARIATION})"),
        (0.1, [100, 120], f"cost within noise ({VARIATION})"),
        (0.3, [100, 120], f"costs 30.0% of an iteration ({VARIATION})"),
        (-0.14, [100], "cost unknown: only one iteration with and one without recording"),
    ],
)
def test_noise_does_not_count_as_a_cost_of_recording(overhead, plain, message):
    assert (
        tables.recording_cost({"overhead": overhead, "cases": [{"iteration_ms": plain}]}) == message
    )
