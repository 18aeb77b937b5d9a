"""The lifetimes of buffers, and the sums of single columns."""

from __future__ import annotations

from dataclasses import replace

import pytest
from parallel.programs import play

from mtrain_cli.parallel.lowering import lower
from mtrain_cli.parallel.program import Post, Wait
from mtrain_cli.parallel.program_builder import Traits
from mtrain_cli.parallel.schedule import UNSCHEDULED, ScheduleOptions, make_schedule


def test_playing_finds_a_buffer_that_is_freed_early_or_never():
    program = lower(make_schedule("ring", ScheduleOptions(4, 4)), 1, backward=True)
    at, wait = next((i, op) for i, op in enumerate(program.operations) if op.frees)
    never = list(program.operations)
    never[at] = replace(wait, frees=())
    with pytest.raises(AssertionError):
        play(replace(program, operations=tuple(never)))
    post = next(i for i, op in enumerate(program.operations) if isinstance(op, Post))
    early = list(program.operations)
    early[post] = replace(early[post], frees=early[post].reads)
    with pytest.raises(AssertionError):
        play(replace(program, operations=tuple(early)))
    lost = [op for op in program.operations if not isinstance(op, Wait)]
    with pytest.raises(AssertionError):
        play(replace(program, operations=tuple(lost)))


@pytest.mark.parametrize("backward", [False, True])
def test_columns_are_summed_over_the_ranks_that_hold_the_same_heads(backward):
    schedule = make_schedule("ring", ScheduleOptions(8, 8, heads=2))
    for rank in range(8):
        program = lower(schedule, rank, backward=backward, traits=Traits(columns=True))
        (post,) = (p for p in program.posts if p.transfer.number == UNSCHEDULED)
        assert post.transfer.peers == ((1, 3, 5, 7) if rank % 2 else (0, 2, 4, 6))
        assert post.transfer.part == (rank % 2, 2)
