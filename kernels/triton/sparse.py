"""Sparse attention on plain tensors: block diagonals (or listed blocks) plus packed single columns, forward and backward, in Triton.

No kernel uses atomics, so results are bitwise repeatable: the forward pass, the gradient of queries (a program owns a block of queries),
the gradient of keys and values (a program owns a block of keys and sums over the query heads of its group), and the gradient of packed
columns (a program owns a tile of columns and a part of the queries). Two small ones prepare them: which columns lie on a diagonal of which
query block, and rowsum(out * dout).

Positions are global: query slot ``i * block + r`` stands at position ``query_blocks[i] * block + r``, so shards need not be contiguous.
Which blocks a program visits follows from the index alone: key block = query block - diagonal going forward, query block = key block +
diagonal going back. No list of blocks per row is ever stored for diagonals.

Shapes: q, out, dout [batch, queries, heads, head_dim]; k, v [batch, keys, kv_heads, head_dim]; lse, delta float32 [batch, heads, queries],
natural logarithm; columns [batch, heads, width, head_dim] with ascending global positions [batch, heads, width]. `Plan` holds the rest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True)
class Plan:
    """Which pairs are computed, as int32 tensors on the device. ``blocks`` is the number of blocks of the whole sequence.

    first: [batch, blocks * block], the first position that the query at a position sees; above it for a position that sees nothing.
    last: [batch, blocks * block], the last query position that sees the key at a position.
    query_blocks, key_blocks: global block of each local block, ascending. query_slot, key_slot: the inverse over all blocks, -1 = absent.
    query_count: [blocks + 1], local query blocks below a global one.
    first_min, first_max: [batch, blocks], smallest and largest of first over the positions of a block: above all positions where none of
        them sees anything (first_min), or where one sees nothing (first_max).
    lines: [batch * heads, width] active diagonals, ascending, with upto [batch * heads, blocks + 1], their number below a diagonal; or, if
        listed, as `list_blocks` makes them, active key blocks [batch * heads, query blocks, width] of each query block at hand with upto
        [batch * heads, query blocks], their number, int16 if that is enough; None for columns alone. lines_t, upto_t: the same transposed,
        for backward only.
    slash: uint8 [batch * heads, blocks], the diagonals as a table (all zero if listed).
    bars: [batch * heads, width] ascending positions of single columns, blocks * block = none, with bars_upto [batch * heads, blocks + 1];
        width is a multiple of 128. covered: bits [batch * heads, local query blocks, width / 32] of the columns that lie on a diagonal of
        the query block, as `covered_columns` makes them.
    holes: some blocks of keys or queries are absent, so a visited block may have to be skipped.
    """

    block: int
    blocks: int
    first: torch.Tensor
    last: torch.Tensor
    query_blocks: torch.Tensor
    key_blocks: torch.Tensor
    query_slot: torch.Tensor
    key_slot: torch.Tensor
    query_count: torch.Tensor
    first_min: torch.Tensor
    first_max: torch.Tensor
    lines: torch.Tensor | None
    upto: torch.Tensor | None
    lines_t: torch.Tensor | None
    upto_t: torch.Tensor | None
    slash: torch.Tensor
    bars: torch.Tensor | None
    bars_upto: torch.Tensor | None
    covered: torch.Tensor | None
    listed: bool
    holes: bool


@triton.jit
def _attend(q, k, v, hidden, m, total, acc, scale, MASKED: tl.constexpr):
    """One tile of keys joins the online softmax; hidden marks pairs that are not seen."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        s = tl.where(hidden, float("-inf"), s)
    # Scores are scaled where the maximum is subtracted, one multiply-add; the scale is above 0, so the maximum may be scaled alone.
    top = tl.maximum(m, tl.max(s, 1) * (scale * LOG2E))
    base = tl.maximum(top, -1e30)  # a row that has seen nothing yet: exp2(-inf + 1e30) = 0
    p = tl.exp2(s * (scale * LOG2E) - base[:, None])
    kept = tl.exp2(m - base)
    acc = tl.dot(p.to(v.dtype), v, acc * kept[:, None], input_precision="ieee")
    return top, total * kept + tl.sum(p, 1), acc


@triton.jit
def _query_gradient(q, k, v, do, lse, delta, hidden, acc, scale, MASKED: tl.constexpr):
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
    p = tl.exp2(s - lse[:, None])
    if MASKED:
        p = tl.where(hidden, 0.0, p)
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee")


@triton.jit
def _key_gradient(q, k, v, do, lse, delta, hidden_t, dk, dv, scale, MASKED: tl.constexpr):
    """k, v [keys, D] stay; q, do [queries, D]; hidden_t [keys, queries]."""
    s = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * LOG2E)
    p = tl.exp2(s - lse[None, :])
    if MASKED:
        p = tl.where(hidden_t, 0.0, p)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
    dp = tl.dot(v, tl.trans(do), input_precision="ieee")
    ds = p * (dp - delta[None, :])
    return tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee"), dv


@triton.jit
def _block_ranges(LINES, UPTO, FIRST_MIN, FIRST_MAX, bh, b, i, qb, width, BLOCKS, BLOCK: tl.constexpr, LISTED: tl.constexpr):
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
def _bar_ranges(BARS_UPTO, FIRST_MIN, FIRST_MAX, bh, b, qb, BLOCKS, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Tiles of columns [begin, end) that query block qb may see; [full_begin, full_end) of them need no row-wise mask."""
    base = BARS_UPTO + bh * (BLOCKS + 1)
    low = tl.minimum(tl.load(FIRST_MIN + b * BLOCKS + qb) // BLOCK, qb + 1)
    high = tl.minimum((tl.load(FIRST_MAX + b * BLOCKS + qb) + BLOCK - 1) // BLOCK, qb + 1)
    begin = tl.load(base + low) // BLOCK_N
    end = (tl.load(base + qb + 1) + BLOCK_N - 1) // BLOCK_N
    full_begin = tl.minimum((tl.load(base + high) + BLOCK_N - 1) // BLOCK_N, end)
    full_end = tl.maximum(tl.load(base + qb) // BLOCK_N, full_begin)
    return begin, full_begin, tl.minimum(full_end, end), end


@triton.jit
def _forward(
    Q, K, V, KB, VB, OUT, LSE, OUT_IN, LSE_IN,
    FIRST, QUERY_BLOCKS, KEY_SLOT, FIRST_MIN, FIRST_MAX, LINES, UPTO, SLASH, BARS, BARS_UPTO, COVERED,
    scale, queries, keys, width, bar_width, BLOCKS, SEQ,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    SLASHES: tl.constexpr, COLUMNS: tl.constexpr, LISTED: tl.constexpr, HOLES: tl.constexpr, CONTINUE: tl.constexpr,
):  # fmt: skip
    i = tl.num_programs(0) - 1 - tl.program_id(0)  # the last queries see most
    bh = tl.program_id(1).to(tl.int64)
    b = bh // HEADS
    h = bh % HEADS
    rows = i * BLOCK + tl.arange(0, BLOCK)
    real = rows < queries
    d = tl.arange(0, D)
    qb = tl.load(QUERY_BLOCKS + i)
    positions = qb * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(FIRST + b * SEQ + positions)
    seeing = real & (first <= positions)
    q = tl.load(Q + b * stride_qb + rows[:, None].to(tl.int64) * stride_qn + h * stride_qh + d, mask=real[:, None], other=0.0)
    out_at = (b * queries + rows[:, None]) * (HEADS * D) + h * D + d
    lse_at = bh * queries + rows
    if CONTINUE:
        lse_in = tl.load(LSE_IN + lse_at, mask=real, other=float("-inf"))
        m = lse_in * LOG2E
        total = tl.where(lse_in == float("-inf"), 0.0, 1.0)
        acc = tl.load(OUT_IN + out_at, mask=real[:, None], other=0.0).to(tl.float32)
    else:
        m = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        acc = tl.zeros([BLOCK, D], tl.float32)
    within = tl.arange(0, BLOCK_N)
    SUB: tl.constexpr = BLOCK // BLOCK_N
    if SLASHES:
        k_base = K + b * stride_kb + (h // GROUP) * stride_kh + d
        v_base = V + b * stride_vb + (h // GROUP) * stride_vh + d
        list_at, diagonal, whole, end = _block_ranges(LINES, UPTO, FIRST_MIN, FIRST_MAX, bh, b, i, qb, width, BLOCKS, BLOCK, LISTED)
        for t in range((diagonal + end - whole) * SUB):
            n = t // SUB
            n = tl.where(n < diagonal, n, n - diagonal + whole)
            kb = tl.load(list_at + n).to(tl.int32)
            if not LISTED:
                kb = qb - kb
            slot = kb
            if HOLES:
                slot = tl.load(KEY_SLOT + kb)
            if slot >= 0:
                inside = (t % SUB) * BLOCK_N + within
                at = slot * BLOCK + inside
                k = tl.load(k_base + at[:, None].to(tl.int64) * stride_kn, mask=(at < keys)[:, None], other=0.0)
                v = tl.load(v_base + at[:, None].to(tl.int64) * stride_vn, mask=(at < keys)[:, None], other=0.0)
                where = kb * BLOCK + inside
                hidden = (where[None, :] < first[:, None]) | (where[None, :] > positions[:, None])
                m, total, acc = _attend(q, k, v, hidden, m, total, acc, scale, True)
        if not LISTED:
            for t in range(diagonal * SUB, whole * SUB):
                slot = qb - tl.load(list_at + t // SUB)
                if HOLES:
                    slot = tl.load(KEY_SLOT + slot)
                at = slot * BLOCK + (t % SUB) * BLOCK_N + within
                if HOLES:
                    if slot >= 0:
                        k = tl.load(k_base + at[:, None].to(tl.int64) * stride_kn)
                        v = tl.load(v_base + at[:, None].to(tl.int64) * stride_vn)
                        m, total, acc = _attend(q, k, v, q, m, total, acc, scale, False)
                else:
                    k = tl.load(k_base + at[:, None].to(tl.int64) * stride_kn)
                    v = tl.load(v_base + at[:, None].to(tl.int64) * stride_vn)
                    m, total, acc = _attend(q, k, v, q, m, total, acc, scale, False)
    if COLUMNS:
        column = bh * bar_width
        begin, full_begin, full_end, end = _bar_ranges(BARS_UPTO, FIRST_MIN, FIRST_MAX, bh, b, qb, BLOCKS, BLOCK, BLOCK_N)
        slash = SLASH + bh * BLOCKS
        words = COVERED + (bh * tl.num_programs(0) + i) * (bar_width // 32)
        # The next tile's bits are asked for before this tile's products, which hide the wait.
        word = tl.load(words + tl.minimum(full_begin * BLOCK_N + within, bar_width - 1) // 32)
        for t in range(full_begin, full_end):
            following = tl.load(words + (tl.minimum(t + 1, full_end - 1) * BLOCK_N + within) // 32)
            at = t * BLOCK_N + within
            k = tl.load(KB + (column + at)[:, None] * D + d)
            v = tl.load(VB + (column + at)[:, None] * D + d)
            covered = ((word >> (at % 32)) & 1) != 0
            m, total, acc = _attend(q, k, v, covered[None, :], m, total, acc, scale, True)
            word = following
        for s in range(begin, end - full_end + full_begin):
            t = tl.where(s < full_begin, s, s - full_begin + full_end)
            at = t * BLOCK_N + within
            where = tl.load(BARS + column + at, mask=at < bar_width, other=SEQ)
            k = tl.load(KB + (column + at)[:, None] * D + d, mask=(at < bar_width)[:, None], other=0.0)
            v = tl.load(VB + (column + at)[:, None] * D + d, mask=(at < bar_width)[:, None], other=0.0)
            away = qb - where // BLOCK
            covered = tl.load(slash + away, mask=away >= 0, other=1) != 0
            hidden = covered[None, :] | (where[None, :] < first[:, None]) | (where[None, :] > positions[:, None])
            m, total, acc = _attend(q, k, v, hidden, m, total, acc, scale, True)
    some = seeing & (total != 0.0)  # NaN is something: it must not look like a row that sees nothing
    out = tl.where(some[:, None], acc / tl.where(some, total, 1.0)[:, None], 0.0)
    lse = tl.where(some, m * LN2 + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    tl.store(OUT + out_at, out.to(OUT.dtype.element_ty), mask=real[:, None])
    tl.store(LSE + lse_at, lse, mask=real)


@triton.jit
def _backward_queries(
    Q, K, V, KB, VB, DO, LSE, DELTA, DQ, DQ_IN,
    FIRST, QUERY_BLOCKS, KEY_SLOT, FIRST_MIN, FIRST_MAX, LINES, UPTO, SLASH, BARS, BARS_UPTO, COVERED,
    scale, queries, keys, width, bar_width, BLOCKS, SEQ,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    SLASHES: tl.constexpr, COLUMNS: tl.constexpr, LISTED: tl.constexpr, HOLES: tl.constexpr, CONTINUE: tl.constexpr,
):  # fmt: skip
    i = tl.num_programs(0) - 1 - tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    b = bh // HEADS
    h = bh % HEADS
    rows = i * BLOCK + tl.arange(0, BLOCK)
    real = rows < queries
    d = tl.arange(0, D)
    qb = tl.load(QUERY_BLOCKS + i)
    positions = qb * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(FIRST + b * SEQ + positions)
    q = tl.load(Q + b * stride_qb + rows[:, None].to(tl.int64) * stride_qn + h * stride_qh + d, mask=real[:, None], other=0.0)
    out_at = (b * queries + rows[:, None]) * (HEADS * D) + h * D + d
    do = tl.load(DO + out_at, mask=real[:, None], other=0.0)
    lse_at = bh * queries + rows
    lse = tl.load(LSE + lse_at, mask=real, other=float("-inf"))
    # A row that sees nothing has no gradient: exp(s - inf) = 0.
    lse = tl.where((lse == float("-inf")) | (first > positions), float("inf"), lse * LOG2E)
    delta = tl.load(DELTA + lse_at, mask=real, other=0.0)
    acc = tl.zeros([BLOCK, D], tl.float32)
    within = tl.arange(0, BLOCK_N)
    SUB: tl.constexpr = BLOCK // BLOCK_N
    if SLASHES:
        k_base = K + b * stride_kb + (h // GROUP) * stride_kh + d
        v_base = V + b * stride_vb + (h // GROUP) * stride_vh + d
        list_at, diagonal, whole, end = _block_ranges(LINES, UPTO, FIRST_MIN, FIRST_MAX, bh, b, i, qb, width, BLOCKS, BLOCK, LISTED)
        for t in range((diagonal + end - whole) * SUB):
            n = t // SUB
            n = tl.where(n < diagonal, n, n - diagonal + whole)
            kb = tl.load(list_at + n).to(tl.int32)
            if not LISTED:
                kb = qb - kb
            slot = kb
            if HOLES:
                slot = tl.load(KEY_SLOT + kb)
            if slot >= 0:
                inside = (t % SUB) * BLOCK_N + within
                at = slot * BLOCK + inside
                k = tl.load(k_base + at[:, None].to(tl.int64) * stride_kn, mask=(at < keys)[:, None], other=0.0)
                v = tl.load(v_base + at[:, None].to(tl.int64) * stride_vn, mask=(at < keys)[:, None], other=0.0)
                where = kb * BLOCK + inside
                hidden = (where[None, :] < first[:, None]) | (where[None, :] > positions[:, None])
                acc = _query_gradient(q, k, v, do, lse, delta, hidden, acc, scale, True)
        if not LISTED:
            for t in range(diagonal * SUB, whole * SUB):
                slot = qb - tl.load(list_at + t // SUB)
                if HOLES:
                    slot = tl.load(KEY_SLOT + slot)
                at = slot * BLOCK + (t % SUB) * BLOCK_N + within
                if HOLES:
                    if slot >= 0:
                        k = tl.load(k_base + at[:, None].to(tl.int64) * stride_kn)
                        v = tl.load(v_base + at[:, None].to(tl.int64) * stride_vn)
                        acc = _query_gradient(q, k, v, do, lse, delta, q, acc, scale, False)
                else:
                    k = tl.load(k_base + at[:, None].to(tl.int64) * stride_kn)
                    v = tl.load(v_base + at[:, None].to(tl.int64) * stride_vn)
                    acc = _query_gradient(q, k, v, do, lse, delta, q, acc, scale, False)
    if COLUMNS:
        column = bh * bar_width
        begin, full_begin, full_end, end = _bar_ranges(BARS_UPTO, FIRST_MIN, FIRST_MAX, bh, b, qb, BLOCKS, BLOCK, BLOCK_N)
        slash = SLASH + bh * BLOCKS
        words = COVERED + (bh * tl.num_programs(0) + i) * (bar_width // 32)
        # The next tile's bits are asked for before this tile's products, which hide the wait.
        word = tl.load(words + tl.minimum(full_begin * BLOCK_N + within, bar_width - 1) // 32)
        for t in range(full_begin, full_end):
            following = tl.load(words + (tl.minimum(t + 1, full_end - 1) * BLOCK_N + within) // 32)
            at = t * BLOCK_N + within
            k = tl.load(KB + (column + at)[:, None] * D + d)
            v = tl.load(VB + (column + at)[:, None] * D + d)
            covered = ((word >> (at % 32)) & 1) != 0
            acc = _query_gradient(q, k, v, do, lse, delta, covered[None, :], acc, scale, True)
            word = following
        for s in range(begin, end - full_end + full_begin):
            t = tl.where(s < full_begin, s, s - full_begin + full_end)
            at = t * BLOCK_N + within
            where = tl.load(BARS + column + at, mask=at < bar_width, other=SEQ)
            k = tl.load(KB + (column + at)[:, None] * D + d, mask=(at < bar_width)[:, None], other=0.0)
            v = tl.load(VB + (column + at)[:, None] * D + d, mask=(at < bar_width)[:, None], other=0.0)
            away = qb - where // BLOCK
            covered = tl.load(slash + away, mask=away >= 0, other=1) != 0
            hidden = covered[None, :] | (where[None, :] < first[:, None]) | (where[None, :] > positions[:, None])
            acc = _query_gradient(q, k, v, do, lse, delta, hidden, acc, scale, True)
    acc *= scale
    if CONTINUE:
        acc += tl.load(DQ_IN + out_at, mask=real[:, None], other=0.0).to(tl.float32)
    tl.store(DQ + out_at, acc.to(DQ.dtype.element_ty), mask=real[:, None])


@triton.jit
def _backward_keys(
    Q, K, V, DO, LSE, DELTA, DK, DV,
    FIRST, LAST, KEY_BLOCKS, QUERY_SLOT, LINES, UPTO,
    scale, queries, keys, width, BLOCKS, SEQ,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
    LISTED: tl.constexpr, HOLES: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0)  # the first keys are seen most
    b = tl.program_id(1).to(tl.int64) // (HEADS // GROUP)
    kv = tl.program_id(1).to(tl.int64) % (HEADS // GROUP)
    slots = j * BLOCK + tl.arange(0, BLOCK)
    real = slots < keys
    d = tl.arange(0, D)
    kb = tl.load(KEY_BLOCKS + j)
    positions = kb * BLOCK + tl.arange(0, BLOCK)
    k = tl.load(K + b * stride_kb + slots[:, None].to(tl.int64) * stride_kn + kv * stride_kh + d, mask=real[:, None], other=0.0)
    v = tl.load(V + b * stride_vb + slots[:, None].to(tl.int64) * stride_vn + kv * stride_vh + d, mask=real[:, None], other=0.0)
    dk = tl.zeros([BLOCK, D], tl.float32)
    dv = tl.zeros([BLOCK, D], tl.float32)
    within = tl.arange(0, BLOCK_M)
    SUB: tl.constexpr = BLOCK // BLOCK_M
    # The last query that sees the first key of the block, and the last key: blocks of queries up to the one see all keys, and up to the
    # other some.
    everywhere = (tl.load(LAST + b * SEQ + kb * BLOCK) + 1) // BLOCK - 1
    somewhere = tl.load(LAST + b * SEQ + kb * BLOCK + BLOCK - 1) // BLOCK
    for g in range(GROUP):
        h = kv * GROUP + g
        bh = b * HEADS + h
        if LISTED:
            row = bh * tl.num_programs(0) + j
            list_at = LINES + row * width
            end = tl.load(UPTO + row)
            diagonal = end
            whole = end
        else:
            base = UPTO + bh * (BLOCKS + 1)
            list_at = LINES + bh * width
            end = tl.load(base + tl.maximum(somewhere - kb + 1, 0))
            diagonal = tl.minimum(tl.load(base + 1), end)
            whole = tl.minimum(tl.maximum(tl.load(base + tl.maximum(everywhere - kb + 1, 0)), diagonal), end)
        q_base = Q + b * stride_qb + h * stride_qh + d
        do_base = DO + b * queries * (HEADS * D) + h * D + d
        row_base = bh * queries
        for t in range((diagonal + end - whole) * SUB):
            n = t // SUB
            n = tl.where(n < diagonal, n, n - diagonal + whole)
            qb = tl.load(list_at + n).to(tl.int32)
            if not LISTED:
                qb = kb + qb
            slot = qb
            if HOLES:
                slot = tl.load(QUERY_SLOT + qb)
            if slot >= 0:
                inside = (t % SUB) * BLOCK_M + within
                at = slot * BLOCK + inside
                there = at < queries
                where = qb * BLOCK + inside
                first = tl.load(FIRST + b * SEQ + where)
                q = tl.load(q_base + at[:, None].to(tl.int64) * stride_qn, mask=there[:, None], other=0.0)
                do = tl.load(do_base + at[:, None].to(tl.int64) * (HEADS * D), mask=there[:, None], other=0.0)
                lse = tl.load(LSE + row_base + at, mask=there, other=float("-inf"))
                lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
                delta = tl.load(DELTA + row_base + at, mask=there, other=0.0)
                hidden = (positions[:, None] < first[None, :]) | (positions[:, None] > where[None, :])
                dk, dv = _key_gradient(q, k, v, do, lse, delta, hidden, dk, dv, scale, True)
        if not LISTED:
            for t in range(diagonal * SUB, whole * SUB):
                slot = kb + tl.load(list_at + t // SUB)
                if HOLES:
                    slot = tl.load(QUERY_SLOT + slot)
                at = slot * BLOCK + (t % SUB) * BLOCK_M + within
                if HOLES:
                    if slot >= 0:
                        q = tl.load(q_base + at[:, None].to(tl.int64) * stride_qn)
                        do = tl.load(do_base + at[:, None].to(tl.int64) * (HEADS * D))
                        lse = tl.load(LSE + row_base + at)
                        lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
                        delta = tl.load(DELTA + row_base + at)
                        dk, dv = _key_gradient(q, k, v, do, lse, delta, q, dk, dv, scale, False)
                else:
                    q = tl.load(q_base + at[:, None].to(tl.int64) * stride_qn)
                    do = tl.load(do_base + at[:, None].to(tl.int64) * (HEADS * D))
                    lse = tl.load(LSE + row_base + at)
                    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
                    delta = tl.load(DELTA + row_base + at)
                    dk, dv = _key_gradient(q, k, v, do, lse, delta, q, dk, dv, scale, False)
    at = ((b * keys + slots[:, None]) * (HEADS // GROUP) + kv) * D + d
    tl.store(DK + at, (dk * scale).to(DK.dtype.element_ty), mask=real[:, None])
    tl.store(DV + at, dv.to(DV.dtype.element_ty), mask=real[:, None])


@triton.jit
def _backward_columns(
    Q, KB, VB, DO, LSE, DELTA, DK, DV,
    FIRST, LAST, QUERY_BLOCKS, QUERY_COUNT, SLASH, BARS, COVERED,
    scale, queries, query_blocks, bar_width, BLOCKS, SEQ,
    stride_qb, stride_qn, stride_qh,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    bh = tl.program_id(1).to(tl.int64)
    b = bh // HEADS
    h = bh % HEADS
    d = tl.arange(0, D)
    at = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    column = bh * bar_width
    where = tl.load(BARS + column + at, mask=at < bar_width, other=SEQ)
    bar = where < SEQ
    k = tl.load(KB + (column + at)[:, None] * D + d, mask=bar[:, None], other=0.0)
    v = tl.load(VB + (column + at)[:, None] * D + d, mask=bar[:, None], other=0.0)
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv = tl.zeros([BLOCK_N, D], tl.float32)
    lowest = tl.min(where, 0)
    highest = tl.max(tl.where(bar, where, -1), 0)
    if highest >= 0:
        last = LAST + b * SEQ
        # Local query blocks [begin, end) see some column of the tile; [full_begin, full_end) see all of them in every row.
        begin = tl.load(QUERY_COUNT + lowest // BLOCK)
        end = tl.load(QUERY_COUNT + tl.load(last + highest) // BLOCK + 1)
        full_begin = tl.load(QUERY_COUNT + highest // BLOCK + 1)
        full_end = tl.load(QUERY_COUNT + (tl.load(last + lowest) + 1) // BLOCK)
        each = (end - begin + PARTS - 1) // PARTS
        begin += part * each
        end = tl.minimum(begin + each, end)
        full_begin = tl.minimum(tl.maximum(full_begin, begin), tl.maximum(end, begin))
        full_end = tl.minimum(tl.maximum(full_end, full_begin), tl.maximum(end, begin))
        within = tl.arange(0, BLOCK_M)
        SUB: tl.constexpr = BLOCK // BLOCK_M
        q_base = Q + b * stride_qb + h * stride_qh + d
        do_base = DO + b * queries * (HEADS * D) + h * D + d
        row_base = bh * queries
        slash = SLASH + bh * BLOCKS
        words = COVERED + bh * query_blocks * (bar_width // 32) + tile * (BLOCK_N // 32) + tl.arange(0, BLOCK_N) // 32
        word = tl.load(words + tl.minimum(full_begin, query_blocks - 1).to(tl.int64) * (bar_width // 32))
        for t in range(full_begin * SUB, full_end * SUB):
            following = tl.load(words + tl.minimum((t + 1) // SUB, full_end - 1).to(tl.int64) * (bar_width // 32))
            i = t // SUB
            rows = i * BLOCK + (t % SUB) * BLOCK_M + within
            qb = tl.load(QUERY_BLOCKS + i)
            q = tl.load(q_base + rows[:, None].to(tl.int64) * stride_qn)
            do = tl.load(do_base + rows[:, None].to(tl.int64) * (HEADS * D))
            lse = tl.load(LSE + row_base + rows)
            lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
            delta = tl.load(DELTA + row_base + rows)
            covered = ((word >> (tl.arange(0, BLOCK_N) % 32)) & 1) != 0
            dk, dv = _key_gradient(q, k, v, do, lse, delta, covered[:, None], dk, dv, scale, True)
            word = following
        for s in range(begin * SUB, (end - full_end + full_begin) * SUB):
            i = s // SUB
            i = tl.where(i < full_begin, i, i - full_begin + full_end)
            rows = i * BLOCK + (s % SUB) * BLOCK_M + within
            there = rows < queries
            qb = tl.load(QUERY_BLOCKS + i)
            position = qb * BLOCK + (s % SUB) * BLOCK_M + within
            first = tl.load(FIRST + b * SEQ + position)
            q = tl.load(q_base + rows[:, None].to(tl.int64) * stride_qn, mask=there[:, None], other=0.0)
            do = tl.load(do_base + rows[:, None].to(tl.int64) * (HEADS * D), mask=there[:, None], other=0.0)
            lse = tl.load(LSE + row_base + rows, mask=there, other=float("-inf"))
            lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
            delta = tl.load(DELTA + row_base + rows, mask=there, other=0.0)
            away = qb - where // BLOCK
            covered = tl.load(slash + away, mask=away >= 0, other=1) != 0
            hidden = covered[:, None] | (where[:, None] < first[None, :]) | (where[:, None] > position[None, :])
            dk, dv = _key_gradient(q, k, v, do, lse, delta, hidden, dk, dv, scale, True)
    to = ((part.to(tl.int64) * tl.num_programs(1) + bh) * bar_width + at[:, None]) * D + d
    tl.store(DK + to, dk * scale, mask=(at < bar_width)[:, None])
    tl.store(DV + to, dv, mask=(at < bar_width)[:, None])


@triton.jit
def _covered_columns(SLASH, BARS, QUERY_BLOCKS, COVERED, width, BLOCKS, BLOCK: tl.constexpr, WORDS: tl.constexpr):
    i = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    qb = tl.load(QUERY_BLOCKS + i)
    bit = tl.arange(0, 32)
    for begin in range(0, width // 32, WORDS):
        word = begin + tl.arange(0, WORDS)
        there = word < width // 32
        where = tl.load(BARS + bh * width + word[:, None] * 32 + bit[None, :], mask=there[:, None], other=0)
        away = qb - where // BLOCK
        covered = tl.load(SLASH + bh * BLOCKS + away, mask=(away >= 0) & there[:, None], other=1).to(tl.int32)
        tl.store(COVERED + (bh * tl.num_programs(0) + i) * (width // 32) + word, tl.sum(covered << bit[None, :], 1), mask=there)


def covered_columns(slash: torch.Tensor, bars: torch.Tensor, query_blocks: torch.Tensor, block: int) -> torch.Tensor:
    """Bit c of int32 [batch * heads, query blocks, width / 32]: column c lies on an active diagonal of the query block or in its future."""
    flat, width = bars.shape
    covered = torch.empty(flat, query_blocks.numel(), width // 32, dtype=torch.int32, device=bars.device)
    _covered_columns[(query_blocks.numel(), flat)](slash, bars, query_blocks, covered, width, slash.shape[-1], BLOCK=block, WORDS=16)
    return covered


@triton.jit
def _list_blocks(
    BITS, SLOTS, OWN, OTHERS, FIRST_MIN, LINES, UPTO, held, rows, others, width, BLOCKS,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    bh = tl.program_id(1).to(tl.int64)
    own = tl.load(OWN + row, mask=row < rows, other=0)[:, None]
    to = LINES + (bh * rows + row[:, None]) * width
    count = tl.zeros([ROWS], tl.int32)
    for begin in range(0, others, WIDE):
        n = begin + tl.arange(0, WIDE)
        other = tl.load(OTHERS + n, mask=n < others, other=0)[None, :]
        q = other if TRANSPOSED else own
        k = own if TRANSPOSED else other
        there = (row < rows)[:, None] & (n < others)[None, :] & (k <= q)
        line = tl.load(SLOTS + q)
        first = tl.load(FIRST_MIN + bh // HEADS * BLOCKS + q)
        there = there & (line >= 0) & ((k + 1) * BLOCK > first)
        on = tl.load(BITS + (bh * held + line) * BLOCKS + k, mask=there, other=0).to(tl.int32)
        place = count[:, None] + tl.cumsum(on, 1) - 1
        tl.store(to + place, (other + tl.zeros_like(on)).to(LINES.dtype.element_ty), mask=on != 0)
        count += tl.sum(on, 1)
    tl.store(UPTO + bh * rows + row, count, mask=row < rows)


def list_blocks(
    bits: torch.Tensor,
    slots: torch.Tensor,
    query_blocks: torch.Tensor,
    key_blocks: torch.Tensor,
    first_min: torch.Tensor,
    block: int,
    transposed: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key blocks that bits and mask leave each query block at hand, or, transposed, query blocks of each key block at hand.

    bits: bool [batch, heads, held, blocks], with slots int32 [blocks], the row of each query block, -1 where none is held. query_blocks,
    key_blocks, first_min: as for `Plan`.
    -> numbers in the sequence, ascending, [batch * heads, rows, blocks of the other side], anything beyond their count int32
    [batch * heads, rows]. int16 while that holds the numbers: with the transposed list, 4 bytes for a pair of blocks.
    """
    batch, heads, held, blocks = bits.shape
    own, others = (key_blocks, query_blocks) if transposed else (query_blocks, key_blocks)
    dtype = torch.int16 if blocks <= torch.iinfo(torch.int16).max else torch.int32
    lines = torch.empty(batch * heads, own.numel(), others.numel(), dtype=dtype, device=bits.device)
    upto = torch.empty(batch * heads, own.numel(), dtype=torch.int32, device=bits.device)
    # Bits of neighbouring keys lie side by side: transposed, these are rows of a tile.
    rows, wide = (32, 64) if transposed else (4, 512)
    _list_blocks[(triton.cdiv(own.numel(), rows), batch * heads)](
        bits.contiguous().view(torch.uint8), slots, own, others, first_min, lines, upto,
        held, own.numel(), others.numel(), others.numel(), blocks,
        HEADS=heads, BLOCK=block, TRANSPOSED=transposed, ROWS=rows, WIDE=wide,
    )  # fmt: skip
    return lines, upto


@triton.jit
def _row_delta(OUT, DO, DELTA, tokens, HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    bh = tl.program_id(1).to(tl.int64)
    b = bh // HEADS
    h = bh % HEADS
    at = ((b * tokens + rows[:, None]) * HEADS + h) * D + tl.arange(0, D)
    real = rows < tokens
    out = tl.load(OUT + at, mask=real[:, None], other=0.0).to(tl.float32)
    do = tl.load(DO + at, mask=real[:, None], other=0.0).to(tl.float32)
    tl.store(DELTA + bh * tokens + rows, tl.sum(out * do, 1), mask=real)


def row_delta(out: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    """rowsum(out * dout), float32 [batch, heads, queries]."""
    batch, queries, heads, dim = out.shape
    delta = torch.empty(batch, heads, queries, dtype=torch.float32, device=out.device)
    rows = 64
    _row_delta[(triton.cdiv(queries, rows), batch * heads)](
        out.contiguous(), dout.contiguous(), delta, queries, HEADS=heads, D=dim, ROWS=rows
    )
    return delta


@dataclass(frozen=True)
class _Tile:
    """keys or rows: width of the moving tile; the other side is one whole block (or ``columns`` packed columns)."""

    moving: int
    warps: int
    stages: int


# By block size; the fastest of those tried on an H200 with head_dim 128 (profiles/notes.md).
_FORWARD = {128: _Tile(64, 4, 3), 64: _Tile(64, 4, 2)}
_FORWARD_COLUMNS = {128: _Tile(32, 4, 3), 64: _Tile(32, 4, 3)}
_QUERIES = {128: _Tile(64, 8, 3), 64: _Tile(64, 4, 2)}
_KEYS = {128: _Tile(64, 8, 2), 64: _Tile(64, 8, 2)}
_COLUMNS_PER_TILE = 128
_PROGRAMS_WANTED = 1024  # programs for the gradient of columns: enough to fill any GPU several times


def _tile(table: dict[int, _Tile], block: int) -> _Tile:
    return table.get(block, _Tile(min(block, 64), 4, 2))


def _strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    assert all(t.stride(-1) == 1 for t in tensors)
    return tuple(s for t in tensors for s in t.stride()[:3])


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    columns: tuple[torch.Tensor, torch.Tensor] | None,
    plan: Plan,
    scale: float,
    slashes: bool = True,
    partial: tuple[torch.Tensor, torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> out of the given dtype (q's if None), lse.

    columns: packed keys and values of plan.bars. slashes: whether blocks are computed, or columns alone. partial: out and
    lse over other keys, which these continue.

    Blocks and columns take a launch each: in one kernel both loops share registers, and each runs slower than alone (profiles/notes.md).
    """
    if slashes and columns is not None:
        partial = _forward_pass(q, k, v, None, plan, scale, partial, torch.float32)
        return _forward_pass(q, k, v, columns, plan, scale, partial, dtype or q.dtype)
    return _forward_pass(q, k, v, columns, plan, scale, partial, dtype or q.dtype)


def _forward_pass(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    columns: tuple[torch.Tensor, torch.Tensor] | None,
    plan: Plan,
    scale: float,
    partial: tuple[torch.Tensor, torch.Tensor] | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks, or, if there are columns, these alone."""
    slashes = columns is None
    batch, queries, heads, dim = q.shape
    assert partial is None or all(t.is_contiguous() for t in partial), "partial results are read as they would be written"
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    tile = _tile(_FORWARD if slashes else _FORWARD_COLUMNS, plan.block)
    lines, upto, width = _lists(slashes, plan, q)
    packed, bars, bars_upto, covered, bar_width = _columns(columns, plan, q)
    _forward[(plan.query_blocks.numel(), batch * heads)](
        q, k, v, *packed, out, lse, *(partial or (out, lse)),
        plan.first, plan.query_blocks, plan.key_slot, plan.first_min, plan.first_max, lines, upto, plan.slash,
        bars, bars_upto, covered,
        scale, queries, k.shape[1], width, bar_width, plan.blocks, plan.blocks * plan.block,
        *_strides(q, k, v),
        HEADS=heads, GROUP=heads // k.shape[2], D=dim, BLOCK=plan.block, BLOCK_N=tile.moving,
        SLASHES=slashes, COLUMNS=columns is not None, LISTED=plan.listed, HOLES=plan.holes, CONTINUE=partial is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, lse


def backward_queries(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    columns: tuple[torch.Tensor, torch.Tensor] | None,
    lse: torch.Tensor,
    delta: torch.Tensor,
    plan: Plan,
    scale: float,
    slashes: bool = True,
    partial: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """-> dq like q, of the given dtype (q's if None). partial: the gradient from other keys, contiguous, to which this is added."""
    assert partial is None or partial.is_contiguous()
    batch, queries, heads, dim = q.shape
    dq = torch.empty(q.shape, dtype=dtype or q.dtype, device=q.device)
    tile = _tile(_QUERIES, plan.block)
    lines, upto, width = _lists(slashes, plan, q)
    packed, bars, bars_upto, covered, bar_width = _columns(columns, plan, q)
    _backward_queries[(plan.query_blocks.numel(), batch * heads)](
        q, k, v, *packed, dout, lse, delta, dq, dq if partial is None else partial,
        plan.first, plan.query_blocks, plan.key_slot, plan.first_min, plan.first_max, lines, upto, plan.slash,
        bars, bars_upto, covered,
        scale, queries, k.shape[1], width, bar_width, plan.blocks, plan.blocks * plan.block,
        *_strides(q, k, v),
        HEADS=heads, GROUP=heads // k.shape[2], D=dim, BLOCK=plan.block, BLOCK_N=tile.moving,
        SLASHES=slashes, COLUMNS=columns is not None, LISTED=plan.listed, HOLES=plan.holes, CONTINUE=partial is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dq


def backward_keys(
    dout: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lse: torch.Tensor, delta: torch.Tensor, plan: Plan, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> dk, dv over the blocks (not the columns), float32 like the keys."""
    assert plan.lines_t is not None
    batch, queries, heads, dim = q.shape
    dk, dv = (torch.empty(k.shape, dtype=torch.float32, device=k.device) for _ in range(2))
    tile = _tile(_KEYS, plan.block)
    _backward_keys[(plan.key_blocks.numel(), batch * k.shape[2])](
        q, k, v, dout, lse, delta, dk, dv,
        plan.first, plan.last, plan.key_blocks, plan.query_slot, plan.lines_t, plan.upto_t,
        scale, queries, k.shape[1], plan.lines_t.shape[-1], plan.blocks, plan.blocks * plan.block,
        *_strides(q, k, v),
        HEADS=heads, GROUP=heads // k.shape[2], D=dim, BLOCK=plan.block, BLOCK_M=tile.moving, LISTED=plan.listed, HOLES=plan.holes,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dk, dv


def backward_columns(
    dout: torch.Tensor,
    q: torch.Tensor,
    columns: tuple[torch.Tensor, torch.Tensor],
    lse: torch.Tensor,
    delta: torch.Tensor,
    plan: Plan,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> dk, dv of the packed columns in parts to be added, float32 [parts, batch, heads, width, head_dim]."""
    assert plan.bars is not None
    batch, queries, heads, dim = q.shape
    width = plan.bars.shape[-1]
    tiles = triton.cdiv(width, _COLUMNS_PER_TILE)
    parts = max(1, min(16, _PROGRAMS_WANTED // (tiles * batch * heads)))
    dk, dv = (torch.empty(parts, batch, heads, width, dim, dtype=torch.float32, device=q.device) for _ in range(2))
    moving = min(64, plan.block)
    _backward_columns[(tiles * parts, batch * heads)](
        q, *columns, dout, lse, delta, dk, dv,
        plan.first, plan.last, plan.query_blocks, plan.query_count, plan.slash, plan.bars, plan.covered,
        scale, queries, plan.query_blocks.numel(), width, plan.blocks, plan.blocks * plan.block,
        *_strides(q),
        HEADS=heads, D=dim, BLOCK=plan.block, BLOCK_M=moving, BLOCK_N=_COLUMNS_PER_TILE, PARTS=parts,
        num_warps=8, num_stages=2,
    )  # fmt: skip
    return dk, dv


def _lists(slashes: bool, plan: Plan, unused: torch.Tensor):
    """-> lists of blocks, their counts and width; any tensor stands in where no blocks are computed."""
    if not slashes:
        return unused, unused, 0
    assert plan.lines is not None
    return plan.lines, plan.upto, plan.lines.shape[-1]


def _columns(columns: tuple[torch.Tensor, torch.Tensor] | None, plan: Plan, unused: torch.Tensor):
    """-> packed keys and values, their positions, counts and width; any tensor stands in where there are none."""
    if columns is None:
        return (unused, unused), unused, unused, unused, 0
    assert plan.bars is not None
    return columns, plan.bars, plan.bars_upto, plan.covered, plan.bars.shape[-1]
