"""The gradient of keys and values: a program owns a block of keys, or a tile of packed columns and a part of the queries, and goes over
the queries that see them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from mtrain_cli.kernels.triton.sparse.device import LOG2E, ungated
from mtrain_cli.kernels.triton.sparse.launch import Tile, gate_arguments, strides, tile_for
from mtrain_cli.kernels.triton.sparse.plan import Plan

# By block size; the fastest of those tried on an H200 with head_dim 128 (profiles/notes.md).
_KEYS = {128: Tile(64, 8, 2), 64: Tile(64, 8, 2)}
_COLUMNS_PER_TILE = 128
_PROGRAMS_WANTED = (
    1024  # programs for the gradient of columns: enough to fill any GPU several times
)


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
def _backward_keys(
    Q, K, V, DO, LSE, DELTA, DK, DV,
    FIRST, LAST, KEY_BLOCKS, QUERY_SLOT, LINES, UPTO,
    GATES, GATE_SLOTS, held, words, CHUNK_BLOCKS,
    scale, queries, keys, width, BLOCKS, SEQ,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh, stride_db, stride_dn, stride_dh,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr,
    LISTED: tl.constexpr, HOLES: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0)  # the first keys are seen most
    b = tl.program_id(1).to(tl.int64) // (HEADS // GROUP)
    kv = tl.program_id(1).to(tl.int64) % (HEADS // GROUP)
    slots = j * BLOCK + tl.arange(0, BLOCK)
    real = slots < keys
    d = tl.arange(0, D)
    kb = tl.load(KEY_BLOCKS + j)
    positions = kb * BLOCK + tl.arange(0, BLOCK)
    k = tl.load(
        K + b * stride_kb + slots[:, None].to(tl.int64) * stride_kn + kv * stride_kh + d,
        mask=real[:, None],
        other=0.0,
    )
    v = tl.load(
        V + b * stride_vb + slots[:, None].to(tl.int64) * stride_vn + kv * stride_vh + d,
        mask=real[:, None],
        other=0.0,
    )
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
            whole = tl.minimum(
                tl.maximum(tl.load(base + tl.maximum(everywhere - kb + 1, 0)), diagonal), end
            )
        q_base = Q + b * stride_qb + h * stride_qh + d
        do_base = DO + b * stride_db + h * stride_dh + d
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
                q = tl.load(
                    q_base + at[:, None].to(tl.int64) * stride_qn, mask=there[:, None], other=0.0
                )
                do = tl.load(
                    do_base + at[:, None].to(tl.int64) * stride_dn, mask=there[:, None], other=0.0
                )
                lse = tl.load(LSE + row_base + at, mask=there, other=float("-inf"))
                lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
                delta = tl.load(DELTA + row_base + at, mask=there, other=0.0)
                hidden = (positions[:, None] < first[None, :]) | (
                    positions[:, None] > where[None, :]
                )
                if GATED:
                    hidden |= ungated(
                        GATES, GATE_SLOTS, bh, qb, inside, kb, held, words, CHUNK_BLOCKS, BLOCK
                    )[None, :]
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
                        do = tl.load(do_base + at[:, None].to(tl.int64) * stride_dn)
                        lse = tl.load(LSE + row_base + at)
                        lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
                        delta = tl.load(DELTA + row_base + at)
                        dk, dv = _key_gradient(q, k, v, do, lse, delta, q, dk, dv, scale, False)
                else:
                    q = tl.load(q_base + at[:, None].to(tl.int64) * stride_qn)
                    do = tl.load(do_base + at[:, None].to(tl.int64) * stride_dn)
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
    scale, queries, query_blocks, column_width, BLOCKS, SEQ,
    stride_qb, stride_qn, stride_qh, stride_db, stride_dn, stride_dh,
    HEADS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS
    bh = tl.program_id(1).to(tl.int64)
    b = bh // HEADS
    h = bh % HEADS
    d = tl.arange(0, D)
    at = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    column = bh * column_width
    where = tl.load(BARS + column + at, mask=at < column_width, other=SEQ)
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
        do_base = DO + b * stride_db + h * stride_dh + d
        row_base = bh * queries
        slash = SLASH + bh * BLOCKS
        words = (
            COVERED
            + bh * query_blocks * (column_width // 32)
            + tile * (BLOCK_N // 32)
            + tl.arange(0, BLOCK_N) // 32
        )
        word = tl.load(
            words + tl.minimum(full_begin, query_blocks - 1).to(tl.int64) * (column_width // 32)
        )
        for t in range(full_begin * SUB, full_end * SUB):
            following = tl.load(
                words + tl.minimum((t + 1) // SUB, full_end - 1).to(tl.int64) * (column_width // 32)
            )
            i = t // SUB
            rows = i * BLOCK + (t % SUB) * BLOCK_M + within
            qb = tl.load(QUERY_BLOCKS + i)
            q = tl.load(q_base + rows[:, None].to(tl.int64) * stride_qn)
            do = tl.load(do_base + rows[:, None].to(tl.int64) * stride_dn)
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
            q = tl.load(
                q_base + rows[:, None].to(tl.int64) * stride_qn, mask=there[:, None], other=0.0
            )
            do = tl.load(
                do_base + rows[:, None].to(tl.int64) * stride_dn, mask=there[:, None], other=0.0
            )
            lse = tl.load(LSE + row_base + rows, mask=there, other=float("-inf"))
            lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
            delta = tl.load(DELTA + row_base + rows, mask=there, other=0.0)
            away = qb - where // BLOCK
            covered = tl.load(slash + away, mask=away >= 0, other=1) != 0
            hidden = (
                covered[:, None]
                | (where[:, None] < first[None, :])
                | (where[:, None] > position[None, :])
            )
            dk, dv = _key_gradient(q, k, v, do, lse, delta, hidden, dk, dv, scale, True)
    to = ((part.to(tl.int64) * tl.num_programs(1) + bh) * column_width + at[:, None]) * D + d
    tl.store(DK + to, dk * scale, mask=(at < column_width)[:, None])
    tl.store(DV + to, dv, mask=(at < column_width)[:, None])


def backward_keys(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    plan: Plan,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-> dk, dv over the blocks (not the columns), float32 like the keys."""
    assert plan.lines_t is not None
    batch, queries, heads, dim = q.shape
    dk, dv = (torch.empty(k.shape, dtype=torch.float32, device=k.device) for _ in range(2))
    tile = tile_for(_KEYS, plan.block)
    _backward_keys[(plan.key_blocks.numel(), batch * k.shape[2])](
        q, k, v, dout, lse, delta, dk, dv,
        plan.first, plan.last, plan.key_blocks, plan.query_slot, plan.lines_t, plan.upto_t, *gate_arguments(plan, q),
        scale, queries, k.shape[1], plan.lines_t.shape[-1], plan.blocks, plan.blocks * plan.block,
        *strides(q, k, v, dout),
        HEADS=heads, GROUP=heads // k.shape[2], D=dim, BLOCK=plan.block, BLOCK_M=tile.moving, LISTED=plan.listed, HOLES=plan.holes,
        GATED=plan.gates is not None, num_warps=tile.warps, num_stages=tile.stages,
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
        plan.first, plan.last, plan.query_blocks, plan.query_count, plan.slash, plan.column_positions, plan.covered,
        scale, queries, plan.query_blocks.numel(), width, plan.blocks, plan.blocks * plan.block,
        *strides(q, dout),
        HEADS=heads, D=dim, BLOCK=plan.block, BLOCK_M=moving, BLOCK_N=_COLUMNS_PER_TILE, PARTS=parts,
        num_warps=8, num_stages=2,
    )  # fmt: skip
    return dk, dv
