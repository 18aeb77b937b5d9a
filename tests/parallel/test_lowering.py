"""Play programs without tensors: lifetimes of buffers, transfers, and agreement of ranks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import product

import pytest
from parallel.programs import SIZES, copies, play
from parallel.test_schedule import cases

from mtrain_cli.parallel.buffers import Buffer, Kind
from mtrain_cli.parallel.lowering import Traits, lower
from mtrain_cli.parallel.operations import AddHeads, MergeBackward
from mtrain_cli.parallel.program import Compute, Operation, Post, Shard, Stage, Whole
from mtrain_cli.parallel.schedule import UNSCHEDULED, Schedule, ScheduleOptions, make_schedule


def traits_of(schedule: Schedule) -> list[Traits]:
    if schedule.gathers:
        return [Traits(), Traits(copies_parts=True)]
    return [Traits(*found) for found in product((False, True), repeat=2)]


def check(schedule: Schedule, rank: int) -> None:
    for backward, traits in product((False, True), traits_of(schedule)):
        program = lower(schedule, rank, backward=backward, traits=traits)
        play(program)
        steps = (schedule.backward if backward else schedule.forward)[rank]
        scheduled = [p.transfer for p in program.posts if p.transfer.number != UNSCHEDULED]
        assert sorted(scheduled, key=lambda t: t.number) == sorted(
            (t for step in steps for t in step.transfers), key=lambda t: t.number
        )
        order: dict[tuple[str, bool], list[int]] = defaultdict(list)
        for t in scheduled:
            order[t.channel, t.payload.startswith("d")].append(t.number)
        assert all(numbers == sorted(numbers) for numbers in order.values())
        heads, at = schedule.heads, 0
        computed = [step for step in steps if step.keys]
        for op, step in zip(program.computes, computed, strict=True):
            at = op.step
            assert (op.queries, op.part) == (Shard(step.queries[0] // heads), step.part)
            keys = Whole() if schedule.gathers else Shard(step.keys[0] // heads)
            if step.stage is not None:
                of = schedule.stages_backward if backward else schedule.stages
                keys = Stage(step.stage, of) if step.stage else op.queries
            assert op.keys == keys
            assert step is steps[at]
        assert [op.step for op in program.operations] == sorted(
            op.step for op in program.operations
        )
        assert program.steps == len(steps)


@pytest.mark.parametrize("exchange", sorted({name for name, _ in cases()}))
def test_programs_use_live_buffers_and_send_what_is_scheduled(exchange):
    for number, (name, options) in enumerate(cases()):
        if name == exchange:
            # One rank per case: test_spmd_schedule.py compares all ranks of a schedule.
            check(make_schedule(name, options), number % options.workers)


def alike(mine: Operation, theirs: Operation) -> bool:
    """Return whether two ranks do the same, apart from the shards that they do it with."""
    if isinstance(mine, Post) and isinstance(theirs, Post):
        return (mine.payload, mine.piece, mine.transfer.number, mine.transfer.after) == (
            theirs.payload,
            theirs.piece,
            theirs.transfer.number,
            theirs.transfer.after,
        )
    plain = {"reads": (), "writes": (), "frees": ()}
    if isinstance(mine, Compute) and isinstance(theirs, Compute):
        plain |= {"queries": Shard(0), "keys": Whole(), "part": (0, 1)}
    elif isinstance(mine, MergeBackward) and isinstance(theirs, MergeBackward):
        plain |= {"begins": ()}
    return replace(mine, **plain) == replace(theirs, **plain)


@pytest.mark.parametrize(
    ("exchange", "options"),
    [
        ("ring", ScheduleOptions(6, 3, prefetch=2)),
        ("ring", ScheduleOptions(8, 4, heads=2, circulates="queries")),
        ("hierarchical_ring", ScheduleOptions(8, 4)),
        ("hierarchical_ring", ScheduleOptions(12, 3, circulates="queries")),
        ("all_gather", ScheduleOptions(4, 4, chunks=2)),
        ("hierarchical_all_gather", ScheduleOptions(8, 4, chunks=2)),
        ("all_gather", ScheduleOptions(8, 8, heads=4)),
    ],
)
@pytest.mark.parametrize("backward", [False, True])
def test_all_ranks_have_the_same_program(exchange, options, backward):
    schedule = make_schedule(exchange, options)
    traits = Traits(columns=not schedule.gathers)
    first = lower(schedule, 0, backward=backward, traits=traits)
    for rank in range(1, options.workers):
        other = lower(schedule, rank, backward=backward, traits=traits)
        assert len(first.operations) == len(other.operations)
        for mine, theirs in zip(first.operations, other.operations, strict=True):
            assert type(mine) is type(theirs)
            assert alike(mine, theirs), (mine, theirs)
            assert [len(n) for n in (mine.reads, mine.writes, mine.frees)] == [
                len(n) for n in (theirs.reads, theirs.writes, theirs.frees)
            ]
        assert first.sent(SIZES) == other.sent(SIZES)


@pytest.mark.parametrize("backward", [False, True])
def test_traded_tokens_live_until_their_views_are_copied(backward):
    schedule = make_schedule("ring", ScheduleOptions(4, 4, heads=2))
    program = lower(schedule, 0, backward=backward)
    (op,) = copies(program, AddHeads)
    assert op == program.operations[-1]
    assert Buffer(Kind.TRADED_TOKENS) in op.frees
