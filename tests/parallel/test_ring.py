"""Schedules of rings: the hops of each rank, and when they are posted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from parallel.programs import FEW, SIZES, copies
from parallel.test_schedule import crosses_nodes

from mtrain_cli.parallel import buffers
from mtrain_cli.parallel.buffers import Buffer, Kind
from mtrain_cli.parallel.lowering import Traits, lower
from mtrain_cli.parallel.operations import AddColumns, Delta, Merge, Reduce
from mtrain_cli.parallel.program import Begin, Shard, pool_bytes
from mtrain_cli.parallel.schedule import (
    DKV,
    DQ,
    KV,
    QUERIES,
    ScheduleOptions,
    make_schedule,
)


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


def test_a_ring_of_keys_step_by_step():
    """The second of four ranks receives its predecessors' keys, one hop ahead."""
    program = lower(make_schedule("ring", ScheduleOptions(4, 4)), 1)
    kinds = [type(op).__name__ for op in program.operations if op.step == 1]
    assert kinds == ["Begin", "PostHop", "Wait", "ComputeForward", "MergeForward"]
    assert [op.keys for op in program.computes] == [Shard(1), Shard(0), Shard(3), Shard(2)]
    assert [(p.reads, p.writes) for p in program.posts] == [
        ((Kind.KV.of(1),), (Kind.KV.of(0),)),
        ((Kind.KV.of(0),), (Kind.KV.of(3),)),
        ((Kind.KV.of(3),), (Kind.KV.of(2),)),
    ]
    assert program.saved == (buffers.Q, Kind.KV.of(2), buffers.OUT, buffers.LSE)
    # One shard leaves, one is computed and one arrives. The last one is saved, not pooled; the
    # first one is not pooled, either.
    assert pool_bytes([program], SIZES) == 2 * 2 * 64 * 24 * 8 * 2
    merges = [op for op in program.operations if isinstance(op, Merge)]
    rows = SIZES.tokens * SIZES.heads * SIZES.head_dim
    assert [op.moves.of(SIZES) for op in merges] == [0, 16 * rows, 10 * rows, 10 * rows]


@pytest.mark.parametrize("circulates", ["kv", "queries"])
@pytest.mark.parametrize(("name", "per_node"), [("ring", 6), ("hierarchical_ring", 3)])
def test_a_ring_frees_the_shards_of_a_step_at_its_end(name, per_node, circulates):
    """Gradients of a step, which may have the same shape, cannot take over their memory."""
    schedule = make_schedule(name, ScheduleOptions(6, per_node, circulates=circulates))
    for backward in (False, True):
        program = lower(schedule, 1, backward=backward)
        begins = [at for at, op in enumerate(program.operations) if isinstance(op, Begin)]
        last = {after - 1 for after in begins[1:]}
        kind = Kind.QUERIES if backward and circulates == "queries" else Kind.KV
        found = [
            at
            for at, op in enumerate(program.operations)
            for buffer in op.frees
            if buffer.kind is kind
        ]
        assert len(found) >= 5
        # After the last step the pass casts its results.
        assert all(at in last or at > begins[-1] for at in found), found


def test_gradients_of_queries_come_home():
    program = lower(
        make_schedule("ring", ScheduleOptions(3, 3, circulates="queries")), 0, backward=True
    )
    hops = [p for p in program.posts if p.transfer.payload == DQ]
    assert [(p.reads, p.writes) for p in hops] == [
        ((Kind.DQUERIES.of(2),), (Buffer(Kind.DQUERIES, 1, 2),)),
        ((Kind.DQUERIES.of(1),), (Buffer(Kind.DQUERIES, 0, 3),)),
    ]
    assert [op.writes for op in program.operations if isinstance(op, Reduce)] == [
        (Kind.DQUERIES.of(1),),
        (Kind.DQUERIES.of(0),),
        (buffers.DQ_SUM,),
    ]
    begins = [op.computes for op in program.operations if isinstance(op, Begin)]
    assert begins == [True, True, True, False]


@pytest.mark.parametrize("heads", [1, 2])
def test_a_rank_adds_its_own_share_of_the_columns(heads):
    """Keys and values of 6 columns per head. Each of 4 elements is read twice and written once."""
    sizes = replace(FEW, columns=6, column_width=128)
    schedule = make_schedule("ring", ScheduleOptions(8, 8, heads=heads))
    program = lower(schedule, 0, backward=True, traits=Traits(columns=True))
    (added,) = (op for op in program.operations if isinstance(op, AddColumns))
    assert added.moves.of(sizes, heads) == 3 * 4 * (2 * 6 * (8 // heads) * 8) / 8


def test_backward_of_queries_is_charged_for_the_message():
    """Bytes per element of the queries: reads out and dout, and starts dq in float32.

    The message reads and writes q and dout.
    """
    for circulates, each in (("kv", 2 * 2 + 4), ("queries", 2 * 2 + 4 + 4 * 2)):
        schedule = make_schedule("ring", ScheduleOptions(4, 4, circulates=circulates))
        (delta,) = copies(lower(schedule, 1, backward=True), Delta)
        assert delta.moves.of(FEW) == each * 640


@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize(("copying", "bytes_each"), [(False, 0), (True, 2)])
def test_a_kernel_that_copies_parts_allocates_an_out_for_messages(copying, bytes_each, heads):
    """A message has no out, even if all ranks share heads and no message leaves its rank."""
    traits = Traits(copies_parts=copying)
    for circulates, allocated in (("kv", 0), ("queries", bytes_each * 640)):
        schedule = make_schedule("ring", ScheduleOptions(4, 4, circulates=circulates, heads=heads))
        program = lower(schedule, 1, backward=True, traits=traits)
        assert [op.scratch.of(FEW, heads) for op in program.computes] == [allocated] * (4 // heads)
