"""Find the largest score in each pair of a query block and a key block, without storing scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS, _KEYS = 128, 64  # most queries and keys of a tile


@triton.jit
def _lse(
    Q, K, FIRST, NUMBERS, OUT, scale, local,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    slot = local - 1 - tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    number = tl.load(NUMBERS + slot)
    row, d, key = tl.program_id(2) * ROWS + tl.arange(0, ROWS), tl.arange(0, D), tl.arange(0, KEYS)
    kv_heads = HEADS // GROUP
    at = slot.to(tl.int64) * BLOCK + row
    q = tl.load(Q + (at[:, None] * HEADS + h) * D + d)
    own = number * BLOCK + row
    first = tl.load(FIRST + own)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    for block in range(0, number + 1):
        of_block = tl.full([ROWS], float("-inf"), tl.float32)
        for begin in tl.static_range(0, BLOCK, KEYS):
            position = block * BLOCK + begin + key
            place = position.to(tl.int64)[:, None] * kv_heads + h // GROUP
            k = tl.load(K + place * D + d)
            s = tl.dot(q, tl.trans(k)) * scale
            seen = (position[None, :] >= first[:, None]) & (position[None, :] <= own[:, None])
            of_block = tl.maximum(of_block, tl.max(tl.where(seen, s, float("-inf")), 1))
        higher = tl.maximum(largest, of_block)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(largest - base) + tl.exp(of_block - base)
        largest = higher
    lse = tl.where(total > 0, largest + tl.log(total), float("inf"))
    tl.store(OUT + (h * local + slot) * BLOCK + row, lse)


@triton.jit
def _largest(
    Q, K, LSE, FIRST, NUMBERS, LEVEL, OUT, scale, local, blocks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STARTS: tl.constexpr,
):  # fmt: skip
    # Late rows have the most work, so they start first.
    slot = local - 1 - tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    split, splits = tl.program_id(2), tl.num_programs(2)
    number = tl.load(NUMBERS + slot)
    d, key = tl.arange(0, D), tl.arange(0, KEYS)
    kv_heads = HEADS // GROUP
    if STARTS:
        level = tl.load(LEVEL)
    for block in range(split, number, splits):
        largest = float("-inf")
        start_row = BLOCK
        for start in tl.static_range(0, BLOCK, ROWS):
            row = start + tl.arange(0, ROWS)
            at = slot.to(tl.int64) * BLOCK + row
            q = tl.load(Q + (at[:, None] * HEADS + h) * D + d)
            lse = tl.load(LSE + (h * local + slot) * BLOCK + row)
            first = tl.load(FIRST + number * BLOCK + row)
            for begin in tl.static_range(0, BLOCK, KEYS):
                position = block * BLOCK + begin + key
                place = position.to(tl.int64)[:, None] * kv_heads + h // GROUP
                k = tl.load(K + place * D + d)
                s = tl.dot(q, tl.trans(k)) * scale - lse[:, None]
                seen = (position[None, :] >= first[:, None]) & (s < float("inf"))
                of_rows = tl.max(tl.where(seen, s, float("-inf")), 1)
                if STARTS:
                    start_row = tl.minimum(
                        start_row, tl.min(tl.where(of_rows >= level, row, BLOCK), 0)
                    )
                else:
                    largest = tl.maximum(largest, tl.max(of_rows, 0))
        tl.store(OUT + (h * local + slot) * blocks + block, start_row if STARTS else largest)


def lse_of_largest(
    q: torch.Tensor,
    k: torch.Tensor,
    first: torch.Tensor,
    numbers: torch.Tensor,
    scale: float,
    block: int,
) -> torch.Tensor:
    """Return each query's log-sum-exp over key blocks of its largest ``scale * q k`` in each.

    Arguments are those of `largest_scores`.

    Returns:
        float32 [heads, local blocks, block]; +inf for a query that sees no key.
    """
    q, k = q.contiguous(), k.contiguous()
    local, _, heads, dim = q.shape
    result = torch.empty(heads, local, block, device=q.device)
    rows = min(block, _ROWS)
    _lse[(local, heads, block // rows)](
        q, k, first.contiguous(), numbers, result, scale, local,
        HEADS=heads, GROUP=heads // k.shape[1], D=dim, BLOCK=block, ROWS=rows,
        KEYS=min(block, _KEYS), num_warps=4 if dim <= 64 else 8, num_stages=3,
    )  # fmt: skip
    return result


def largest_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    first: torch.Tensor,
    numbers: torch.Tensor,
    scale: float,
    block: int,
    level: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the largest of ``scale * q k - lse`` in each pair of a query block and a key block.

    With a level, return instead the first query of the query block that reaches it for any key.

    Args:
        q: [local blocks, block, heads, dim], contiguous.
        k: [blocks * block, kv_heads, dim], contiguous, all keys of the sequence in order.
        lse: float32 [heads, local blocks, block]; +inf for a query that sees no key.
        first: int32 [blocks, block], position of the first key that each query sees.
        numbers: int32 [local blocks], block number of each local query block.
        level: float32, a scalar.

    Returns:
        float32 [heads, local blocks, blocks]; -inf from the query block itself on. With a level,
        int32, and ``block`` if no query reaches it.
    """
    local, _, heads, dim = q.shape
    blocks, kv_heads = len(first), k.shape[1]
    shape, device = (heads, local, blocks), q.device
    if level is None:
        result = torch.full(shape, float("-inf"), device=device)
    else:
        result = torch.full(shape, block, dtype=torch.int32, device=device)
    splits = 1 if local * heads >= 512 else 8
    _largest[(local, heads, splits)](
        q, k, lse.contiguous(), first.contiguous(), numbers, lse if level is None else level,
        result, scale, local, blocks,
        HEADS=heads, GROUP=heads // kv_heads, D=dim, BLOCK=block, ROWS=min(block, _ROWS),
        KEYS=min(block, _KEYS), STARTS=level is not None, num_warps=4 if dim <= 64 else 8,
        num_stages=3,
    )  # fmt: skip
    return result
