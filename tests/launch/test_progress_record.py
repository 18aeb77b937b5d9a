"""The activity record of a worker: it outlives the worker, is cheap, and never makes a run fail."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import pytest

from mtrain_cli.launch import progress_record
from mtrain_cli.launch.progress_record import SEVERAL, WorkerActivity


@pytest.fixture(autouse=True)
def _no_record_stays(monkeypatch):
    monkeypatch.setattr(progress_record, "_record", None)


def test_the_last_note_is_read_back(tmp_path):
    progress_record.start_record(tmp_path / "where")
    assert progress_record.read_activity(tmp_path / "where") is None, "nothing was noted yet"
    progress_record.note("prepares")
    progress_record.begin_step(7)
    progress_record.note("ring, layer 3, forward, step 2 of 4: waits for kv from rank 12", 12)
    activity = progress_record.read_activity(tmp_path / "where")
    assert activity == WorkerActivity(
        activity.time, 7, "ring, layer 3, forward, step 2 of 4: waits for kv from rank 12", 12
    )
    assert abs(activity.time - time.time()) < 5
    progress_record.note("short", SEVERAL)
    activity = progress_record.read_activity(tmp_path / "where")
    assert (activity.doing, activity.waits_for) == ("short", SEVERAL)
    progress_record.note("x" * 1000)
    activity = progress_record.read_activity(tmp_path / "where")
    assert set(activity.doing) == {"x"}
    assert activity.waits_for is None


def test_notes_inside_a_place_begin_with_it(tmp_path):
    path = tmp_path / "where"
    progress_record.start_record(path)
    with contextlib.suppress(OSError), progress_record.inside("stage 1, micro-batch 2"):
        assert progress_record.read_activity(path).doing == "stage 1, micro-batch 2"
        progress_record.note("ring: waits", 1)
        raise OSError
    assert progress_record.read_activity(path).doing == "stage 1, micro-batch 2: ring: waits"
    progress_record.note("optimizer")
    assert progress_record.read_activity(path).doing == "optimizer"


def test_a_note_survives_the_death_of_its_process(tmp_path):
    code = (
        "import os, sys, pathlib; from mtrain_cli.launch import progress_record as w; "
        "w.start_record(pathlib.Path(sys.argv[1])); w.begin_step(2);"
        "w.note('the last thing', 1); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "where")], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert (
        progress_record.read_activity(tmp_path / "where").text(0)
        == "training step 2, the last thing"
    )


@pytest.mark.parametrize(("timeout_s", "silent_s"), [(600, 60), (20, 10), (1, 5)])
def test_a_record_says_how_long_its_worker_may_be_silent_under_the_timeout(
    timeout_s, silent_s, tmp_path
):
    paths = {rank: tmp_path / f"where-{rank}" for rank in (0, 1)}
    for path in paths.values():
        progress_record.start_record(path, timeout_s)
        progress_record.note("a message", 1)
    renewed = time.time() + 100
    for late, silent in (silent_s - 1, set()), (silent_s + 1, {1}):
        os.utime(paths[0], (renewed, renewed))
        os.utime(paths[1], (renewed - late, renewed - late))
        assert progress_record.silent_ranks(progress_record.read_activities(paths)) == silent


def test_a_record_of_an_earlier_version_has_the_longest_time_without_a_sign_of_life(tmp_path):
    path = tmp_path / "where"
    progress_record.start_record(path, 20)
    progress_record.note("a message", 1)
    with path.open("r+b") as file:
        file.seek(8)
        file.write(bytes(8))
    found = progress_record.read_activity(path)
    assert found is not None
    assert found.silent_s == progress_record.SILENT_S


def test_a_worker_with_a_short_timeout_shows_more_often_that_it_lives(tmp_path):
    path = tmp_path / "where"
    progress_record.start_record(path, 10)
    os.utime(path, (0, 0))
    time.sleep(1.9)
    assert path.stat().st_mtime > 0


def test_without_a_record_nothing_happens(tmp_path):
    progress_record.note("nowhere")
    progress_record.begin_step(1)
    progress_record.start_record(tmp_path / "no folder" / "where")
    progress_record.note("nowhere")
    assert progress_record.read_activity(tmp_path / "no folder" / "where") is None
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"\1", b"\7" + bytes(2000), bytes(2000)])
def test_a_file_without_a_record_gives_none(tmp_path, content):
    (tmp_path / "where").write_bytes(content)
    assert progress_record.read_activity(tmp_path / "where") is None


def test_a_table_of_many_ranks_shows_the_failed_rank_and_those_that_wait_for_it():
    records = {
        rank: WorkerActivity(100.0, 3, f"waits for kv from rank {rank - 1}", rank - 1)
        for rank in range(1, 64)
    }
    records[0] = WorkerActivity(100.0, 0, "prepares")
    lines = progress_record.activity_lines(records, [40], 112.0)
    assert len(lines) == 9
    assert "  rank 40: training step 3, waits for kv from rank 39 (12 s ago)" in lines
    assert "  rank 41: training step 3, waits for kv from rank 40 (12 s ago)" in lines
    assert lines[0] == "  rank 0: before the first training step, prepares (12 s ago)"
    assert lines[-1] == "  and 56 more ranks"


def test_a_table_of_ranks_with_equal_activity_is_one_line():
    records = {rank: WorkerActivity(1.0, 0, "prepares") for rank in range(8)}
    assert progress_record.activity_lines(records, [3], 1.0) == [
        "  all: before the first training step, prepares"
    ]
