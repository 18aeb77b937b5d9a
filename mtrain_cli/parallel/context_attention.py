"""Attention over a sequence that is spread over a context group, as one differentiable call."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mtrain_cli.attention.kernel import Kernel
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.parallel.exchange import Exchange


@dataclass(frozen=True)
class ContextAttention:
    """Exact attention of one batch: ``attend(q, k, v, layer)`` for every layer of the model.

    tiles: what this rank computes in each step, made once per batch.
    """

    exchange: Exchange
    kernel: Kernel
    tiles: dict[tuple[int, ...], Tiles]

    @staticmethod
    def make(exchange: Exchange, kernel: Kernel, masks: Sequence[SequenceMask], device: torch.device | str) -> ContextAttention:
        """masks: one per sequence of the batch."""
        return ContextAttention(exchange, kernel, exchange.tiles(masks, device))

    @property
    def pairs(self) -> int:
        """Query-key pairs that this rank computes per head and layer."""
        return sum(t.pairs for t in self.tiles.values())

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:  # noqa: ARG002
        """q [batch, tokens, heads, head_dim], k and v [batch, tokens, kv_heads, head_dim] of this rank -> out like q."""
        return _Attend.apply(q, k, v, self)

    @staticmethod
    def scale(head_dim: int) -> float:
        return 1.0 / math.sqrt(head_dim)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, call: ContextAttention):
        out, lse, kept = call.exchange.forward(q, k, v, call.tiles, call.kernel, call.scale(q.shape[-1]))
        ctx.call = call
        ctx.save_for_backward(q, kept, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, kept, out, lse = ctx.saved_tensors
        call: ContextAttention = ctx.call
        dq, dk, dv = call.exchange.backward(dout.contiguous(), q, kept, out, lse, call.tiles, call.kernel, call.scale(q.shape[-1]))
        return dq, dk, dv, None
