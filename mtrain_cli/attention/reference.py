"""Attention by its definition, with scores and mask of all pairs materialized: the oracle.

Shapes of `forward` and `backward`: q, out, dout [batch, heads, queries, head_dim]; k, v [batch,
heads, keys, head_dim]; lse, delta [batch, heads, queries]. All have one floating-point dtype. seen:
bool [batch, heads or 1, queries, keys], which query sees which key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtrain_cli.attention.kernel import KernelRequest, Saved
from mtrain_cli.attention.partials import Pair, Triple, accumulation_dtype, merge
from mtrain_cli.attention.tiles import Tiles


def forward(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float) -> Pair:
    """Return out and lse. A query that sees no key has out 0 and lse -inf."""
    scores = _scores(q, k, seen, scale)
    lse = scores.logsumexp(-1)
    return _probabilities(scores, lse) @ v, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    seen: Tensor,
    scale: float,
) -> Triple:
    """Return dq, dk and dv. lse and delta = rowsum(out * dout) may cover more keys than k holds."""
    p = _probabilities(_scores(q, k, seen, scale), lse)
    ds = p * (dout @ v.transpose(-1, -2) - delta.unsqueeze(-1)) * scale
    return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dout


def _scores(q: Tensor, k: Tensor, seen: Tensor, scale: float) -> Tensor:
    return (q @ k.transpose(-1, -2) * scale).masked_fill_(~seen, float("-inf"))


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    return torch.exp(scores - lse.masked_fill(torch.isneginf(lse), 0.0).unsqueeze(-1))


def per_query_head(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    """Return q, k and v in float64, [batch, heads, tokens, head_dim], KV repeated per head of q."""
    group = q.shape[2] // k.shape[2]
    k, v = (t.double().repeat_interleave(group, 2).transpose(1, 2) for t in (k, v))
    return q.double().transpose(1, 2), k, v


class DefinitionColumns:
    """Exact, slow methods of a `Kernel` that needs PyTorch only: gathered columns and a cache."""

    skips = False

    def missing_package(self, request: KernelRequest) -> str | None:  # noqa: ARG002
        return None

    def decode(self, q, k, v, used, scale):
        slots = torch.arange(k.shape[1], device=q.device)
        seen = (slots < used[:, None])[:, None, None, :]
        out, lse = forward(*per_query_head(q, k, v), seen, scale)
        return out.transpose(1, 2).to(q.dtype), lse.to(accumulation_dtype(q.dtype))

    def forward_columns(self, q, packed, columns, scale, partial):
        high = accumulation_dtype(q.dtype)
        k, v = packed.to(high)
        out, lse = forward(q.to(high).transpose(1, 2), k, v, columns.seen(), scale)
        out = out.transpose(1, 2)
        if partial is None:
            return out, lse
        total, total_lse = partial[0].to(out.dtype, copy=True), partial[1].clone()
        merge(total, total_lse, out, lse)
        return total, total_lse

    def backward_columns(self, dout, q, packed, lse, delta, columns, scale):
        high = accumulation_dtype(q.dtype)
        q, dout = (t.to(high).transpose(1, 2) for t in (q, dout))
        k, v = packed.to(high)
        lse, delta = lse.to(high), delta.to(high)
        dq, *gradients = backward(dout, q, k, v, lse, delta, columns.seen(), scale)
        return dq.transpose(1, 2), torch.stack(gradients)


class ReferenceKernel(DefinitionColumns):
    """The oracle in float64, with which tests compare every other kernel."""

    name = "reference"
    needs_out = False

    def unsupported_reason(self, request: KernelRequest) -> str | None:  # noqa: ARG002
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Pair:
        out, lse = forward(*per_query_head(q, k, v), tiles.seen(), scale)
        return out.transpose(1, 2).to(q.dtype), lse.to(accumulation_dtype(q.dtype))

    def backward(self, dout: Tensor, saved: Saved, tiles: Tiles, scale: float) -> Triple:
        q, k, v, out, lse, delta = saved
        group = q.shape[2] // k.shape[2]
        if delta is None:
            assert out is not None
            delta = (out.double() * dout.double()).sum(-1).transpose(1, 2)
        dout = dout.double().transpose(1, 2)
        dq, dk, dv = backward(
            dout, *per_query_head(q, k, v), lse.double(), delta.double(), tiles.seen(), scale
        )
        dk, dv = (t.unflatten(1, (-1, group)).sum(2).transpose(1, 2) for t in (dk, dv))
        return dq.transpose(1, 2).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
