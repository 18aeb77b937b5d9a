"""A program counts its bytes: what it sends, and the pool that its passes need."""

from __future__ import annotations

from dataclasses import replace

import pytest
from parallel.test_lowering import SIZES

from mtrain_cli.parallel.lowering import Traits, lower
from mtrain_cli.parallel.program import (
    ShardSizes,
    pool_bytes,
)
from mtrain_cli.parallel.schedule import (
    UNSCHEDULED,
    ScheduleOptions,
    make_schedule,
)


def test_the_pool_of_a_ring_of_keys_in_float32_by_hand():
    """In float32, gradients and shards share buffers.

    A step in backward holds six of them: the shard that it computes, the one before, which has
    left, and the one that arrives; this rank's part of a gradient, and the gradients that arrive
    and leave.
    """
    schedule = make_schedule("ring", ScheduleOptions(6, 6))
    backward = lower(schedule, 1, backward=True)
    shard = 2 * SIZES.tokens * SIZES.kv_heads * SIZES.head_dim * 4
    assert pool_bytes([backward], replace(SIZES, dtype_bytes=4)) == 6 * shard


@pytest.mark.parametrize("heads", [1, 2])
def test_an_all_reduce_of_columns_sends_its_payload_almost_twice(heads):
    """A ring all-reduce of n ranks sends 2 (n - 1) / n of the payload."""
    sizes = replace(SIZES, columns=6, column_width=128)
    program = lower(
        make_schedule("ring", ScheduleOptions(8, 8, heads=heads)), 0, traits=Traits(columns=True)
    )
    (post,) = (p for p in program.posts if p.transfer.number == UNSCHEDULED)
    payload = 2 * (SIZES.heads // heads) * 128 * SIZES.head_dim * SIZES.dtype_bytes
    ranks = 8 // heads
    assert post.payload.of(sizes, heads) == payload
    assert post.sends.of(sizes, heads) == payload * 2 * (ranks - 1) / ranks


def test_a_part_of_the_heads_has_at_least_one_head():
    """With two key-value heads and four ranks, each rank has one, for the tokens of all four."""
    sizes = ShardSizes(tokens=10, heads=8, kv_heads=2, head_dim=16, dtype_bytes=2)
    for heads, kept in ((4, 1), (2, 1), (1, 2)):
        schedule = make_schedule("ring", ScheduleOptions(2 * heads, 2 * heads, heads=heads))
        for backward, numbers in ((False, {"kv": 2}), (True, {"kv": 2, "dkv": 4})):
            program = lower(schedule, 0, backward=backward)
            assert {
                p.transfer.payload: p.sends.of(sizes, heads)
                for p in program.posts
                if p.transfer.payload != "heads"
            } == {name: 2 * heads * 10 * kept * 16 * each for name, each in numbers.items()}
    queries = make_schedule("ring", ScheduleOptions(8, 8, circulates="queries", heads=4))
    (dq,) = (p for p in lower(queries, 0, backward=True).posts if p.transfer.payload == "dq")
    assert dq.sends.of(sizes, 4) == 4 * 4 * 10 * 16 * 2
