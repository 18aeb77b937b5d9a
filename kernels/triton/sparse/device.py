"""What kernels share: constants, and which entries of its lists a program that owns a block of queries visits."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def block_ranges(
    LINES,
    UPTO,
    FIRST_MIN,
    FIRST_MAX,
    bh,
    b,
    i,
    qb,
    width,
    BLOCKS,
    BLOCK: tl.constexpr,
    LISTED: tl.constexpr,
):
    """-> address of the list, masked before, end of unmasked, end: entries [0, a) and [b, c) need a mask, [a, b) none. i: local
    number of query block qb, which owns the program.
    """
    if LISTED:
        row = bh * tl.num_programs(0) + i
        end = tl.load(UPTO + row)
        return LINES + row * width, end, end, end
    base = UPTO + bh * (BLOCKS + 1)
    low = tl.load(FIRST_MIN + b * BLOCKS + qb)
    high = tl.load(FIRST_MAX + b * BLOCKS + qb)
    end = tl.load(base + tl.maximum(qb - low // BLOCK + 1, 0))
    diagonal = tl.minimum(tl.load(base + 1), end)
    whole = tl.load(base + tl.maximum(qb - (high + BLOCK - 1) // BLOCK + 1, 0))
    whole = tl.minimum(tl.maximum(whole, diagonal), end)
    return LINES + bh * width, diagonal, whole, end


@triton.jit
def ungated(GATES, GATE_SLOTS, bh, qb, inside, kb, held, words, CHUNK_BLOCKS, BLOCK: tl.constexpr):
    """bool like inside: rows of query block qb that do not see the chunk of key block kb."""
    row = bh * held + tl.load(GATE_SLOTS + qb) * BLOCK + inside
    chunk = kb // CHUNK_BLOCKS
    return ((tl.load(GATES + row * words + chunk // 32) >> (chunk % 32)) & 1) == 0


@triton.jit
def bar_ranges(
    BARS_UPTO, FIRST_MIN, FIRST_MAX, bh, b, qb, BLOCKS, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Tiles of columns [begin, end) that query block qb may see; [full_begin, full_end) of them need no row-wise mask."""
    base = BARS_UPTO + bh * (BLOCKS + 1)
    low = tl.minimum(tl.load(FIRST_MIN + b * BLOCKS + qb) // BLOCK, qb + 1)
    high = tl.minimum((tl.load(FIRST_MAX + b * BLOCKS + qb) + BLOCK - 1) // BLOCK, qb + 1)
    begin = tl.load(base + low) // BLOCK_N
    end = (tl.load(base + qb + 1) + BLOCK_N - 1) // BLOCK_N
    full_begin = tl.minimum((tl.load(base + high) + BLOCK_N - 1) // BLOCK_N, end)
    full_end = tl.maximum(tl.load(base + qb) // BLOCK_N, full_begin)
    return begin, full_begin, tl.minimum(full_end, end), end
