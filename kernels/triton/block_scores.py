"""Rank the pairs of a query block and a key block by their scores, without storing scores."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_KEYS = 64  # most keys of a tile
_MOST_BYTES = 1 << 28  # of the largest scores of queries and key blocks
_PROGRAMS = 512  # fewer are split


@triton.jit
def _maxima(
    Q, K, FIRST, NUMBERS, OUT, scale, blocks, local, start,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    # Late rows have the most work, so they start first.
    slot = local - 1 - tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    split, splits = tl.program_id(2), tl.num_programs(2)
    number = tl.load(NUMBERS + start + slot)
    row, d, key = tl.arange(0, BLOCK), tl.arange(0, D), tl.arange(0, KEYS)
    kv_heads = HEADS // GROUP
    at = (start + slot).to(tl.int64) * BLOCK + row
    q = tl.load(Q + (at[:, None] * HEADS + h) * D + d)
    own = number * BLOCK + row
    first = tl.load(FIRST + own)
    latest = tl.max(first, 0)
    out = OUT + (h * local + slot) * blocks * BLOCK + row
    for block in range(split, number + 1, splits):
        largest = tl.full([BLOCK], float("-inf"), tl.float32)
        hides = (block == number) | (latest > block * BLOCK)
        for begin in tl.static_range(0, BLOCK, KEYS):
            position = block * BLOCK + begin + key
            place = position.to(tl.int64)[:, None] * kv_heads + h // GROUP
            k = tl.load(K + place * D + d)
            s = tl.dot(q, tl.trans(k))
            if hides:
                seen = (position[None, :] >= first[:, None]) & (position[None, :] <= own[:, None])
                s = tl.where(seen, s, float("-inf"))
            largest = tl.maximum(largest, tl.max(s, 1))
        tl.store(out + block * BLOCK, largest * scale)


@triton.jit
def _rank(
    MAXIMA, NUMBERS, LSE, RANKS, blocks, local, start, whole, BLOCK: tl.constexpr,
    PART: tl.constexpr,
):  # fmt: skip
    slot, h = tl.program_id(0), tl.program_id(1).to(tl.int64)
    number = tl.load(NUMBERS + start + slot)
    row, part = tl.arange(0, BLOCK), tl.arange(0, PART)
    maxima = MAXIMA + (h * local + slot) * blocks * BLOCK + row
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, number + 1, PART):
        block = (begin + part)[:, None]
        s = tl.load(maxima + block * BLOCK, mask=block <= number, other=float("-inf"))
        higher = tl.maximum(largest, tl.max(s, 0))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(largest - base) + tl.sum(tl.exp(s - base[None, :]), 0)
        largest = higher
    lse = tl.where(total > 0, largest + tl.log(total), float("inf"))
    place = h * whole + start + slot
    tl.store(LSE + place * BLOCK + row, lse)
    for begin in range(0, number, PART):
        block = begin + part
        mask = block < number
        s = tl.load(maxima + block[:, None] * BLOCK, mask=mask[:, None], other=float("-inf"))
        tl.store(RANKS + place * blocks + block, tl.max(s - lse[None, :], 1), mask=mask)


@triton.jit
def _first_rows(
    Q, K, LSE, FIRST, NUMBERS, CHOSEN, LEVEL, OUT, scale, local, blocks,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SHARING: tl.constexpr, D: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    slot = local - 1 - tl.program_id(0)
    h = tl.program_id(1).to(tl.int64)
    split, splits = tl.program_id(2), tl.num_programs(2)
    number, level = tl.load(NUMBERS + slot), tl.load(LEVEL)
    row, d, key = tl.arange(0, BLOCK), tl.arange(0, D), tl.arange(0, KEYS)
    kv_heads = HEADS // GROUP
    at = slot.to(tl.int64) * BLOCK + row
    q = tl.load(Q + (at[:, None] * HEADS + h) * D + d)
    lse = tl.load(LSE + (h * local + slot) * BLOCK + row)
    first = tl.load(FIRST + number * BLOCK + row)
    chosen = CHOSEN + ((h // SHARING) * local + slot) * blocks
    for block in range(split, number, splits):
        if tl.load(chosen + block):
            largest = tl.full([BLOCK], float("-inf"), tl.float32)
            for begin in tl.static_range(0, BLOCK, KEYS):
                position = block * BLOCK + begin + key
                place = position.to(tl.int64)[:, None] * kv_heads + h // GROUP
                k = tl.load(K + place * D + d)
                s = tl.where(
                    position[None, :] >= first[:, None], tl.dot(q, tl.trans(k)), float("-inf")
                )
                largest = tl.maximum(largest, tl.max(s, 1))
            reached = largest * scale - lse >= level
            start_row = tl.min(tl.where(reached, row, BLOCK - 1), 0)
            tl.store(OUT + (h * local + slot) * blocks + block, start_row)


@triton.jit
def _cap(RANKS, CAP, OUT, blocks, local, WIDTH: tl.constexpr):
    slot, row = tl.program_id(0), tl.program_id(1).to(tl.int64) * local + tl.program_id(0)
    block = tl.arange(0, WIDTH)
    ranks = tl.load(RANKS + row * blocks + block, mask=block < blocks, other=0)
    cap = tl.load(CAP + slot)
    level = cap * 0
    for i in range(31):
        higher = level | (1 << (30 - i))
        level = tl.where(tl.sum((ranks >= higher).to(tl.int32), 0) > cap, higher, level)
    tl.store(OUT + row * blocks + block, tl.where(ranks > level, ranks, 0), mask=block < blocks)


@triton.jit(do_not_specialize=["shift"])
def _count_digits(RANKS, LEVEL, OUT, total, shift, parts, PART: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * parts * PART
    level = tl.load(LEVEL).to(tl.int32)
    counts = tl.zeros([256], tl.int32)
    for part in range(parts):
        place = begin + part * PART + tl.arange(0, PART)
        rank = tl.load(RANKS + place, mask=place < total, other=0)
        # All 31 bits are digits: shifted twice, as a shift of 32 bits is undefined.
        alike = (place < total) & ((rank >> shift >> 8) == (level >> shift >> 8))
        digit = tl.where(alike, (rank >> shift) & 0xFF, 0)
        hidden = tl.sum((~alike).to(tl.int32), 0)
        counts += tl.histogram(digit, 256) - tl.where(tl.arange(0, 256) == 0, hidden, 0)
    tl.store(OUT + tl.program_id(0) * 256 + tl.arange(0, 256), counts)


@triton.jit
def _count_pairs(
    BITS, STARTS, ROWS, FIRST, OUT, rows, blocks, heads, BLOCK: tl.constexpr, PART: tl.constexpr
):
    # A row of blocks of one sequence and head.
    slot, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    number = tl.load(ROWS + slot)
    query, part = tl.arange(0, BLOCK), tl.arange(0, PART)
    position = number * BLOCK + query
    first = tl.load(FIRST + bh // heads * blocks * BLOCK + position)
    base = (bh * rows + slot) * blocks
    pairs = tl.zeros([PART], tl.int32)
    for begin in range(0, number + 1, PART):
        block = begin + part
        chosen = tl.load(BITS + base + block, mask=block <= number, other=0) != 0
        start = tl.load(STARTS + base + block, mask=block <= number, other=0).to(tl.int32)
        end = tl.minimum(position[:, None], (block * BLOCK + BLOCK - 1)[None, :]) + 1
        keys = end - tl.maximum(first[:, None], (block * BLOCK)[None, :])
        seen = chosen[None, :] & (query[:, None] >= start[None, :])
        pairs += tl.sum(tl.where(seen, tl.maximum(keys, 0), 0), 0)
    tl.store(OUT + bh * rows + slot, tl.sum(pairs.to(tl.int64), 0))


def ranks(
    q: torch.Tensor,
    k: torch.Tensor,
    first: torch.Tensor,
    numbers: torch.Tensor,
    scale: float,
    block: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each query's log-sum-exp over key blocks of its largest ``scale * q k``, and ranks.

    The rank of a pair of blocks is the maximum over its queries of the largest minus that sum.

    Args:
        q: [local blocks, block, heads, dim], contiguous.
        k: [blocks * block, kv_heads, dim], contiguous, all keys of the sequence in order.
        first: int32 [blocks, block], position of the first key that each query sees.
        numbers: int32 [local blocks], block number of each local query block.
        scale: positive.

    Returns:
        float32 [heads, local blocks, block], +inf for a query that sees no key; and float32 [heads,
        local blocks, blocks], -inf from the query block itself on.
    """
    whole, _, heads, dim = q.shape
    blocks, kv_heads = len(first), k.shape[1]
    lse = torch.empty(heads, whole, block, device=q.device)
    result = torch.full((heads, whole, blocks), float("-inf"), device=q.device)
    at_once = max(1, min(whole, _MOST_BYTES // (4 * heads * block * blocks)))
    maxima = torch.empty(heads * at_once * blocks * block, device=q.device)
    for start in range(0, whole, at_once):
        local = min(at_once, whole - start)
        splits = 1 if local * heads >= _PROGRAMS else 8
        _maxima[(local, heads, splits)](
            q, k, first, numbers, maxima, scale, blocks, local, start, HEADS=heads,
            GROUP=heads // kv_heads, D=dim, BLOCK=block, KEYS=min(block, _KEYS),
            num_warps=4 if dim <= 64 else 8, num_stages=3,
        )  # fmt: skip
        _rank[(local, heads)](
            maxima, numbers, lse, result, blocks, local, start, whole, BLOCK=block, PART=32
        )
    return lse, result


def first_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    lse: torch.Tensor,
    first: torch.Tensor,
    numbers: torch.Tensor,
    chosen: torch.Tensor,
    level: torch.Tensor,
    scale: float,
    block: int,
) -> torch.Tensor:
    """Return the first query of each query block that ranks a chosen key block as high as a level.

    Arguments are those of `ranks`, with its sums ``lse``, and

    Args:
        chosen: bool [groups of heads, local blocks, blocks].
        level: float32, a scalar.

    Returns:
        uint8 [heads, local blocks, blocks]; the last query if no query does, or the block is not
        chosen.
    """
    local, _, heads, dim = q.shape
    blocks, kv_heads = len(first), k.shape[1]
    result = torch.full((heads, local, blocks), block - 1, dtype=torch.uint8, device=q.device)
    splits = 1 if local * heads >= _PROGRAMS else 8
    _first_rows[(local, heads, splits)](
        q, k, lse, first, numbers, chosen.contiguous().to(torch.int8), level, result, scale, local,
        blocks, HEADS=heads, GROUP=heads // kv_heads, SHARING=heads // len(chosen), D=dim,
        BLOCK=block, KEYS=min(block, _KEYS), num_warps=4 if dim <= 64 else 8, num_stages=3,
    )  # fmt: skip
    return result


def capped(ranks: torch.Tensor, cap: torch.Tensor) -> torch.Tensor:
    """Return the largest ranks of each row, at most ``cap`` of them, and 0 for the others.

    Of equal ranks at the border, none remains.

    Args:
        ranks: int32 [heads, rows, blocks], not negative.
        cap: [rows, 1].
    """
    heads, rows, blocks = ranks.shape
    result, width = torch.empty_like(ranks), triton.next_power_of_2(blocks)
    _cap[(rows, heads)](
        ranks.contiguous(), cap.to(torch.int32).contiguous(), result, blocks, rows, WIDTH=width,
        num_warps=max(1, min(16, width // 512)),
    )  # fmt: skip
    return result


def digit_counts(ranks: torch.Tensor, level: torch.Tensor, shift: int) -> torch.Tensor:
    """Count the ranks that equal ``level`` above ``shift + 8`` by their next 8 bits, int64 [256].

    ranks: int32, not negative. level: int64, a scalar.
    """
    total, part, parts = ranks.numel(), 1024, 16
    programs = triton.cdiv(total, part * parts)
    counts = torch.empty(programs, 256, dtype=torch.int32, device=ranks.device)
    _count_digits[(programs,)](
        ranks.contiguous(), level, counts, total, shift, parts, PART=part, num_warps=4
    )
    return counts.sum(0, dtype=torch.int64)


def count_pairs(
    bits: torch.Tensor, starts: torch.Tensor, rows: torch.Tensor, first: torch.Tensor
) -> torch.Tensor:
    """Count the allowed pairs of chosen blocks, from the first query of a block on.

    Args:
        bits, starts: bool and uint8 [batch, heads, rows, blocks], as in a `StartBitmap`.
        rows: int32 [rows], numbers of the query blocks.
        first: int32 [batch, blocks * block], position of the first key that each query sees.

    Returns:
        int64 [batch, heads].
    """
    batch, heads, held, blocks = bits.shape
    pairs = torch.empty(batch, heads, held, dtype=torch.int64, device=bits.device)
    _count_pairs[(held, batch * heads)](
        bits.contiguous().view(torch.uint8), starts.contiguous(), rows, first.contiguous(), pairs,
        held, blocks, heads, BLOCK=first.shape[1] // blocks, PART=32, num_warps=4,
    )  # fmt: skip
    return pairs.sum(-1)
