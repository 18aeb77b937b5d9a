"""Single key columns, packed side by side: gathered before the kernels run, and their gradients added back after.

On a GPU with CuPy the work is done by `kernels/cuda/columns.cu`, elsewhere by PyTorch; both add in the same order of heads.
"""

from __future__ import annotations

import numpy as np
import torch

from mtrain_cli.attention.cupy_kernels import cuda_kernels_usable
from mtrain_cli.attention.index import Index, VerticalSlash
from mtrain_cli.attention.kernel import accumulation_dtype
from mtrain_cli.attention.tiles import BlockGeometry, Tiles

COLUMN_TILE = 128  # packed columns are filled up to a multiple of this
_WARPS = 8


def pack_columns(
    k: torch.Tensor, v: torch.Tensor, tiles: Tiles
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """k, v [batch, keys, kv_heads, head_dim] -> the keys and values of each query head's columns, [batch, heads, width, head_dim].

    None where the index has no columns. Places that hold no column are 0 and must be masked.
    """
    if not isinstance(tiles.index, VerticalSlash) or not tiles.index.columns.shape[-1]:
        return None
    return pack_rows(k, v, local_columns(tiles)[1])


def pack_rows(
    k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """slots: int32 [batch, heads, width], the key slot of each column, -1 = none -> packed keys and values, as `pack_columns`."""
    batch, heads, width = slots.shape
    group, dim = heads // k.shape[2], k.shape[3]
    if cuda_kernels_usable(k):
        from mtrain_cli.kernels.cuda.nvrtc import launch

        packed = tuple(
            torch.empty(batch, heads, width, dim, dtype=k.dtype, device=k.device) for _ in range(2)
        )
        unit = 16 // k.element_size()
        assert not any(s % unit for t in (k, v) for s in (*t.stride()[:3], dim)), (
            "rows start at multiples of 16 bytes"
        )
        strides = (np.int64(s // unit) for t in (k, v) for s in t.stride()[:3])
        grid = (-(-width // _WARPS), batch * heads)
        launch(
            "columns",
            "pack_columns",
            grid,
            32 * _WARPS,
            k,
            v,
            slots,
            *packed,
            *strides,
            heads,
            group,
            width,
            dim // unit,
        )
        return packed[0], packed[1]
    none, at = (slots < 0)[..., None], slots.clamp(min=0)
    rows = torch.arange(batch, device=k.device)[:, None, None]
    kv_heads = (torch.arange(heads, device=k.device) // group)[None, :, None]
    return k[rows, at, kv_heads].masked_fill_(none, 0.0), v[rows, at, kv_heads].masked_fill_(
        none, 0.0
    )


def add_column_gradients(
    dk: torch.Tensor,
    dv: torch.Tensor,
    columns_dk: torch.Tensor,
    columns_dv: torch.Tensor,
    tiles: Tiles,
) -> None:
    """Adds the gradients of packed columns to dk and dv [batch, keys, kv_heads, head_dim], float32 or bfloat16, in place and in one order.

    columns_dk, columns_dv: float32 [parts, batch, heads, width, head_dim], parts to be added.
    """
    add_rows(dk, dv, columns_dk, columns_dv, local_columns(tiles)[1])


def add_rows(
    dk: torch.Tensor,
    dv: torch.Tensor,
    columns_dk: torch.Tensor,
    columns_dv: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """As `add_column_gradients`, for columns whose key slots are given: int32 [batch, heads, width], those without one (-1) at the end."""
    batch, keys, kv_heads, dim = dk.shape
    heads, width = slots.shape[1:]
    group = heads // kv_heads
    if cuda_kernels_usable(dk):
        from mtrain_cli.kernels.cuda.nvrtc import launch

        assert dk.is_contiguous()
        assert dv.is_contiguous()
        counts = (slots >= 0).sum(-1, dtype=torch.int32)
        launch(
            "columns", f"add_column_gradients_{str(dk.dtype).removeprefix('torch.')}", (-(-width // _WARPS), batch * heads), 32 * _WARPS,
            dk, dv, columns_dk, columns_dv, slots, counts,
            len(columns_dk), np.int64(columns_dk[0].numel()), np.int64(keys), kv_heads, group,
            width, dim,
        )  # fmt: skip
        return
    real, at = slots >= 0, slots.clamp(min=0).long().unflatten(1, (kv_heads, group))
    for target, source in ((dk, columns_dk), (dv, columns_dv)):
        # Within one head no column stands twice; what holds no column adds 0.
        source = source.sum(0).masked_fill(~real[..., None], 0.0).unflatten(1, (kv_heads, group))
        whole = target.to(accumulation_dtype(target.dtype))
        for g in range(group):
            index = at[:, :, g].transpose(1, 2)[..., None].expand(-1, -1, -1, dim)
            whole.scatter_add_(1, index, source[:, :, g].transpose(1, 2))
        target.copy_(whole)


def local_columns(tiles: Tiles) -> tuple[torch.Tensor, torch.Tensor]:
    """The index's columns among the keys at hand: int32 [batch, heads, width], ascending, ``blocks * block`` where there is none, and the
    key slot of each, int32, -1 where there is none. width is a multiple of `COLUMN_TILE`.

    Kept with tiles of all keys, which a layer has one of; the steps of a ring would keep as much each, of which most holds no column.
    """
    index, geometry = tiles.index, tiles.geometry
    assert index is not None
    assert geometry is not None
    if "columns" in tiles.of_index:
        return tiles.of_index["columns"]
    columns = whole_columns(index)
    slots = key_slots(columns, geometry)
    if geometry.all_keys:
        tiles.of_index["columns"] = columns, slots
        return columns, slots
    # Slots ascend as positions do.
    columns, order = columns.masked_fill(slots < 0, index.blocks * index.block).sort(-1)
    return columns, slots.gather(-1, order)


def whole_columns(index: Index) -> torch.Tensor:
    """`VerticalSlash.columns`, filled up to a multiple of `COLUMN_TILE`."""
    assert isinstance(index, VerticalSlash)
    short = -index.columns.shape[-1] % COLUMN_TILE
    columns = (
        torch.nn.functional.pad(index.columns, (0, short), value=index.blocks * index.block)
        if short
        else index.columns
    )
    return columns.contiguous()


def key_slots(columns: torch.Tensor, geometry: BlockGeometry) -> torch.Tensor:
    """columns: int32, positions, ``blocks * block`` for none -> int32, their key slots, -1 where the keys at hand have none."""
    if geometry.all_keys:
        return columns.masked_fill(columns == geometry.blocks * geometry.block, -1)
    return (geometry.key_starts[columns // geometry.block] + columns % geometry.block).clamp_(
        min=-1
    )
