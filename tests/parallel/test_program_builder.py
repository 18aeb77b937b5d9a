"""The lifetimes of buffers, and the sums of single columns."""

from __future__ import annotations

import pytest

from mtrain_cli.parallel.lowering import lower
from mtrain_cli.parallel.program_builder import Traits
from mtrain_cli.parallel.schedule import UNSCHEDULED, ScheduleOptions, make_schedule


@pytest.mark.parametrize("backward", [False, True])
def test_columns_are_summed_over_the_ranks_that_hold_the_same_heads(backward):
    schedule = make_schedule("ring", ScheduleOptions(8, 8, heads=2))
    for rank in range(8):
        program = lower(schedule, rank, backward=backward, traits=Traits(columns=True))
        (post,) = (p for p in program.posts if p.transfer.number == UNSCHEDULED)
        assert post.transfer.peers == ((1, 3, 5, 7) if rank % 2 else (0, 2, 4, 6))
        assert post.transfer.part == (rank % 2, 2)
