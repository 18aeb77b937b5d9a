"""The interface of a kernel, or local attention implementation, and attention by definition.

q, out, dout: [batch, queries, heads, head_dim].
k, v: [batch, keys, kv_heads, head_dim]. Query heads that share a KV head read the same memory.
lse, delta: [batch, heads, queries], float32 (float64 for float64 inputs). lse is a natural
    logarithm.

A query that sees no key has out 0 and lse -inf.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mtrain_cli.attention.packed_columns import SharedColumns
from mtrain_cli.attention.partials import Pair, Triple, accumulation_dtype, merge
from mtrain_cli.attention.tiles import Tiles


@dataclass(frozen=True)
class IndexRequest:
    """The dynamic index of a pattern.

    chunk: keys per chunk of a `GatedBitmap`, else 0.
    starts: whether it is a `StartBitmap`.
    """

    block: int
    bitmap: bool
    chunk: int = 0
    starts: bool = False


@dataclass(frozen=True)
class KernelRequest:
    """What a run needs from a kernel.

    intervals: most intervals of keys that a query sees.
    softcap: scores become softcap * tanh(score / softcap); 0 for no cap.
    """

    device: str
    capability: tuple[int, int] | None
    dtype: str
    head_dim: int
    num_heads: int
    num_kv_heads: int
    deterministic: bool = False
    index: IndexRequest | None = None
    intervals: int = 1
    softcap: float = 0.0


class Saved(NamedTuple):
    """What a backward call needs besides dout; delta: rowsum(out * dout), or None to compute it."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor | None
    lse: Tensor
    delta: Tensor | None


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, cap: float = 0.0
) -> Pair:
    """Return out and lse, with scores and mask of all pairs materialized.

    Shapes here and below: q, out, dout [batch, heads, queries, head_dim]; k, v [batch, heads, keys,
    head_dim]; lse, delta [batch, heads, queries]; seen: bool [batch, heads or 1, queries, keys].
    cap: soft cap of scores, 0 for none.
    """
    scores = _scores(q, k, seen, scale, cap)
    lse = scores.logsumexp(-1)
    return _probabilities(scores, lse) @ v, lse


def gradients_by_definition(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    seen: Tensor,
    scale: float,
    cap: float = 0.0,
) -> Triple:
    """Return dq, dk and dv. lse and delta = rowsum(out * dout) may cover more keys than k holds."""
    scores = _scores(q, k, seen, scale, cap)
    p = _probabilities(scores, lse)
    ds = p * (dout @ v.transpose(-1, -2) - delta.unsqueeze(-1)) * scale
    if cap:  # the derivative of the hyperbolic tangent
        ds = ds * (1 - (scores.masked_fill(~seen, 0) / cap).square())
    return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ dout


def _scores(q: Tensor, k: Tensor, seen: Tensor, scale: float, cap: float) -> Tensor:
    scores = q @ k.transpose(-1, -2) * scale
    if cap:
        scores = torch.tanh(scores / cap) * cap
    return scores.masked_fill_(~seen, float("-inf"))


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    return torch.exp(scores - lse.masked_fill(torch.isneginf(lse), 0.0).unsqueeze(-1))


def per_query_head(q: Tensor, k: Tensor, v: Tensor) -> Triple:
    """Return q, k and v in float64, [batch, heads, tokens, head_dim], KV repeated per head of q."""
    group = q.shape[2] // k.shape[2]
    k, v = (t.double().repeat_interleave(group, 2).transpose(1, 2) for t in (k, v))
    return q.double().transpose(1, 2), k, v


class Kernel(ABC):
    """A local attention implementation; by default with slow, exact columns and cache.

    Delta suffices for backward, so exchanges that circulate queries send delta instead of out.

    skips: whether the kernel skips pairs that an index leaves out, or only masks them.
    softcap: see `KernelRequest`, of which a kernel must support it.
    """

    name: str
    skips = False
    softcap = 0.0

    @abstractmethod
    def unsupported_reason(self, request: KernelRequest) -> str | None:
        """Return why no machine with all packages can serve the request; None if one can."""

    def missing_package(self, request: KernelRequest) -> str | None:  # noqa: ARG002
        """Return which package this machine lacks to serve the request; None for none."""
        return None

    @abstractmethod
    def forward(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Pair: ...

    @abstractmethod
    def backward(self, dout: Tensor, saved: Saved, tiles: Tiles, scale: float) -> Triple: ...

    def forward_columns(
        self, q: Tensor, packed: Tensor, columns: SharedColumns, scale: float, partial: Pair | None
    ) -> Pair:
        """Return out and lse over the columns of an index, in the accumulation dtype.

        packed: keys and values from all workers, [2, batch, heads, width, head_dim].
        partial: (out, lse) over other keys, to include in the result.
        """
        high = accumulation_dtype(q.dtype)
        k, v = packed.to(high)
        out, lse = by_definition(
            q.to(high).transpose(1, 2), k, v, columns.seen(), scale, self.softcap
        )
        out = out.transpose(1, 2)
        if partial is None:
            return out, lse
        total, total_lse = partial[0].to(out.dtype, copy=True), partial[1].clone()
        merge(total, total_lse, out, lse)
        return total, total_lse

    def backward_columns(
        self,
        dout: Tensor,
        q: Tensor,
        packed: Tensor,
        lse: Tensor,
        delta: Tensor,
        columns: SharedColumns,
        scale: float,
    ) -> Pair:
        """Return dq and the gradient of ``packed``; lse and delta cover the keys of all workers."""
        high = accumulation_dtype(q.dtype)
        q, dout = (t.to(high).transpose(1, 2) for t in (q, dout))
        (k, v), lse, delta = packed.to(high), lse.to(high), delta.to(high)
        dq, *gradients = gradients_by_definition(
            dout, q, k, v, lse, delta, columns.seen(), scale, self.softcap
        )
        return dq.transpose(1, 2), torch.stack(gradients)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, used: Tensor, scale: float) -> Pair:
        """Return out and lse of one query per sequence over the first ``used`` keys of a cache.

        used: int32 [batch] on the device. A GPU call fits into a CUDA graph: the host reads
            nothing.
        """
        slots = torch.arange(k.shape[1], device=q.device)
        seen = (slots < used[:, None])[:, None, None, :]
        out, lse = by_definition(*per_query_head(q, k, v), seen, scale, self.softcap)
        return out.transpose(1, 2).to(q.dtype), lse.to(accumulation_dtype(q.dtype))
