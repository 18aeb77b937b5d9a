"""Where the attention of a few probed queries falls: sums over the keys' columns, without scores ever in memory.

Two passes over the keys of a shard, which may be any blocks of the sequence: the first finds the log-sum-exp of every probed query by tiles
of keys, the second, given that over all tiles of all shards, adds up probabilities per key. A tile lies within a block and every result is
written by one program, so both are bitwise repeatable, whichever worker holds a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 64


@triton.jit
def _tile_of_keys(KEY_BLOCKS, tile, BLOCK: tl.constexpr, KEYS: tl.constexpr):
    """-> slots and positions of the keys of a tile."""
    within = tl.arange(0, KEYS)
    slot = tile * KEYS
    number = tl.load(KEY_BLOCKS + slot // BLOCK)
    return slot + within, number * BLOCK + slot % BLOCK + within


@triton.jit
def _scores(
    Q, K, FIRST, ROWS_AT, h, kv, slot, key, start, rows, keys, scale, stride_kn, stride_kh, HEADS, D: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Scores of rows [start, start + ROWS) against a tile of keys, -inf where unseen or not finite; [ROWS, keys]."""
    d = tl.arange(0, D)
    row = start + tl.arange(0, ROWS)
    there = row < rows
    q = tl.load(Q + (row[:, None] * HEADS + h) * D + d, mask=there[:, None], other=0.0)
    k = tl.load(
        K + slot[:, None].to(tl.int64) * stride_kn + kv.to(tl.int64) * stride_kh + d,
        mask=(slot < keys)[:, None],
        other=0.0,
    )
    position = tl.load(ROWS_AT + row, mask=there, other=-1)
    first = tl.load(FIRST + row, mask=there, other=0)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    seen = (
        (key[None, :] >= first[:, None])
        & (key[None, :] <= position[:, None])
        & (slot < keys)[None, :]
    )
    return tl.where(seen & (s < float("inf")), s, float("-inf"))


@triton.jit
def _lse_of_tiles(
    Q, K, FIRST, ROWS_AT, KEY_BLOCKS, LSE, rows, keys, scale, stride_kn, stride_kh,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    slot, key = _tile_of_keys(KEY_BLOCKS, tile, BLOCK, KEYS)
    for start in range(0, rows, ROWS):
        s = _scores(
            Q,
            K,
            FIRST,
            ROWS_AT,
            h,
            h // GROUP,
            slot,
            key,
            start,
            rows,
            keys,
            scale,
            stride_kn,
            stride_kh,
            HEADS,
            D,
            ROWS,
        )
        top = tl.maximum(tl.max(s, 1), -1e30)
        lse = top + tl.log(tl.sum(tl.exp(s - top[:, None]), 1))
        row = start + tl.arange(0, ROWS)
        tl.store(LSE + (tile * HEADS + h) * rows + row, lse, mask=row < rows)


@triton.jit(do_not_specialize=["begin", "groups"])
def _columns(
    Q, K, FIRST, ROWS_AT, KEY_BLOCKS, OF_ROW, LSE, COLUMNS, rows, keys, width, begin, groups,
    scale, stride_kn, stride_kh,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    slot, key = _tile_of_keys(KEY_BLOCKS, tile, BLOCK, KEYS)
    for group in range(groups):
        total = tl.zeros([KEYS], tl.float32)
        for start in range(0, rows, ROWS):
            row = start + tl.arange(0, ROWS)
            mine = tl.load(OF_ROW + row, mask=row < rows, other=-1) == begin + group
            if tl.max(mine.to(tl.int32), 0) > 0:
                s = _scores(
                    Q,
                    K,
                    FIRST,
                    ROWS_AT,
                    h,
                    h // GROUP,
                    slot,
                    key,
                    start,
                    rows,
                    keys,
                    scale,
                    stride_kn,
                    stride_kh,
                    HEADS,
                    D,
                    ROWS,
                )
                lse = tl.load(LSE + h * rows + row, mask=row < rows, other=float("inf"))
                total += tl.sum(tl.where(mine[:, None], tl.exp(s - lse[:, None]), 0.0), 0)
        at = (h + group * HEADS) * width + slot
        tl.store(COLUMNS + at, total / rows, mask=slot < width)


def tile_lse(
    q: torch.Tensor,
    k: torch.Tensor,
    first: torch.Tensor,
    positions: torch.Tensor,
    key_blocks: torch.Tensor,
    block: int,
    tile: int,
    scale: float,
) -> torch.Tensor:
    """Log-sum-exp of the probed queries over each tile of keys.

    q: [rows, heads, head_dim], the probed queries. k: [keys, kv_heads, head_dim], the keys of a shard. first, positions: int32 [rows], the
    first position that each query sees and its own. key_blocks: int32 [local blocks], the block of the sequence that each block of the keys
    is. tile: keys of a tile, a power of two of at least 16 that divides ``block``.
    -> float32 [local blocks * block / tile, heads, rows], natural logarithm, -inf where nothing is seen.
    """
    rows, heads = q.shape[:2]
    tiles = len(key_blocks) * block // tile
    lse = torch.empty(tiles, heads, rows, dtype=torch.float32, device=q.device)
    shared = (rows, len(k), scale, *_key_strides(k))
    _lse_of_tiles[(tiles, heads)](
        q.contiguous(), k, first, positions, key_blocks, lse, *shared, **_shape(q, k, block, tile)
    )
    return lse


def probed_columns(
    q: torch.Tensor,
    k: torch.Tensor,
    first: torch.Tensor,
    positions: torch.Tensor,
    key_blocks: torch.Tensor,
    block: int,
    tile: int,
    scale: float,
    lse: torch.Tensor,
    of_row: torch.Tensor,
    groups: range,
    width: int,
) -> torch.Tensor:
    """Attention that each key of a shard gets from the probed queries of each of some groups, over the number of all probed queries.

    lse: float32 [heads, rows], contiguous, over the keys of all shards; +inf for a query that sees nothing. of_row: int32 [rows], the group
    of each; groups: their numbers. The rest as for `tile_lse`. -> float32 [groups, heads, width], 0 beyond the keys.
    """
    rows, heads = q.shape[:2]
    tiles = len(key_blocks) * block // tile
    assert width <= tiles * tile
    columns = torch.empty(len(groups), heads, width, dtype=torch.float32, device=q.device)
    shared = (rows, len(k), width, groups.start, len(groups), scale, *_key_strides(k))
    _columns[(tiles, heads)](
        q.contiguous(), k, first, positions, key_blocks, of_row, lse, columns, *shared, **_shape(q, k, block, tile)
    )  # fmt: skip
    return columns


def _key_strides(k: torch.Tensor) -> tuple[int, int]:
    assert k.stride(-1) == 1
    return k.stride(0), k.stride(1)


def _shape(q: torch.Tensor, k: torch.Tensor, block: int, tile: int) -> dict[str, int]:
    heads, dim = q.shape[1:]
    group = heads // k.shape[1]
    return {
        "HEADS": heads,
        "GROUP": group,
        "D": dim,
        "BLOCK": block,
        "KEYS": tile,
        "ROWS": _ROWS,
        "num_warps": 4,
        "num_stages": 2,
    }
