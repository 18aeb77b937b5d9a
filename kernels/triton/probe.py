"""Where the attention of a few probed queries falls: sums over the keys' columns, without scores ever in memory.

Two passes over the keys: the first finds the log-sum-exp of every probed query by tiles of keys, the second adds up probabilities per key.
Every result is written by one program, so it is bitwise repeatable.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_KEYS = 128
_ROWS = 64


@triton.jit
def _scores(Q, K, FIRST, ROWS_AT, h, kv, key, start, rows, keys, scale, stride_kn, stride_kh, HEADS, D: tl.constexpr, ROWS: tl.constexpr):
    """Scores of rows [start, start + ROWS) against a tile of keys, -inf where unseen; [ROWS, keys]."""
    d = tl.arange(0, D)
    row = start + tl.arange(0, ROWS)
    there = row < rows
    q = tl.load(Q + (row[:, None] * HEADS + h) * D + d, mask=there[:, None], other=0.0)
    k = tl.load(K + key[:, None].to(tl.int64) * stride_kn + kv * stride_kh + d, mask=(key < keys)[:, None], other=0.0)
    position = tl.load(ROWS_AT + row, mask=there, other=-1)
    first = tl.load(FIRST + row, mask=there, other=0)
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    seen = (key[None, :] >= first[:, None]) & (key[None, :] <= position[:, None]) & (key < keys)[None, :]
    return tl.where(seen, s, float("-inf"))


@triton.jit
def _lse_of_tiles(
    Q, K, FIRST, ROWS_AT, LSE, rows, keys, scale, stride_kn, stride_kh,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    h = tl.program_id(1)
    key = tile * KEYS + tl.arange(0, KEYS)
    for start in range(0, rows, ROWS):
        s = _scores(Q, K, FIRST, ROWS_AT, h, h // GROUP, key, start, rows, keys, scale, stride_kn, stride_kh, HEADS, D, ROWS)
        top = tl.maximum(tl.max(s, 1), -1e30)
        lse = top + tl.log(tl.sum(tl.exp(s - top[:, None]), 1))
        row = start + tl.arange(0, ROWS)
        tl.store(LSE + (tile * HEADS + h) * rows + row, lse, mask=row < rows)


@triton.jit
def _columns(
    Q, K, FIRST, ROWS_AT, OF_ROW, LSE, COLUMNS, rows, keys, width, groups, scale, stride_kn, stride_kh,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    h = tl.program_id(1)
    key = tile * KEYS + tl.arange(0, KEYS)
    for group in range(groups):
        total = tl.zeros([KEYS], tl.float32)
        for start in range(0, rows, ROWS):
            row = start + tl.arange(0, ROWS)
            mine = tl.load(OF_ROW + row, mask=row < rows, other=-1) == group
            if tl.max(mine.to(tl.int32), 0) > 0:
                s = _scores(Q, K, FIRST, ROWS_AT, h, h // GROUP, key, start, rows, keys, scale, stride_kn, stride_kh, HEADS, D, ROWS)
                lse = tl.load(LSE + h * rows + row, mask=row < rows, other=float("inf"))
                total += tl.sum(tl.where(mine[:, None], tl.exp(s - lse[:, None]), 0.0), 0)
        at = (h.to(tl.int64) + group * HEADS) * width + key
        tl.store(COLUMNS + at, total / rows, mask=key < width)


def probed_columns(
    q: torch.Tensor,
    k: torch.Tensor,
    first: torch.Tensor,
    positions: torch.Tensor,
    of_row: torch.Tensor,
    groups: int,
    width: int,
    scale: float,
) -> torch.Tensor:
    """Attention that each key gets from the probed queries of each group, over the number of all probed queries.

    q: [rows, heads, head_dim], the probed queries. k: [keys, kv_heads, head_dim]. first, positions: int32 [rows], the first position that
    each sees and its own. of_row: int32 [rows], the group of each. -> float32 [groups, heads, width], 0 beyond the keys.
    """
    rows, heads, dim = q.shape
    keys = len(k)
    assert k.stride(-1) == 1
    tiles = triton.cdiv(width, _KEYS)
    partial = torch.empty(tiles, heads, rows, dtype=torch.float32, device=q.device)
    shared = (rows, keys)
    shape = {"HEADS": heads, "GROUP": heads // k.shape[1], "D": dim, "KEYS": _KEYS, "ROWS": _ROWS, "num_warps": 4, "num_stages": 2}
    q = q.contiguous()
    _lse_of_tiles[(tiles, heads)](q, k, first, positions, partial, *shared, scale, k.stride(0), k.stride(1), **shape)
    lse = partial.logsumexp(0)
    columns = torch.empty(groups, heads, width, dtype=torch.float32, device=q.device)
    _columns[(tiles, heads)](q, k, first, positions, of_row, lse, columns, *shared, width, groups, scale, k.stride(0), k.stride(1), **shape)
    return columns
