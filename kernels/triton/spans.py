"""Triton kernels for attention under a mask of a few key intervals per query.

Block lists say which pairs of blocks a launch visits, and intervals mask single pairs in partial
blocks. As in `kernels.triton.sparse`, no kernel uses atomics, and results are bitwise repeatable.

Shapes: q, out, dout [batch, queries, heads, head_dim]; k, v [batch, keys, kv_heads, head_dim];
lse, delta float32 [batch, heads, queries], lse a natural logarithm. Keys and queries are slots:
position in the shard.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from mtrain_cli.kernels.triton.sparse.arguments import Tile, strides
from mtrain_cli.kernels.triton.sparse.device import LN2, LOG2E, load_rows
from mtrain_cli.kernels.triton.sparse.key_gradient import key_gradient
from mtrain_cli.kernels.triton.sparse.output import attend
from mtrain_cli.kernels.triton.sparse.query_gradient import query_gradient

_FORWARD = Tile(64, 8, 3)
_QUERIES = Tile(64, 8, 3)
_KEYS = Tile(64, 8, 2)


@dataclass(frozen=True)
class SpanPlan:
    """The query-key pairs that a launch computes. Tensors are int32 on the device.

    block: tokens per block on both sides. The last block of either side may be short.
    low, high: [batch, intervals, queries]; each query sees the keys low <= j < high of each
        interval.
    partial, full: ascending key blocks of each query block or, for dk and dv, query blocks of each
        key block, [batch, 1, blocks, width]. Every query of a full pair of blocks sees all keys.
    partial_count, full_count: number of entries, [batch, 1, blocks].
    """

    block: int
    low: torch.Tensor
    high: torch.Tensor
    partial: torch.Tensor
    full: torch.Tensor
    partial_count: torch.Tensor
    full_count: torch.Tensor

    def arguments(self) -> tuple[Any, ...]:
        """Return the tensors and sizes in the order in which every kernel takes them."""
        tensors = self.partial, self.partial_count, self.full, self.full_count, self.low, self.high
        assert all(t.is_contiguous() for t in tensors)
        return *tensors, self.partial.shape[-1]


@triton.jit
def _hidden(LOW, HIGH, rows, keys, queries, INTERVALS: tl.constexpr):
    """Return which queries do not see which keys, bool.

    LOW, HIGH: bounds of the sequence's first interval.
    rows, keys: numbers of the queries and of the keys, each with an axis of size 1 for the other.
    """
    valid = rows < queries
    seen = (keys < 0) & (rows < 0)
    for n in tl.static_range(INTERVALS):
        low = tl.load(LOW + n * queries + rows, mask=valid, other=0)
        high = tl.load(HIGH + n * queries + rows, mask=valid, other=0)
        seen |= (keys >= low) & (keys < high)
    return ~seen


@triton.jit
def _forward(
    Q, K, V, OUT, LSE,
    PARTIAL, PARTIAL_COUNT, FULL, FULL_COUNT, LOW, HIGH, width,
    scale, queries, keys,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn,
    stride_vh,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    CAP: tl.constexpr, BLOCK_N: tl.constexpr, INTERVALS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    i = tl.num_programs(0) - 1 - tl.program_id(0)  # under most masks, late queries see most keys
    bh = tl.program_id(1).to(tl.int64)
    b = bh // HEADS
    h = bh % HEADS
    rows = i * BLOCK + tl.arange(0, BLOCK)
    valid = rows < queries
    d = tl.arange(0, D)
    q = tl.load(
        Q + b * stride_qb + rows[:, None].to(tl.int64) * stride_qn + h * stride_qh + d,
        mask=valid[:, None],
        other=0.0,
    )
    m = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, D], tl.float32)
    k_base = K + b * stride_kb + (h // GROUP) * stride_kh + d
    v_base = V + b * stride_vb + (h // GROUP) * stride_vh + d
    offsets = tl.arange(0, BLOCK_N)
    SUB: tl.constexpr = BLOCK // BLOCK_N
    row = b * tl.num_programs(0) + i
    bounds = b * INTERVALS * queries
    for t in range(tl.load(PARTIAL_COUNT + row) * SUB):
        block = tl.load(PARTIAL + row * width + t // SUB)
        slots = block * BLOCK + (t % SUB) * BLOCK_N + offsets
        k = load_rows(k_base, slots, stride_kn, keys)
        v = load_rows(v_base, slots, stride_vn, keys)
        hidden = _hidden(
            LOW + bounds, HIGH + bounds, rows[:, None], slots[None, :], queries, INTERVALS
        )
        m, total, acc = attend(q, k, v, hidden, m, total, acc, scale, CAP, True)
    for t in range(tl.load(FULL_COUNT + row) * SUB):
        block = tl.load(FULL + row * width + t // SUB)
        slots = block * BLOCK + (t % SUB) * BLOCK_N + offsets
        k_at = k_base + slots[:, None].to(tl.int64) * stride_kn
        v_at = v_base + slots[:, None].to(tl.int64) * stride_vn
        if EVEN:
            k = tl.load(k_at)
            v = tl.load(v_at)
            m, total, acc = attend(q, k, v, q, m, total, acc, scale, CAP, False)
        else:
            inside = slots < keys
            k = tl.load(k_at, mask=inside[:, None], other=0.0)
            v = tl.load(v_at, mask=inside[:, None], other=0.0)
            m, total, acc = attend(q, k, v, ~inside[None, :], m, total, acc, scale, CAP, True)
    # NaN != 0, so a row with a NaN stays NaN and does not count as a row that sees no key.
    sees_keys = valid & (total != 0.0)
    out = tl.where(sees_keys[:, None], acc / tl.where(sees_keys, total, 1.0)[:, None], 0.0)
    lse = tl.where(sees_keys, m * LN2 + tl.log(tl.where(sees_keys, total, 1.0)), float("-inf"))
    at = (b * queries + rows[:, None]) * (HEADS * D) + h * D + d
    tl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=valid[:, None])
    tl.store(LSE + bh * queries + rows, lse, mask=valid)


@triton.jit
def _backward_queries(
    Q, K, V, DO, LSE, DELTA, DQ,
    PARTIAL, PARTIAL_COUNT, FULL, FULL_COUNT, LOW, HIGH, width,
    scale, queries, keys,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn,
    stride_vh, stride_db, stride_dn, stride_dh,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    CAP: tl.constexpr, BLOCK_N: tl.constexpr, INTERVALS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    i = tl.num_programs(0) - 1 - tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    b = bh // HEADS
    h = bh % HEADS
    rows = i * BLOCK + tl.arange(0, BLOCK)
    valid = rows < queries
    d = tl.arange(0, D)
    at = rows[:, None].to(tl.int64)
    q = tl.load(
        Q + b * stride_qb + at * stride_qn + h * stride_qh + d, mask=valid[:, None], other=0.0
    )
    do = tl.load(
        DO + b * stride_db + at * stride_dn + h * stride_dh + d, mask=valid[:, None], other=0.0
    )
    lse = tl.load(LSE + bh * queries + rows, mask=valid, other=float("-inf"))
    # For a row that sees no key, set lse to +inf: exp(s - inf) = 0 gives it no probabilities.
    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
    delta = tl.load(DELTA + bh * queries + rows, mask=valid, other=0.0)
    acc = tl.zeros([BLOCK, D], tl.float32)
    k_base = K + b * stride_kb + (h // GROUP) * stride_kh + d
    v_base = V + b * stride_vb + (h // GROUP) * stride_vh + d
    offsets = tl.arange(0, BLOCK_N)
    SUB: tl.constexpr = BLOCK // BLOCK_N
    row = b * tl.num_programs(0) + i
    bounds = b * INTERVALS * queries
    for t in range(tl.load(PARTIAL_COUNT + row) * SUB):
        block = tl.load(PARTIAL + row * width + t // SUB)
        slots = block * BLOCK + (t % SUB) * BLOCK_N + offsets
        k = load_rows(k_base, slots, stride_kn, keys)
        v = load_rows(v_base, slots, stride_vn, keys)
        hidden = _hidden(
            LOW + bounds, HIGH + bounds, rows[:, None], slots[None, :], queries, INTERVALS
        )
        acc = query_gradient(q, k, v, do, lse, delta, hidden, acc, scale, CAP, True)
    for t in range(tl.load(FULL_COUNT + row) * SUB):
        block = tl.load(FULL + row * width + t // SUB)
        slots = block * BLOCK + (t % SUB) * BLOCK_N + offsets
        k_at = k_base + slots[:, None].to(tl.int64) * stride_kn
        v_at = v_base + slots[:, None].to(tl.int64) * stride_vn
        if EVEN:
            acc = query_gradient(
                q, tl.load(k_at), tl.load(v_at), do, lse, delta, q, acc, scale, CAP, False
            )
        else:
            inside = slots < keys
            k = tl.load(k_at, mask=inside[:, None], other=0.0)
            v = tl.load(v_at, mask=inside[:, None], other=0.0)
            acc = query_gradient(q, k, v, do, lse, delta, ~inside[None, :], acc, scale, CAP, True)
    out = (b * queries + rows[:, None]) * (HEADS * D) + h * D + d
    tl.store(DQ + out, (acc * scale).to(DQ.dtype.element_ty), mask=valid[:, None])


@triton.jit
def _backward_keys(
    Q, K, V, DO, LSE, DELTA, DK, DV,
    PARTIAL, PARTIAL_COUNT, FULL, FULL_COUNT, LOW, HIGH, width,
    scale, queries, keys,
    stride_qb, stride_qn, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn,
    stride_vh, stride_db, stride_dn, stride_dh,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
    CAP: tl.constexpr, BLOCK_M: tl.constexpr, INTERVALS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    j = tl.program_id(0)  # under most masks, most queries see the first keys
    b = tl.program_id(1).to(tl.int64) // (HEADS // GROUP)
    kv = tl.program_id(1).to(tl.int64) % (HEADS // GROUP)
    slots = j * BLOCK + tl.arange(0, BLOCK)
    inside = slots < keys
    d = tl.arange(0, D)
    at = slots[:, None].to(tl.int64)
    k = tl.load(
        K + b * stride_kb + at * stride_kn + kv * stride_kh + d, mask=inside[:, None], other=0.0
    )
    v = tl.load(
        V + b * stride_vb + at * stride_vn + kv * stride_vh + d, mask=inside[:, None], other=0.0
    )
    dk = tl.zeros([BLOCK, D], tl.float32)
    dv = tl.zeros([BLOCK, D], tl.float32)
    offsets = tl.arange(0, BLOCK_M)
    SUB: tl.constexpr = BLOCK // BLOCK_M
    row = b * tl.num_programs(0) + j
    bounds = b * INTERVALS * queries
    partial = tl.load(PARTIAL_COUNT + row) * SUB
    full = tl.load(FULL_COUNT + row) * SUB
    for g in range(GROUP):
        h = kv * GROUP + g
        bh = b * HEADS + h
        q_base = Q + b * stride_qb + h * stride_qh + d
        do_base = DO + b * stride_db + h * stride_dh + d
        for t in range(partial):
            block = tl.load(PARTIAL + row * width + t // SUB)
            rows = block * BLOCK + (t % SUB) * BLOCK_M + offsets
            valid = rows < queries
            q = load_rows(q_base, rows, stride_qn, queries)
            do = load_rows(do_base, rows, stride_dn, queries)
            lse = tl.load(LSE + bh * queries + rows, mask=valid, other=float("-inf"))
            lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
            delta = tl.load(DELTA + bh * queries + rows, mask=valid, other=0.0)
            hidden = _hidden(
                LOW + bounds, HIGH + bounds, rows[None, :], slots[:, None], queries, INTERVALS
            )
            dk, dv = key_gradient(q, k, v, do, lse, delta, hidden, dk, dv, scale, CAP, True)
        for t in range(full):
            block = tl.load(FULL + row * width + t // SUB)
            rows = block * BLOCK + (t % SUB) * BLOCK_M + offsets
            q_at = q_base + rows[:, None].to(tl.int64) * stride_qn
            do_at = do_base + rows[:, None].to(tl.int64) * stride_dn
            if EVEN:
                q = tl.load(q_at)
                do = tl.load(do_at)
                lse = tl.load(LSE + bh * queries + rows)
                delta = tl.load(DELTA + bh * queries + rows)
            else:
                valid = rows < queries
                q = tl.load(q_at, mask=valid[:, None], other=0.0)
                do = tl.load(do_at, mask=valid[:, None], other=0.0)
                lse = tl.load(LSE + bh * queries + rows, mask=valid, other=float("-inf"))
                delta = tl.load(DELTA + bh * queries + rows, mask=valid, other=0.0)
            lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
            dk, dv = key_gradient(q, k, v, do, lse, delta, q, dk, dv, scale, CAP, False)
    out = ((b * keys + slots[:, None]) * (HEADS // GROUP) + kv) * D + d
    tl.store(DK + out, dk * scale, mask=inside[:, None])
    tl.store(DV + out, dv, mask=inside[:, None])


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    plan: SpanPlan,
    scale: float,
    cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out, in the dtype of q, and lse. ``plan`` lists the key blocks of query blocks.

    cap: soft cap of scores, here and below: cap * tanh(score / cap); 0 for none.
    """
    batch, queries, heads, dim = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    moving = min(_FORWARD.moving, plan.block)
    _forward[(plan.partial.shape[2], batch * heads)](
        q, k, v, out, lse, *plan.arguments(), scale, queries, k.shape[1], *strides(q, k, v),
        HEADS=heads, GROUP=heads // k.shape[2], D=dim, BLOCK=plan.block, BLOCK_N=moving,
        INTERVALS=plan.low.shape[1], EVEN=k.shape[1] % plan.block == 0,
        CAP=cap, num_warps=_FORWARD.warps, num_stages=_FORWARD.stages,
    )  # fmt: skip
    return out, lse


def backward_queries(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    plan: SpanPlan,
    scale: float,
    cap: float = 0.0,
) -> torch.Tensor:
    """Return dq, shaped like q. ``plan`` lists the key blocks of query blocks."""
    batch, queries, heads, dim = q.shape
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    moving = min(_QUERIES.moving, plan.block)
    _backward_queries[(plan.partial.shape[2], batch * heads)](
        q, k, v, dout, lse, delta, dq, *plan.arguments(), scale, queries, k.shape[1],
        *strides(q, k, v, dout),
        HEADS=heads, GROUP=heads // k.shape[2], D=dim, BLOCK=plan.block, BLOCK_N=moving,
        INTERVALS=plan.low.shape[1], EVEN=k.shape[1] % plan.block == 0,
        CAP=cap, num_warps=_QUERIES.warps, num_stages=_QUERIES.stages,
    )  # fmt: skip
    return dq


def backward_keys(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    plan: SpanPlan,
    scale: float,
    cap: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return dk and dv, float32, shaped like k. ``plan`` lists the query blocks of key blocks."""
    batch, queries, heads, dim = q.shape
    dk, dv = (torch.empty(k.shape, dtype=torch.float32, device=k.device) for _ in range(2))
    moving = min(_KEYS.moving, plan.block)
    _backward_keys[(plan.partial.shape[2], batch * k.shape[2])](
        q, k, v, dout, lse, delta, dk, dv, *plan.arguments(), scale, queries, k.shape[1],
        *strides(q, k, v, dout),
        HEADS=heads, GROUP=heads // k.shape[2], D=dim, BLOCK=plan.block, BLOCK_M=moving,
        INTERVALS=plan.low.shape[1], EVEN=queries % plan.block == 0,
        CAP=cap, num_warps=_KEYS.warps, num_stages=_KEYS.stages,
    )  # fmt: skip
    return dk, dv
