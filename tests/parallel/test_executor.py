"""The executor holds the buffers that a program lists, with the bytes that it lists."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import Any

import gloo
import pytest
import torch
from parallel.programs import ARRANGEMENTS
from parallel.ways import group_of, make_attention, qkv
from torch.utils.checkpoint import checkpoint

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.parallel.buffers import Kind
from mtrain_cli.parallel.exchange import Exchange, Executor, ShardTiles, make_exchange
from mtrain_cli.parallel.layout import Placement, make_layout
from mtrain_cli.parallel.lowering import Traits, lower
from mtrain_cli.parallel.operations import Arrange, Order, QueryMessage, RunningAttention, Shards
from mtrain_cli.parallel.program import Operation, Post, Recompute, ShardSizes
from mtrain_cli.parallel.schedule import GROUP_CAST, ScheduleOptions, make_schedule
from mtrain_cli.sparsity.fixed import FixedPattern

WORLD, SEQ, HEADS, KV_HEADS, HEAD_DIM, COLUMNS = 4, 256, 8, 4, 16, 6
WAYS: list[tuple[str, int, dict[str, Any]]] = [
    ("ring", 1, {}),
    ("ring", 1, {"circulates": "queries"}),
    ("ring", 2, {}),
    ("hierarchical_ring", 1, {"prefetch": 2}),
    ("hierarchical_ring", 1, {"circulates": "queries"}),
    ("all_gather", 1, {"chunks": 2}),
    ("hierarchical_all_gather", 1, {"chunks": 2}),
    ("all_gather", 2, {"chunks": 2}),
    ("all_gather", 4, {}),
    ("group_cast", 1, {"chunks": 2}),
    ("group_cast", 2, {}),
    ("hierarchical_group_cast", 1, {"chunks": 2}),
    ("group_cast", 1, {"chunks": 2, "stages": 1, "stages_backward": 2}),
    ("group_cast", 2, {"stages": 1, "stages_backward": 1}),
    ("hierarchical_group_cast", 1, {"stages": 2, "stages_backward": 2}),
    ("ring", 2, {"rounds": True}),
    ("hierarchical_all_gather", 1, {"chunks": 2, "rounds": True}),
    ("hierarchical_group_cast", 1, {"stages": 2, "stages_backward": 1, "rounds": True}),
]


def shares_of(rows):
    """Return the `ShardSizes.casts` of a rank."""
    forward, backward = rows
    same = len(forward.stages) == len(backward.stages)
    return forward.shares if same else forward.shares + backward.shares


def nbytes(found: Any) -> int:
    if isinstance(found, torch.Tensor):
        return found.nbytes
    return sum(nbytes(part) for part in found)


def watched(
    rank: int, world: int, name: str, heads: int, options: dict[str, Any], kv_heads: int
) -> list[int]:
    """Count the operations of each pass; compare the executor's tensors after each of them."""
    # Columns travel in tiles of 128.
    sizes = ShardSizes(SEQ // WORLD, HEADS, kv_heads, HEAD_DIM, 4, COLUMNS, 128)
    seen: list[int] = []
    run = Executor.run

    def looking(self: Executor, operations: Iterable[Operation]) -> None:
        operations = tuple(operations)
        assert operations == self.program.operations
        left = set(self.program.inputs)
        for op in operations:
            run(self, [op])
            left = (left | set(op.writes)) - set(op.frees)
            if isinstance(op, Post) and op.transfer.kind == GROUP_CAST:
                message = self.transport._messages[op.transfer.number]
                assert message.size == self.tensors[op.writes[1]].nbytes
            assert set(self.tensors) == left, (op, set(self.tensors) ^ left)
            for buffer in left:
                found = self.tensors[buffer]
                casts = () if self.tiles.rows is None else shares_of(self.tiles.rows)
                moved = replace(sizes, casts=casts)
                size = self.program.sizes[buffer].of(moved, heads)
                # A size of 0 stands for a view. The running output starts in the compute dtype.
                if size and not isinstance(found, RunningAttention):
                    assert nbytes(found) == size, (op, buffer)
        seen.append(len(operations))

    group = group_of(rank, world, per_node=2, heads=heads)
    layout = make_layout("zigzag", world, SEQ, 16, unit=16)
    exchange = make_exchange(name, layout, group, **options)
    pattern = FixedPattern(block=16, slashes=9, columns=COLUMNS, density=0.0, seed=0)
    masks = [SequenceMask.causal(SEQ, layout.padded_seq)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "run", looking)
        for index in (None, pattern):
            attend = make_attention(exchange, SdpaKernel(), masks, "cpu", index)
            q, k, v = qkv(layout.tokens_per_worker, HEADS, kv_heads, HEAD_DIM)
            attend(q, k, v, 0).sum().backward()
    return seen


@pytest.mark.parametrize(
    ("name", "heads", "options", "kv_heads"),
    # With more ranks that share heads than key-value heads, these are repeated.
    [*((*way, KV_HEADS) for way in WAYS), ("all_gather", 4, {}, 2), ("ring", 4, {}, 1)],
)
def test_the_executor_holds_the_buffers_of_the_program(name, heads, options, kv_heads):
    for seen in gloo.run(WORLD, watched, name, heads, options, kv_heads):
        assert len(seen) == 4
        assert min(seen) > 5


def test_these_programs_run_every_arrangement():
    named = set()
    for (name, heads, options), workers in product(WAYS, (1, WORLD)):
        heads = min(heads, workers)
        schedule = make_schedule(name, ScheduleOptions(workers, 2, heads=heads, **options))
        for backward, columns in product((False, True), repeat=2):
            traits = Traits(columns=columns and not schedule.gathers)
            operations = lower(schedule, 0, backward=backward, traits=traits).operations
            named |= {type(op) for op in operations if isinstance(op, Arrange)}
    assert named == ARRANGEMENTS


KEPT = (None, 1.0, 0.5, 0.0)  # shares of out; None: without checkpointing


def posted(
    rank: int, world: int, name: str, heads: int, options: dict[str, Any]
) -> dict[float | None, list[int]]:
    """Count the transfers of each pass of a layer, by the share of out that checkpointing keeps."""
    passes: list[int] = []
    run, begin = Executor.run, Exchange._begin

    def counting(self: Executor, operations: Iterable[Operation]) -> None:
        passes[-1] += sum(isinstance(op, Post) for op in operations)
        run(self, operations)

    def beginning(*args) -> Any:
        passes.append(0)
        return begin(*args)

    group = group_of(rank, world, per_node=2, heads=heads)
    layout = make_layout("zigzag", world, SEQ, 16, unit=16)
    exchange = make_exchange(name, layout, group, **options)
    masks = [SequenceMask.causal(SEQ, layout.padded_seq)]
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "run", counting)
        patch.setattr(Exchange, "_begin", beginning)
        for keep in KEPT:
            passes.clear()
            attend = make_attention(exchange, SdpaKernel(), masks, "cpu", keep=keep or 0.0)
            q, k, v = qkv(layout.tokens_per_worker, HEADS, KV_HEADS, HEAD_DIM)
            if keep is None:
                out = attend(q, k, v, 0)
            else:
                out = checkpoint(attend, q, k, v, 0, use_reentrant=False)
            out.sum().backward()
            found[keep] = list(passes)
    return found


@pytest.mark.parametrize(("name", "heads", "options"), WAYS)
def test_recomputation_sends_what_its_program_sends(name, heads, options):
    schedule = make_schedule(name, ScheduleOptions(WORLD, 2, heads=heads, **options))
    for rank, found in enumerate(gloo.run(WORLD, posted, name, heads, options)):
        forward, backward = (lower(schedule, rank, backward=b) for b in (False, True))
        for keep in KEPT:
            early = 0 if keep == 1.0 else None if keep == 0.0 else 32
            what = Recompute.NOTHING if keep is None else Recompute.of(early, heads)
            again = forward.recomputed(what)
            programs = [forward, *([again] if again.operations else []), backward]
            assert found[keep] == [len(list(program.posts)) for program in programs], keep


@pytest.mark.parametrize("among", [0, 2, 3])
def test_shards_travel_in_the_order_of_nodes_and_return_in_the_order_of_ranks(among):
    """Six ranks; ``among`` of them share a node. A hierarchical collective has its own order."""
    layout = make_layout("striped", 6, 96, 4)
    dk, dv = torch.rand(2, 1, 96, 2, 4)
    run = object.__new__(Executor)
    run.tiles, run.high = ShardTiles({}, Placement(layout)), torch.float32
    run.message_dtype = run.high
    made, cut_up, gathered, keys = (
        Kind.DKEYS.at(0),
        Kind.SHARDS.at(0),
        Kind.GATHERED.at(0),
        Kind.KEYS.at(0),
    )
    run.tensors = {made: (dk, dv)}
    (shards,) = Shards(step=0, reads=(made,), writes=(cut_up,), among=among).copy(run)
    for rank in range(6):
        # [ranks of the node, nodes, ...] if ranks exchange within their nodes first.
        found = shards[rank % among, rank // among] if among else shards[rank]
        held = layout.positions(rank)
        assert found.equal(torch.stack([dk[:, held], dv[:, held]]))
    run.tensors = {gathered: shards}
    (keys,) = Order(step=0, reads=(gathered,), writes=(keys,), among=among).copy(run)
    assert keys[0].equal(dk)
    assert keys[1].equal(dv)


def test_parts_of_a_message_start_at_multiples_of_256_bytes():
    q, dout = torch.randn(2, 1, 5, 3, 7)
    lse, delta = torch.randn(2, 1, 3, 5)
    message, packed = QueryMessage.pack(q, dout, lse, delta)
    parts = [part for part in message.unpack(packed) if part is not None]
    assert all((part.data_ptr() - packed.data_ptr()) % 256 == 0 for part in parts)
    assert all(map(torch.equal, parts, (q, dout, lse, delta)))


def test_partial_outputs_in_bfloat16_are_merged_in_float32():
    """Seven keys with equal scores, one a step; values 1 and six 0. bfloat16 merges would round."""
    total = RunningAttention(torch.zeros(1, 1, 1, 4, dtype=torch.bfloat16))
    for step in range(7):
        out = torch.full((1, 1, 1, 4), 1.0 if step == 0 else 0.0, dtype=torch.bfloat16)
        total.add(out, torch.zeros(1, 1, 1))
    partial = total.sums
    assert partial is not None
    torch.testing.assert_close(partial[0], torch.full((1, 1, 1, 4), 1 / 7), atol=1e-7, rtol=0)
    out, lse = total.result()
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(lse, torch.full((1, 1, 1), 7.0).log())
