"""The kernel in Triton: masks, block diagonals, block lists and packed columns."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from mtrain_cli import install_command
from mtrain_cli.attention.block_lists import mask_lists, set_indices
from mtrain_cli.attention.index import BlockBitmap, GatedBitmap, StartBitmap, VerticalSlash
from mtrain_cli.attention.kernel import Kernel, KernelRequest, Saved
from mtrain_cli.attention.mask_tables import BlockGeometry
from mtrain_cli.attention.packed_columns import add_column_gradients, local_columns, pack_columns
from mtrain_cli.attention.partials import Pair, Triple
from mtrain_cli.attention.tiles import Tiles

if TYPE_CHECKING:
    from mtrain_cli.kernels.triton.spans import SpanPlan
    from mtrain_cli.kernels.triton.sparse import TilePlan

Derived = TypeVar("Derived")
HEAD_DIMS = (16, 32, 64, 128)
BLOCKS = (16, 32, 64, 128)
# Without an index, tokens per block of 16-bit and of longer numbers, which take more shared memory.
_DENSE_BLOCK, _DENSE_BLOCK_32 = 128, 64


class TritonColumns(Kernel):
    """Methods of a `Kernel` for gathered columns and a cache, by the GPU's kernels."""

    skips = True

    def decode(self, q, k, v, used, scale):
        assert not self.softcap, "the library, which alone has caps, does not generate"
        from mtrain_cli.kernels.triton import decode

        return decode.decode(q, k, v, used, scale)

    def forward_columns(self, q, packed, columns, scale, partial):
        from mtrain_cli.kernels.triton import sparse

        plan, pair = make_tile_plan(columns.tiles, slashes=False), (packed[0], packed[1])
        # Columns alone: the kernel reads neither of the tensors that stand in for k and v.
        return sparse.forward(
            q, q, q, pair, plan, scale, slashes=False, partial=partial, dtype=torch.float32,
            cap=self.softcap,
        )  # fmt: skip

    def backward_columns(self, dout, q, packed, lse, delta, columns, scale):
        from mtrain_cli.kernels.triton import sparse

        plan, pair = make_tile_plan(columns.tiles, slashes=False), (packed[0], packed[1])
        dq = sparse.backward_queries(
            dout, q, q, q, pair, lse, delta, plan, scale, slashes=False, dtype=torch.float32,
            cap=self.softcap,
        )  # fmt: skip
        parts = sparse.backward_columns(dout, q, pair, lse, delta, plan, scale, self.softcap)
        return dq, torch.stack([t.sum(0) for t in parts])


class TritonKernel(TritonColumns):
    """FlashAttention over chosen blocks and columns (arXiv:2205.14135, algorithm 1)."""

    name = "triton"

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        if request.device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return "needs a CUDA GPU"
        if request.device == "cuda" and (request.capability is None or request.capability < (8, 0)):
            return "needs compute capability 8.0 (Ampere) or later"
        if request.dtype not in ("bfloat16", "float32"):
            return f"computes bfloat16 or float32, not {request.dtype}"
        if request.head_dim not in HEAD_DIMS:
            return f"head_dim {request.head_dim} is none of {', '.join(map(str, HEAD_DIMS))}"
        if request.index is not None and request.index.block not in BLOCKS:
            return f"sparsity.block {request.index.block} is none of {', '.join(map(str, BLOCKS))}"
        return None

    def missing_package(self, request: KernelRequest) -> str | None:  # noqa: ARG002
        if importlib.util.find_spec("triton") is None:
            return f"triton is not installed ({install_command('cuda')})"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Pair:
        from mtrain_cli.kernels.triton import spans, sparse

        cap = self.softcap
        if tiles.index is None:
            return spans.forward(q, k, v, make_span_plans(tiles, q.dtype)[0], scale, cap)
        plan = make_tile_plan(tiles)
        return sparse.forward(q, k, v, pack_columns(k, v, tiles), plan, scale, cap=cap)

    def backward(self, dout: Tensor, saved: Saved, tiles: Tiles, scale: float) -> Triple:
        from mtrain_cli.kernels.triton import spans, sparse

        cap = self.softcap
        q, k, v, out, lse, delta = saved
        lse = lse.contiguous()
        delta = ensure_delta(out, dout, delta)
        if tiles.index is None:
            of_queries, of_keys = make_span_plans(tiles, q.dtype)
            dq = spans.backward_queries(dout, q, k, v, lse, delta, of_queries, scale, cap)
            return dq, *spans.backward_keys(dout, q, k, v, lse, delta, of_keys, scale, cap)
        plan = make_tile_plan(tiles, backward=True)
        columns = pack_columns(k, v, tiles)
        dq = sparse.backward_queries(dout, q, k, v, columns, lse, delta, plan, scale, cap=cap)
        dk, dv = sparse.backward_keys(dout, q, k, v, lse, delta, plan, scale, cap)
        if columns is not None:
            columns_dk, columns_dv = sparse.backward_columns(
                dout, q, columns, lse, delta, plan, scale, cap
            )
            add_column_gradients(dk, dv, columns_dk, columns_dv, local_columns(tiles)[1])
        return dq, dk, dv


def ensure_delta(out: Tensor | None, dout: Tensor, delta: Tensor | None) -> Tensor:
    from mtrain_cli.kernels.triton import sparse

    if delta is not None:
        return delta.contiguous()
    assert out is not None
    return sparse.row_delta(out, dout)


def make_span_plans(tiles: Tiles, dtype: torch.dtype) -> tuple[SpanPlan, SpanPlan]:
    """Return the mask with the key blocks of query blocks, and the reverse."""
    from mtrain_cli.kernels.triton.spans import SpanPlan

    block = _DENSE_BLOCK if dtype.itemsize == 2 else _DENSE_BLOCK_32
    of_queries, of_keys = mask_lists(tiles, block)
    bounds = tiles.low.contiguous(), tiles.high.contiguous()
    return SpanPlan(block, *bounds, **of_queries), SpanPlan(block, *bounds, **of_keys)


def make_tile_plan(tiles: Tiles, *, slashes: bool = True, backward: bool = False) -> TilePlan:
    """Return mask and index in the form that the Triton kernels read.

    Block lists and the bits of covered columns are built on every call. backward: include the query
    blocks of each key block, which dk and dv need.
    """
    from mtrain_cli.kernels.triton.sparse import TilePlan

    index, geometry = tiles.index, tiles.geometry
    assert geometry is not None
    if isinstance(index, VerticalSlash):
        of_index = _vertical_slash_fields(tiles, index, slashes)
    else:
        assert isinstance(index, BlockBitmap)
        of_index = _bitmap_fields(index, geometry, backward)
    return TilePlan(
        block=index.block,
        blocks=index.blocks,
        first=geometry.tables.first,
        last=geometry.tables.last,
        query_blocks=geometry.query_blocks,
        key_blocks=geometry.key_blocks,
        query_slot=geometry.query_slot,
        key_slot=geometry.key_slot,
        query_count=geometry.query_count,
        first_min=geometry.tables.first_min,
        first_max=geometry.tables.first_max,
        holes=geometry.holes,
        **of_index,
    )


_COLUMN_FIELDS = ("column_positions", "columns_below", "covered")


def _vertical_slash_fields(tiles: Tiles, index: VerticalSlash, slashes: bool) -> dict[str, Any]:
    from mtrain_cli.kernels.triton.sparse import covered_columns

    assert tiles.geometry is not None
    entries, counts = _cached(tiles, "diagonals", _diagonals) if slashes else (None, None)
    slash = index.slashes.flatten(0, 1).contiguous().view(torch.uint8)
    columns: tuple[Tensor | None, ...] = (None, None, None)
    if index.columns.shape[-1]:
        positions = local_columns(tiles)[0].flatten(0, 1)
        below = _cached(tiles, "columns below blocks", _columns_below_blocks)
        covered = covered_columns(slash, positions, tiles.geometry.query_blocks, index.block)
        columns = (positions, below, covered)
    # Diagonals lead from a query block to key blocks and from a key block to query blocks.
    both_ways = {"entries": entries, "counts": counts, "entries_t": entries, "counts_t": counts}
    return {
        **both_ways,
        "slash": slash,
        "listed": False,
        **dict(zip(_COLUMN_FIELDS, columns, strict=True)),
    }


def _bitmap_fields(index: BlockBitmap, geometry: BlockGeometry, backward: bool) -> dict[str, Any]:
    from mtrain_cli.kernels.triton.sparse import list_blocks

    # Lists hold the global numbers of local blocks, which ascend like the blocks' slots.
    inputs = (
        index.bits, index.slots, geometry.query_blocks, geometry.key_blocks,
        geometry.tables.first_min, index.block,
    )  # fmt: skip
    starts = index.starts if isinstance(index, StartBitmap) else None
    entries, counts = list_blocks(*inputs, transposed=False, starts=starts)
    fields: dict[str, Any] = {"entries": entries, "counts": counts}
    fields |= {"entries_t": None, "counts_t": None, "starts": starts is not None}
    fields["sharing"] = index.sharing if isinstance(index, StartBitmap) else 1
    if backward:
        fields["entries_t"], fields["counts_t"] = list_blocks(
            *inputs, transposed=True, starts=starts
        )
    if isinstance(index, GatedBitmap):
        gates = index.gates.flatten(0, 1).contiguous()
        fields |= {"gates": gates, "gate_slots": index.slots, "chunk": index.chunk}
    flat = index.heads[0] * index.heads[1]
    slash = torch.zeros(flat, index.blocks, dtype=torch.uint8, device=index.bits.device)
    return {**fields, "slash": slash, "listed": True, **dict.fromkeys(_COLUMN_FIELDS)}


def _cached(tiles: Tiles, name: str, make: Callable[[Tiles], Derived]) -> Derived:
    """Return make(tiles). Cache the result in the tiles if they hold all keys."""
    assert tiles.geometry is not None
    if not tiles.geometry.all_keys:
        return make(tiles)
    if name not in tiles.index_cache:
        tiles.index_cache[name] = make(tiles)
    return tiles.index_cache[name]


def _diagonals(tiles: Tiles) -> Pair:
    """Return `TilePlan.entries` and `counts`: chosen diagonals that occur between the shards."""
    index, geometry = tiles.index, tiles.geometry
    assert isinstance(index, VerticalSlash)
    assert geometry is not None
    return set_indices((index.slashes & geometry.diagonals).flatten(0, 1))


def _columns_below_blocks(tiles: Tiles) -> Tensor:
    """Return `TilePlan.columns_below`: the number of columns below the start of each block."""
    assert tiles.index is not None
    positions = local_columns(tiles)[0].flatten(0, 1)
    key = (
        f"starts of blocks, {len(positions)} times"  # in the mask's cache: the same for all layers
    )
    if key not in tiles.cache:
        numbers = torch.arange(tiles.index.blocks + 1, dtype=torch.int32, device=positions.device)
        tiles.cache[key] = (numbers * tiles.index.block).repeat(len(positions), 1)
    return torch.searchsorted(positions, tiles.cache[key], out_int32=True)
