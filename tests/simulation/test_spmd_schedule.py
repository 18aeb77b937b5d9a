"""A schedule for all ranks at once agrees with the schedule of every rank."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from parallel.test_schedule import cases

from mtrain_cli.config.problem import ConfigError
from mtrain_cli.parallel.schedule import (
    CONTEXT,
    DKV,
    KV,
    SUM,
    ScheduleOptions,
    ScheduleStep,
    Transfer,
    make_schedule,
)
from mtrain_cli.simulation.spmd_schedule import (
    EVERYTHING,
    SpmdSchedule,
    SpmdStep,
    SpmdTransfer,
)


def test_every_rank_of_every_schedule_agrees():
    compared = 0
    for exchange, options in cases():
        schedule = make_schedule(exchange, options)
        spmd = SpmdSchedule.of(schedule)
        for rank in range(schedule.workers):
            for direction in ("forward", "backward"):
                steps, of_ranks = spmd.steps(direction), getattr(schedule, direction)
                for step, first, own in zip(steps, of_ranks[0], of_ranks[rank], strict=True):
                    assert (first.wait, first.collect) == (own.wait, own.collect)
                    compare(spmd, rank, step, own)
            compared += 1
    assert compared > 4000


def test_a_schedule_whose_ranks_differ_is_refused():
    schedule = make_schedule("ring", ScheduleOptions(4, 4))
    forward = [list(steps) for steps in schedule.forward]
    post = tuple(replace(t, to=1, source=3) for t in forward[2][0].post)
    forward[2][0] = replace(forward[2][0], post=post)
    with pytest.raises(ConfigError, match=r"topology.exchange=ring: cannot be predicted.*rank 2"):
        SpmdSchedule.of(replace(schedule, forward=forward))


def compare(spmd: SpmdSchedule, rank: int, step: SpmdStep, own: ScheduleStep) -> None:
    heads, groups_of = spmd.grid.heads, spmd.grid.groups_of
    assert (step.queries is not None) == bool(own.queries)
    if own.queries:
        assert (spmd.parts_of(step)[rank], step.part[1]) == own.part
        assert groups_of(step.queries)[rank] == own.queries[0] // heads
        whole = step.keys == EVERYTHING
        assert whole == (len(own.keys) == spmd.grid.workers)
        assert whole or {groups_of(key)[rank] for key in step.keys} == {
            k // heads for k in own.keys
        }
    for transfers, of_rank in ((step.post, own.post), (step.send, own.send)):
        for transfer, t in zip(transfers, of_rank, strict=True):
            first = transfer.first
            for name in ("number", "kind", "payload", "channel", "after"):
                assert getattr(first, name) == getattr(t, name), name
            sizes = len(first.sends), len(first.receives), len(first.peers)
            assert sizes == (len(t.sends), len(t.receives), len(t.peers))
            if transfer.to is not None:
                assert (transfer.to[rank], transfer.source[rank]) == (t.to, t.source)
                shards = [groups_of(place)[rank] for place in (transfer.arriving, transfer.leaving)]
                assert shards == [t.receives[0] // heads, t.sends[0] // heads]
            if transfer.peers is not None:
                assert transfer.peers[rank] == min(t.peers)


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
