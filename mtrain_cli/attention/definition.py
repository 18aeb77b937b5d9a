"""Attention by its definition: softmax over all scores, with scores and mask materialized.

Shapes: q, out, dout [batch, heads, queries, head_dim]; k, v [batch, heads, keys, head_dim]; lse,
delta [batch, heads, queries]. All have one floating-point dtype. seen: bool [batch, heads or 1,
queries, keys], which query sees which key. A query that sees no key has out 0 and lse -inf.
"""

from __future__ import annotations

import torch


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(q, k, seen, scale)
    lse = scores.logsumexp(-1)
    return _probabilities(scores, lse) @ v, lse


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return dq, dk and dv."""
    p = _probabilities(_scores(q, k, seen, scale), lse)
    ds = p * (dout @ v.transpose(-1, -2) - delta.unsqueeze(-1)) * scale
    return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dout


def _scores(q: torch.Tensor, k: torch.Tensor, seen: torch.Tensor, scale: float) -> torch.Tensor:
    """Return the scaled scores, -inf for keys that a query does not see."""
    return (q @ k.transpose(-1, -2) * scale).masked_fill_(~seen, float("-inf"))


def _probabilities(scores: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
    return torch.exp(scores - lse.masked_fill(torch.isneginf(lse), 0.0).unsqueeze(-1))


def per_query_head(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v in float64, [batch, heads, tokens, head_dim], KV repeated per head of q."""
    group = q.shape[2] // k.shape[2]
    k, v = (t.double().repeat_interleave(group, 2).transpose(1, 2) for t in (k, v))
    return q.double().transpose(1, 2), k, v
