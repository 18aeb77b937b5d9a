"""CSV files of a report."""

from __future__ import annotations

import csv
import dataclasses

import pytest
from reporting.test_evaluations import ONE, TWO
from reporting.test_tables import heavy
from synthetic_records import Play, recorded_once, ring

from mtrain_cli.reporting.report_source import ReportSource, open_source
from mtrain_cli.reporting.sections import files


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
