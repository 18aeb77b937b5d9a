"""Merge partial attention results, and compute delta: what kernels and exchanges share."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of partial sums: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def high_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, or batches of it, in the accumulation dtype, which its sums have, too."""
    high = accumulation_dtype(a.dtype)
    if a.is_cuda and a.dtype != high:
        return (torch.mm if a.ndim == 2 else torch.bmm)(a, b, out_dtype=high)
    return a.to(high) @ b.to(high)


def merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge the attention over more keys into out and lse, in place.

    With w = sigmoid(part_lse - lse), which cannot overflow: out += w (part_out - out) and lse -=
    logsigmoid(lse - part_lse). A row that sees no new key (part_lse -inf) does not change.

    out, part_out: [batch, queries, heads, head_dim]; out is float32 or float64, and so is lse.
    lse, part_lse: [batch, heads, queries].
    """
    if _fused_merge(out, lse, part_out, part_lse):
        return
    difference = part_lse - lse
    no_new_keys = torch.isneginf(part_lse)
    weight = torch.sigmoid(difference).masked_fill_(no_new_keys, 0.0)
    out.lerp_(part_out.to(out.dtype), weight.transpose(1, 2).unsqueeze(-1).to(out.dtype))
    merged_lse = lse - torch.nn.functional.logsigmoid(-difference)
    # If lse is -inf, the line above gives inf - inf: take the new part's lse instead.
    merged_lse = torch.where(torch.isneginf(lse), part_lse, merged_lse)
    lse.copy_(torch.where(no_new_keys, lse, merged_lse))


def _fused_merge(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> bool:
    if not (out.dtype == lse.dtype == part_lse.dtype == torch.float32 and cuda_kernels_usable(out)):
        return False
    tensors = (out, lse, part_out, part_lse)
    if part_out.dtype not in (torch.float32, torch.bfloat16) or not all(
        t.is_contiguous() for t in tensors
    ):
        return False
    import numpy as np

    from mtrain_cli.kernels.cuda.nvrtc import launch

    batch, queries, heads, dim = out.shape
    rows = batch * queries * heads
    launch(
        "merge", f"merge_{str(part_out.dtype).removeprefix('torch.')}", (-(-rows // 8), 1), 256,
        *tensors, np.int64(rows), np.int64(queries), heads, dim,
    )  # fmt: skip
    return True


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Pair:
    """Return out and lse with a further score per head that adds nothing to the output.

    Any backward pass from these is right: it needs exp(score - lse) and rowsum(out * dout).

    sinks: [heads].
    """
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    # A row without keys has the share 0, for a sink of -inf, too.
    share = torch.where(lse.isneginf(), 0.0, (lse - total).exp()).transpose(1, 2)[..., None]
    return (out * share).to(out.dtype), total


def sink_gradient(out: Tensor, lse: Tensor, dout: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of sinks, [heads], from what `add_sinks` returned."""
    shares = torch.where(lse.isneginf(), 0.0, (sinks.to(lse.dtype)[:, None] - lse).exp())
    return -(shares * row_delta(out, dout)).sum((0, 2)).to(sinks.dtype)


def row_delta(out: Tensor, dout: Tensor) -> Tensor:
    """Return delta = rowsum(out * dout), [batch, heads, queries], in the accumulation dtype."""
    if out.is_cuda and out.dtype != torch.float64 and has_triton():
        from mtrain_cli.kernels.triton import sparse

        return sparse.row_delta(out, dout)
    high = accumulation_dtype(out.dtype)
    return (out.to(high) * dout.to(high)).sum(-1).transpose(1, 2).contiguous()


def merge_parts(parts: Tensor) -> Pair:
    """Merge the attention of the same queries over disjoint sets of keys.

    parts: float32 or float64 [parts, batch, heads, head_dim + 1]: out (0 without keys), then lse.
    """
    if parts.is_cuda and parts.dtype == torch.float32 and has_triton():
        from mtrain_cli.kernels.triton import decode

        return decode.merge_parts(parts)
    out, part_lse = parts[..., :-1], parts[..., -1]
    lse = part_lse.logsumexp(0)
    shares = torch.exp(part_lse - lse.masked_fill(lse.isneginf(), 0.0))
    return (shares[..., None] * out).sum(0)[:, None], lse[..., None]


def pack_part(out: Tensor, lse: Tensor) -> Tensor:
    """Return out and lse of one query per sequence as a part for `merge_parts`."""
    return torch.cat([out[:, 0].to(lse.dtype), lse], dim=-1)


@cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def cupy_unsupported_reason() -> str | None:
    """Return why the CUDA kernels cannot run on the current GPU, or None if they can."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    try:
        from mtrain_cli.kernels.cuda.nvrtc import check
    except Exception as error:  # a broken installation can raise anything
        return f"CuPy cannot be imported: {_first_line(error)}"
    try:
        check()
    except Exception as error:
        return f"CuPy cannot compile here: {_first_line(error)}"
    return None


def cuda_kernels_usable(tensor: Tensor) -> bool:
    """Return whether the CUDA kernels can process the tensor: it is on a GPU and CuPy works."""
    return tensor.is_cuda and cupy_unsupported_reason() is None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]
