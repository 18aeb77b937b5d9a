"""CSV files and figures of a report have the numbers of the worker, rank and direction."""

from __future__ import annotations

import csv
import dataclasses

import numpy as np
import pytest
from reporting.test_evaluations import ONE, TWO
from reporting.test_tables import heavy
from synthetic_records import Play, facts_of, recorded_once, ring, rows_of, write

from mtrain_cli.reporting.plots import Figure
from mtrain_cli.reporting.report_source import ReportSource, open_source
from mtrain_cli.reporting.sections import figures, files


def test_settings_and_keys_tell_rows_of_evaluations_apart(tmp_path):
    one = dataclasses.replace(ONE, details=("", "weights 4"))
    source = ReportSource("run", tmp_path, results=(one, TWO))
    (sheet,) = files([source])
    found = [(row["name"], row["settings"], row["key"]) for row in sheet.records()]
    first = ("dense, seed 1", "needles 3; seed 1; weights 4", "a")
    second = ("dense, seed 2", "needles 3; seed 2", "b")
    assert found == [first, first, second, second]  # each with a row of its part
    assert [row["begin"] for row in sheet.records()] == [None, 0, None, 0]


def test_sheets_are_read_back_with_their_numbers(tmp_path):
    source = open_source(recorded_once(tmp_path / "profile", Play(ring(4), heavy)))
    (case,) = source.cases
    found = {table.name: table for table in files([source])}
    assert set(found) == {"summary", "steps", "time_by_rank", "layers", "causes"}
    with found["steps"].write(tmp_path).open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 4 * 4
    (row,) = [r for r in rows if (r["direction"], r["worker"], r["step"]) == ("forward", "1", "2")]
    assert float(row["attention_ms"]) == pytest.approx(3.0, rel=1e-5)
    with found["time_by_rank"].write(tmp_path).open() as file:
        for line in csv.DictReader(file):
            bins = [
                float(value)
                for name, value in line.items()
                if name.endswith("_ms") and name != "pass_ms"
            ]
            assert sum(bins) == pytest.approx(float(line["pass_ms"]), rel=1e-4)
    with found["summary"].write(tmp_path).open() as file:
        assert float(next(csv.DictReader(file))["time_worker_id"]) == pytest.approx(
            case.time.worker.mean, rel=1e-5
        )
    assert len(found["causes"].records()) == len(case.causes) > 0


LATE, EXPOSED = "waiting for late peers, ms", "exposed communication, ms"


def uneven(direction: str, rank: int, step: int) -> float:
    return (1 + 0.5 * rank + 0.1 * step) * (2 if direction == "backward" else 1)


def figures_of(folder) -> dict[str, Figure]:
    return {figure.name: figure for figure in figures([open_source(folder)])}


def views(figure: Figure) -> dict[tuple[str, ...], list[dict]]:
    """Return the traces by the labels after the case."""
    return {view.labels[1:]: view.data for view in figure.views}


def test_rank_bars_belong_to_the_ranks_that_spent_the_time(tmp_path):
    rows = rows_of(Play(ring(4), uneven))
    drawn_views = views(
        figures_of(write(tmp_path, [rows[rows["rank"] != 1]], [facts_of(ring(4))]))["ranks"]
    )
    for which, times in (("all passes", 3), ("forward", 1), ("backward", 2)):
        (bar,) = (trace for trace in drawn_views[(which,)] if trace["name"] == "attention")
        known = {
            rank: times * sum(uneven("forward", rank, step) for step in range(4))
            for rank in (0, 2, 3)
        }
        assert dict(zip(bar["x"], bar["y"], strict=True)) == pytest.approx(known, rel=1e-3)


def test_heat_maps_show_the_direction_and_quantity_in_their_labels(tmp_path):
    def pairs(direction: str, rank: int, step: int) -> float:
        return uneven(direction, rank, step) * 1000

    folder = recorded_once(
        tmp_path, Play(ring(3), uneven, pairs=pairs, link={"context": 2.5}, merge=0.4)
    )
    drawn_views = views(figures_of(folder)["heat"])
    for direction in ("forward", "backward"):
        known = np.array(
            [[uneven(direction, rank, step) for step in range(3)] for rank in range(3)]
        )
        shown = {
            quantity: np.array(data[0]["z"], float)
            for (shown_direction, quantity), data in drawn_views.items()
            if shown_direction == direction
        }
        assert shown["attention, ms"] == pytest.approx(known, rel=1e-3)
        assert shown["work: pairs"] == pytest.approx(known * 1000, rel=1e-3)
        assert shown["work: blocks"] == pytest.approx(known * 10, abs=1)
        late, exposed = shown[LATE], shown[EXPOSED]
        assert shown["whole step, ms"] == pytest.approx(known + 0.4 + late + exposed, rel=1e-3)
        # A wait for a link ends with its message; a wait for a late peer has no such bound.
        assert 0 < exposed[:, 1:].max() <= 2.5 + 1e-3
        assert drawn_views[direction, "attention, ms"][0]["y"] == [0, 1, 2]
    # Rank 0 finishes its first step after 1 ms (1.4 ms with the merge). The message of rank 2
    # starts with the pass and takes 2.5 ms.
    waits = {
        quantity: np.array(drawn_views["forward", quantity][0]["z"], float)[0, 1]
        for quantity in (LATE, EXPOSED)
    }
    assert waits == pytest.approx({LATE: 0, EXPOSED: 2.5 - 1.4}, abs=1e-3)
