"""Schedules as data, played through without processes: every pair once, sends match receives, gradients come home complete."""

from __future__ import annotations

import pytest

from mtrain_cli.parallel.schedule import Step, Transfer, make_schedule

NAMES = ("all_gather", "ring")


def play_keys(steps: tuple[tuple[Step, ...], ...], first: list[int]) -> None:
    """All ranks in lockstep, from the shard each holds first: what is computed and sent is at hand, and every pair comes once."""
    workers = len(steps)
    held = [{shard} for shard in first]
    computed: list[tuple[int, int]] = []
    for now in zip(*steps, strict=True):
        for rank, step in enumerate(now):
            for transfer in step.before:
                assert set(transfer.sends) <= held[rank]
                held[rank] = held[rank] | set(transfer.receives)
            assert set(step.compute) <= held[rank], "computes only what it holds"
            computed += [(rank, shard) for shard in step.compute]
        arriving: list[set[int]] = [set() for _ in range(workers)]
        for rank, step in enumerate(now):
            for transfer in step.during:
                check_partners(transfer, [s.during for s in now], rank)
                assert set(transfer.sends) <= held[rank], "sends only what it holds"
                arriving[transfer.to] |= set(transfer.sends)
        held = [new if step.during else old for new, old, step in zip(arriving, held, now, strict=True)]
    assert sorted(computed) == [(rank, shard) for rank in range(workers) for shard in range(workers)], "every pair exactly once"


def play_gradients(steps: tuple[tuple[Step, ...], ...]) -> None:
    """Every worker's part of a shard's gradient is added exactly once and ends at the owner of the shard."""
    workers = len(steps)
    at_hand: list[dict[int, list[int]]] = [{} for _ in range(workers)]
    for now in zip(*steps, strict=True):
        for rank, step in enumerate(now):
            for shard in step.compute:
                at_hand[rank].setdefault(shard, []).append(rank)
        arriving: list[dict[int, list[int]]] = [{} for _ in range(workers)]
        for rank, step in enumerate(now):
            for transfer in step.after:
                assert transfer.payload == "dkv"
                if transfer.kind == "reduce_scatter":
                    for shard in transfer.sends:
                        arriving[shard].setdefault(shard, []).extend(at_hand[rank].pop(shard))
                else:
                    check_partners(transfer, [s.after for s in now], rank)
                    (shard,) = transfer.sends
                    arriving[transfer.to][shard] = at_hand[rank].pop(shard)
        for rank in range(workers):
            for shard, parts in arriving[rank].items():
                at_hand[rank].setdefault(shard, []).extend(parts)
    assert [list(shards) for shards in at_hand] == [[rank] for rank in range(workers)], "each owner ends with its own shard alone"
    assert all(sorted(at_hand[rank][rank]) == list(range(workers)) for rank in range(workers)), "complete, nothing twice"


def check_partners(transfer: Transfer, of_ranks: list[tuple[Transfer, ...]], rank: int) -> None:
    assert transfer.kind == "p2p"
    assert any(t.source == rank and t.receives == transfer.sends and t.payload == transfer.payload for t in of_ranks[transfer.to])
    assert any(t.to == rank and t.sends == transfer.receives and t.payload == transfer.payload for t in of_ranks[transfer.source])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 7, 8, 12])
def test_every_pair_is_computed_once_and_every_gradient_comes_home(name, workers):
    schedule = make_schedule(name, workers)
    assert len(schedule.forward) == len(schedule.backward) == workers
    play_keys(schedule.forward, list(range(workers)))
    play_keys(schedule.backward, list(schedule.keeps))
    play_gradients(schedule.backward)


@pytest.mark.parametrize("workers", [2, 7])
def test_a_ring_hops_one_time_less_than_it_has_workers(workers):
    schedule = make_schedule("ring", workers)
    for steps in (schedule.forward, schedule.backward):
        for rank_steps in steps:
            assert sum(len(s.during) for s in rank_steps) == workers - 1
    assert all(sum(len(s.after) for s in rank_steps) == workers - 1 for rank_steps in schedule.backward)
    assert all(schedule.keeps[r] == schedule.forward[r][-1].compute[0] for r in range(workers)), "backward starts from what came last"
