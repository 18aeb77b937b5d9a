"""Exchanges: how keys and values reach the queries of a context group. Each executes a schedule, with any kernel.

k and v travel packed in one message [2, batch, tokens, kv_heads, head_dim]. Partial outputs and gradients are added in float32; gradients
of keys and values also travel in float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
import torch.distributed as dist

from mtrain_cli.attention.kernel import Kernel, accumulation_dtype, merge
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.parallel.collectives import all_gather, reduce_scatter
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.schedule import Schedule, Step, Transfer, make_schedule

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Exchange(ABC):
    """One way of moving keys and values, bound to a layout and a context group."""

    name: ClassVar[str]

    def __init__(self, layout: Layout, group: ContextGroup) -> None:
        assert layout.workers == group.size, "A layout is made for its context group."
        self.layout = layout
        self.group = group
        self.schedule: Schedule = make_schedule(self.name, group.size)
        self.forward_steps: tuple[Step, ...] = self.schedule.forward[group.rank]
        self.backward_steps: tuple[Step, ...] = self.schedule.backward[group.rank]

    def tiles(self, masks: Sequence[SequenceMask], device: torch.device | str) -> dict[tuple[int, ...], Tiles]:
        """What this rank computes for each set of key shards that a step names; masks: one per sequence of the batch."""
        queries = self.layout.positions(self.group.rank)
        return {
            step.compute: Tiles.make([mask.spans(queries, self._key_positions(step.compute)) for mask in masks], device)
            for step in self.forward_steps
        }

    @abstractmethod
    def _key_positions(self, shards: tuple[int, ...]):
        """Global positions of the key slots that a step computes, ascending."""

    @abstractmethod
    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tiles: dict[tuple[int, ...], Tiles], kernel: Kernel, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """-> out like q, lse, and the packed key shard that this rank keeps for `backward` (`Schedule.keeps`)."""

    @abstractmethod
    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        kept: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        tiles: dict[tuple[int, ...], Tiles],
        kernel: Kernel,
        scale: float,
    ) -> Triple:
        """-> dq, dk, dv of this rank's own queries, keys and values."""


class AllGather(Exchange):
    """Keys and values are gathered in sequence order; their gradients return by one reduce-scatter."""

    name = "all_gather"

    def _key_positions(self, shards: tuple[int, ...]):
        assert len(shards) == self.group.size
        return np.arange(self.layout.padded_seq, dtype=np.int64)

    def _gathered(self, packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Packed shard of this rank -> k, v [batch, padded_seq, kv_heads, head_dim] in sequence order."""
        if self.group.size == 1:
            return packed[0], packed[1]
        shards = all_gather(packed, self.group.size, self.group.kv)
        return self.layout.to_sequence(shards[:, 0]), self.layout.to_sequence(shards[:, 1])

    def forward(self, q, k, v, tiles, kernel, scale):
        (step,) = self.forward_steps
        packed = torch.stack([k, v])
        keys, values = self._gathered(packed)
        out, lse = kernel.forward(q, keys, values, tiles[step.compute], scale)
        return out, lse, packed

    def backward(self, dout, q, kept, out, lse, tiles, kernel, scale):
        (step,) = self.backward_steps
        keys, values = self._gathered(kept)
        dq, dk, dv = kernel.backward(dout, q, keys, values, out, lse, None, tiles[step.compute], scale)
        if self.group.size > 1:
            del keys, values
            shards = torch.empty(self.group.size, *kept.shape, dtype=accumulation_dtype(kept.dtype), device=kept.device)
            shards[:, 0] = self.layout.to_shards(dk)
            shards[:, 1] = self.layout.to_shards(dv)
            dk, dv = reduce_scatter(shards, self.group.gradients)
        return dq, dk.to(kept.dtype), dv.to(kept.dtype)


class Ring(Exchange):
    """Key shards circulate (`schedule.ring`); compute may be skipped where nothing is seen, communication never is."""

    name = "ring"

    def _key_positions(self, shards: tuple[int, ...]):
        (shard,) = shards
        return self.layout.positions(shard)

    def _start(self, transfer: Transfer, payload: torch.Tensor, group: dist.ProcessGroup | None) -> tuple[torch.Tensor, list[dist.Work]]:
        """Sends the payload and begins to receive another like it."""
        assert transfer.to is not None
        assert transfer.source is not None
        arriving = torch.empty_like(payload)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, payload, self.group.ranks[transfer.to], group),
                dist.P2POp(dist.irecv, arriving, self.group.ranks[transfer.source], group),
            ]
        )
        return arriving, works

    def forward(self, q, k, v, tiles, kernel, scale):
        packed = torch.stack([k, v])
        out: torch.Tensor | None = None
        lse: torch.Tensor | None = None
        for step in self.forward_steps:
            moving = [self._start(t, packed, self.group.kv) for t in step.during]
            part = tiles[step.compute]
            if not part.empty:
                part_out, part_lse = kernel.forward(q, packed[0], packed[1], part, scale)
                if out is None or lse is None:
                    out, lse = part_out.to(accumulation_dtype(q.dtype)), part_lse
                else:
                    merge(out, lse, part_out, part_lse)
            for arriving, works in moving:
                _wait(works)
                packed = arriving
        if out is None or lse is None:
            out = torch.zeros_like(q)
            lse = torch.full((q.shape[0], q.shape[2], q.shape[1]), float("-inf"), dtype=accumulation_dtype(q.dtype), device=q.device)
        return out.to(q.dtype), lse, packed

    def backward(self, dout, q, kept, out, lse, tiles, kernel, scale):
        high = accumulation_dtype(q.dtype)
        dq = torch.zeros(q.shape, dtype=high, device=q.device)
        packed = kept
        gradient: torch.Tensor | None = None
        leaving: tuple[torch.Tensor, list[dist.Work]] | None = None
        for step in self.backward_steps:
            moving = [self._start(t, packed, self.group.kv) for t in step.during]
            own = torch.zeros(packed.shape, dtype=high, device=q.device)
            part = tiles[step.compute]
            if not part.empty:
                part_q, part_k, part_v = kernel.backward(dout, q, packed[0], packed[1], out, lse, None, part, scale)
                dq += part_q
                own[0] += part_k
                own[1] += part_v
            if leaving is not None:
                # What the workers before this one have added to the shard at hand arrives while it is computed here.
                _wait(leaving[1])
                own += leaving[0]
            gradient = own
            for transfer in step.after:
                leaving = self._start(transfer, gradient, self.group.gradients)
            for arriving, works in moving:
                _wait(works)
                packed = arriving
        assert gradient is not None
        return dq.to(q.dtype), gradient[0].to(kept.dtype), gradient[1].to(kept.dtype)


def _wait(works: list[dist.Work]) -> None:
    for work in works:
        work.wait()


_EXCHANGES: dict[str, type[Exchange]] = {cls.name: cls for cls in (AllGather, Ring)}


def make_exchange(name: str, layout: Layout, group: ContextGroup) -> Exchange:
    """The exchange of a run; `selection.choose_exchange` turns ``auto`` into a name before."""
    return _EXCHANGES[name](layout, group)
