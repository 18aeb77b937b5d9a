"""Ulysses: heads of all tokens for tokens of all heads."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.attention.kernel import accumulation_dtype
from mtrain_cli.parallel.exchange import Exchange, Shards, ShardTiles
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.recording import ARRANGE, BACKWARD, FORWARD, Recorder
from mtrain_cli.parallel.schedule import Schedule, ScheduleStep, Transfer
from mtrain_cli.parallel.transport import Transport


class UlyssesExchange(Exchange):
    """Ulysses: the ranks of a head group trade their tokens for a part of the heads of all of them, and then take part in another exchange
    as one (DeepSpeed-Ulysses, arXiv:2309.14509). Where there are fewer key-value heads than ranks, they are repeated.
    """

    def __init__(
        self, layout: Layout, group: ContextGroup, schedule: Schedule, inner: Exchange
    ) -> None:
        super().__init__(layout, group, schedule)
        self.inner = inner
        self.heads = group.heads
        first = group.rank - group.rank % group.heads
        together = np.concatenate([layout.positions(r) for r in range(first, first + self.heads)])
        order = np.argsort(together, kind="stable")
        self._kv_heads = 0  # of the model, known from the first forward pass
        self._order, self._back = order, np.argsort(order)
        self._moved: dict[int, torch.Tensor] = {}

    def _on(self, order: NDArray[np.int64], device: torch.device) -> torch.Tensor:
        """On the device, where it is copied once."""
        if id(order) not in self._moved:
            self._moved[id(order)] = to_device(order, device)
        return self._moved[id(order)]

    def record(self, recorder: Recorder | None) -> None:
        super().record(recorder)
        self.inner.record(recorder)

    @property
    def foreign_queries(self) -> bool:
        return True

    @property
    def gathers_columns(self) -> bool:
        return self.inner.gathers_columns

    def named_tiles(self, *, indexed, forward_only=False):
        return self.inner.named_tiles(indexed=indexed, forward_only=forward_only)

    @property
    def queries(self) -> int:
        return self.inner.queries

    @property
    def rebuilds_alone(self) -> bool:
        return False

    def _tile(self, step: ScheduleStep) -> tuple[Shards, Shards]:  # noqa: ARG002
        raise AssertionError("its tiles are those of the exchange inside")

    def work(self, masks, device, block=None, *, early=None):
        return self.inner.work(masks, device, block, early=early)

    def pairs(self, work: ShardTiles) -> float:
        return self.inner.pairs(work)

    def forward(self, q, k, v, work, kernel, scale, what=""):
        return self._traded(
            q, k, v, what, lambda q, k, v: self.inner.forward(q, k, v, work, kernel, scale, what)
        )

    def kept(self, saved, early):
        return self.inner.kept(saved, early)

    def again(self, q, k, v, kept, early, work, kernel, scale, what=""):
        def inside(q, k, v):
            out, saved = self.inner.again(q, k, v, kept, early, work, kernel, scale, what)
            return out, saved[3], saved

        out, _, saved = self._traded(q, k, v, what, inside)
        return out, saved

    def _traded(self, q, k, v, what, attend):
        """attend: takes q, k, v of a part of the heads for the tokens of all ranks -> out, lse, saved."""
        with self._mail(what, FORWARD) as mail:
            parts = [_heads_for(t, self.heads) for t in (q, k, v)]
            mail.begin(0)
            q_part, k_part, v_part = self._to_heads(mail, self.forward_steps[0].post[0], parts)
            out, lse, saved = attend(q_part, k_part, v_part)
            mail.begin(len(self.forward_steps) - 1)
            (whole,) = self._to_tokens(mail, self.forward_steps[-1].post[0], [out])
            self._kv_heads = k.shape[2]
        return whole.flatten(2, 3), lse, saved

    def backward(self, dout, saved, work, kernel, scale, what=""):
        with self._mail(what, BACKWARD) as mail:
            mail.begin(0)
            (mine,) = self._to_heads(
                mail, self.backward_steps[0].post[0], [_heads_for(dout, self.heads)]
            )
            gradients = self.inner.backward(mine, saved, work, kernel, scale, what)
            mail.begin(len(self.backward_steps) - 1)
            dq, dk, dv = self._to_tokens(mail, self.backward_steps[-1].post[0], list(gradients))
        return dq.flatten(2, 3), _added(dk, self._kv_heads), _added(dv, self._kv_heads)

    def _to_heads(
        self, mail: Transport, transfer: Transfer, tensors: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """tensors [ranks, batch, tokens, heads of the rank, head_dim] -> [batch, tokens of all ranks ascending, heads, head_dim]."""
        with mail.span(ARRANGE):
            together = torch.cat(tensors, 3)
        arrived = mail.trade(transfer, together)
        with mail.span(ARRANGE):
            whole = (
                arrived.transpose(0, 1)
                .flatten(1, 2)
                .index_select(1, self._on(self._order, arrived.device))
            )
            return [t.contiguous() for t in whole.split([t.shape[3] for t in tensors], 2)]

    def _to_tokens(
        self, mail: Transport, transfer: Transfer, tensors: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """tensors [batch, tokens of all ranks, heads, head_dim] -> [batch, tokens, ranks, heads, head_dim]."""
        with mail.span(ARRANGE):
            together = torch.cat(tensors, 2).index_select(
                1, self._on(self._back, tensors[0].device)
            )
            leaving = together.unflatten(1, (self.heads, -1)).transpose(0, 1).contiguous()
        arrived = mail.trade(transfer, leaving)
        return list(arrived.permute(1, 2, 0, 3, 4).split([t.shape[2] for t in tensors], 3))


def _heads_for(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """[batch, tokens, heads, head_dim] -> [ranks, batch, tokens, heads of each rank, head_dim]; too few heads are repeated."""
    heads = tensor.shape[2]
    if heads < ranks:
        tensor = tensor.repeat_interleave(ranks // heads, 2)
    return tensor.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4)


def _added(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    """[batch, tokens, ranks, heads of each, head_dim] -> [batch, tokens, heads, head_dim]: gradients of repeated heads are added."""
    flat = gradient.flatten(2, 3)
    repeats = flat.shape[2] // heads
    if repeats == 1:
        return flat
    return (
        flat.unflatten(2, (heads, repeats)).to(accumulation_dtype(flat.dtype)).sum(3).to(flat.dtype)
    )
