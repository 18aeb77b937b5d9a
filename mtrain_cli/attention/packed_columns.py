"""Gather single key columns for the kernels, and add their gradients to dk and dv."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mtrain_cli.attention.index import Index, VerticalSlash
from mtrain_cli.attention.mask_tables import BlockGeometry
from mtrain_cli.attention.partials import Pair, accumulation_dtype, cuda_kernels_usable
from mtrain_cli.attention.tiles import Tiles

COLUMN_TILE = 128  # packed columns are padded to a multiple of this
_WARPS = 8


def pack_columns(k: Tensor, v: Tensor, tiles: Tiles) -> Pair | None:
    """Return keys and values of each query head's columns, [batch, heads, width, head_dim].

    None if the index has no columns. Unused entries hold 0, and the kernel must mask them.
    """
    if not isinstance(tiles.index, VerticalSlash) or not tiles.index.columns.shape[-1]:
        return None
    return pack_rows(k, v, local_columns(tiles)[1])


def pack_rows(k: Tensor, v: Tensor, slots: Tensor) -> Pair:
    """Return keys and values as `pack_columns` does, for given key slots."""
    batch, heads, width = slots.shape
    group, dim = heads // k.shape[2], k.shape[3]
    if cuda_kernels_usable(k):
        from mtrain_cli.kernels.cuda.nvrtc import launch

        packed = tuple(k.new_empty(batch, heads, width, dim) for _ in range(2))
        unit = 16 // k.element_size()
        assert not any(s % unit for t in (k, v) for s in (*t.stride()[:3], dim)), (
            "rows must start at multiples of 16 bytes"
        )
        strides = (np.int64(s // unit) for t in (k, v) for s in t.stride()[:3])
        launch(
            "columns", "pack_columns", (-(-width // _WARPS), batch * heads), 32 * _WARPS,
            k, v, slots, *packed, *strides, heads, group, width, dim // unit,
        )  # fmt: skip
        return packed[0], packed[1]
    empty, clamped = (slots < 0)[..., None], slots.clamp(min=0)
    rows = torch.arange(batch, device=k.device)[:, None, None]
    kv_heads = (torch.arange(heads, device=k.device) // group)[None, :, None]
    packed_k, packed_v = (t[rows, clamped, kv_heads].masked_fill_(empty, 0.0) for t in (k, v))
    return packed_k, packed_v


def add_column_gradients(
    dk: Tensor, dv: Tensor, columns_dk: Tensor, columns_dv: Tensor, slots: Tensor
) -> None:
    """Add the gradients of packed columns to dk and dv in place, in a fixed order.

    dk, dv: [batch, keys, kv_heads, head_dim], float32 or bfloat16.
    columns_dk, columns_dv: float32 [parts, batch, heads, width, head_dim], parts to add up.
    slots: int32 [batch, heads, width] of the columns (`local_columns`), unused (-1) last.
    """
    batch, keys, kv_heads, dim = dk.shape
    heads, width = slots.shape[1:]
    group = heads // kv_heads
    if cuda_kernels_usable(dk):
        from mtrain_cli.kernels.cuda.nvrtc import launch

        assert dk.is_contiguous()
        assert dv.is_contiguous()
        launch(
            "columns", f"add_column_gradients_{str(dk.dtype).removeprefix('torch.')}",
            (-(-width // _WARPS), batch * heads), 32 * _WARPS,
            dk, dv, columns_dk, columns_dv, slots,
            len(columns_dk), np.int64(columns_dk[0].numel()), np.int64(keys), kv_heads, group,
            width, dim,
        )  # fmt: skip
        return
    real, clamped = slots >= 0, slots.clamp(min=0).long().unflatten(1, (kv_heads, group))
    for target, source in ((dk, columns_dk), (dv, columns_dv)):
        # A head has no column twice, so one scatter per head adds each number once, in a fixed
        # order. Empty places add 0.
        source = source.sum(0).masked_fill(~real[..., None], 0.0).unflatten(1, (kv_heads, group))
        total = target.to(accumulation_dtype(target.dtype))
        for g in range(group):
            index = clamped[:, :, g].transpose(1, 2)[..., None].expand(-1, -1, -1, dim)
            total.scatter_add_(1, index, source[:, :, g].transpose(1, 2))
        target.copy_(total)


def local_columns(tiles: Tiles) -> Pair:
    """Return (positions, key slots) of the index's columns among local keys, int32.

    Both are [batch, heads, width], positions ascend, unused entries have position ``blocks *
    block`` and slot -1, and width is a multiple of `COLUMN_TILE`. The tiles cache them if they hold
    all keys, but not in a ring, where every step would keep a table of mostly unused entries.
    """
    index, geometry = tiles.index, tiles.geometry
    assert index is not None
    assert geometry is not None
    if "columns" in tiles.index_cache:
        return tiles.index_cache["columns"]
    columns = whole_columns(index)
    slots = key_slots(columns, geometry)
    if geometry.all_keys:
        tiles.index_cache["columns"] = columns, slots
        return columns, slots
    # Sorting by position also sorts the slots.
    columns, order = columns.masked_fill(slots < 0, index.blocks * index.block).sort(-1)
    return columns, slots.gather(-1, order)


def whole_columns(index: Index) -> Tensor:
    """Return `VerticalSlash.columns`, padded to a multiple of `COLUMN_TILE`."""
    assert isinstance(index, VerticalSlash)
    columns = index.columns
    if missing := -columns.shape[-1] % COLUMN_TILE:
        columns = torch.nn.functional.pad(columns, (0, missing), value=index.blocks * index.block)
    return columns.contiguous()


def key_slots(columns: Tensor, geometry: BlockGeometry) -> Tensor:
    """Return the local key slot of each position, int32; -1 if the key is not local."""
    block = geometry.block
    if geometry.all_keys:
        return torch.where(columns == geometry.blocks * block, -1, columns)
    return (geometry.key_starts[columns // block] + columns % block).clamp_(min=-1)


@dataclass(frozen=True)
class SharedColumns:
    """The columns of one layer's index.

    slots: int32 [batch, heads, width], slot of each column's key on this worker; -1 if another
        worker holds the key or if the entry is unused.
    """

    tiles: Tiles
    slots: Tensor

    @staticmethod
    def make(whole: Tiles, own: Tiles) -> SharedColumns | None:
        """Return the columns of a layer, or None if the layer's index has no columns."""
        index, geometry = whole.index, own.geometry
        assert geometry is not None
        if not isinstance(index, VerticalSlash) or not index.columns.shape[-1]:
            return None
        # The slots depend on this worker's keys, so cache them with `own`, not with `whole`.
        if "slots" not in own.index_cache:
            own.index_cache["slots"] = key_slots(whole_columns(index), geometry)
        return SharedColumns(whole, own.index_cache["slots"])

    def pack(self, k: Tensor, v: Tensor) -> Tensor:
        """Return this worker's part of the packed tensor, [2, batch, heads, width, head_dim]."""
        return torch.stack(pack_rows(k, v, self.slots))

    def add_gradients(self, dk: Tensor, dv: Tensor, gradients: Tensor) -> None:
        """Add the gradients of this worker's columns to dk and dv, in place."""
        # Places without a slot must come last.
        absent = self.slots < 0
        order = torch.argsort(absent.to(torch.int8), dim=-1, stable=True)
        slots = self.slots.gather(-1, order)
        rows = order[None, ..., None].expand_as(gradients)
        own = gradients.gather(3, rows)
        add_column_gradients(dk, dv, own[:1], own[1:], slots)

    def seen(self) -> Tensor:
        """Return which query sees which column, bool [batch, heads, queries, width]."""
        index, geometry = self.tiles.index, self.tiles.geometry
        assert isinstance(index, VerticalSlash)
        assert geometry is not None
        positions = self.tiles.positions()[0]
        columns = whole_columns(index).long()
        first = geometry.tables.first[:, positions]
        rows_at = positions[:, None]
        allowed = (columns[:, :, None] >= first[:, None, :, None]) & (
            columns[:, :, None] <= rows_at
        )
        diagonals = (rows_at // index.block - columns[:, :, None] // index.block).clamp(min=0)
        table = index.slashes[:, :, None].expand(-1, -1, len(positions), -1)
        return allowed & ~table.gather(-1, diagonals)
