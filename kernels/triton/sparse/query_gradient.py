"""Compute dq, one program per query block, and delta = rowsum(out * dout)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from mtrain_cli.kernels.triton.sparse.arguments import (
    Tile,
    column_arguments,
    gate_arguments,
    list_arguments,
    strides,
    tile_for,
)
from mtrain_cli.kernels.triton.sparse.device import (
    LN2,
    LOG2E,
    block_ranges,
    column_ranges,
    hidden_by_gates,
    load_rows,
    outside,
    tanh,
)
from mtrain_cli.kernels.triton.sparse.tile_plan import TilePlan

# By block size. Fastest of the shapes tried on an H200 with head_dim 128 (profiles/notes.md).
_QUERIES = {128: Tile(64, 8, 3), 64: Tile(64, 4, 2)}


@triton.jit
def _row_delta(
    OUT, DO, DELTA, tokens, stride_ob, stride_on, stride_oh, stride_db, stride_dn, stride_dh,
    HEADS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    bh = tl.program_id(1).to(tl.int64)
    b = bh // HEADS
    h = bh % HEADS
    d = tl.arange(0, D)
    row = rows[:, None].to(tl.int64)
    real = rows < tokens
    out = tl.load(
        OUT + b * stride_ob + row * stride_on + h * stride_oh + d, mask=real[:, None], other=0.0
    ).to(tl.float32)
    do = tl.load(
        DO + b * stride_db + row * stride_dn + h * stride_dh + d, mask=real[:, None], other=0.0
    ).to(tl.float32)
    tl.store(DELTA + bh * tokens + rows, tl.sum(out * do, 1), mask=real)


def row_delta(out: torch.Tensor, dout: torch.Tensor) -> torch.Tensor:
    """Return rowsum(out * dout), float32 [batch, heads, queries]."""
    batch, queries, heads, dim = out.shape
    delta = torch.empty(batch, heads, queries, dtype=torch.float32, device=out.device)
    rows = 64
    _row_delta[(triton.cdiv(queries, rows), batch * heads)](
        out, dout, delta, queries, *strides(out, dout), HEADS=heads, D=dim, ROWS=rows
    )
    return delta


@triton.jit
def query_gradient(
    q, k, v, do, lse, delta, hidden, acc, scale, CAP: tl.constexpr, MASKED: tl.constexpr
):
    """Add one tile of keys to acc, which is dq / scale.

    lse: times log2(e).
    hidden: pairs to mask; read only if MASKED.
    """
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2E)
    if CAP > 0:
        share = tanh(s * (LN2 / CAP))
        s = share * (CAP * LOG2E)
    p = tl.exp2(s - lse[:, None])
    if MASKED:
        p = tl.where(hidden, 0.0, p)
    dp = tl.dot(do, tl.trans(v), input_precision="ieee")
    ds = p * (dp - delta[:, None])
    if CAP > 0:
        ds *= 1.0 - share * share
    return tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee")


@triton.jit
def _backward_queries(
    Q, K, V, COLUMN_K, COLUMN_V, DO, LSE, DELTA, DQ, DQ_IN,
    FIRST, QUERY_BLOCKS, KEY_SLOT, FIRST_MIN, FIRST_MAX, ENTRIES, COUNTS, SLASH, COLUMN_POSITIONS,
    COLUMNS_BELOW, COVERED,
    GATES, GATE_SLOTS, gate_rows, gate_words, CHUNK_BLOCKS,
    scale, queries, keys, width, column_width, BLOCKS, SEQ,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn,
    stride_vh, stride_db, stride_dn, stride_dh,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    CAP: tl.constexpr, BLOCK_N: tl.constexpr,
    SLASHES: tl.constexpr, COLUMNS: tl.constexpr, LISTED: tl.constexpr, HOLES: tl.constexpr,
    CONTINUE: tl.constexpr, GATED: tl.constexpr, STARTS: tl.constexpr, SHARING: tl.constexpr,
):  # fmt: skip
    i = tl.num_programs(0) - 1 - tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    b = bh // HEADS
    h = bh % HEADS
    rows = i * BLOCK + tl.arange(0, BLOCK)
    valid = rows < queries
    d = tl.arange(0, D)
    qb = tl.load(QUERY_BLOCKS + i)
    query_positions = qb * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(FIRST + b * SEQ + query_positions)
    q = tl.load(
        Q + b * stride_qb + rows[:, None].to(tl.int64) * stride_qn + h * stride_qh + d,
        mask=valid[:, None],
        other=0.0,
    )
    out_offsets = (b * queries + rows[:, None]) * (HEADS * D) + h * D + d
    do = tl.load(
        DO + b * stride_db + rows[:, None].to(tl.int64) * stride_dn + h * stride_dh + d,
        mask=valid[:, None],
        other=0.0,
    )
    lse_offsets = bh * queries + rows
    lse = tl.load(LSE + lse_offsets, mask=valid, other=float("-inf"))
    # For a row that sees no key, set lse to +inf: exp(s - inf) = 0 gives it no probabilities.
    lse = tl.where((lse == float("-inf")) | (first > query_positions), float("inf"), lse * LOG2E)
    delta = tl.load(DELTA + lse_offsets, mask=valid, other=0.0)
    acc = tl.zeros([BLOCK, D], tl.float32)
    tile_offsets = tl.arange(0, BLOCK_N)
    SUB: tl.constexpr = BLOCK // BLOCK_N
    visible = tl.maximum(query_positions - first + 1, 0)
    if SLASHES:
        k_base = K + b * stride_kb + (h // GROUP) * stride_kh + d
        v_base = V + b * stride_vb + (h // GROUP) * stride_vh + d
        list_start, full_begin, full_end, end = block_ranges(
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
            BLOCK,
            LISTED,
            SHARING,
        )
        # Entries that need an element mask: those outside [full_begin, full_end).
        for t in range((full_begin + end - full_end) * SUB):
            n = t // SUB
            n = tl.where(n < full_begin, n, n - full_begin + full_end)
            kb = tl.load(list_start + n).to(tl.int32)
            seen = visible
            if STARTS:
                seen = tl.where(tl.arange(0, BLOCK) < ((kb >> 24) & 0xFF), 0, seen)
                kb = kb & 0xFFFFFF
            if not LISTED:
                kb = qb - kb
            slot = kb
            if HOLES:
                slot = tl.load(KEY_SLOT + kb)
                if not LISTED:
                    # A condition would keep the next loads from overlapping these products.
                    seen = tl.where(slot < 0, 0, seen)
                    slot = tl.where(slot < 0, BLOCKS, slot)
            if GATED:
                seen = tl.where(
                    hidden_by_gates(
                        GATES,
                        GATE_SLOTS,
                        bh,
                        qb,
                        tl.arange(0, BLOCK),
                        kb,
                        gate_rows,
                        gate_words,
                        CHUNK_BLOCKS,
                        BLOCK,
                    ),
                    0,
                    seen,
                )
            in_block = (t % SUB) * BLOCK_N + tile_offsets
            key_slots = slot * BLOCK + in_block
            k = load_rows(k_base, key_slots, stride_kn, keys)
            v = load_rows(v_base, key_slots, stride_vn, keys)
            hidden = outside((kb * BLOCK + in_block)[None, :] - first[:, None], seen[:, None])
            acc = query_gradient(q, k, v, do, lse, delta, hidden, acc, scale, CAP, True)
        if not LISTED:
            # Entries that every row sees in full: no element mask and no bounds.
            for t in range(full_begin * SUB, full_end * SUB):
                slot = qb - tl.load(list_start + t // SUB)
                if HOLES:
                    slot = tl.load(KEY_SLOT + slot)
                key_slots = slot * BLOCK + (t % SUB) * BLOCK_N + tile_offsets
                if HOLES:
                    if slot >= 0:
                        k = tl.load(k_base + key_slots[:, None].to(tl.int64) * stride_kn)
                        v = tl.load(v_base + key_slots[:, None].to(tl.int64) * stride_vn)
                        acc = query_gradient(q, k, v, do, lse, delta, q, acc, scale, CAP, False)
                else:
                    k = tl.load(k_base + key_slots[:, None].to(tl.int64) * stride_kn)
                    v = tl.load(v_base + key_slots[:, None].to(tl.int64) * stride_vn)
                    acc = query_gradient(q, k, v, do, lse, delta, q, acc, scale, CAP, False)
    if COLUMNS:
        column_base = bh * column_width
        begin, full_begin, full_end, end = column_ranges(
            COLUMNS_BELOW, FIRST_MIN, FIRST_MAX, bh, b, qb, BLOCKS, BLOCK, BLOCK_N
        )
        slash = SLASH + bh * BLOCKS
        covered_words = COVERED + (bh * tl.num_programs(0) + i) * (column_width // 32)
        # Load the next tile's bits before this tile's products, which hide the load's latency.
        covered_bits = tl.load(
            covered_words + tl.minimum(full_begin * BLOCK_N + tile_offsets, column_width - 1) // 32
        )
        for t in range(full_begin, full_end):
            next_bits = tl.load(
                covered_words + (tl.minimum(t + 1, full_end - 1) * BLOCK_N + tile_offsets) // 32
            )
            columns = t * BLOCK_N + tile_offsets
            k = tl.load(COLUMN_K + (column_base + columns)[:, None] * D + d)
            v = tl.load(COLUMN_V + (column_base + columns)[:, None] * D + d)
            covered = ((covered_bits >> (columns % 32)) & 1) != 0
            acc = query_gradient(q, k, v, do, lse, delta, covered[None, :], acc, scale, CAP, True)
            covered_bits = next_bits
        # Tiles at either end: check every pair against mask, causality and diagonals.
        for s in range(begin, end - full_end + full_begin):
            t = tl.where(s < full_begin, s, s - full_begin + full_end)
            columns = t * BLOCK_N + tile_offsets
            column_positions = tl.load(
                COLUMN_POSITIONS + column_base + columns, mask=columns < column_width, other=SEQ
            )
            k = tl.load(
                COLUMN_K + (column_base + columns)[:, None] * D + d,
                mask=(columns < column_width)[:, None],
                other=0.0,
            )
            v = tl.load(
                COLUMN_V + (column_base + columns)[:, None] * D + d,
                mask=(columns < column_width)[:, None],
                other=0.0,
            )
            diagonal = qb - column_positions // BLOCK
            covered = tl.load(slash + diagonal, mask=diagonal >= 0, other=1) != 0
            hidden = (
                covered[None, :]
                | (column_positions[None, :] < first[:, None])
                | (column_positions[None, :] > query_positions[:, None])
            )
            acc = query_gradient(q, k, v, do, lse, delta, hidden, acc, scale, CAP, True)
    acc *= scale
    if CONTINUE:
        acc += tl.load(DQ_IN + out_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
    tl.store(DQ + out_offsets, acc.to(DQ.dtype.element_ty), mask=valid[:, None])


def backward_queries(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    columns: tuple[torch.Tensor, torch.Tensor] | None,
    lse: torch.Tensor,
    delta: torch.Tensor,
    plan: TilePlan,
    scale: float,
    slashes: bool = True,
    partial: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    cap: float = 0.0,
) -> torch.Tensor:
    """Return dq, shaped like q, over the plan's blocks and columns.

    Args:
        columns: packed keys and values of ``plan.column_positions``; None for blocks only.
        slashes: compute the blocks; False for columns only.
        partial: dq over other keys, contiguous, to add to the result.
        dtype: dtype of dq; None for the dtype of q.
        cap: soft cap of scores; 0 for none.
    """
    assert partial is None or partial.is_contiguous()
    batch, queries, heads, dim = q.shape
    dq = torch.empty(q.shape, dtype=dtype or q.dtype, device=q.device)
    tile = tile_for(_QUERIES, plan.block)
    entries, counts, width = list_arguments(slashes, plan, q)
    packed, column_positions, columns_below, covered, column_width = column_arguments(
        columns, plan, q
    )
    _backward_queries[(plan.query_blocks.numel(), batch * heads)](
        q, k, v, *packed, dout, lse, delta, dq, dq if partial is None else partial,
        plan.first, plan.query_blocks, plan.key_slot, plan.first_min, plan.first_max, entries,
        counts, plan.slash,
        column_positions, columns_below, covered, *gate_arguments(plan, q),
        scale, queries, k.shape[1], width, column_width, plan.blocks, plan.blocks * plan.block,
        *strides(q, k, v, dout),
        HEADS=heads, GROUP=heads // k.shape[2], D=dim, BLOCK=plan.block, BLOCK_N=tile.moving,
        SLASHES=slashes, COLUMNS=columns is not None, LISTED=plan.listed, HOLES=plan.holes,
        CONTINUE=partial is not None,
        GATED=slashes and plan.gates is not None, STARTS=slashes and plan.starts,
        SHARING=plan.sharing,
        CAP=cap, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dq
