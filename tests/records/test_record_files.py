"""Files of a profile: rows round-trip, parts join into one table, other files are refused."""

from __future__ import annotations

import json

import numpy as np
import pandas
import pytest

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.records import record_files
from mtrain_cli.records.record_files import (
    ROW,
    WORDS,
    delete_parts_after,
    join_parts,
    open_records,
    write_part,
    write_rows,
    write_summary,
)


def some_rows(count: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    rows = np.zeros(count, ROW)
    for name in ROW.names:
        top = len(WORDS[name]) if name in WORDS else 100
        rows[name] = random.integers(0, top, count)
    rows["start_us"] += random.random(count)
    return rows


def same(recorded: record_files.RecordedFolder, rows: np.ndarray) -> bool:
    found = {name: np.concatenate([b[name] for b in recorded.batches()]) for name in ROW.names}
    return all(
        (found[name] == rows[name]).all() and found[name].dtype == ROW[name] for name in ROW.names
    )


def test_rows_round_trip(tmp_path):
    rows = some_rows(1000)
    write_rows(rows, tmp_path / "records.parquet")
    write_summary(tmp_path, {"complete": True})
    recorded = open_records(tmp_path)
    assert recorded.complete
    assert same(recorded, rows)
    frame = recorded.frame()
    assert list(frame.phase) == [WORDS["phase"][code] for code in rows["phase"]]
    assert len(frame) == 1000
    # Other tools read it, with words instead of codes.
    assert list(pandas.read_parquet(tmp_path / "records.parquet").link) == [
        WORDS["link"][code] for code in rows["link"]
    ]


def test_parts_are_read_before_and_after_they_are_joined(tmp_path):
    parts = [some_rows(n, seed=n) for n in (10, 20, 5)]
    write_summary(tmp_path, {"complete": False})
    for number, rows in enumerate(parts, 1):
        write_part(rows, tmp_path, number)
    killed = open_records(tmp_path)
    assert not killed.complete
    assert same(killed, np.concatenate(parts))
    join_parts(tmp_path)
    assert not (tmp_path / "records").exists()
    assert same(open_records(tmp_path), np.concatenate(parts))


def test_parts_of_repeated_steps_are_deleted(tmp_path):
    parts = {step: some_rows(step, seed=step) for step in (2, 4, 6, 8)}
    for step, rows in parts.items():
        write_part(rows, tmp_path, step)
    assert delete_parts_after(tmp_path, 5) == 2
    write_part(parts[6], tmp_path, 6)
    write_summary(tmp_path, {"complete": False})
    assert same(open_records(tmp_path), np.concatenate([parts[2], parts[4], parts[6]]))
    assert delete_parts_after(tmp_path / "nowhere", 5) == 0


def test_without_rows_there_is_no_file(tmp_path):
    join_parts(tmp_path)
    write_summary(tmp_path, {"complete": False})
    assert len(open_records(tmp_path).frame()) == 0


def damage(folder, how: str) -> None:
    write_rows(some_rows(5), folder / "records.parquet")
    write_summary(folder, {"complete": True})
    if how == "no summary":
        (folder / "summary.json").unlink()
    elif how == "no JSON":
        (folder / "summary.json").write_text("{")
    elif how == "a list":
        (folder / "summary.json").write_text("[1]")
    elif how == "older":
        (folder / "summary.json").write_text(json.dumps({"schema": 1}))
    elif how in ("cases", "case"):
        (folder / "summary.json").write_text(
            json.dumps({"schema": 2, "cases": 1.5 if how == "cases" else ["one"]})
        )
    elif how == "no parquet":
        (folder / "records.parquet").write_text("who computes, who waits")
    elif how == "cut":
        whole = (folder / "records.parquet").read_bytes()
        (folder / "records.parquet").write_bytes(whole[: len(whole) // 2])
    elif how == "columns":
        pandas.read_parquet(folder / "records.parquet").drop(
            columns=["late_us", "pairs"]
        ).to_parquet(folder / "records.parquet")
    elif how == "words":
        frame = pandas.read_parquet(folder / "records.parquet")
        frame["phase"] = "dreaming"
        frame.to_parquet(folder / "records.parquet")


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("no summary", "not a profile (summary.json is missing)"),
        ("no JSON", "not the summary of a profile"),
        ("a list", "not the summary of a profile"),
        ("cases", "cases must be a list of objects"),
        ("case", "cases must be a list of objects"),
        ("older", "has schema 1, this version of mtrain reads 2"),
        ("no parquet", "not a parquet file, or damaged"),
        ("cut", "not a parquet file, or damaged"),
        ("columns", "has no column late_us, pairs"),
        ("words", "unknown phase 'dreaming'"),
    ],
)
def test_folders_without_a_profile_are_refused_in_one_line(tmp_path, how, said):
    damage(tmp_path, how)
    with pytest.raises(ConfigError) as found:
        list(open_records(tmp_path).batches())
    assert said in str(found.value)
    assert "\n" not in str(found.value)
