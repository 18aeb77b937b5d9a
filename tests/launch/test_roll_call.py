"""Rank 0 says for whom it waits, and a rank that ends before the meeting does not go unnoticed."""

from __future__ import annotations

import signal
import socket
import time

import pytest
import torch.distributed as dist
from test_failure_channel import connected, job_at
from test_job import SimulatedJob, here  # noqa: F401 - a fixture

from mtrain_cli.launch import failure_channel, roll_call
from mtrain_cli.launch import job as jobs
from mtrain_cli.launch.failure_channel import RankZeroDuties, _Hub
from mtrain_cli.launch.failures import RunError
from mtrain_cli.launch.roll_call import BEAT_S, RollCall


class Clock:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(roll_call, "time", clock)
    return clock


def show_life(store: dist.Store, rank: int, number: int, host: str) -> None:
    key = f"sign of life/8/{rank}"
    store.set(key, jobs.seal(key, f"{number} {host}"))


def test_a_line_names_those_that_have_not_come_and_their_nodes_after_10_s_and_ever_later(
    clock, capsys, monkeypatch
):
    monkeypatch.setattr(roll_call, "SILENT_S", 1000.0)
    store, said = dist.HashStore(), {}
    call = RollCall(job_at("node0", nodes=4), store)
    show_life(store, 1, 0, "node0")
    for second in range(100):
        clock.now = float(second)
        show_life(store, 2, second, "node1")
        call.check(lambda: [1, 2, 3, 4, 5])
        if line := capsys.readouterr().err:
            said[second] = line
    assert list(said) == [10, 20, 40, 80]
    assert said[20] == (
        "rank 0 waits for rank 1 (no sign of life on node0), rank 2 (starting on node1), "
        "rank 3-5 (not seen yet), 20 s so far\n"
    )
    call.check(lambda: [])
    clock.now = 1000.0
    call.check(lambda: [])
    assert capsys.readouterr().err == ""


def test_a_rank_that_shows_no_more_life_is_gone_and_a_slow_or_late_one_is_not(clock):
    store = dist.HashStore()
    call = RollCall(job_at("node0", nodes=4), store)
    show_life(store, 6, 0, "node3")
    for second in range(60):
        clock.now = float(second)
        show_life(store, 2, second, "node1")
        call.check(lambda: [2, 3, 6])
    clock.now += 2 + 2 * BEAT_S
    with pytest.raises(RunError, match="rank 6 on node3 is gone: it showed no sign of life for 60"):
        call.check(lambda: [3, 6])


def test_rank_0_ends_soon_after_a_rank_was_killed_before_the_meeting():
    began = time.monotonic()
    variables = {0: {"SILENT_S": "3"}, 1: {"ENDS_EARLY": "1"}}
    ends = SimulatedJob("adds_ranks", 2, "run.dir=run", variables_of=variables).ends()
    assert time.monotonic() - began < 30
    assert ends == [
        (
            1,
            f"before the workers: rank 1 on {socket.gethostname()} is gone: it showed no sign of "
            "life for 3 s before it met rank 0. See its output.\n",
        ),
        (-signal.SIGKILL, ""),
    ]


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ("by itself", "rank 1: seq=abc: expected"),
        ("silently", "rank 1 on node1 is gone: it showed"),
    ],
)
def test_the_hub_ends_a_job_of_which_a_rank_does_not_come(ends, expected, monkeypatch):
    causes, codes = [], []

    def exit_now(code):
        codes.append(code)
        hub._expected.clear()  # ends the thread of the hub

    monkeypatch.setattr(failure_channel, "exit_now", exit_now)
    monkeypatch.setattr(failure_channel, "print_cause", lambda cause, _: causes.append(cause))
    monkeypatch.setattr(failure_channel, "FAREWELL_S", 0.1)
    monkeypatch.setattr(roll_call, "SILENT_S", 0.3)
    monkeypatch.setattr(roll_call, "BEAT_S", 0.1)
    store, job = dist.HashStore(), job_at("node0", nodes=4)
    if ends == "by itself":
        jobs._leave_note(jobs.replace(job, rank=1), store, ["seq=abc: expected a number"])
    else:
        show_life(store, 1, 0, "node1")
    hub = _Hub(2, RankZeroDuties(lambda: None), roll_call=RollCall(job, store))
    with connected(hub) as rank_0:
        rank_0.sendall(f"{hub.token} 0\n".encode())
        hub.thread.join(10)
    assert [cause.message.startswith(expected) for cause in causes] == [True]
    assert codes == [2 if ends == "by itself" else 1]
