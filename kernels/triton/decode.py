"""Attention of one query per sequence over the first keys of a cache, split over many programs.

1. `_parts` computes attention over one part of a sequence's keys, for all query heads of a KV head.
2. `_merge` adds up the parts (Flash-Decoding). It also merges the parts of several workers.

The number of parts depends only on shapes and on the device, and the kernels read on the GPU how
many keys are used. A CUDA graph can therefore contain the calls.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

_KEYS = 64  # keys that a program reads at a time
_PROGRAMS_PER_SM = 4
_MOST_PARTS = 128
_INTERPRETED_PARTS = 3  # enough to test the merge


@triton.jit
def _parts(
    Q, K, V, USED, PARTS, scale, chunk, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn,
    stride_vh, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    kv_heads: tl.constexpr = HEADS // GROUP
    b = tl.program_id(1) // kv_heads
    kv = tl.program_id(1) % kv_heads
    used = tl.load(USED + b)
    begin = part * chunk
    end = tl.minimum(begin + chunk, used)
    row = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    head = b * HEADS + kv * GROUP + row
    valid = (row < GROUP)[:, None] & (d < D)[None, :]
    q = tl.load(Q + head[:, None] * D + d[None, :], mask=valid, other=0.0)
    highest = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    k_start = K + b.to(tl.int64) * stride_kb + kv.to(tl.int64) * stride_kh
    v_start = V + b.to(tl.int64) * stride_vb + kv.to(tl.int64) * stride_vh
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        loaded = (key < end)[:, None] & (d < D)[None, :]
        slot = key[:, None].to(tl.int64)
        k = tl.load(k_start + slot * stride_kn + d[None, :], mask=loaded, other=0.0)
        v = tl.load(v_start + slot * stride_vn + d[None, :], mask=loaded, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        s = tl.where((key < end)[None, :], s, float("-inf"))
        higher = tl.maximum(highest, tl.max(s, 1))
        p = tl.exp(s - higher[:, None])
        shrink = tl.exp(highest - higher)
        total = total * shrink + tl.sum(p, 1)
        out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        highest = higher
    empty = begin >= end
    lse = tl.where(empty, float("-inf"), highest + tl.log(tl.where(empty, 1.0, total)))
    out = out / tl.where(empty, 1.0, total)[:, None]
    batch = tl.num_programs(1) // kv_heads
    to = PARTS + (part * batch * HEADS + head) * (D + 1)
    tl.store(to[:, None] + d[None, :], out, mask=valid)
    tl.store(to + D, lse, mask=row < GROUP)


@triton.jit
def _merge(PARTS, OUT, LSE, rows, parts, D: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr):
    row = tl.program_id(0)
    d = tl.arange(0, WIDTH)
    part = tl.arange(0, COUNT)
    start = PARTS + (part * rows + row) * (D + 1)
    lse = tl.load(start + D, mask=part < parts, other=float("-inf"))
    highest = tl.maximum(tl.max(lse, 0), -1e30)
    share = tl.exp(lse - highest)
    total = tl.sum(share, 0)
    loaded = (part < parts)[:, None] & (d < D)[None, :]
    out = tl.load(start[:, None] + d[None, :], mask=loaded, other=0.0)
    merged = tl.sum(out * share[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(OUT + row * D + d, merged, mask=d < D)
    whole = highest + tl.log(tl.where(total > 0, total, 1.0))
    tl.store(LSE + row, tl.where(total > 0, whole, float("-inf")))


def decode(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, used: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [batch, 1, heads, head_dim] and lse [batch, heads, 1], both float32.

    Args:
        q: [batch, 1, heads, head_dim].
        k, v: [batch, capacity, kv_heads, head_dim].
        used: number of keys that each query sees, int32 [batch].
    """
    batch, capacity, kv_heads, dim = k.shape
    heads = q.shape[2]
    most = _most_parts(q.device, batch * kv_heads)
    chunk = _KEYS * triton.cdiv(triton.cdiv(capacity, _KEYS), most)
    parts = triton.cdiv(capacity, chunk)
    packed = torch.empty(parts, batch, heads, dim + 1, dtype=torch.float32, device=q.device)
    group = heads // kv_heads
    _parts[parts, batch * kv_heads](
        q.contiguous(), k, v, used, packed, scale, chunk, *k.stride()[:3], *v.stride()[:3],
        HEADS=heads, GROUP=group, D=dim, ROWS=max(16, triton.next_power_of_2(group)),
        WIDTH=max(16, triton.next_power_of_2(dim)), KEYS=_KEYS,
    )  # fmt: skip
    return merge_parts(packed)


def merge_parts(parts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over disjoint sets of keys; see `attention.decode.merge_parts`.

    parts: float32 [parts, batch, heads, head_dim + 1].
    """
    parts = parts.contiguous()
    count, batch, heads, width = parts.shape
    dim = width - 1
    out = torch.empty(batch, 1, heads, dim, dtype=torch.float32, device=parts.device)
    lse = torch.empty(batch, heads, 1, dtype=torch.float32, device=parts.device)
    _merge[(batch * heads,)](
        parts, out, lse, batch * heads, count, D=dim, WIDTH=triton.next_power_of_2(dim),
        COUNT=triton.next_power_of_2(count),
    )  # fmt: skip
    return out, lse


@cache
def _most_parts(device: torch.device, programs: int) -> int:
    """Return how many parts fill a device, with ``programs`` programs for each part."""
    if device.type != "cuda":
        return _INTERPRETED_PARTS
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, min(_MOST_PARTS, processors * _PROGRAMS_PER_SM // programs))
