"""The forward pass: a program computes a query block in a loop over key blocks or columns."""

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
_FORWARD = {128: Tile(64, 4, 3, 1), 64: Tile(64, 4, 3)}
_FORWARD_COLUMNS = {128: Tile(32, 4, 3), 64: Tile(32, 4, 3)}


@triton.jit
def attend(q, k, v, hidden, m, total, acc, scale, CAP: tl.constexpr, MASKED: tl.constexpr):
    """Add one tile of keys to the online softmax.

    hidden: pairs to mask; read only if MASKED.
    m: running maximum of the scaled scores, times log2(e).
    total: running sum of the exponentials.
    acc: running sum of the values, weighted by the exponentials.
    """
    s = tl.dot(q, tl.trans(k), input_precision="ieee")
    factor = scale * LOG2E
    if CAP > 0:
        s = tanh(s * (scale / CAP))
        factor = CAP * LOG2E
    if MASKED:
        s = tl.where(hidden, float("-inf"), s)
    # Scale and subtract the maximum in one multiply-add. The factor is positive, so scaling the
    # maximum of the raw scores gives the maximum of the scaled ones.
    new_max = tl.maximum(m, tl.max(s, 1) * factor)
    # A row that has seen no key yet has new_max = -inf. The bound avoids -inf - -inf = NaN below.
    base = tl.maximum(new_max, -1e30)
    p = tl.exp2(s * factor - base[:, None])
    decay = tl.exp2(m - base)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return new_max, total * decay + tl.sum(p, 1), acc


@triton.jit
def _forward(
    Q, K, V, COLUMN_K, COLUMN_V, OUT, LSE, OUT_IN, LSE_IN,
    FIRST, QUERY_BLOCKS, KEY_SLOT, FIRST_MIN, FIRST_MAX, ENTRIES, COUNTS, SLASH, COLUMN_POSITIONS,
    COLUMNS_BELOW, COVERED,
    GATES, GATE_SLOTS, gate_rows, gate_words, CHUNK_BLOCKS,
    scale, queries, keys, width, column_width, BLOCKS, SEQ,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn,
    stride_vh,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    CAP: tl.constexpr, BLOCK_N: tl.constexpr,
    SLASHES: tl.constexpr, COLUMNS: tl.constexpr, LISTED: tl.constexpr, HOLES: tl.constexpr,
    CONTINUE: tl.constexpr, GATED: tl.constexpr, STARTS: tl.constexpr, SHARING: tl.constexpr,
    MASKED_STAGES: tl.constexpr,
):  # fmt: skip
    # The last queries see most keys: start the longest programs first.
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
    may_see = valid & (first <= query_positions)
    visible = tl.maximum(query_positions - first + 1, 0)
    q = tl.load(
        Q + b * stride_qb + rows[:, None].to(tl.int64) * stride_qn + h * stride_qh + d,
        mask=valid[:, None],
        other=0.0,
    )
    out_offsets = (b * queries + rows[:, None]) * (HEADS * D) + h * D + d
    lse_offsets = bh * queries + rows
    if CONTINUE:
        lse_in = tl.load(LSE_IN + lse_offsets, mask=valid, other=float("-inf"))
        m = lse_in * LOG2E
        total = tl.where(lse_in == float("-inf"), 0.0, 1.0)
        acc = tl.load(OUT_IN + out_offsets, mask=valid[:, None], other=0.0).to(tl.float32)
    else:
        m = tl.full([BLOCK], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK], tl.float32)
        acc = tl.zeros([BLOCK, D], tl.float32)
    tile_offsets = tl.arange(0, BLOCK_N)
    SUB: tl.constexpr = BLOCK // BLOCK_N
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
        for t in tl.range((full_begin + end - full_end) * SUB, num_stages=MASKED_STAGES):
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
            m, total, acc = attend(q, k, v, hidden, m, total, acc, scale, CAP, True)
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
                        m, total, acc = attend(q, k, v, q, m, total, acc, scale, CAP, False)
                else:
                    k = tl.load(k_base + key_slots[:, None].to(tl.int64) * stride_kn)
                    v = tl.load(v_base + key_slots[:, None].to(tl.int64) * stride_vn)
                    m, total, acc = attend(q, k, v, q, m, total, acc, scale, CAP, False)
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
            m, total, acc = attend(q, k, v, covered[None, :], m, total, acc, scale, CAP, True)
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
            m, total, acc = attend(q, k, v, hidden, m, total, acc, scale, CAP, True)
    # NaN != 0, so a row with a NaN stays NaN and does not count as a row that sees no key.
    sees_keys = may_see & (total != 0.0)
    out = tl.where(sees_keys[:, None], acc / tl.where(sees_keys, total, 1.0)[:, None], 0.0)
    lse = tl.where(sees_keys, m * LN2 + tl.log(tl.where(sees_keys, total, 1.0)), float("-inf"))
    tl.store(OUT + out_offsets, out.to(OUT.dtype.element_ty), mask=valid[:, None])
    tl.store(LSE + lse_offsets, lse, mask=valid)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    columns: tuple[torch.Tensor, torch.Tensor] | None,
    plan: TilePlan,
    scale: float,
    slashes: bool = True,
    partial: tuple[torch.Tensor, torch.Tensor] | None = None,
    dtype: torch.dtype | None = None,
    cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out and lse over the plan's blocks and columns.

    Args:
        columns: packed keys and values of ``plan.column_positions``; None for blocks only.
        slashes: compute the blocks; False for columns only.
        partial: out and lse over other keys, to merge into the result. None to merge nothing.
        dtype: dtype of out; None for the dtype of q.
        cap: soft cap of scores: cap * tanh(score / cap); 0 for none.
    """
    # Launch once for the blocks and once for the columns. In a single kernel, both loops share
    # registers, and each runs slower than alone (profiles/notes.md).
    if slashes and columns is not None:
        partial = _forward_pass(q, k, v, None, plan, scale, partial, torch.float32, cap)
        return _forward_pass(q, k, v, columns, plan, scale, partial, dtype or q.dtype, cap)
    return _forward_pass(q, k, v, columns, plan, scale, partial, dtype or q.dtype, cap)


def _forward_pass(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    columns: tuple[torch.Tensor, torch.Tensor] | None,
    plan: TilePlan,
    scale: float,
    partial: tuple[torch.Tensor, torch.Tensor] | None,
    dtype: torch.dtype,
    cap: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel for the columns, or for the blocks if ``columns`` is None."""
    slashes = columns is None
    batch, queries, heads, dim = q.shape
    assert partial is None or all(t.is_contiguous() for t in partial), (
        "partial results are read with the strides of new ones"
    )
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    tile = tile_for(_FORWARD if slashes else _FORWARD_COLUMNS, plan.block)
    entries, counts, width = list_arguments(slashes, plan, q)
    packed, column_positions, columns_below, covered, column_width = column_arguments(
        columns, plan, q
    )
    _forward[(plan.query_blocks.numel(), batch * heads)](
        q, k, v, *packed, out, lse, *(partial or (out, lse)),
        plan.first, plan.query_blocks, plan.key_slot, plan.first_min, plan.first_max, entries,
        counts, plan.slash,
        column_positions, columns_below, covered, *gate_arguments(plan, q),
        scale, queries, k.shape[1], width, column_width, plan.blocks, plan.blocks * plan.block,
        *strides(q, k, v),
        HEADS=heads, GROUP=heads // k.shape[2], D=dim, BLOCK=plan.block, BLOCK_N=tile.moving,
        SLASHES=slashes, COLUMNS=columns is not None, LISTED=plan.listed, HOLES=plan.holes,
        CONTINUE=partial is not None,
        GATED=slashes and plan.gates is not None, STARTS=slashes and plan.starts,
        SHARING=plan.sharing,
        MASKED_STAGES=tile.masked or tile.stages,
        CAP=cap, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return out, lse
