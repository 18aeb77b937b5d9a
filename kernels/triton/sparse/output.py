"""The forward pass: a program owns a block of queries and goes over the blocks of keys and the packed columns that it sees."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from mtrain_cli.kernels.triton.sparse.device import LN2, LOG2E, bar_ranges, block_ranges, ungated
from mtrain_cli.kernels.triton.sparse.launch import (
    Tile,
    column_arguments,
    gate_arguments,
    list_arguments,
    strides,
    tile_for,
)
from mtrain_cli.kernels.triton.sparse.plan import Plan

# By block size; the fastest of those tried on an H200 with head_dim 128 (profiles/notes.md).
_FORWARD = {128: Tile(64, 4, 3), 64: Tile(64, 4, 2)}
_FORWARD_COLUMNS = {128: Tile(32, 4, 3), 64: Tile(32, 4, 3)}


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
def _forward(
    Q, K, V, KB, VB, OUT, LSE, OUT_IN, LSE_IN,
    FIRST, QUERY_BLOCKS, KEY_SLOT, FIRST_MIN, FIRST_MAX, LINES, UPTO, SLASH, BARS, BARS_UPTO, COVERED,
    GATES, GATE_SLOTS, held, words, CHUNK_BLOCKS,
    scale, queries, keys, width, column_width, BLOCKS, SEQ,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_N: tl.constexpr,
    SLASHES: tl.constexpr, COLUMNS: tl.constexpr, LISTED: tl.constexpr, HOLES: tl.constexpr, CONTINUE: tl.constexpr, GATED: tl.constexpr,
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
    q = tl.load(
        Q + b * stride_qb + rows[:, None].to(tl.int64) * stride_qn + h * stride_qh + d,
        mask=real[:, None],
        other=0.0,
    )
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
        list_at, diagonal, whole, end = block_ranges(
            LINES, UPTO, FIRST_MIN, FIRST_MAX, bh, b, i, qb, width, BLOCKS, BLOCK, LISTED
        )
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
                k = tl.load(
                    k_base + at[:, None].to(tl.int64) * stride_kn,
                    mask=(at < keys)[:, None],
                    other=0.0,
                )
                v = tl.load(
                    v_base + at[:, None].to(tl.int64) * stride_vn,
                    mask=(at < keys)[:, None],
                    other=0.0,
                )
                where = kb * BLOCK + inside
                hidden = (where[None, :] < first[:, None]) | (where[None, :] > positions[:, None])
                if GATED:
                    hidden |= ungated(
                        GATES,
                        GATE_SLOTS,
                        bh,
                        qb,
                        tl.arange(0, BLOCK),
                        kb,
                        held,
                        words,
                        CHUNK_BLOCKS,
                        BLOCK,
                    )[:, None]
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
        column = bh * column_width
        begin, full_begin, full_end, end = bar_ranges(
            BARS_UPTO, FIRST_MIN, FIRST_MAX, bh, b, qb, BLOCKS, BLOCK, BLOCK_N
        )
        slash = SLASH + bh * BLOCKS
        words = COVERED + (bh * tl.num_programs(0) + i) * (column_width // 32)
        # The next tile's bits are asked for before this tile's products, which hide the wait.
        word = tl.load(words + tl.minimum(full_begin * BLOCK_N + within, column_width - 1) // 32)
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
            where = tl.load(BARS + column + at, mask=at < column_width, other=SEQ)
            k = tl.load(
                KB + (column + at)[:, None] * D + d, mask=(at < column_width)[:, None], other=0.0
            )
            v = tl.load(
                VB + (column + at)[:, None] * D + d, mask=(at < column_width)[:, None], other=0.0
            )
            away = qb - where // BLOCK
            covered = tl.load(slash + away, mask=away >= 0, other=1) != 0
            hidden = (
                covered[None, :]
                | (where[None, :] < first[:, None])
                | (where[None, :] > positions[:, None])
            )
            m, total, acc = _attend(q, k, v, hidden, m, total, acc, scale, True)
    some = seeing & (
        total != 0.0
    )  # NaN is something: it must not look like a row that sees nothing
    out = tl.where(some[:, None], acc / tl.where(some, total, 1.0)[:, None], 0.0)
    lse = tl.where(some, m * LN2 + tl.log(tl.where(some, total, 1.0)), float("-inf"))
    tl.store(OUT + out_at, out.to(OUT.dtype.element_ty), mask=real[:, None])
    tl.store(LSE + lse_at, lse, mask=real)


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

    columns: packed keys and values of plan.column_positions. slashes: whether blocks are computed, or columns alone. partial: out and
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
    assert partial is None or all(t.is_contiguous() for t in partial), (
        "partial results are read as they would be written"
    )
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    tile = tile_for(_FORWARD if slashes else _FORWARD_COLUMNS, plan.block)
    lines, upto, width = list_arguments(slashes, plan, q)
    packed, column_positions, columns_upto, covered, column_width = column_arguments(
        columns, plan, q
    )
    _forward[(plan.query_blocks.numel(), batch * heads)](
        q, k, v, *packed, out, lse, *(partial or (out, lse)),
        plan.first, plan.query_blocks, plan.key_slot, plan.first_min, plan.first_max, lines, upto, plan.slash,
        column_positions, columns_upto, covered, *gate_arguments(plan, q),
        scale, queries, k.shape[1], width, column_width, plan.blocks, plan.blocks * plan.block,
        *strides(q, k, v),
        HEADS=heads, GROUP=heads // k.shape[2], D=dim, BLOCK=plan.block, BLOCK_N=tile.moving,
        SLASHES=slashes, COLUMNS=columns is not None, LISTED=plan.listed, HOLES=plan.holes, CONTINUE=partial is not None,
        GATED=slashes and plan.gates is not None,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, lse
