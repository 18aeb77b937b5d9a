"""PyTorch's fused attention: the CPU flash kernel, and FlashAttention-2 on CUDA.

Under a dynamic index the CPU kernel computes all pairs and masks those that are not chosen. This is
exact, but no faster than dense attention.
"""

from __future__ import annotations

import torch

from mtrain_cli.attention.kernel import DefinitionColumns, KernelRequest
from mtrain_cli.attention.mask import KeySlice
from mtrain_cli.attention.partials import accumulation_dtype
from mtrain_cli.attention.tiles import Tiles

# Bytes of the largest additive mask of one CPU call, and the most bytes of a batch's masks that are
# cached for the other layers.
_MASK_BYTES = 16 << 20
_CACHED_MASK_BYTES = 256 << 20
_ROWS_PER_CALL = 512


class SdpaKernel(DefinitionColumns):
    """Exact in float32 and bfloat16, and float64 on the CPU.

    On CUDA a fragmented mask (striped layout, many documents) takes one call per rectangle.
    """

    name = "sdpa"
    needs_out = False

    def unsupported_reason(self, request: KernelRequest) -> str | None:
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

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: Tiles, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch, queries, heads, _ = q.shape
        out = torch.zeros_like(q)
        lse = torch.full(
            (batch, heads, queries),
            float("-inf"),
            dtype=accumulation_dtype(q.dtype),
            device=q.device,
        )
        piece_forward = _cuda_forward if q.is_cuda else _cpu_forward
        for b in range(batch):
            for rows, keys, mask in _pieces(tiles, b, q):
                part, part_lse = piece_forward(q[b, rows], k[b, keys], v[b, keys], mask, scale)
                out[b, rows] = part
                lse[b, :, rows] = part_lse
        if not q.is_cuda and tiles.index is None:
            # The CPU kernel returns lse 0 for a row without keys.
            lse.masked_fill_((tiles.low >= tiles.high)[:, None], float("-inf"))
        return out, lse

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor | None,
        lse: torch.Tensor,
        delta: torch.Tensor | None,
        tiles: Tiles,
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        high = accumulation_dtype(q.dtype)
        dq = torch.zeros_like(q)
        dk, dv = (torch.zeros(k.shape, dtype=high, device=k.device) for _ in range(2))
        if not q.is_cuda:
            # In 16 bits the CPU kernel rounds key gradients after every query tile; float32 is no
            # slower.
            dout, q, k, v = (t.to(high) for t in (dout, q, k, v))
            out = None if out is None else out.to(high)
        if out is None:
            assert delta is not None
            out = _surrogate_out(dout, delta)
        # A masked score gives exp(-inf - lse), which is NaN for a row without any keys (lse -inf).
        lse = lse.masked_fill(torch.isneginf(lse), 0.0)
        piece_backward = _cuda_backward if q.is_cuda else _cpu_backward
        for b in range(q.shape[0]):
            for rows, keys, mask in _pieces(tiles, b, q):
                part_q, part_k, part_v = piece_backward(
                    dout[b, rows],
                    q[b, rows],
                    k[b, keys],
                    v[b, keys],
                    out[b, rows],
                    lse[b, :, rows],
                    mask,
                    scale,
                )
                dq[b, rows] = part_q
                dk[b, keys] += part_k
                dv[b, keys] += part_v
        return dq, dk, dv


def _surrogate_out(dout: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
    """Return an out with rowsum(out * dout) = delta, for kernels that read out only for delta.

    The element with the largest |dout| of a row carries delta / dout. In 16 bits, two more elements
    carry the rounding error, so that the sum matches delta to float32 precision. The first quotient
    cannot overflow: |delta| is at most head_dim * max |out| * max |dout|.
    """
    high = accumulation_dtype(dout.dtype)
    out, size = torch.zeros_like(dout), dout.abs()
    remainder = delta.transpose(1, 2).unsqueeze(-1).to(high)
    for term in range(3 if dout.element_size() == 2 else 1):
        at = size.argmax(-1, keepdim=True)
        factor = dout.gather(-1, at).to(high)
        part = torch.where(factor == 0, 0, remainder / factor).to(dout.dtype)
        if term:
            # A later element of dout may be so small that the quotient overflows.
            part = torch.where(part.isfinite(), part, 0)
        out.scatter_(-1, at, part)
        size.scatter_(-1, at, -1)
        remainder = remainder - part.to(high) * factor
    return out


def _pieces(
    tiles: Tiles, b: int, q: torch.Tensor
) -> list[tuple[slice, slice, torch.Tensor | bool]]:
    """Return the calls that compute sequence b: query rows, key slots, and a mask.

    On the CPU the mask is an additive tensor or False; on CUDA it says whether the piece is causal.
    """
    if tiles.index is not None:
        return list(_cpu_index_pieces(tiles, b, accumulation_dtype(q.dtype)))
    key = f"sdpa:{b}:{accumulation_dtype(q.dtype)}"
    if key not in tiles.cache:
        pieces = (
            _cuda_pieces(tiles.slices[b])
            if q.is_cuda
            else _cpu_pieces(tiles, b, accumulation_dtype(q.dtype))
        )
        tiles.cache[key] = list(pieces)
        total = sum(
            m.numel() * m.element_size()
            for _, _, m in tiles.cache[key]
            if isinstance(m, torch.Tensor)
        )
        if total > _CACHED_MASK_BYTES:
            return tiles.cache.pop(key)
    return tiles.cache[key]


def _cuda_pieces(slices: tuple[KeySlice, ...]):
    for s in slices:
        yield slice(s.q_start, s.q_stop), slice(s.k_start, s.k_stop), s.causal


def _cpu_pieces(tiles: Tiles, b: int, dtype: torch.dtype):
    """Yield groups of rows with small masks; no mask if every row of a group sees all its keys."""
    low, high = tiles.low[b], tiles.high[b]
    num_rows = len(low)
    rows_with_keys = (low < high).nonzero().flatten()
    start = int(rows_with_keys[0]) if len(rows_with_keys) else num_rows
    while start < num_rows:
        stop = min(start + _ROWS_PER_CALL, num_rows)
        width = max(int(high[start:stop].max()) - int(low[start]), 1)
        stop = min(stop, start + max(16, _MASK_BYTES // (4 * width)))
        group_low, group_high = low[start:stop], high[start:stop]
        sees_keys = group_low < group_high
        if not bool(sees_keys.any()):
            break
        first, last = int(group_low[sees_keys].min()), int(group_high[sees_keys].max())
        mask: torch.Tensor | bool = False
        if bool((group_low != first).any()) or bool((group_high != last).any()):
            slots = torch.arange(first, last, dtype=torch.int32)
            hidden = (slots < group_low[:, None]) | (slots >= group_high[:, None])
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        yield slice(start, stop), slice(first, last), mask
        start = stop


def _cpu_index_pieces(tiles: Tiles, b: int, dtype: torch.dtype):
    """Yield groups of rows with the mask of every head, [heads, rows, keys]."""
    assert tiles.index is not None
    positions, key_positions = tiles.positions()
    rows = max(16, _MASK_BYTES // (4 * tiles.num_keys * tiles.index.heads[1]))
    slots = torch.arange(tiles.num_keys, dtype=torch.int32)
    for start in range(0, len(positions), rows):
        stop = min(start + rows, len(positions))
        last = int(tiles.high[b, start:stop].max())
        if not last:
            continue
        visible = (slots[:last] >= tiles.low[b, start:stop, None]) & (
            slots[:last] < tiles.high[b, start:stop, None]
        )
        visible = visible & tiles.index.allowed(positions[start:stop], key_positions[:last])[b]
        yield (
            slice(start, stop),
            slice(0, last),
            torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf")),
        )


def _bias(mask: torch.Tensor | bool, kv_heads: int) -> torch.Tensor | None:
    """Return a piece's mask in the kernel's shape for grouped heads.

    mask: [rows, keys] for all heads, or [heads, rows, keys].
    """
    if not isinstance(mask, torch.Tensor):
        return None
    return mask[None, None] if mask.ndim == 2 else mask.unflatten(0, (kv_heads, -1))


def _grouped(q: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """Return [kv_heads, group, queries, head_dim], a view of [queries, heads, head_dim]."""
    return q.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)


def _shared(k: torch.Tensor, group: int) -> torch.Tensor:
    """Return [kv_heads, group, keys, head_dim], a view of [keys, kv_heads, head_dim].

    Keys are not repeated in memory.
    """
    return k.transpose(0, 1)[:, None].expand(-1, group, -1, -1)


def _cpu_forward(q, k, v, mask, scale):
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    bias = _bias(mask, kv_heads)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        _grouped(q, kv_heads),
        _shared(k, group),
        _shared(v, group),
        0.0,
        False,
        attn_mask=bias,
        scale=scale,
    )
    lse = lse.flatten(0, 1)
    if isinstance(mask, torch.Tensor) and mask.ndim == 3:
        lse = lse.masked_fill(mask.amax(-1) < 0, float("-inf"))
    return out.permute(2, 0, 1, 3).flatten(1, 2), lse


def _cpu_backward(dout, q, k, v, out, lse, mask, scale):
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    bias = _bias(mask, kv_heads)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        _grouped(dout, kv_heads),
        _grouped(q, kv_heads),
        _shared(k, group),
        _shared(v, group),
        _grouped(out, kv_heads),
        lse.unflatten(0, (kv_heads, group)),
        0.0,
        False,
        attn_mask=bias,
        scale=scale,
    )
    return (
        dq.permute(2, 0, 1, 3).flatten(1, 2),
        dk.sum(1).transpose(0, 1),
        dv.sum(1).transpose(0, 1),
    )


def _cuda_forward(q, k, v, causal, scale):
    out, lse, *_ = torch.ops.aten._flash_attention_forward(
        q[None],
        k[None],
        v[None],
        None,
        None,
        q.shape[0],
        k.shape[0],
        0.0,
        causal,
        False,
        scale=scale,
    )
    return out[0], lse[0]


def _cuda_backward(dout, q, k, v, out, lse, causal, scale):
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        dout[None].contiguous(),
        q[None],
        k[None],
        v[None],
        out[None].to(q.dtype).contiguous(),
        lse[None].contiguous(),
        None,
        None,
        q.shape[0],
        k.shape[0],
        0.0,
        causal,
        unused,
        unused,
        scale=scale,
    )
    return dq[0], dk[0], dv[0]
