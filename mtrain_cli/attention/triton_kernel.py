"""The portable sparse kernel: block diagonals, block lists and packed columns in Triton."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch

from mtrain_cli import install_command
from mtrain_cli.attention.block_lists import set_indices
from mtrain_cli.attention.index import BlockBitmap, GatedBitmap, VerticalSlash
from mtrain_cli.attention.kernel import KernelRequest
from mtrain_cli.attention.packed_columns import add_column_gradients, local_columns, pack_columns
from mtrain_cli.attention.tiles import Tiles

if TYPE_CHECKING:
    from mtrain_cli.kernels.triton.sparse import TilePlan

Derived = TypeVar("Derived")
HEAD_DIMS = (16, 32, 64, 128)
BLOCKS = (16, 32, 64, 128)


class TritonColumns:
    """Attention over columns gathered once for all steps, by the Triton column kernels."""

    skips = True

    def forward_columns(self, q, packed, columns, scale, partial):
        from mtrain_cli.kernels.triton import sparse

        plan = make_tile_plan(columns.tiles, slashes=False)
        return sparse.forward(
            q,
            q,
            q,
            (packed[0], packed[1]),
            plan,
            scale,
            slashes=False,
            partial=partial,
            dtype=torch.float32,
        )

    def backward_columns(self, dout, q, packed, lse, delta, columns, scale):
        from mtrain_cli.kernels.triton import sparse

        plan = make_tile_plan(columns.tiles, slashes=False)
        pair = (packed[0], packed[1])
        dq = sparse.backward_queries(
            dout, q, q, q, pair, lse, delta, plan, scale, slashes=False, dtype=torch.float32
        )
        parts = sparse.backward_columns(dout, q, pair, lse, delta, plan, scale)
        return dq, torch.stack([t.sum(0) for t in parts])


class TritonKernel(TritonColumns):
    """FlashAttention over chosen blocks and columns (arXiv:2205.14135, algorithm 1).

    Backward takes two passes. It is bitwise repeatable: one program owns each result, no atomics.
    """

    name = "triton"
    needs_out = False

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        if importlib.util.find_spec("triton") is None:
            return f"triton is not installed ({install_command('cuda')})"
        if request.device != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
            return "needs a CUDA GPU"
        if request.device == "cuda" and (request.capability is None or request.capability < (8, 0)):
            return "needs compute capability 8.0 (Ampere) or later"
        if request.index is None:
            return "computes under a dynamic index only, not sparsity=dense"
        if request.dtype not in ("bfloat16", "float32"):
            return f"computes bfloat16 or float32, not {request.dtype}"
        if request.head_dim not in HEAD_DIMS:
            return f"head_dim {request.head_dim} is none of {', '.join(map(str, HEAD_DIMS))}"
        if request.index.block not in BLOCKS:
            return f"sparsity.block {request.index.block} is none of {', '.join(map(str, BLOCKS))}"
        return None

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: Tiles, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from mtrain_cli.kernels.triton import sparse

        plan = make_tile_plan(tiles)
        return sparse.forward(q, k, v, pack_columns(k, v, tiles), plan, scale)

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor,
        delta: torch.Tensor | None,
        tiles: Tiles,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        from mtrain_cli.kernels.triton import sparse

        plan = make_tile_plan(tiles, backward=True)
        lse = lse.contiguous()
        delta = ensure_delta(out, dout, delta)
        columns = pack_columns(k, v, tiles)
        dq = sparse.backward_queries(dout, q, k, v, columns, lse, delta, plan, scale)
        dk, dv = sparse.backward_keys(dout, q, k, v, lse, delta, plan, scale)
        if columns is not None:
            columns_dk, columns_dv = sparse.backward_columns(
                dout, q, columns, lse, delta, plan, scale
            )
            add_column_gradients(dk, dv, columns_dk, columns_dv, tiles)
        return dq, dk, dv


def ensure_delta(
    out: torch.Tensor | None, dout: torch.Tensor, delta: torch.Tensor | None
) -> torch.Tensor:
    """Return delta; if it is None, compute rowsum(out * dout)."""
    from mtrain_cli.kernels.triton import sparse

    if delta is not None:
        return delta.contiguous()
    assert out is not None
    return sparse.row_delta(out, dout)


def make_tile_plan(tiles: Tiles, *, slashes: bool = True, backward: bool = False) -> TilePlan:
    """Return the index of the tiles in the form that the kernels read.

    Small tables are cached with the tiles if the tiles hold all keys (`local_columns`). Block lists
    of a bitmap and the bits of covered columns are built on every call.

    Args:
        slashes: include the blocks; False for columns only.
        backward: include the transpose, which the gradient of keys needs.
    """
    from mtrain_cli.kernels.triton.sparse import TilePlan, covered_columns, list_blocks

    index, geometry = tiles.index, tiles.geometry
    assert index is not None
    assert geometry is not None
    flat = index.heads[0] * index.heads[1]
    entries: torch.Tensor | None = None
    counts: torch.Tensor | None = None
    entries_t: torch.Tensor | None = None
    counts_t: torch.Tensor | None = None
    if isinstance(index, VerticalSlash):
        if slashes:
            entries, counts = entries_t, counts_t = _cached(tiles, "diagonals", _diagonals)
        slash, listed = index.slashes, False
        column_positions = local_columns(tiles)[0].reshape(flat, -1)
        columns_below = (
            _cached(tiles, "columns below blocks", _columns_below_blocks)
            if column_positions.shape[-1]
            else None
        )
    else:
        assert isinstance(index, BlockBitmap)
        # Lists hold local blocks only, by global number. Numbers ascend in the order of the slots.
        list_inputs = (
            index.bits,
            index.slots,
            geometry.query_blocks,
            geometry.key_blocks,
            geometry.tables.first_min,
            index.block,
        )
        entries, counts = list_blocks(*list_inputs, transposed=False)
        if backward:
            entries_t, counts_t = list_blocks(*list_inputs, transposed=True)
        slash = torch.zeros(flat, index.blocks, dtype=torch.bool, device=index.bits.device)
        column_positions, columns_below, listed = None, None, True
    table = slash.reshape(flat, -1).contiguous().view(torch.uint8)
    covered = (
        covered_columns(table, column_positions, geometry.query_blocks, index.block)
        if columns_below is not None
        else None
    )
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
        entries=entries,
        counts=counts,
        entries_t=entries_t,
        counts_t=counts_t,
        slash=table,
        column_positions=column_positions if columns_below is not None else None,
        columns_below=columns_below,
        covered=covered,
        listed=listed,
        holes=geometry.holes,
        gates=index.gates.flatten(0, 1).contiguous() if isinstance(index, GatedBitmap) else None,
        gate_slots=index.slots if isinstance(index, GatedBitmap) else None,
        chunk=index.chunk if isinstance(index, GatedBitmap) else 0,
    )


def _cached(tiles: Tiles, name: str, make: Callable[[Tiles], Derived]) -> Derived:
    """Return make(tiles), cached if the tiles hold all keys; ring steps compute it anew."""
    assert tiles.geometry is not None
    if not tiles.geometry.all_keys:
        return make(tiles)
    if name not in tiles.index_cache:
        tiles.index_cache[name] = make(tiles)
    return tiles.index_cache[name]


def _diagonals(tiles: Tiles) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `TilePlan.entries` and `counts`: the chosen diagonals that occur between the shards.

    With a striped layout these are one residue class per ring step, so every key block that they
    visit is in the key shard.
    """
    index, geometry = tiles.index, tiles.geometry
    assert isinstance(index, VerticalSlash)
    assert geometry is not None
    return set_indices((index.slashes & geometry.diagonals).flatten(0, 1))


def _columns_below_blocks(tiles: Tiles) -> torch.Tensor:
    """Return `TilePlan.columns_below`."""
    index = tiles.index
    assert index is not None
    flat = index.heads[0] * index.heads[1]
    column_positions = local_columns(tiles)[0].reshape(flat, -1)
    key = f"starts of blocks, {flat} times"  # in the mask's cache: the same for all layers
    if key not in tiles.cache:
        end = (index.blocks + 1) * index.block
        tiles.cache[key] = torch.arange(
            0, end, index.block, dtype=torch.int32, device=column_positions.device
        ).repeat(flat, 1)
    return torch.searchsorted(column_positions, tiles.cache[key], out_int32=True)
