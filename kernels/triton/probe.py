"""Sum the attention that each key gets from a few probed queries, without storing the scores.

1. `tile_lse` computes every probed query's log-sum-exp over each tile of a shard's keys.
2. The caller merges the log-sum-exps over the tiles of all shards.
3. `probed_columns` adds up the probabilities of each key, and `largest_attention` returns the
   largest ones of a group of heads.

A shard may hold any blocks of the sequence. A tile lies within a block, and a single program writes
each result, so results are bitwise repeatable and do not depend on which worker holds a block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 64


@triton.jit
def _tile_of_keys(KEY_BLOCKS, tile, BLOCK: tl.constexpr, KEYS: tl.constexpr):
    """Return the slots and the positions of the keys in a tile."""
    tile_offsets = tl.arange(0, KEYS)
    slot = tile * KEYS
    number = tl.load(KEY_BLOCKS + slot // BLOCK)
    return slot + tile_offsets, number * BLOCK + slot % BLOCK + tile_offsets


@triton.jit
def _scores(
    Q, K, FIRST, ROW_POSITIONS, h, kv, slot, key, start, rows, keys, scale, stride_kn, stride_kh,
    HEADS, D: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Return the scores of queries [start, start + ROWS) and a tile of keys, [ROWS, keys].

    The score is -inf if the query does not see the key, or if the product is +inf or NaN.
    """
    d = tl.arange(0, D)
    row = start + tl.arange(0, ROWS)
    valid = row < rows
    q = tl.load(Q + (row[:, None] * HEADS + h) * D + d, mask=valid[:, None], other=0.0)
    k = tl.load(
        K + slot[:, None].to(tl.int64) * stride_kn + kv.to(tl.int64) * stride_kh + d,
        mask=(slot < keys)[:, None],
        other=0.0,
    )
    position = tl.load(ROW_POSITIONS + row, mask=valid, other=-1)
    first = tl.load(FIRST + row, mask=valid, other=0)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    visible = (
        (key[None, :] >= first[:, None])
        & (key[None, :] <= position[:, None])
        & (slot < keys)[None, :]
    )
    return tl.where(visible & (s < float("inf")), s, float("-inf"))


@triton.jit
def _lse_of_tiles(
    Q, K, FIRST, ROW_POSITIONS, KEY_BLOCKS, LSE, rows, keys, scale, stride_kn, stride_kh,
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
            ROW_POSITIONS,
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
        highest = tl.maximum(tl.max(s, 1), -1e30)
        lse = highest + tl.log(tl.sum(tl.exp(s - highest[:, None]), 1))
        row = start + tl.arange(0, ROWS)
        tl.store(LSE + (tile * HEADS + h) * rows + row, lse, mask=row < rows)


@triton.jit(do_not_specialize=["begin", "groups"])
def _columns(
    Q, K, FIRST, ROW_POSITIONS, KEY_BLOCKS, ROW_GROUPS, LSE, COLUMNS, rows, keys, width, begin,
    groups,
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
            in_group = tl.load(ROW_GROUPS + row, mask=row < rows, other=-1) == begin + group
            if tl.max(in_group.to(tl.int32), 0) > 0:
                s = _scores(
                    Q,
                    K,
                    FIRST,
                    ROW_POSITIONS,
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
                total += tl.sum(tl.where(in_group[:, None], tl.exp(s - lse[:, None]), 0.0), 0)
        offsets = (h + group * HEADS) * width + slot
        tl.store(COLUMNS + offsets, total / rows, mask=slot < width)


@triton.jit
def _largest(
    Q, K, FIRST, ROW_POSITIONS, KEY_BLOCKS, LSE, OUT, rows, keys, scale, stride_kn, stride_kh,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    kv = tl.program_id(1).to(tl.int64)
    slot, key = _tile_of_keys(KEY_BLOCKS, tl.program_id(0), BLOCK, KEYS)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        largest = tl.zeros([ROWS, KEYS], tl.float32)
        for head in range(GROUP):
            h = kv * GROUP + head
            s = _scores(
                Q, K, FIRST, ROW_POSITIONS, h, kv, slot, key, start, rows, keys, scale, stride_kn,
                stride_kh, HEADS, D, ROWS,
            )  # fmt: skip
            lse = tl.load(LSE + h * rows + row, mask=row < rows, other=float("inf"))
            largest = tl.maximum(largest, tl.exp(s - lse[:, None]))
        place = (kv * rows + row[:, None]) * keys + slot[None, :]
        tl.store(OUT + place, largest, mask=(row < rows)[:, None] & (slot < keys)[None, :])


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
    """Return each probed query's log-sum-exp over each tile of keys.

    Args:
        q: [rows, heads, head_dim], the probed queries.
        k: [keys, kv_heads, head_dim], the keys of a shard.
        first, positions: int32 [rows], each query's first visible position, and its own position.
        key_blocks: int32 [local blocks], global block number of each local key block.
        tile: keys per tile, a power of two that divides ``block`` and is at least 16.

    Returns:
        float32 [local blocks * block / tile, heads, rows], natural logarithm; -inf if the query
        sees no key of the tile.
    """
    rows, heads = q.shape[:2]
    tiles = len(key_blocks) * block // tile
    lse = torch.empty(tiles, heads, rows, dtype=torch.float32, device=q.device)
    shared = (rows, len(k), scale, *_key_strides(k))
    _lse_of_tiles[(tiles, heads)](
        q.contiguous(),
        k,
        first,
        positions,
        key_blocks,
        lse,
        *shared,
        **_shape_arguments(q, k, block, tile),
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
    row_groups: torch.Tensor,
    groups: range,
    width: int,
) -> torch.Tensor:
    """Return the attention that each key gets from each group of probed queries.

    Sums are divided by the number of all probed queries.

    Args:
        lse: float32 [heads, rows], contiguous, over the keys of all shards; +inf for a query that
            sees no key.
        row_groups: int32 [rows], group of each probed query.
        groups: numbers of the groups to compute.
        width: number of columns to return, at least the number of keys.

    The other arguments are those of `tile_lse`.

    Returns:
        float32 [groups, heads, width]; 0 in columns beyond the keys.
    """
    rows, heads = q.shape[:2]
    tiles = len(key_blocks) * block // tile
    assert width <= tiles * tile
    columns = torch.empty(len(groups), heads, width, dtype=torch.float32, device=q.device)
    shared = (rows, len(k), width, groups.start, len(groups), scale, *_key_strides(k))
    _columns[(tiles, heads)](
        q.contiguous(), k, first, positions, key_blocks, row_groups, lse, columns, *shared,
        **_shape_arguments(q, k, block, tile)
    )  # fmt: skip
    return columns


def largest_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    first: torch.Tensor,
    positions: torch.Tensor,
    key_blocks: torch.Tensor,
    block: int,
    tile: int,
    scale: float,
    lse: torch.Tensor,
) -> torch.Tensor:
    """Return the attention that each probed query of a group of heads gives to each key, at most.

    The arguments are those of `probed_columns`.

    Returns:
        float32 [kv_heads, rows, keys].
    """
    rows, keys = len(q), len(k)
    largest = torch.empty(k.shape[1], rows, keys, dtype=torch.float32, device=q.device)
    _largest[(len(key_blocks) * block // tile, k.shape[1])](
        q.contiguous(), k, first, positions, key_blocks, lse, largest, rows, keys, scale,
        *_key_strides(k), **_shape_arguments(q, k, block, tile)
    )  # fmt: skip
    return largest


def _key_strides(k: torch.Tensor) -> tuple[int, int]:
    assert k.stride(-1) == 1
    return k.stride(0), k.stride(1)


def _shape_arguments(q: torch.Tensor, k: torch.Tensor, block: int, tile: int) -> dict[str, int]:
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
