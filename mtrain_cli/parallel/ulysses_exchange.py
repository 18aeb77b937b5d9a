"""Ulysses: trade tokens of all heads for all tokens of some heads, by all-to-all."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.attention.partials import accumulation_dtype
from mtrain_cli.parallel.exchange import Exchange, Shards, ShardTiles
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.recording import ARRANGE, BACKWARD, FORWARD, Recorder
from mtrain_cli.parallel.schedule import Schedule, ScheduleStep, Transfer
from mtrain_cli.parallel.transport import Transport


class UlyssesExchange(Exchange):
    """Ulysses around another exchange (DeepSpeed-Ulysses, arXiv:2309.14509).

    Each rank of a head group trades its tokens for a part of the heads, of all tokens of the group.
    Then the ranks take part in the inner exchange as one shard. If there are fewer KV heads than
    ranks in a head group, KV heads are repeated.
    """

    def __init__(
        self, layout: Layout, group: ContextGroup, schedule: Schedule, inner: Exchange
    ) -> None:
        super().__init__(layout, group, schedule)
        self.inner = inner
        self.heads = group.heads
        first = group.rank - group.rank % group.heads
        positions = [layout.positions(r) for r in range(first, first + self.heads)]
        order = np.argsort(np.concatenate(positions), kind="stable")
        self._kv_heads = 0  # of the model; set by the first forward pass
        self._order, self._back = order, np.argsort(order)
        self._orders_on_device: dict[int, torch.Tensor] = {}

    def _order_on(self, order: NDArray[np.int64], device: torch.device) -> torch.Tensor:
        """Copy an order to the device once."""
        if id(order) not in self._orders_on_device:
            self._orders_on_device[id(order)] = to_device(order, device)
        return self._orders_on_device[id(order)]

    def set_recorder(self, recorder: Recorder | None) -> None:
        super().set_recorder(recorder)
        self.inner.set_recorder(recorder)

    @property
    def foreign_queries(self) -> bool:
        return True

    @property
    def gathers_columns(self) -> bool:
        return self.inner.gathers_columns

    def needed_tiles(self, *, indexed, forward_only=False):
        return self.inner.needed_tiles(indexed=indexed, forward_only=forward_only)

    @property
    def num_queries(self) -> int:
        return self.inner.num_queries

    @property
    def recompute_is_local(self) -> bool:
        return False

    def _tile(self, step: ScheduleStep) -> tuple[Shards, Shards]:  # noqa: ARG002
        raise AssertionError("the tiles are those of the inner exchange")

    def make_tiles(self, masks, device, block=None, *, early=None):
        return self.inner.make_tiles(masks, device, block, early=early)

    def pairs(self, shard_tiles: ShardTiles) -> float:
        return self.inner.pairs(shard_tiles)

    def forward(self, q, k, v, shard_tiles, kernel, scale, label=""):
        def forward_inner(q, k, v):
            return self.inner.forward(q, k, v, shard_tiles, kernel, scale, label)

        return self._with_heads_traded(q, k, v, label, forward_inner)

    def kept_for_recompute(self, saved, early):
        return self.inner.kept_for_recompute(saved, early)

    def recompute(self, q, k, v, kept, early, shard_tiles, kernel, scale, label=""):
        def recompute_inner(q, k, v):
            out, saved = self.inner.recompute(
                q, k, v, kept, early, shard_tiles, kernel, scale, label
            )
            return out, saved[3], saved

        out, _, saved = self._with_heads_traded(q, k, v, label, recompute_inner)
        return out, saved

    def _with_heads_traded(self, q, k, v, label, attend):
        """Run ``attend`` on this rank's part of the heads, for the tokens of the head group.

        attend: (q, k, v) -> out, lse, saved.
        """
        with self._transport(label, FORWARD) as transport:
            parts = [_split_heads(t, self.heads) for t in (q, k, v)]
            transport.begin_step(0)
            q_part, k_part, v_part = self._to_heads(transport, self.forward_steps[0].post[0], parts)
            out, lse, saved = attend(q_part, k_part, v_part)
            transport.begin_step(len(self.forward_steps) - 1)
            (whole,) = self._to_tokens(transport, self.forward_steps[-1].post[0], [out])
            self._kv_heads = k.shape[2]
        return whole.flatten(2, 3), lse, saved

    def backward(self, dout, saved, shard_tiles, kernel, scale, label=""):
        with self._transport(label, BACKWARD) as transport:
            transport.begin_step(0)
            (dout_part,) = self._to_heads(
                transport, self.backward_steps[0].post[0], [_split_heads(dout, self.heads)]
            )
            gradients = self.inner.backward(dout_part, saved, shard_tiles, kernel, scale, label)
            transport.begin_step(len(self.backward_steps) - 1)
            dq, dk, dv = self._to_tokens(
                transport, self.backward_steps[-1].post[0], list(gradients)
            )
        return (
            dq.flatten(2, 3),
            _sum_repeated_heads(dk, self._kv_heads),
            _sum_repeated_heads(dv, self._kv_heads),
        )

    def _to_heads(
        self, transport: Transport, transfer: Transfer, tensors: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Trade tokens for heads.

        tensors: [ranks, batch, tokens, heads per rank, head_dim].
        Returns: [batch, tokens of all ranks in ascending order, heads per rank, head_dim].
        """
        with transport.span(ARRANGE):
            together = torch.cat(tensors, 3)
        arrived = transport.all_to_all(transfer, together)
        with transport.span(ARRANGE):
            whole = (
                arrived.transpose(0, 1)
                .flatten(1, 2)
                .index_select(1, self._order_on(self._order, arrived.device))
            )
            return [t.contiguous() for t in whole.split([t.shape[3] for t in tensors], 2)]

    def _to_tokens(
        self, transport: Transport, transfer: Transfer, tensors: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Trade heads for tokens.

        tensors: [batch, tokens of all ranks, heads per rank, head_dim].
        Returns: [batch, tokens, ranks, heads per rank, head_dim].
        """
        with transport.span(ARRANGE):
            together = torch.cat(tensors, 2).index_select(
                1, self._order_on(self._back, tensors[0].device)
            )
            leaving = together.unflatten(1, (self.heads, -1)).transpose(0, 1).contiguous()
        arrived = transport.all_to_all(transfer, leaving)
        return list(arrived.permute(1, 2, 0, 3, 4).split([t.shape[2] for t in tensors], 3))


def _split_heads(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """Split [batch, tokens, heads, head_dim] into [ranks, batch, tokens, heads per rank, head_dim].

    Repeats heads if there are fewer than ranks.
    """
    heads = tensor.shape[2]
    if heads < ranks:
        tensor = tensor.repeat_interleave(ranks // heads, 2)
    return tensor.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4)


def _sum_repeated_heads(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    """Turn [batch, tokens, ranks, heads per rank, head_dim] into [batch, tokens, heads, head_dim].

    Sums the gradients of repeated heads.
    """
    flat = gradient.flatten(2, 3)
    repeats = flat.shape[2] // heads
    if repeats == 1:
        return flat
    return (
        flat.unflatten(2, (heads, repeats)).to(accumulation_dtype(flat.dtype)).sum(3).to(flat.dtype)
    )
