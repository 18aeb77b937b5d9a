"""Constants and device functions that the kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(base, rows, stride, count):
    """Load rows of a tensor, [rows, D]. Rows from ``count`` on are 0.

    base: pointers to the elements of row 0, [D].
    rows: numbers of the rows, int32.
    stride: number of elements from one row to the next.
    """
    return tl.load(
        base + rows[:, None].to(tl.int64) * stride, mask=(rows < count)[:, None], other=0.0
    )


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (tl.exp2(x * (2.0 * LOG2E)) + 1.0)


@triton.jit
def outside(place, count):
    """Return whether not 0 <= place < count, for int32. One comparison of unsigned numbers."""
    return place.to(tl.uint32) >= count.to(tl.uint32)


@triton.jit
def block_ranges(
    ENTRIES,
    COUNTS,
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
    SHARING: tl.constexpr,
):
    """Return (list, full_begin, full_end, end): where query block qb finds its entries.

    Entries [0, end) of the list hold the blocks to visit. Every query of qb sees all keys of the
    blocks in [full_begin, full_end). The other entries need an element mask.

    i: local number of qb.
    """
    if LISTED:
        row = bh // SHARING * tl.num_programs(0) + i
        end = tl.load(COUNTS + row)
        return ENTRIES + row * width, end, end, end
    base = COUNTS + bh * (BLOCKS + 1)
    low = tl.load(FIRST_MIN + b * BLOCKS + qb)
    high = tl.load(FIRST_MAX + b * BLOCKS + qb)
    end = tl.load(base + tl.maximum(qb - low // BLOCK + 1, 0))
    # Diagonal 0 crosses the causal boundary. If chosen, it is the first entry and needs the mask.
    full_begin = tl.minimum(tl.load(base + 1), end)
    full_end = tl.load(base + tl.maximum(qb - (high + BLOCK - 1) // BLOCK + 1, 0))
    full_end = tl.minimum(tl.maximum(full_end, full_begin), end)
    return ENTRIES + bh * width, full_begin, full_end, end


@triton.jit
def hidden_by_gates(
    GATES,
    GATE_SLOTS,
    bh,
    qb,
    in_block,
    kb,
    gate_rows,
    gate_words,
    CHUNK_BLOCKS,
    BLOCK: tl.constexpr,
):
    """Return which queries of block qb do not see the chunk of key block kb, bool like in_block.

    in_block: offsets of the queries in block qb.
    """
    row = bh * gate_rows + tl.load(GATE_SLOTS + qb) * BLOCK + in_block
    chunk = kb // CHUNK_BLOCKS
    return ((tl.load(GATES + row * gate_words + chunk // 32) >> (chunk % 32)) & 1) == 0


@triton.jit
def column_ranges(
    COLUMNS_BELOW,
    FIRST_MIN,
    FIRST_MAX,
    bh,
    b,
    qb,
    BLOCKS,
    BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Return (begin, full_begin, full_end, end): the tiles of columns that query block qb visits.

    Tiles [begin, end) hold all columns that the block may see. In tiles [full_begin, full_end), the
    mask allows every pair, so only the columns that a chosen diagonal covers must be skipped.
    """
    base = COLUMNS_BELOW + bh * (BLOCKS + 1)
    low = tl.minimum(tl.load(FIRST_MIN + b * BLOCKS + qb) // BLOCK, qb + 1)
    high = tl.minimum((tl.load(FIRST_MAX + b * BLOCKS + qb) + BLOCK - 1) // BLOCK, qb + 1)
    begin = tl.load(base + low) // BLOCK_N
    end = (tl.load(base + qb + 1) + BLOCK_N - 1) // BLOCK_N
    full_begin = tl.minimum((tl.load(base + high) + BLOCK_N - 1) // BLOCK_N, end)
    full_end = tl.maximum(tl.load(base + qb) // BLOCK_N, full_begin)
    return begin, full_begin, tl.minimum(full_end, end), end
