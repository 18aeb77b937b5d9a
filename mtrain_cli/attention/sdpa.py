"""PyTorch's fused attention: the CPU flash kernel, and FlashAttention-2 on CUDA.

Under a dynamic index the CPU kernel computes all pairs and masks those that are not chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from mtrain_cli.attention.kernel import Kernel, KernelRequest, Saved
from mtrain_cli.attention.mask import SliceKind
from mtrain_cli.attention.partials import Pair, Triple, accumulation_dtype, merge
from mtrain_cli.attention.tiles import Tiles

MASK_BYTES = 16 << 20  # maximum size of the additive mask of one CPU call
CACHED_MASK_BYTES = 256 << 20  # maximum size of a sequence's masks that other layers reuse
ROWS_PER_CALL = 512

# Query rows, key slots and mask of one kernel call. On the CPU the mask is an additive tensor, or
# False for none, and the slots may be a tensor. On CUDA the mask is the kind of a slice.
Call = tuple[slice, slice | Tensor, Tensor | bool | SliceKind]


class SdpaKernel(Kernel):
    """PyTorch's attention: float32, bfloat16 and float64 on the CPU, bfloat16 on CUDA."""

    name = "sdpa"

    def unsupported_reason(self, request: KernelRequest) -> str | None:
        if request.softcap:
            return f"does not cap scores (softcap={request.softcap:g})"
        if request.device == "cpu":
            return None
        if request.index is not None:
            return "FlashAttention-2 in PyTorch computes dense attention only"
        if request.capability is None or request.capability < (8, 0):
            return "FlashAttention-2 in PyTorch needs compute capability 8.0 or later"
        if request.dtype != "bfloat16":
            return (
                f"FlashAttention-2 in PyTorch computes bfloat16, not {request.dtype}; "
                "train.kernel=reference computes any dtype"
            )
        if request.head_dim > 256 or request.head_dim % 8:
            return f"head_dim {request.head_dim} is not a multiple of 8 up to 256"
        if request.deterministic:
            return "its backward adds with atomics, which is not bitwise repeatable"
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Pair:
        batch, queries, heads, _ = q.shape
        high = accumulation_dtype(q.dtype)
        merges = _on_gpu(q) and tiles.intervals > 1  # several slices share queries
        out = torch.zeros(q.shape, dtype=high if merges else q.dtype, device=q.device)
        lse = q.new_full((batch, heads, queries), -torch.inf, dtype=high)
        forward = _cuda_forward if _on_gpu(q) else _cpu_forward
        for b in range(batch):
            for rows, keys, mask in _calls(tiles, b, q):
                part, part_lse = forward(q[b, rows], k[b, keys], v[b, keys], mask, scale)
                if merges:
                    merge(out[b : b + 1, rows], lse[b : b + 1, :, rows], part[None], part_lse[None])
                else:
                    out[b, rows], lse[b, :, rows] = part, part_lse
        if not _on_gpu(q) and tiles.index is None:
            # For a row that sees no key, the CPU kernel returns lse 0.
            lse.masked_fill_((tiles.low >= tiles.high).all(1)[:, None], float("-inf"))
        return out.to(q.dtype), lse

    def decode(self, q: Tensor, k: Tensor, v: Tensor, used: Tensor, scale: float) -> Pair:
        if _on_gpu(q):
            from mtrain_cli.kernels.triton import decode

            return decode.decode(q, k, v, used, scale)
        batch, _, heads, _ = q.shape
        lse = q.new_full((batch, heads, 1), -torch.inf, dtype=accumulation_dtype(q.dtype))
        out = torch.zeros_like(q)
        for b, keys in enumerate(used.tolist()):
            if keys:  # for a row that sees no key, the CPU kernel returns lse 0
                out[b], lse[b] = _cpu_forward(q[b], k[b, :keys], v[b, :keys], False, scale)
        return out, lse

    def backward(self, dout: Tensor, saved: Saved, tiles: Tiles, scale: float) -> Triple:
        q, k, v, out, lse, delta = saved
        high = accumulation_dtype(q.dtype)
        # Under several intervals, slices share queries on a GPU.
        low, adds = q.dtype, _on_gpu(q) and tiles.intervals > 1
        dq = torch.zeros(q.shape, dtype=high if adds else low, device=q.device)
        dk, dv = (torch.zeros(k.shape, dtype=high, device=k.device) for _ in range(2))
        if not _on_gpu(q):
            # Given 16-bit inputs, the CPU kernel rounds dk and dv after every tile of queries.
            # float32 is as fast.
            dout, q, k, v = (t.to(high) for t in (dout, q, k, v))
            out = None if out is None else out.to(high)
        if out is None:
            assert delta is not None
            out = _surrogate_out(dout, delta)
        # For a row that sees no key (lse -inf), exp(-inf - lse) of a masked score would be NaN.
        lse = lse.masked_fill(torch.isneginf(lse), 0.0)
        backward = _cuda_backward if _on_gpu(q) else _cpu_backward
        for b in range(q.shape[0]):
            for rows, keys, mask in _calls(tiles, b, q):
                of_rows = out[b, rows], lse[b, :, rows]
                part_dq, part_dk, part_dv = backward(
                    dout[b, rows], q[b, rows], k[b, keys], v[b, keys], *of_rows, mask, scale
                )
                dq[b, rows] += part_dq
                dk[b, keys] += part_dk
                dv[b, keys] += part_dv
        return dq.to(low), dk, dv


def _on_gpu(q: Tensor) -> bool:
    return q.is_cuda


def _surrogate_out(dout: Tensor, delta: Tensor) -> Tensor:
    """Return an out with rowsum(out * dout) = delta, for kernels that read out only for delta."""
    # The element with the largest |dout| of a row becomes delta / dout, the others 0. In 16 bits,
    # two more elements correct the rounding error to float32 precision. The first quotient cannot
    # overflow: |delta| is at most head_dim * max |out| * max |dout|.
    high = accumulation_dtype(dout.dtype)
    out, size = torch.zeros_like(dout), dout.abs()
    remainder = delta.transpose(1, 2).unsqueeze(-1).to(high)
    for term in range(3 if dout.element_size() == 2 else 1):
        at = size.argmax(-1, keepdim=True)
        factor = dout.gather(-1, at).to(high)
        part = torch.where(factor == 0, 0, remainder / factor).to(dout.dtype)
        if term:
            # This element of dout may be so small that the quotient overflows.
            part = torch.where(part.isfinite(), part, 0)
        out.scatter_(-1, at, part)
        size.scatter_(-1, at, -1)
        remainder = remainder - part.to(high) * factor
    return out


def _calls(tiles: Tiles, b: int, q: Tensor) -> Iterable[Call]:
    """Return the kernel calls that together compute sequence number b of the batch."""
    # On the CPU, masks are made one by one: a long sequence's together take quadratic memory.
    dtype = accumulation_dtype(q.dtype)
    if tiles.index is not None:
        return _cpu_index_calls(tiles, b, dtype)
    if _on_gpu(q):
        return [
            (slice(s.q_start, s.q_stop), slice(s.k_start, s.k_stop), SliceKind(s.kind))
            for s in tiles.slices[b]
        ]
    key = f"sdpa:{b}:{dtype}"
    if key in tiles.cache:
        return tiles.cache[key]
    split = _cpu_calls if tiles.intervals == 1 else _cpu_interval_calls
    return _cached(split(tiles, b, dtype), tiles, key)


def _cached(calls: Iterator[Call], tiles: Tiles, key: str) -> Iterator[Call]:
    """Yield calls. Keep them for the other layers if their masks are small together."""
    kept: list[Call] = []
    size = 0
    for call in calls:
        size += call[2].nbytes if isinstance(call[2], Tensor) else 0
        if size <= CACHED_MASK_BYTES:
            kept.append(call)
        else:
            kept.clear()
        yield call
    if size <= CACHED_MASK_BYTES:
        tiles.cache[key] = kept


def _cpu_calls(tiles: Tiles, b: int, dtype: torch.dtype) -> Iterator[Call]:
    low, high = (bound[b] for bound in tiles.one_interval)
    num_rows = len(low)
    rows_with_keys = (low < high).nonzero().flatten()
    start = int(rows_with_keys[0]) if len(rows_with_keys) else num_rows
    while start < num_rows:
        stop = min(start + ROWS_PER_CALL, num_rows)
        width = max(int(high[start:stop].max()) - int(low[start]), 1)
        stop = min(stop, start + max(16, MASK_BYTES // (4 * width)))
        group_low, group_high = low[start:stop], high[start:stop]
        sees_keys = group_low < group_high
        if bool(sees_keys.any()):
            first, last = int(group_low[sees_keys].min()), int(group_high[sees_keys].max())
            mask: Tensor | bool = False
            if bool((group_low != first).any()) or bool((group_high != last).any()):
                slots = torch.arange(first, last, dtype=torch.int32)
                hidden = (slots < group_low[:, None]) | (slots >= group_high[:, None])
                mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
            yield slice(start, stop), slice(first, last), mask
        start = stop


def _cpu_interval_calls(tiles: Tiles, b: int, dtype: torch.dtype) -> Iterator[Call]:
    """Yield one call per group of rows, with only the keys that some row of the group sees."""
    start, num_rows = 0, tiles.num_queries
    while start < num_rows:
        stop = min(start + ROWS_PER_CALL, num_rows)
        low, high = tiles.low[b, :, start:stop], tiles.high[b, :, start:stop]
        slots = _slots_seen(low, high, tiles.num_keys)
        most = max(16, MASK_BYTES // (4 * max(1, len(slots))))
        if stop - start > most:
            stop = start + most
            low, high = low[:, :most], high[:, :most]
            slots = _slots_seen(low, high, tiles.num_keys)
        if len(slots):
            seen = ((slots >= low[..., None]) & (slots < high[..., None])).any(0)
            mask: Tensor | bool = False
            if not bool(seen.all()):
                mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, float("-inf"))
            first, last = int(slots[0]), int(slots[-1]) + 1
            whole = last - first == len(slots)
            yield slice(start, stop), slice(first, last) if whole else slots, mask
        start = stop


def _slots_seen(low: Tensor, high: Tensor, num_keys: int) -> Tensor:
    """Return the key slots that at least one row sees, ascending, int64."""
    edges = torch.zeros(num_keys + 1, dtype=torch.int64)
    ones = torch.ones(low.numel(), dtype=torch.int64)
    edges.index_add_(0, low.flatten().long(), ones)
    edges.index_add_(0, high.flatten().long(), -ones)
    return edges.cumsum(0)[:-1].nonzero().flatten()


def _cpu_index_calls(tiles: Tiles, b: int, dtype: torch.dtype) -> Iterator[Call]:
    """Yield one call per group of rows, with masks of all heads, [heads, rows, keys]."""
    assert tiles.index is not None
    positions, key_positions = tiles.positions()
    rows = max(16, MASK_BYTES // (4 * tiles.num_keys * tiles.index.heads[1]))
    slots = torch.arange(tiles.num_keys, dtype=torch.int32)
    for start in range(0, len(positions), rows):
        stop = min(start + rows, len(positions))
        low, high = (bound[b, start:stop, None] for bound in tiles.one_interval)
        last = int(high.max())
        if not last:
            continue
        visible = (slots[:last] >= low) & (slots[:last] < high)
        visible = visible & tiles.index.allowed(positions[start:stop], key_positions[:last])[b]
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
        yield slice(start, stop), slice(0, last), mask


def _bias(mask: Tensor | bool, kv_heads: int) -> Tensor | None:
    if not isinstance(mask, Tensor):
        return None
    return mask[None, None] if mask.ndim == 2 else mask.unflatten(0, (kv_heads, -1))


def _grouped(q: Tensor, kv_heads: int) -> Tensor:
    """Return [kv_heads, group, queries, head_dim], a view of [queries, heads, head_dim]."""
    return q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)


def _shared(k: Tensor, group: int) -> Tensor:
    """Return [kv_heads, group, keys, head_dim], a view of [keys, kv_heads, head_dim]."""
    return k.transpose(0, 1)[:, None].expand(-1, group, -1, -1)


def _cpu_forward(q, k, v, mask, scale):
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    inputs = _grouped(q, kv_heads), _shared(k, group), _shared(v, group)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *inputs, 0.0, False, attn_mask=_bias(mask, kv_heads), scale=scale
    )
    lse = lse.flatten(0, 1)
    if isinstance(mask, Tensor) and mask.ndim == 3:
        lse = lse.masked_fill(mask.amax(-1) < 0, float("-inf"))
    return out.permute(2, 0, 1, 3).flatten(1, 2), lse


def _cpu_backward(dout, q, k, v, out, lse, mask, scale):
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    inputs = _grouped(q, kv_heads), _shared(k, group), _shared(v, group), _grouped(out, kv_heads)
    lse = lse.unflatten(0, (kv_heads, group))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _grouped(dout, kv_heads), *inputs, lse, 0.0, False, attn_mask=_bias(mask, kv_heads),
        scale=scale,
    )  # fmt: skip
    dk, dv = (t.sum(1).transpose(0, 1) for t in (dk, dv))
    return dq.permute(2, 0, 1, 3).flatten(1, 2), dk, dv


def flash_window(queries: int, keys: int, kind: SliceKind) -> tuple[bool, dict[str, int]]:
    """Return (is_causal, window sizes) with which FlashAttention-2 computes a slice.

    Row i sees the keys ``i + keys - queries - left <= j <= i + keys - queries + right``, without a
    size all. Every row of a slice sees a key, so keys >= queries unless the slice is full.
    """
    if not kind & SliceKind.INVERSE:
        return bool(kind & SliceKind.CAUSAL), {}
    sizes = {"window_size_left": keys - queries}
    if kind & SliceKind.CAUSAL:
        sizes["window_size_right"] = 0
    return False, sizes


def _cuda_forward(q, k, v, kind, scale):
    causal, window = flash_window(len(q), len(k), kind)
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q[None], k[None], v[None], None, None, len(q), len(k), 0.0, causal, False, scale=scale,
        **window,
    )  # fmt: skip
    return out[0], lse[0]


def _cuda_backward(dout, q, k, v, out, lse, kind, scale):
    causal, window = flash_window(len(q), len(k), kind)
    dout, out, lse = (t[None].contiguous() for t in (dout, out.to(q.dtype), lse))
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
    gradients = torch.ops.aten._flash_attention_backward(
        dout, q[None], k[None], v[None], out, lse, None, None, len(q), len(k), 0.0, causal,
        unused, unused, scale=scale, **window,
    )  # fmt: skip
    return tuple(t[0] for t in gradients)
