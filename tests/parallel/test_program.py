"""A program counts its bytes: what it sends, and the pool that its passes need."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from parallel.programs import FEW, SIZES

from mtrain_cli.parallel import buffers
from mtrain_cli.parallel.lowering import Traits, lower
from mtrain_cli.parallel.operations import Arrange, FromHeads, FromTokens, Rename, ToHeads, ToTokens
from mtrain_cli.parallel.program import (
    HIGH,
    LOW,
    MADE,
    Begin,
    Compute,
    Recompute,
    ShardSizes,
    pool_bytes,
)
from mtrain_cli.parallel.schedule import UNSCHEDULED, ScheduleOptions, make_schedule


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
    """A ring all-reduce of n ranks, which hold the same heads, sends 2 (n - 1) / n of it."""
    sizes = replace(SIZES, columns=6, column_width=128)
    schedule = make_schedule("ring", ScheduleOptions(8, 8, heads=heads))
    program = lower(schedule, 5, traits=Traits(columns=True))
    (post,) = (p for p in program.posts if p.transfer.number == UNSCHEDULED)
    assert post.transfer.peers == ((1, 3, 5, 7) if heads == 2 else tuple(range(8)))
    assert post.transfer.part == (heads - 1, heads)
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


@pytest.mark.parametrize(
    ("early", "sharing", "what"),
    [
        (None, 1, Recompute.EVERYTHING),
        (None, 4, Recompute.EVERYTHING),
        (32, 1, Recompute.EVERYTHING),
        (32, 4, Recompute.EVERYTHING),
        (0, 1, Recompute.NOTHING),
        (0, 4, Recompute.HEAD_TRADES),
    ],
)
def test_backward_runs_the_exchange_again_unless_out_was_kept(early, sharing, what):
    assert Recompute.of(early, sharing) is what


@pytest.mark.parametrize("name", ["ring", "all_gather"])
@pytest.mark.parametrize("heads", [1, 2])
def test_the_recomputed_part_is_all_nothing_or_the_trades_of_heads(name, heads):
    """Six ranks: a ring has 6 / heads - 1 hops, an all-gather one, and Ulysses two trades more."""
    forward = lower(make_schedule(name, ScheduleOptions(6, 6, heads=heads)), 1)
    hops = 6 // heads - 1 if name == "ring" else 1
    trades = 2 if heads > 1 else 0
    assert len(list(forward.posts)) == hops + trades
    assert forward.recomputed(Recompute.EVERYTHING) is forward
    nothing = forward.recomputed(Recompute.NOTHING)
    assert nothing.operations == ()
    assert nothing.sent(SIZES) == 0
    part = forward.recomputed(Recompute.HEAD_TRADES)
    assert [post.transfer.payload for post in part.posts] == ["heads"] * trades
    assert not list(part.computes)
    assert not any(op.computes for op in part.operations if isinstance(op, Begin))
    assert part.inside == slice(forward.inside.start, forward.inside.start)


@pytest.mark.parametrize("backward", [False, True])
def test_the_trades_of_heads_send_queries_keys_and_values_there_and_the_output_back(backward):
    """Backward sends the gradient of the output there, and those of q, k and v back.

    A rank keeps 1 / heads of its own numbers.
    """
    heads = 4
    schedule = make_schedule("all_gather", ScheduleOptions(8, 8, heads=heads))
    program = lower(schedule, 0, backward=backward)
    there, back = (p.sends.of(SIZES, heads) for p in program.posts if p.transfer.payload == "heads")
    rows = SIZES.tokens * SIZES.heads * SIZES.head_dim * SIZES.dtype_bytes
    keys = 2 * SIZES.tokens * SIZES.kv_heads * SIZES.head_dim * SIZES.dtype_bytes
    sent = [(rows + keys) * (heads - 1) / heads, rows * (heads - 1) / heads]
    assert [there, back] == (sent[::-1] if backward else sent)


@pytest.mark.parametrize("backward", [False, True])
def test_the_copies_of_a_head_trade_move_what_the_trade_carries(backward):
    """Each of the four copies reads and writes only the tensors of its own trade."""
    heads = 4
    schedule = make_schedule("all_gather", ScheduleOptions(8, 8, heads=heads))
    program = lower(schedule, 0, backward=backward)
    moved = {
        type(op): op.moves.of(SIZES, heads) for op in program.operations if isinstance(op, Arrange)
    }
    rows = SIZES.tokens * SIZES.heads * SIZES.head_dim * SIZES.dtype_bytes
    keys = 2 * SIZES.tokens * SIZES.kv_heads * SIZES.head_dim * SIZES.dtype_bytes
    there, back = (rows, rows + keys) if backward else (rows + keys, rows)
    assert moved[ToHeads] == moved[FromTokens] == 3 * there
    assert moved[ToTokens] == moved[FromHeads] == 3 * back


def test_gradients_of_a_kernel_have_the_compute_dtype_unless_the_kernel_says_more():
    for compute in (2, 4):
        sizes = replace(FEW, dtype_bytes=compute)
        assert [sizes.width(precision) for precision in (LOW, HIGH, MADE)] == [compute, 4, compute]
        assert replace(sizes, made_bytes=4).width(MADE) == 4


def test_a_renamed_buffer_is_not_held_twice():
    """Without other ranks, dk and dv are the gradients that the rank has summed."""
    program = lower(make_schedule("all_gather", ScheduleOptions(1, 1)), 0, backward=True)
    (held,) = (set(live) for op, live in program.live() if isinstance(op, Rename))
    assert held == {buffers.DQ, buffers.DK, buffers.DV}


def test_the_pool_of_ranks_that_share_heads_holds_repeated_heads():
    """Four ranks share two key-value heads: each holds one, for the tokens of all four."""
    schedule = make_schedule("ring", ScheduleOptions(12, 12, heads=4))
    shard = 2 * (4 * FEW.tokens) * FEW.head_dim * 2
    # The second of two shards that arrive is saved.
    assert pool_bytes([lower(schedule, 0)], FEW) == shard


def test_temporary_memory_counts_once():
    """A copy's scratch and a kernel's buffers are in memory at different times.

    At its peak, the rank cuts the gradients of the whole sequence, four times its own 320 elements:
    it holds dq in bf16 and the kernel's gradients in bf16, and shards and their copy in float32.
    """
    schedule = make_schedule("hierarchical_all_gather", ScheduleOptions(4, 2))
    backward = lower(schedule, 0, backward=True)
    copy = 4 * 320 * 4
    held = 2 * 640 + 2 * 320 * 4 + copy
    assert backward.peak_bytes(FEW) == held + copy
    assert backward.peak_bytes(FEW, call=copy) == held + copy
    # A call holds the gathered keys in bf16, dq, and dk and dv in bf16.
    call = 2 * 640 + 2 * 2 * 320 * 4
    assert backward.peak_bytes(FEW, call=3 * copy) == call + 3 * copy


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("circulates", ["kv", "queries"])
@pytest.mark.parametrize("name", ["ring", "hierarchical_ring", "all_gather", "group_cast"])
def test_leaving_out_equal_steps_changes_no_peak_and_no_pool(name, circulates, backward):
    """The memory of a program equals that of a walk over every one of its operations."""
    options = ScheduleOptions(8, 4, chunks=2, circulates=circulates)
    columns = "ring" in name
    traits = Traits(columns=columns, copies_parts=True)
    program = lower(make_schedule(name, options), 3, traits=traits, backward=backward)
    sizes = replace(SIZES, columns=6, column_width=128, casts=((1, 2),))
    saved = program.pooled & set(program.saved)
    kept = Counter(program.sizes[buffer].shape(sizes) for buffer in saved)
    peak, pooled = 0, Counter()
    for op, live in program.live():
        apart = live - set(program.inputs) - program.pooled
        held = [op.scratch, *(program.sizes[buffer] for buffer in apart)]
        peak = max(peak, sum(s.of(sizes) for s in held) + 1000 * isinstance(op, Compute))
        shapes = (program.sizes[buffer].shape(sizes) for buffer in live & program.pooled)
        pooled |= Counter(shapes) - kept
    assert program.peak_bytes(sizes, call=1000) == peak > 1000
    assert program.pooled_at_once(sizes) == pooled
    assert pooled or not columns
