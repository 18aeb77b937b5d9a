"""The flight record names the rank that keeps others waiting, and says where they wait."""

from __future__ import annotations

import json
import time

import pytest

from mtrain_cli.launch import progress_record
from mtrain_cli.launch.progress_record import SEVERAL, SILENT_S, WorkerActivity
from mtrain_extras.watch import flight_record

PLACES = ("node0, GPU 0", "node0, GPU 1", "node1, GPU 0", "node1, GPU 1")
NOW = 1000.0


@pytest.fixture(autouse=True)
def _no_record_stays(monkeypatch):
    monkeypatch.setattr(progress_record, "_record", None)


def waiting(for_whom: int, seconds: float = 70.0, seen: float = NOW) -> WorkerActivity:
    doing = f"ring, layer 3, forward, step 2 of 4: waits for kv from rank {for_whom}"
    return WorkerActivity(NOW - seconds, 12, doing, for_whom, seen)


def busy(seconds: float = 71.0, seen: float = NOW) -> WorkerActivity:
    return WorkerActivity(NOW - seconds, 12, "ring, layer 3, forward, step 1 of 4", None, seen)


def test_a_rank_that_computes_is_named_and_who_waits_for_it():
    records = {0: waiting(3), 1: waiting(0), 2: waiting(1), 3: busy()}
    assert flight_record.explain(records, PLACES, NOW) == [
        "rank 3 (node1, GPU 1) keeps others waiting. It does not wait for another rank: it "
        "computes, reads data, or hangs",
        "its last activity: training step 12, ring, layer 3, forward, step 1 of 4 (71 s ago)",
        "rank 0 (node0, GPU 0), for 70 s: training step 12, ring, layer 3, forward, step 2 of 4: "
        "waits for kv from rank 3",
        "rank 1 (node0, GPU 1), for 70 s: training step 12, ring, layer 3, forward, step 2 of 4: "
        "waits for kv from rank 0",
        "rank 2 (node1, GPU 0), for 70 s: training step 12, ring, layer 3, forward, step 2 of 4: "
        "waits for kv from rank 1",
    ]


def test_a_stopped_rank_is_named_although_it_waited_itself():
    stopped = waiting(1, seconds=71, seen=NOW - SILENT_S - 5)
    everyone = WorkerActivity(NOW - 70, 12, "FSDP, layers.3: waits for weights", SEVERAL, NOW)
    found = flight_record.explain({0: everyone, 1: everyone, 2: stopped, 3: everyone}, PLACES, NOW)
    assert found[0] == (
        "rank 2 (node1, GPU 0) keeps others waiting. It shows no sign of life for 65 s: its "
        "process is stopped or ended, or its machine or link is gone"
    )
    assert found[2:] == [
        "ranks 0-1, 3, for 70 s: training step 12, FSDP, layers.3: waits for weights"
    ]


def test_a_rank_that_is_known_to_have_ended_is_named_whatever_it_did():
    found = flight_record.explain({0: waiting(1), 1: waiting(0)}, PLACES, NOW, gone=[1])
    assert found[0].startswith("rank 1 (node0, GPU 1) keeps others waiting. It shows no sign of")
    assert len(found) == 3


def test_of_ranks_that_all_wait_the_one_behind_is_named():
    behind = WorkerActivity(NOW - 80, 11, "waits for the loss", SEVERAL, NOW)
    found = flight_record.explain({0: waiting(1), 1: behind}, PLACES, NOW)
    assert found[:2] == [
        "all ranks wait for each other, in different places",
        "rank 1 (node0, GPU 1) keeps others waiting. It is behind the others, or in another "
        "collective",
    ]
    same = {rank: waiting(1 - rank) for rank in (0, 1)}
    assert flight_record.explain(same, PLACES, NOW)[0] == (
        "all ranks wait for each other, in the same place: a message does not arrive"
    )


@pytest.mark.parametrize("records", [{}, {0: busy(), 1: busy()}])
def test_without_a_wait_there_is_nothing_to_explain(records):
    assert flight_record.explain(records, PLACES, NOW) == []


def test_a_rank_is_silent_by_the_clock_of_the_disk_not_by_the_one_here():
    records = {0: waiting(1, seen=NOW - 7200), 1: waiting(0, seen=NOW - 7195)}
    assert flight_record.explain(records, PLACES, NOW)[0].startswith("all ranks wait")
    stopped = records | {2: waiting(0, seen=NOW - 7300)}
    assert flight_record.explain(stopped, PLACES, NOW)[0].startswith(
        "rank 2 (node1, GPU 0) keeps others waiting. It shows no sign of life for 105 s"
    )


def test_the_file_has_the_times_of_rank_0s_clock_whichever_rank_writes_it(tmp_path, monkeypatch):
    monkeypatch.setattr(progress_record, "_ahead", 0.0)
    before = time.time()
    progress_record.start_record(tmp_path / "rank-0")
    progress_record.note("a message", 1)
    for ahead in (7200.0, -7200.0):
        progress_record.set_clock(time.time() - ahead)
        progress_record.start_record(tmp_path / "rank-1")
        progress_record.note("a message")
        with monkeypatch.context() as patch:  # rank 1 reads its own clock
            patch.setattr(progress_record, "_ahead", 0.0)
            real = time.time
            patch.setattr(time, "time", lambda real=real, ahead=ahead: real() + ahead)
            progress_record.set_clock(real())
            progress_record.note("a message")
            flight_record.save(tmp_path, {rank: tmp_path / f"rank-{rank}" for rank in (0, 1)})
        found = flight_record.read(tmp_path, before)
        assert found is not None
        assert all(-60 < seconds <= 0 for of in found.ranks.values() for seconds, *_ in of[-1:])
        assert found.explained[0].startswith("rank 1 keeps others waiting. It does not wait")


def test_the_last_activities_of_all_ranks_are_kept_in_a_file(tmp_path):
    (tmp_path / "state.json").write_text(json.dumps({"workers": PLACES[:2]}))
    logs = tmp_path / "logs"
    logs.mkdir()
    for rank in (0, 1):
        progress_record.start_record(logs / f"rank-{rank}")
        progress_record.begin_step(4)
        for number in range(300):
            progress_record.note(f"message {number}", 1 if number == 299 and rank == 0 else None)
    before = time.time()
    flight_record.save(logs, {rank: logs / f"rank-{rank}" for rank in (0, 1, 2)})
    found = flight_record.read(logs, before)
    assert found is not None
    assert found.explained[0].startswith("rank 1 (node0, GPU 1) keeps others waiting.")
    assert found.ranks.keys() == {"0", "1"}
    kept = found.ranks["0"]
    assert [text for _, _, text, _ in kept] == [f"message {number}" for number in range(173, 300)]
    assert all(-60 < seconds <= 0 for seconds, *_ in kept)
    assert list(kept[-1][1:]) == [4, "message 299", 1]
    assert flight_record.read(logs, time.time() + 1) is None, "of an earlier start of the run"
    (logs / flight_record.FILE).write_text("{")
    assert flight_record.read(logs, 0) is None
