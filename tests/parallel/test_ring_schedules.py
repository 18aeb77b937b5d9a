"""Schedules of rings: the hops of each rank, and when they are posted."""

from __future__ import annotations

import pytest
from parallel.test_schedule import crosses_nodes

from mtrain_cli.parallel.schedule import DKV, DQ, KV, QUERIES, ScheduleOptions, make_schedule


@pytest.mark.parametrize("workers", [2, 7])
def test_a_ring_of_n_workers_hops_n_minus_1_times(workers):
    schedule = make_schedule("ring", ScheduleOptions(workers, workers))
    for steps in (*schedule.forward, *schedule.backward):
        assert sum(t.payload == KV for s in steps for t in s.transfers) == workers - 1
    assert all(
        sum(t.payload == DKV for s in steps for t in s.transfers) == workers - 1
        for steps in schedule.backward
    )
    assert all(schedule.keeps[r] == schedule.forward[r][-1].keys for r in range(workers)), (
        "backward starts from what came last"
    )
    queries = make_schedule("ring", ScheduleOptions(workers, workers, circulates=QUERIES))
    assert all(
        sum(t.payload == DQ for s in steps for t in s.transfers) == workers - 1
        for steps in queries.backward
    )


def test_a_flat_ring_crosses_nodes_only_at_their_ends():
    schedule = make_schedule("ring", ScheduleOptions(8, 4))
    crossing = [
        any(crosses_nodes(schedule, r, t) for s in schedule.forward[r] for t in s.transfers)
        for r in range(8)
    ]
    assert crossing == [True, False, False, True, True, False, False, True]


def test_inner_neighbours_are_in_the_same_node():
    schedule = make_schedule("hierarchical_ring", ScheduleOptions(8, 4))
    inner = [
        (r, t)
        for r in range(8)
        for s in schedule.forward[r]
        for t in s.transfers
        if t.channel == "inner"
    ]
    assert inner
    assert not any(crosses_nodes(schedule, r, t) for r, t in inner)


@pytest.mark.parametrize(("name", "classes"), [("ring", 1), ("hierarchical_ring", 2)])
def test_all_ranks_of_a_step_look_equally_far_back(name, classes):
    # Striped layouts are balanced because of this: query block - key block is in one residue class
    # on all ranks. Rings inside nodes have two classes in a step, since the first ranks of a node
    # look back at its last ones.
    schedule = make_schedule(name, ScheduleOptions(8, 4))
    for steps in (schedule.forward, schedule.backward):
        for now in zip(*steps, strict=True):
            distances = {(rank - step.keys[0]) % 8 for rank, step in enumerate(now)}
            assert len(distances) <= classes
            assert len({d % 4 for d in distances}) == 1


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_hops_are_posted_prefetch_turns_ahead(prefetch):
    for steps in make_schedule("ring", ScheduleOptions(5, 5, prefetch=prefetch)).forward:
        posted = {t.number: at for at, step in enumerate(steps) for t in step.post}
        awaited = {number: at for at, step in enumerate(steps) for number in step.wait}
        assert [posted[n] for n in sorted(posted)] == [
            max(0, turn - prefetch) for turn in range(1, 5)
        ]
        assert [awaited[n] for n in sorted(posted)] == [1, 2, 3, 4]
