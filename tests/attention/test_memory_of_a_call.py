"""What kernels allocate under an index has the size that the memory estimate predicts."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from attention.sparse_problems import Problem, column_problem, make_problem
from mtrain_cli.kernels.triton import sparse
from torch.utils._pytree import tree_iter

from mtrain_cli.attention.block_lists import index_lists
from mtrain_cli.attention.column_blocks import Front
from mtrain_cli.attention.index import BlockBitmap
from mtrain_cli.attention.packed_columns import add_column_gradients, local_columns, pack_columns
from mtrain_cli.attention.triton_kernel import make_tile_plan
from mtrain_cli.composition.compose import compose
from mtrain_cli.training.attention_memory import IndexShape, kernel_backward


def shape_of(p: Problem) -> IndexShape:
    index = p.tiles.index
    sequences, heads = index.heads
    columns = (
        0 if isinstance(index, BlockBitmap) else pack_columns(p.k, p.v, p.tiles)[0][..., 0].numel()
    )
    return IndexShape(
        sequences=sequences, heads=heads, owners=heads, block=16, blocks=index.blocks,
        bitmap=columns == 0, kept=0, counted=0, column_width=columns // (sequences * heads), ways=1,
        rings=False, gathers_columns=False,
    )  # fmt: skip


def kernel_bytes(kernel: str, p: Problem, index: IndexShape | None) -> int:
    model = dataclasses.replace(
        compose(["model=tiny"]).model, num_heads=4, num_kv_heads=2, head_dim=16
    )
    queries, keys = (t.shape[0] * t.shape[1] for t in (p.q, p.k))
    return kernel_backward(kernel, model, queries, keys, p.q.element_size(), False, index)[1]


def size(*tensors: torch.Tensor) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


SHAPE = {"seq": 640, "where": "later queries"}


def test_block_lists_have_the_estimated_size():
    p = make_problem(0, "bitmap", **SHAPE)
    plan = make_tile_plan(p.tiles, backward=True)
    assert kernel_bytes("triton", p, shape_of(p)) - kernel_bytes("triton", p, None) == size(
        plan.entries, plan.entries_t
    )
    for transposed in (False, True):
        lists = index_lists(p.tiles, transposed)
        assert kernel_bytes("flash4", p, shape_of(p)) - kernel_bytes("flash4", p, None) == size(
            lists["partial"], lists["full"]
        )


def test_lists_bounded_by_diagonals_have_the_estimated_size():
    p = make_problem(0, "both", **SHAPE)
    lists = index_lists(p.tiles, transposed=True)
    few = dataclasses.replace(shape_of(p), diagonals=p.tiles.index.max_slashes)
    queries, keys = (t.shape[0] * t.shape[1] for t in (p.q, p.k))
    assert 4 * few.listed(queries, keys) == size(lists["partial"], lists["full"])
    # A rank with half of the heads and the tokens of two has as many numbers.
    halves = dataclasses.replace(few, ways=2)
    assert halves.listed(queries // 2, keys) == few.listed(queries, keys) // 2


@pytest.mark.parametrize("kernel", ["flash4", "triton"])
def test_the_index_cache_has_the_estimated_size(kernel):
    p = make_problem(0, "both", **{**SHAPE, "where": "striped queries"})
    shape = shape_of(p)
    for _ in ("forward", "backward"):
        plan, packed = (
            make_tile_plan(p.tiles, slashes=kernel == "triton"),
            pack_columns(p.k, p.v, p.tiles),
        )
        parts = (t[None] for t in packed)
        add_column_gradients(p.k, p.v, *parts, local_columns(p.tiles)[1])
        kept = {
            t.data_ptr(): size(t)
            for t in tree_iter(p.tiles.index_cache)
            if t.data_ptr() != p.tiles.index.columns.data_ptr()
        }
        assert {t.data_ptr() for t in (plan.columns_below, local_columns(p.tiles)[1])} <= set(kept)
        # Columns that do not fill a tile are copied, too; the estimate assumes that they do.
        assert shape.derived(kernel) == sum(kept.values()) - size(plan.column_positions)
    steps = make_problem(0, "both", **{**SHAPE, "where": "striped"}).tiles
    assert not make_tile_plan(steps).column_positions.equal(plan.column_positions)
    assert not steps.index_cache
    assert make_tile_plan(p.tiles, slashes=False).columns_below is plan.columns_below, (
        "the cache is reused"
    )
    other = p.tiles.with_index(
        dataclasses.replace(p.tiles.index, columns=p.tiles.index.columns[..., 1:])
    )
    assert not make_tile_plan(other).columns_below.equal(plan.columns_below), (
        "another index has a cache of its own"
    )


def test_packed_columns_have_the_estimated_size():
    p = make_problem(0, "both", **SHAPE)
    plan, packed = make_tile_plan(p.tiles), pack_columns(p.k, p.v, p.tiles)
    rows = torch.zeros(p.q.shape[0], p.q.shape[2], p.q.shape[1])
    gradients = sparse.backward_columns(p.dout, p.q, packed, rows, rows, plan, 1.0)
    held = size(*packed, *gradients, plan.covered, *local_columns(p.tiles))
    estimate = kernel_bytes("triton", p, shape_of(p)) - kernel_bytes("triton", p, None)
    assert held <= estimate <= 1.2 * held


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_columns_in_front_of_the_keys_have_the_estimated_size(kv_heads):
    p = column_problem(1, kv_heads=kv_heads)
    index = dataclasses.replace(shape_of(p), block=128)
    front = Front.of(p.tiles, kv_heads, backward=True)
    made = torch.empty_like(p.k[:, :1]).expand(-1, front.blocks * 128, -1, -1)
    gradients = 2 * made.numel() * made.element_size()
    if kv_heads < 4:  # FlashAttention-4 adds up the gradients of a group in float32
        gradients += 2 * 4 * made.numel()
    lists, alone = index_lists(p.tiles, True, front), index_lists(p.tiles, transposed=True)
    longer = size(lists["partial"], lists["full"]) - size(alone["partial"], alone["full"])
    held = size(*front.join(p.k, p.v, p.tiles), front.words(p.tiles)[0]) + gradients + longer
    queries, keys = (t.shape[0] * t.shape[1] for t in (p.q, p.k))
    estimate = index.in_front(queries, keys, kv_heads * 8, 4 // kv_heads, 8)
    # The estimate of the call without a front has wider lists of partial blocks.
    wider = 4 * (index.listed(queries, keys) - alone["partial"].numel() - alone["full"].numel())
    assert estimate + wider == held
    in_ring = dataclasses.replace(index, rings=True)
    assert in_ring.in_front(queries, keys, kv_heads * 8, 4 // kv_heads, 8) == 0
