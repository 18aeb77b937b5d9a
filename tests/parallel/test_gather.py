"""Schedules of all-gathers and group casts: the order of parts of the heads and of stages."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from parallel.programs import FEW, copies
from training.allocations import LiveBytes

from mtrain_cli.parallel import buffers
from mtrain_cli.parallel.buffers import Buffer, Kind
from mtrain_cli.parallel.layout import Joined, make_layout
from mtrain_cli.parallel.lowering import Traits, lower
from mtrain_cli.parallel.operations import (
    AddDq,
    AddHeads,
    Cut,
    Join,
    MergeRows,
    MergeStage,
    OwnRows,
    ReduceRows,
    Shards,
    SplitRows,
)
from mtrain_cli.parallel.program import Compute, Post, Program, Shard, ShardSizes, Stage, Wait
from mtrain_cli.parallel.schedule import DKV, KV, ScheduleOptions, make_schedule


@pytest.mark.parametrize(
    ("name", "per_node", "each"), [("all_gather", 4, 1), ("hierarchical_all_gather", 2, 2)]
)
def test_a_part_sends_its_gradients_before_the_next_part_does(name, per_node, each):
    for steps in make_schedule(name, ScheduleOptions(4, per_node, chunks=3)).backward:
        assert [len(step.send) for step in steps] == [each] * 3
        assert [step.collect for step in steps] == [
            (),
            *(tuple(t.number for t in step.send) for step in steps[:-1]),
        ]


@pytest.mark.parametrize("name", ["all_gather", "hierarchical_all_gather"])
def test_a_part_of_the_heads_is_gathered_while_the_one_before_is_computed(name):
    for steps in make_schedule(name, ScheduleOptions(4, 2, chunks=3)).forward:
        coming = [{t.part for t in step.post} for step in steps]
        assert coming == [{(0, 3), (1, 3)}, {(2, 3)}, set()]


CUTS = [(1, 4, 1), (2, 2, 2), (3, 2, 2), (5, 4, 3)]


@pytest.mark.parametrize(("stages", "per_node", "found"), CUTS)
def test_stages_divide_the_keys_of_a_part(stages, per_node, found):
    """Forward begins with a rank's own keys, backward ends with them."""
    options = ScheduleOptions(4, per_node, chunks=2, stages=stages, stages_backward=stages)
    schedule = make_schedule("hierarchical_group_cast", options)
    assert schedule.stages == found
    for rank in range(4):
        for steps, order in ((schedule.forward[rank], 1), (schedule.backward[rank], -1)):
            for part in range(2):
                of_part = [step for step in steps if step.part == (part, 2)]
                assert [step.stage for step in of_part] == list(range(found + 1))[::order]
                assert sorted(key for step in of_part for key in step.keys) == list(range(4))
                (own,) = (step for step in of_part if step.stage == 0)
                assert (own.keys, own.wait, own.send) == ((rank,), (), ())


@pytest.mark.parametrize("name", ["all_gather", "hierarchical_all_gather"])
def test_one_part_of_the_heads_is_scattered_at_a_time(name):
    """The shards of a part take over the memory of the part before."""
    schedule = make_schedule(name, ScheduleOptions(4, 2, chunks=4))
    program = lower(schedule, 0, backward=True)
    live: set[Buffer] = set()
    most = 0
    for op in program.operations:
        live.update(op.writes)
        most = max(most, sum(buffer.kind is Kind.SHARDS for buffer in live))
        live.difference_update(op.frees)
    assert most == 1


@pytest.mark.parametrize("zigzag", [False, True])
@pytest.mark.parametrize(("chunks", "heads"), [(1, 1), (2, 1), (4, 2)])
def test_shards_need_copies_in_another_order(chunks, heads, zigzag):
    """All keys of a part of the heads are cut into shards.

    A hierarchical reduce-scatter sorts their float32 gradients by node. Otherwise, ranks that share
    heads sort dk and dv in turn, in the kernel's dtype. So does a zigzag layout, which also copies
    the half that it reverses.
    """
    options, traits = ScheduleOptions(8, 4, chunks=chunks, heads=heads), Traits(zigzag=zigzag)
    flat, tree = (
        copies(lower(make_schedule(name, options), 0, backward=True, traits=traits), Shards)
        for name in ("all_gather", "hierarchical_all_gather")
    )
    keys = 320 * (8 // heads) // chunks
    share = 1 / 2 if heads > 1 else 3 / 4 * zigzag
    for made_bytes in (2, 4):
        sizes = replace(FEW, made_bytes=made_bytes)
        assert [op.scratch.of(sizes, heads) for op in flat] == [made_bytes * keys * share] * chunks
        assert [op.scratch.of(sizes, heads) for op in tree] == [4 * keys] * chunks


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
def test_cutting_shards_allocates_the_scratch_of_the_program(name, heads):
    schedule = make_schedule("all_gather", ScheduleOptions(4, 4, heads=heads))
    traits = Traits(zigzag=name == "zigzag")
    (op,) = copies(lower(schedule, 0, backward=True, traits=traits), Shards)
    sizes = ShardSizes(tokens=8, heads=4, kv_heads=4, head_dim=16, dtype_bytes=2)
    base = make_layout(name, 4, 32, 4)
    layout = base if heads == 1 else Joined.of(base, heads)
    kv = torch.zeros(2, 1, 32, 4 // heads, 16, dtype=torch.bfloat16)
    shards = torch.empty(layout.workers, 2, 1, 8 * heads, 4 // heads, 16)
    with LiveBytes([kv, shards]) as live:
        for i in (0, 1):
            layout.copy_to_shards(kv[i], shards[:, i])
    # A layout of joined shards keeps the order of its tokens.
    assert live.peak - live.now() == op.scratch.of(sizes, heads)


def test_the_gradients_of_a_kernel_stay_until_the_reduce_scatter_has_started():
    for name, sent in (("all_gather", 1), ("hierarchical_all_gather", 2)):
        schedule = make_schedule(name, ScheduleOptions(4, 2, chunks=2))
        program = lower(schedule, 0, backward=True)
        for step in (0, 1):
            posts = [p for p in program.posts if p.step == step and p.transfer.payload == "dkv"]
            assert len(posts) == sent
            assert [Kind.DKEYS.at(step) in post.frees for post in posts] == [False] * (sent - 1) + [
                True
            ]


@pytest.mark.parametrize(
    ("workers", "chunks", "copying", "moved"),
    [
        (4, 1, True, [0]),
        (4, 2, False, [0, 0]),
        (4, 2, True, [8 * 640 / 2] * 2),  # reads and writes out and dout, 2 bytes per element
        (4, 4, True, [8 * 640 / 4] * 4),
        (1, 2, True, [0, 0]),
    ],
)
def test_a_kernel_that_copies_parts_is_charged_for_each(workers, chunks, copying, moved):
    schedule = make_schedule("all_gather", ScheduleOptions(workers, 4, chunks=chunks))
    program = lower(schedule, 0, backward=True, traits=Traits(copies_parts=copying))
    assert [op.moves.of(FEW) for op in copies(program, Cut)] == moved
    # out and dout in 2 bytes per element, lse in 4 bytes
    copied = (4 * 640 + 4 * 80) / chunks if copying and chunks > 1 else 0
    assert [op.scratch.of(FEW) for op in program.computes] == [copied] * chunks


@pytest.mark.parametrize(
    ("chunks", "heads", "moved"),
    [
        # Keys: reads 4 bytes per element and writes 2. Several parts of dq: reads 2 and writes 2.
        (1, 1, {Join: [6 * 320], AddHeads: []}),
        (2, 1, {Join: [6 * 320 + 4 * 640], AddHeads: []}),
        (1, 2, {Join: [0], AddHeads: [6 * 320]}),
        (4, 2, {Join: [0], AddHeads: [6 * 320 + 4 * 640]}),
    ],
)
def test_one_operation_is_charged_for_joining_the_gradients(chunks, heads, moved):
    schedule = make_schedule("all_gather", ScheduleOptions(8, 8, chunks=chunks, heads=heads))
    program = lower(schedule, 0, backward=True)
    assert moved == {
        what: [op.moves.of(FEW, heads) for op in copies(program, what)] for what in moved
    }


# A rank sends and receives half as many rows as it has in the first cast, 3 times as many in the
# second.
CAST = replace(FEW, casts=((Fraction(1, 2), Fraction(1, 2)), (Fraction(3), Fraction(3))))
TREE = make_schedule("hierarchical_group_cast", ScheduleOptions(4, 2))


def test_the_cast_inside_a_node_forwards_rows_of_the_cast_across_nodes():
    program = lower(TREE, 1)
    assert [(p.reads, p.writes, p.cast, p.transfer.payload) for p in program.posts] == [
        ((Kind.KV.of(1),), (Kind.GATHERED.at(0), Kind.LEAVING.at(0)), 0, KV),
        ((Kind.KV.of(1), Kind.GATHERED.at(0)), (Kind.GATHERED.at(1), Kind.LEAVING.at(1)), 1, KV),
    ]
    (merge,) = copies(program, MergeRows)
    assert merge.reads == (Kind.KV.of(1), Kind.GATHERED.at(0), Kind.GATHERED.at(1))
    # 320 elements in 2 bytes, read and written
    assert merge.moves.of(CAST) == 2 * 2 * 320 * (1 + 0.5 + 3)


def test_gradients_of_rows_return_in_the_reverse_order():
    program = lower(TREE, 1, backward=True)
    inner, outer = (p for p in program.posts if p.transfer.payload == DKV)
    assert (inner.cast, outer.cast) == (1, 0)
    # Before the rows of the first cast return, this rank adds what returned for them.
    assert outer.reads == (Kind.ROWS.at(0), *inner.writes)
    assert inner.sends.of(CAST) == 4 * 320 * 3
    assert outer.sends.of(CAST) == 4 * 320 / 2
    (reduce,) = (op for op in program.operations if isinstance(op, ReduceRows))
    assert (reduce.reads, reduce.writes, reduce.cast) == (outer.writes, (Kind.ROWS.at(0),), 0)
    (split,) = copies(program, SplitRows)
    (own,) = copies(program, OwnRows)
    assert split.moves.of(CAST) == (2 + 4) * 320 * 4.5
    assert split.scratch.of(CAST) == 2 * 320 * 4.5 / 2
    assert own.moves.of(CAST) == 2 * 4 * 320


# By cast, the rows that a rank sends and receives, divided by its own 320 elements.
CASTS = replace(FEW, casts=tuple((Fraction(n), Fraction(n)) for n in (1, 2, 3)))


def order(program: Program, *kinds: type) -> list[str]:
    """Name the operations of these kinds in order."""
    names = []
    for op in program.operations:
        if not isinstance(op, kinds):
            continue
        if isinstance(op, Compute):
            names.append("own" if isinstance(op.keys, Shard) else "received")
        elif isinstance(op, Post):
            names.append(f"post {op.transfer.number}")
        elif isinstance(op, Wait):
            names.append(f"wait {op.number}")
    return names


def staged(stages: int, per_node: int, **more: int) -> ScheduleOptions:
    return ScheduleOptions(4, per_node, stages=stages, stages_backward=stages, **more)


def test_the_next_part_of_the_heads_is_cast_during_a_part():
    schedule = make_schedule("group_cast", staged(1, 4, chunks=2))
    assert order(lower(schedule, 1), Post, Wait, Compute) == [
        *("post 0", "own", "post 1", "wait 0", "received", "own", "wait 1", "received")
    ]
    assert order(lower(schedule, 1, backward=True), Post, Wait, Compute) == [
        *("post 0", "post 1", "wait 0", "received", "post 2", "own"),
        *("wait 1", "received", "wait 2", "post 3", "own", "wait 3"),
    ]


def test_three_stages_compute_own_keys_then_the_node_then_other_nodes():
    schedule = make_schedule("hierarchical_group_cast", staged(2, 2))
    program = lower(schedule, 1)
    assert [op.keys for op in program.computes] == [Shard(1), Stage(1, 2), Stage(2, 2)]
    posts = {post.cast: post for post in program.posts}
    assert posts[1].transfer.peers == (1, 3)
    assert [(posts[n].transfer.peers, posts[n].transfer.sends) for n in (0, 2)] == [
        ((0, 1), (1,)),
        ((0, 1), (3,)),
    ]
    assert [post.reads for post in program.posts] == [
        (Kind.KV.of(1),),
        (Kind.KV.of(1),),
        (Kind.KV.of(1), Kind.GATHERED.at(1)),
    ]
    merged = copies(program, MergeStage)
    assert [op.reads for op in merged] == [
        (Kind.GATHERED.at(0),),
        (Kind.GATHERED.at(1), Kind.GATHERED.at(2)),
    ]
    assert [op.moves.of(CASTS) for op in merged] == [2 * 2 * 320, 2 * 2 * 320 * (2 + 3)]


def test_gradients_of_other_nodes_leave_first():
    schedule = make_schedule("hierarchical_group_cast", staged(2, 2))
    program = lower(schedule, 1, backward=True)
    assert [op.keys for op in program.computes] == [Stage(2, 2), Stage(1, 2), Shard(1)]
    posts = [post for post in program.posts if post.transfer.payload == DKV]
    assert [(post.cast, post.reads) for post in posts] == [
        (2, (Kind.ROWS.at(0),)),
        (1, (Kind.ROWS.at(0), Kind.RETURNED.at(3))),
        (0, (Kind.ROWS.at(0),)),
    ]
    reduces = [op for op in program.operations if isinstance(op, ReduceRows)]
    assert sorted((op.cast, op.reads) for op in reduces) == [
        (0, (Kind.RETURNED.at(5),)),
        (1, (Kind.RETURNED.at(4),)),
    ]
    total = Kind.DQ_SUM.at(0)
    first, *later = [op.reads for op in copies(program, AddDq)]
    assert first == (buffers.Q, Kind.DQ.at(0))
    assert later == [(buffers.Q, Kind.DQ.at(n), total) for n in (1, 2)]
    (own,) = copies(program, OwnRows)
    assert own.reads == (Kind.ROWS.at(0), Kind.DKEYS.at(2))


@pytest.mark.parametrize("chunks", [1, 2])
def test_each_stage_is_charged_for_its_own_rows(chunks):
    schedule = make_schedule("group_cast", staged(1, 4, chunks=chunks))
    sizes = replace(CASTS, casts=CASTS.casts[2:])
    program = lower(schedule, 1, backward=True)
    split = copies(program, SplitRows)
    assert [op.moves.of(sizes) for op in split] == [(2 + 4) * 320 * 3 / chunks] * chunks
    # Gradients of received rows, and of own rows for their sum
    assert program.sizes[Kind.ROWS.at(0)].of(sizes) == 4 * 320 * (1 + 3) / chunks
    assert program.sizes[Kind.DKEYS.at(0)].of(sizes) == 2 * 320 * 3 / chunks
    assert program.sizes[Kind.DKEYS.at(1)].of(sizes) == 2 * 320 / chunks
