"""Rank 0 says for whom it waits, and a rank that ends before the meeting does not go unnoticed."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch import job as jobs
from mtrain_cli.launch.failures import RunError
from mtrain_extras.watch import roll_call
from mtrain_extras.watch.roll_call import BEAT_S, RollCall

JOB = jobs.Job("slurm", 0, 8, 0, 2, "node0", 0)


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


@pytest.mark.parametrize("wrong", ["MTRAIN_PORT", "MTRAIN_SECRET"])
@pytest.mark.parametrize("rank", ["0", "1"])
def test_what_nobody_should_wait_for_is_refused_before_a_rank_signs_in(wrong, rank, monkeypatch):
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in (numbers | place | {wrong: "" if "SECRET" in wrong else "29k"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(jobs, "open_store", lambda _: pytest.fail("it opened the store"))
    monkeypatch.setattr(roll_call, "_show_life", lambda _: pytest.fail("it signed in"))
    monkeypatch.setattr(roll_call, "_signs_in", False)
    with pytest.raises(ConfigError, match=f"^{wrong}"):
        roll_call.sign_in()


def test_a_line_names_those_that_have_not_come_and_their_nodes_after_10_s_and_ever_later(
    clock, capsys, monkeypatch
):
    monkeypatch.setattr(roll_call, "UNSEEN_S", 1000.0)
    store, said = dist.HashStore(), {}
    call = RollCall(JOB, store)
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
    call = RollCall(JOB, store)
    show_life(store, 6, 0, "node3")
    for second in range(180):
        clock.now = float(second)
        show_life(store, 2, second, "node1")
        call.check(lambda: [2, 3, 6])
    clock.now += 2 + 2 * BEAT_S
    with pytest.raises(RunError, match="rank 6 on node3 is gone: it showed no sign of life for 18"):
        call.check(lambda: [3, 6])


@pytest.mark.parametrize(("torchrun", "signs_in"), [(True, True), (False, True), (True, False)])
def test_a_rank_of_torchrun_that_never_signs_in_is_not_waited_for(
    clock, monkeypatch, torchrun, signs_in
):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(torchrun))
    monkeypatch.setattr(roll_call, "_signs_in", signs_in)
    call = RollCall(JOB, dist.HashStore())
    for clock.now in map(float, range(0, 180, 5)):
        call.check(lambda: [3])
    clock.now = 190.0
    if torchrun and signs_in:
        with pytest.raises(RunError, match="rank 3 was not seen for 180 s after rank 0 had star"):
            call.check(lambda: [3])
    else:
        call.check(lambda: [3])
