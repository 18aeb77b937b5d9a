"""A schedule for all ranks at once agrees with the schedule of every rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from parallel.test_schedule import cases

from mtrain_cli.parallel.schedule import (
    CONTEXT,
    DKV,
    KV,
    SUM,
    ScheduleOptions,
    Transfer,
    make_schedule,
)
from mtrain_cli.simulation.spmd_schedule import SpmdSchedule, SpmdTransfer


def test_every_rank_of_every_schedule_agrees():
    compared = 0
    for exchange, options in cases():
        schedule = make_schedule(exchange, options)
        found = SpmdSchedule.of(schedule)
        for rank in range(schedule.workers):
            found.compare(rank)
            compared += 1
    assert compared > 4000


def test_a_different_schedule_is_detected():
    schedule = make_schedule("hierarchical_ring", ScheduleOptions(8, 4))
    found = SpmdSchedule.of(schedule)
    for other in (
        make_schedule("hierarchical_ring", ScheduleOptions(8, 2)),
        make_schedule("ring", ScheduleOptions(8, 4)),
    ):
        with pytest.raises(AssertionError):
            replace(found, schedule=other).compare(5)


@pytest.mark.parametrize("rank", [1, 4, 7])
def test_a_schedule_with_a_rank_of_its_own_is_refused(rank):
    schedule = make_schedule("ring", ScheduleOptions(8, 8))
    ranks = list(schedule.backward)
    ranks[rank] = ranks[(rank + 1) % 8]
    with pytest.raises(AssertionError):
        SpmdSchedule.of(replace(schedule, backward=tuple(ranks)))


def test_each_pass_has_its_own_transfers():
    found = SpmdSchedule.of(make_schedule("ring", ScheduleOptions(8, 8)))
    assert found.steps("forward") is found.steps("recompute") is found.forward
    assert found.steps("backward") is found.backward
    payloads = [
        {move.first.payload for move in found.transfers(direction).values()}
        for direction in ("forward", "backward")
    ]
    assert payloads == [{KV}, {KV, DKV}]


def test_gradients_and_sums_have_communicators_of_their_own():
    queues = [
        SpmdTransfer(Transfer(0, kind, payload, CONTEXT, (), ()), None, None, None).queue
        for kind, payload in (("p2p", KV), ("p2p", DKV), (SUM, "columns"))
    ]
    assert queues == [(CONTEXT, False), (CONTEXT, True), ("whole", False)]


def test_columns_are_summed_over_ranks_that_hold_the_same_heads():
    found = SpmdSchedule.of(make_schedule("ring", ScheduleOptions(8, 8, heads=2)))
    move = found.column_sum(Transfer(-1, SUM, "columns", CONTEXT, (), ()))
    np.testing.assert_array_equal(move.peers, [0, 1] * 4)
