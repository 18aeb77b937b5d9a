"""Compute dk and dv of key blocks, and of packed columns.

A program computes a key block, or a tile of columns over a part of the queries. It loops over the
query blocks that see these keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from mtrain_cli.kernels.triton.sparse.arguments import Tile, gate_arguments, strides, tile_for
from mtrain_cli.kernels.triton.sparse.device import (
    LN2,
    LOG2E,
    hidden_by_gates,
    load_rows,
    outside,
    tanh,
)
from mtrain_cli.kernels.triton.sparse.tile_plan import TilePlan

# By block size. Fastest of the shapes tried on an H200 with head_dim 128 (profiles/notes.md).
_KEYS = {128: Tile(64, 8, 2), 64: Tile(64, 4, 2)}
_COLUMNS_PER_TILE = 128
_PROGRAMS_WANTED = 1024  # of the column gradient: enough to fill any GPU several times


@triton.jit
def key_gradient(
    q, k, v, do, lse, delta, hidden_t, dk, dv, scale, CAP: tl.constexpr, MASKED: tl.constexpr
):
    """Add one tile of queries to dk and dv. Multiply the final dk by scale.

    k, v: [keys, D].
    q, do: [queries, D].
    lse: [queries], times log2(e).
    hidden_t: [keys, queries], pairs to mask; read only if MASKED.
    """
    s = tl.dot(k, tl.trans(q), input_precision="ieee") * (scale * LOG2E)
    if CAP > 0:
        share = tanh(s * (LN2 / CAP))
        s = share * (CAP * LOG2E)
    p = tl.exp2(s - lse[None, :])
    if MASKED:
        p = tl.where(hidden_t, 0.0, p)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
    dp = tl.dot(v, tl.trans(do), input_precision="ieee")
    ds = p * (dp - delta[None, :])
    if CAP > 0:
        ds *= 1.0 - share * share
    return tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee"), dv


@triton.jit
def _backward_keys(
    Q, K, V, DO, LSE, DELTA, DK, DV,
    FIRST, LAST, KEY_BLOCKS, QUERY_SLOT, ENTRIES, COUNTS,
    GATES, GATE_SLOTS, gate_rows, gate_words, CHUNK_BLOCKS,
    scale, queries, keys, width, BLOCKS, SEQ,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn,
    stride_vh, stride_db, stride_dn, stride_dh,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    CAP: tl.constexpr, BLOCK_M: tl.constexpr,
    LISTED: tl.constexpr, HOLES: tl.constexpr, GATED: tl.constexpr,
    STARTS: tl.constexpr, SHARING: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0)  # the longest programs start first: most queries see the first keys
    b = tl.program_id(1).to(tl.int64) // (HEADS // GROUP)
    kv = tl.program_id(1).to(tl.int64) % (HEADS // GROUP)
    key_slots = j * BLOCK + tl.arange(0, BLOCK)
    valid_keys = key_slots < keys
    d = tl.arange(0, D)
    kb = tl.load(KEY_BLOCKS + j)
    key_positions = kb * BLOCK + tl.arange(0, BLOCK)
    k = tl.load(
        K + b * stride_kb + key_slots[:, None].to(tl.int64) * stride_kn + kv * stride_kh + d,
        mask=valid_keys[:, None],
        other=0.0,
    )
    v = tl.load(
        V + b * stride_vb + key_slots[:, None].to(tl.int64) * stride_vn + kv * stride_vh + d,
        mask=valid_keys[:, None],
        other=0.0,
    )
    dk = tl.zeros([BLOCK, D], tl.float32)
    dv = tl.zeros([BLOCK, D], tl.float32)
    tile_offsets = tl.arange(0, BLOCK_M)
    SUB: tl.constexpr = BLOCK // BLOCK_M
    # LAST, the last query that sees a key, never decreases along a sequence. Query blocks up to the
    # LAST of the block's first key see every key; those up to the LAST of its last key see some.
    all_keys_until = (tl.load(LAST + b * SEQ + kb * BLOCK) + 1) // BLOCK - 1
    some_keys_until = tl.load(LAST + b * SEQ + kb * BLOCK + BLOCK - 1) // BLOCK
    for g in range(GROUP):
        h = kv * GROUP + g
        bh = b * HEADS + h
        if LISTED:
            row = bh // SHARING * tl.num_programs(0) + j
            list_start = ENTRIES + row * width
            end = tl.load(COUNTS + row)
            full_begin = end
            full_end = end
        else:
            base = COUNTS + bh * (BLOCKS + 1)
            list_start = ENTRIES + bh * width
            end = tl.load(base + tl.maximum(some_keys_until - kb + 1, 0))
            full_begin = tl.minimum(tl.load(base + 1), end)
            full_end = tl.minimum(
                tl.maximum(tl.load(base + tl.maximum(all_keys_until - kb + 1, 0)), full_begin), end
            )
        q_base = Q + b * stride_qb + h * stride_qh + d
        do_base = DO + b * stride_db + h * stride_dh + d
        row_base = bh * queries
        # Entries that need an element mask: those outside [full_begin, full_end).
        for t in range((full_begin + end - full_end) * SUB):
            n = t // SUB
            n = tl.where(n < full_begin, n, n - full_begin + full_end)
            qb = tl.load(list_start + n).to(tl.int32)
            in_block = (t % SUB) * BLOCK_M + tile_offsets
            if STARTS:
                too_early = in_block < ((qb >> 24) & 0xFF)
                qb = qb & 0xFFFFFF
            if not LISTED:
                qb = kb + qb
            slot = qb
            if HOLES:
                slot = tl.load(QUERY_SLOT + qb)
                if not LISTED:
                    # A condition would keep the next loads from overlapping these products. Queries
                    # beyond the shard have no probabilities.
                    slot = tl.where(slot < 0, BLOCKS, slot)
            query_slots = slot * BLOCK + in_block
            valid_queries = query_slots < queries
            first = tl.load(FIRST + b * SEQ + qb * BLOCK + in_block)
            seen = tl.maximum(qb * BLOCK + in_block - first + 1, 0)
            if STARTS:
                seen = tl.where(too_early, 0, seen)
            if GATED:
                seen = tl.where(
                    hidden_by_gates(
                        GATES,
                        GATE_SLOTS,
                        bh,
                        qb,
                        in_block,
                        kb,
                        gate_rows,
                        gate_words,
                        CHUNK_BLOCKS,
                        BLOCK,
                    ),
                    0,
                    seen,
                )
            q = load_rows(q_base, query_slots, stride_qn, queries)
            do = load_rows(do_base, query_slots, stride_dn, queries)
            lse = tl.load(LSE + row_base + query_slots, mask=valid_queries, other=float("-inf"))
            lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
            delta = tl.load(DELTA + row_base + query_slots, mask=valid_queries, other=0.0)
            hidden = outside(key_positions[:, None] - first[None, :], seen[None, :])
            dk, dv = key_gradient(q, k, v, do, lse, delta, hidden, dk, dv, scale, CAP, True)
        if not LISTED:
            # Entries whose queries all see the whole key block: no element mask and no bounds.
            for t in range(full_begin * SUB, full_end * SUB):
                slot = kb + tl.load(list_start + t // SUB)
                if HOLES:
                    slot = tl.load(QUERY_SLOT + slot)
                query_slots = slot * BLOCK + (t % SUB) * BLOCK_M + tile_offsets
                if HOLES:
                    if slot >= 0:
                        q = tl.load(q_base + query_slots[:, None].to(tl.int64) * stride_qn)
                        do = tl.load(do_base + query_slots[:, None].to(tl.int64) * stride_dn)
                        lse = tl.load(LSE + row_base + query_slots)
                        lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
                        delta = tl.load(DELTA + row_base + query_slots)
                        dk, dv = key_gradient(q, k, v, do, lse, delta, q, dk, dv, scale, CAP, False)
                else:
                    q = tl.load(q_base + query_slots[:, None].to(tl.int64) * stride_qn)
                    do = tl.load(do_base + query_slots[:, None].to(tl.int64) * stride_dn)
                    lse = tl.load(LSE + row_base + query_slots)
                    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
                    delta = tl.load(DELTA + row_base + query_slots)
                    dk, dv = key_gradient(q, k, v, do, lse, delta, q, dk, dv, scale, CAP, False)
    offsets = ((b * keys + key_slots[:, None]) * (HEADS // GROUP) + kv) * D + d
    tl.store(DK + offsets, (dk * scale).to(DK.dtype.element_ty), mask=valid_keys[:, None])
    tl.store(DV + offsets, dv.to(DV.dtype.element_ty), mask=valid_keys[:, None])


@triton.jit
def _backward_columns(
    Q, COLUMN_K, COLUMN_V, DO, LSE, DELTA, DK, DV,
    FIRST, LAST, QUERY_BLOCKS, QUERY_COUNT, SLASH, COLUMN_POSITIONS, COVERED,
    scale, queries, query_blocks, column_width, BLOCKS, SEQ,
    stride_qb, stride_qn, stride_qh, stride_db, stride_dn, stride_dh,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
    CAP: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    bh = tl.program_id(1).to(tl.int64)
    b = bh // HEADS
    h = bh % HEADS
    d = tl.arange(0, D)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    column_base = bh * column_width
    column_positions = tl.load(
        COLUMN_POSITIONS + column_base + columns, mask=columns < column_width, other=SEQ
    )
    is_column = column_positions < SEQ
    k = tl.load(
        COLUMN_K + (column_base + columns)[:, None] * D + d, mask=is_column[:, None], other=0.0
    )
    v = tl.load(
        COLUMN_V + (column_base + columns)[:, None] * D + d, mask=is_column[:, None], other=0.0
    )
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv = tl.zeros([BLOCK_N, D], tl.float32)
    lowest = tl.min(column_positions, 0)
    highest = tl.max(tl.where(is_column, column_positions, -1), 0)
    if highest >= 0:
        last_query = LAST + b * SEQ
        # Local query blocks [begin, end) see some column of the tile. In [full_begin, full_end),
        # every query sees all columns. Each of PARTS programs takes an equal share of [begin, end).
        begin = tl.load(QUERY_COUNT + lowest // BLOCK)
        end = tl.load(QUERY_COUNT + tl.load(last_query + highest) // BLOCK + 1)
        full_begin = tl.load(QUERY_COUNT + highest // BLOCK + 1)
        full_end = tl.load(QUERY_COUNT + (tl.load(last_query + lowest) + 1) // BLOCK)
        share = (end - begin + PARTS - 1) // PARTS
        begin += part * share
        end = tl.minimum(begin + share, end)
        full_begin = tl.minimum(tl.maximum(full_begin, begin), tl.maximum(end, begin))
        full_end = tl.minimum(tl.maximum(full_end, full_begin), tl.maximum(end, begin))
        tile_offsets = tl.arange(0, BLOCK_M)
        SUB: tl.constexpr = BLOCK // BLOCK_M
        q_base = Q + b * stride_qb + h * stride_qh + d
        do_base = DO + b * stride_db + h * stride_dh + d
        row_base = bh * queries
        slash = SLASH + bh * BLOCKS
        covered_words = (
            COVERED
            + bh * query_blocks * (column_width // 32)
            + tile * (BLOCK_N // 32)
            + tl.arange(0, BLOCK_N) // 32
        )
        covered_bits = tl.load(
            covered_words
            + tl.minimum(full_begin, query_blocks - 1).to(tl.int64) * (column_width // 32)
        )
        # Mask only the columns that a diagonal covers. A word has the bits of 32 columns. Load each
        # word one tile ahead.
        for t in range(full_begin * SUB, full_end * SUB):
            next_bits = tl.load(
                covered_words
                + tl.minimum((t + 1) // SUB, full_end - 1).to(tl.int64) * (column_width // 32)
            )
            i = t // SUB
            rows = i * BLOCK + (t % SUB) * BLOCK_M + tile_offsets
            qb = tl.load(QUERY_BLOCKS + i)
            q = tl.load(q_base + rows[:, None].to(tl.int64) * stride_qn)
            do = tl.load(do_base + rows[:, None].to(tl.int64) * stride_dn)
            lse = tl.load(LSE + row_base + rows)
            lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
            delta = tl.load(DELTA + row_base + rows)
            covered = ((covered_bits >> (tl.arange(0, BLOCK_N) % 32)) & 1) != 0
            dk, dv = key_gradient(
                q, k, v, do, lse, delta, covered[:, None], dk, dv, scale, CAP, True
            )
            covered_bits = next_bits
        # Query blocks at either end: check every pair against mask, causality and diagonals.
        for step in range(begin * SUB, (end - full_end + full_begin) * SUB):
            i = step // SUB
            i = tl.where(i < full_begin, i, i - full_begin + full_end)
            rows = i * BLOCK + (step % SUB) * BLOCK_M + tile_offsets
            valid = rows < queries
            qb = tl.load(QUERY_BLOCKS + i)
            query_positions = qb * BLOCK + (step % SUB) * BLOCK_M + tile_offsets
            first = tl.load(FIRST + b * SEQ + query_positions)
            q = load_rows(q_base, rows, stride_qn, queries)
            do = load_rows(do_base, rows, stride_dn, queries)
            lse = tl.load(LSE + row_base + rows, mask=valid, other=float("-inf"))
            lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
            delta = tl.load(DELTA + row_base + rows, mask=valid, other=0.0)
            diagonal = qb - column_positions // BLOCK
            covered = tl.load(slash + diagonal, mask=diagonal >= 0, other=1) != 0
            hidden = (
                covered[:, None]
                | (column_positions[:, None] < first[None, :])
                | (column_positions[:, None] > query_positions[None, :])
            )
            dk, dv = key_gradient(q, k, v, do, lse, delta, hidden, dk, dv, scale, CAP, True)
    offsets = (
        (part.to(tl.int64) * tl.num_programs(1) + bh) * column_width + columns[:, None]
    ) * D + d
    tl.store(DK + offsets, dk * scale, mask=(columns < column_width)[:, None])
    tl.store(DV + offsets, dv, mask=(columns < column_width)[:, None])


def backward_keys(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    plan: TilePlan,
    scale: float,
    cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dk and dv of the blocks, without the columns: float32, shaped like k."""
    assert plan.entries_t is not None
    batch, queries, heads, dim = q.shape
    dk, dv = (torch.empty(k.shape, dtype=torch.float32, device=k.device) for _ in range(2))
    tile = tile_for(_KEYS, plan.block)
    _backward_keys[(plan.key_blocks.numel(), batch * k.shape[2])](
        q, k, v, dout, lse, delta, dk, dv,
        plan.first, plan.last, plan.key_blocks, plan.query_slot, plan.entries_t, plan.counts_t,
        *gate_arguments(plan, q),
        scale, queries, k.shape[1], plan.entries_t.shape[-1], plan.blocks, plan.blocks * plan.block,
        *strides(q, k, v, dout),
        HEADS=heads, GROUP=heads // k.shape[2], D=dim, BLOCK=plan.block, BLOCK_M=tile.moving,
        LISTED=plan.listed, HOLES=plan.holes,
        GATED=plan.gates is not None, STARTS=plan.starts, SHARING=plan.sharing,
        CAP=cap, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return dk, dv


def backward_columns(
    dout: torch.Tensor,
    q: torch.Tensor,
    columns: tuple[torch.Tensor, torch.Tensor],
    lse: torch.Tensor,
    delta: torch.Tensor,
    plan: TilePlan,
    scale: float,
    cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dk and dv of the packed columns, float32 [parts, batch, heads, width, head_dim].

    Each part covers a share of the queries, so that few columns still fill a GPU. The caller adds
    up the parts.
    """
    assert plan.column_positions is not None
    batch, queries, heads, dim = q.shape
    width = plan.column_positions.shape[-1]
    tiles = triton.cdiv(width, _COLUMNS_PER_TILE)
    parts = max(1, min(16, _PROGRAMS_WANTED // (tiles * batch * heads)))
    dk, dv = (
        torch.empty(parts, batch, heads, width, dim, dtype=torch.float32, device=q.device)
        for _ in range(2)
    )
    moving = min(64, plan.block)
    _backward_columns[(tiles * parts, batch * heads)](
        q, *columns, dout, lse, delta, dk, dv,
        plan.first, plan.last, plan.query_blocks, plan.query_count, plan.slash,
        plan.column_positions, plan.covered,
        scale, queries, plan.query_blocks.numel(), width, plan.blocks, plan.blocks * plan.block,
        *strides(q, dout),
        HEADS=heads, D=dim, BLOCK=plan.block, BLOCK_M=moving, BLOCK_N=_COLUMNS_PER_TILE,
        PARTS=parts,
        CAP=cap, num_warps=8, num_stages=2,
    )  # fmt: skip
    return dk, dv
