"""The order of a staged group cast: what overlaps with own keys, and what each stage computes."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
from parallel.programs import FEW, copies

from mtrain_cli.parallel import buffers
from mtrain_cli.parallel.buffers import Kind
from mtrain_cli.parallel.lowering import lower
from mtrain_cli.parallel.operations import AddDq, MergeStage, OwnRows, ReduceRows, SplitRows
from mtrain_cli.parallel.program import Compute, Post, Program, Shard, Stage, Wait
from mtrain_cli.parallel.schedule import DKV, ScheduleOptions, make_schedule

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


def test_own_keys_are_computed_while_the_cast_travels():
    schedule = make_schedule("group_cast", ScheduleOptions(4, 4, stages=2))
    assert order(lower(schedule, 1), Post, Wait, Compute) == ["post 0", "own", "wait 0", "received"]


def test_gradients_travel_home_while_own_keys_are_computed():
    schedule = make_schedule("group_cast", ScheduleOptions(4, 4, stages=2))
    program = lower(schedule, 1, backward=True)
    assert order(program, Post, Wait, Compute) == [
        *("post 0", "wait 0", "received", "post 1", "own", "wait 1")
    ]


def test_the_next_part_of_the_heads_is_cast_during_a_part():
    schedule = make_schedule("group_cast", ScheduleOptions(4, 4, chunks=2, stages=2))
    assert order(lower(schedule, 1), Post, Wait, Compute) == [
        *("post 0", "own", "post 1", "wait 0", "received", "own", "wait 1", "received")
    ]
    assert order(lower(schedule, 1, backward=True), Post, Wait, Compute) == [
        *("post 0", "post 1", "wait 0", "received", "post 2", "own"),
        *("wait 1", "received", "wait 2", "post 3", "own", "wait 3"),
    ]


def test_three_stages_compute_own_keys_then_the_node_then_other_nodes():
    schedule = make_schedule("hierarchical_group_cast", ScheduleOptions(4, 2, stages=3))
    program = lower(schedule, 1)
    assert [op.keys for op in program.computes] == [Shard(1), Stage(1), Stage(2)]
    posts = {post.cast: post for post in program.posts}
    assert posts[0].transfer.peers == (1, 3)
    assert [(posts[n].transfer.peers, posts[n].transfer.sends) for n in (1, 2)] == [
        ((0, 1), (1,)),
        ((0, 1), (3,)),
    ]
    assert [post.reads for post in program.posts] == [
        (Kind.KV.of(1),),
        (Kind.KV.of(1),),
        (Kind.KV.of(1), Kind.GATHERED.at(0)),
    ]
    merged = copies(program, MergeStage)
    assert [op.reads for op in merged] == [
        (Kind.GATHERED.at(1),),
        (Kind.GATHERED.at(0), Kind.GATHERED.at(2)),
    ]
    assert [op.moves.of(CASTS) for op in merged] == [2 * 2 * 320 * 2, 2 * 2 * 320 * (1 + 3)]


def test_gradients_of_other_nodes_leave_first():
    schedule = make_schedule("hierarchical_group_cast", ScheduleOptions(4, 2, stages=3))
    program = lower(schedule, 1, backward=True)
    assert [op.keys for op in program.computes] == [Stage(2), Stage(1), Shard(1)]
    posts = [post for post in program.posts if post.transfer.payload == DKV]
    assert [(post.cast, post.reads) for post in posts] == [
        (2, (Kind.ROWS.at(0),)),
        (0, (Kind.ROWS.at(0), Kind.RETURNED.at(3))),
        (1, (Kind.ROWS.at(0),)),
    ]
    reduces = [op for op in program.operations if isinstance(op, ReduceRows)]
    assert sorted((op.cast, op.reads) for op in reduces) == [
        (0, (Kind.RETURNED.at(4),)),
        (1, (Kind.RETURNED.at(5),)),
    ]
    (added,) = copies(program, AddDq)
    assert added.reads == (buffers.Q, Kind.DQ.at(0), Kind.DQ.at(1), Kind.DQ.at(2))
    (own,) = copies(program, OwnRows)
    assert own.reads == (Kind.ROWS.at(0), Kind.DKEYS.at(2))


@pytest.mark.parametrize("chunks", [1, 2])
def test_each_stage_is_charged_for_its_own_rows(chunks):
    schedule = make_schedule("group_cast", ScheduleOptions(4, 4, chunks=chunks, stages=2))
    sizes = replace(CASTS, casts=CASTS.casts[2:])
    program = lower(schedule, 1, backward=True)
    split = copies(program, SplitRows)
    assert [op.moves.of(sizes) for op in split] == [(2 + 4) * 320 * 3 / chunks] * chunks
    # Gradients of received rows, and of own rows for their sum
    assert program.sizes[Kind.ROWS.at(0)].of(sizes) == 4 * 320 * (1 + 3) / chunks
    assert program.sizes[Kind.DKEYS.at(0)].of(sizes) == 2 * 320 * 3 / chunks
    assert program.sizes[Kind.DKEYS.at(1)].of(sizes) == 2 * 320 / chunks
