"""Operations, scratch memory and charges of exchanges that gather keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from parallel.programs import FEW, copies
from training.allocations import LiveBytes

from mtrain_cli.parallel.buffers import Buffer, Kind
from mtrain_cli.parallel.layout import Joined, make_layout
from mtrain_cli.parallel.lowering import lower
from mtrain_cli.parallel.operations import AddHeads, Cut, Join, Shards
from mtrain_cli.parallel.program import ShardSizes
from mtrain_cli.parallel.program_builder import Traits
from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule


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
