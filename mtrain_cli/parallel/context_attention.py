"""Attention over a sequence that is spread over a context group, as one differentiable call."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from mtrain_cli.attention.index import Counts, Index, MaskWork
from mtrain_cli.attention.kernel import Kernel
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.parallel.exchange import Exchange
from mtrain_cli.parallel.index_group import make_index_group
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.sparsity.pattern import Masked, Pattern


@dataclass(frozen=True)
class IndexRecord:
    """One estimate of an index: what it leaves to compute, and how long it took."""

    layer: int
    counts: Counts
    started: torch.cuda.Event | float
    ended: torch.cuda.Event | float

    @property
    def seconds(self) -> float:
        """Time on the device; on a GPU its work must have ended."""
        if isinstance(self.started, float):
            assert isinstance(self.ended, float)
            return self.ended - self.started
        assert not isinstance(self.ended, float)
        return self.started.elapsed_time(self.ended) / 1e3


@dataclass(frozen=True)
class DynamicIndex:
    """The pattern of a run at work on one batch.

    kept: the index of every layer between its forward and backward pass, so that recomputation finds it. records: one per estimate.
    """

    pattern: Pattern
    masked: Masked
    work: MaskWork
    kept: dict[int, Index] = field(default_factory=dict)
    records: list[IndexRecord] = field(default_factory=list)

    @staticmethod
    def make(
        pattern: Pattern,
        masks: Sequence[SequenceMask],
        device: torch.device | str,
        layout: Layout | None = None,
        group: ContextGroup | None = None,
    ) -> DynamicIndex:
        """masks: one per sequence of the batch. layout, group: who holds which tokens; None: one worker holds all. Over several workers
        a record counts the work of all queries for diagonals and columns, and that of this worker's own queries for listed blocks.

        Raises:
            ValueError: the layout does not give every worker whole blocks of the pattern, as many to each.
        """
        request = pattern.request()
        shards = None if layout is None else [layout.positions(rank) for rank in range(layout.workers)]
        masked = Masked.make(masks, request.block, device, shards, make_index_group(group or ContextGroup.alone()))
        return DynamicIndex(pattern, masked, MaskWork.make(masks, request.block, device, request.bitmap, masked.numbers))

    def of(self, layer: int, q: torch.Tensor, k: torch.Tensor) -> Index:
        """The index of a layer: estimated once, then kept."""
        if layer not in self.kept:
            started = _now(q.device)
            with torch.no_grad():
                index = self.pattern.estimate(q.detach(), k.detach(), self.masked, layer)
            ended = _now(q.device)
            self.kept[layer] = index
            self.records.append(IndexRecord(layer, index.counts(self.work), started, ended))
        return self.kept[layer]


def _now(device: torch.device) -> torch.cuda.Event | float:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True)
class ContextAttention:
    """Attention of one batch: ``attend(q, k, v, layer)`` for every layer of the model. Exact over what mask and index allow.

    tiles: what this rank computes in each step, made once per batch. index: None for dense attention.
    """

    exchange: Exchange
    kernel: Kernel
    tiles: dict[tuple[int, ...], Tiles]
    index: DynamicIndex | None = None

    @staticmethod
    def make(
        exchange: Exchange,
        kernel: Kernel,
        masks: Sequence[SequenceMask],
        device: torch.device | str,
        pattern: Pattern | None = None,
    ) -> ContextAttention:
        """masks: one per sequence of the batch. pattern: None for dense attention.

        Raises:
            ValueError: a dynamic index is asked for over several workers, which no exchange serves yet.
        """
        if pattern is None:
            return ContextAttention(exchange, kernel, exchange.tiles(masks, device))
        if exchange.group.size > 1:
            raise ValueError(f"A {pattern.name} index is estimated on one worker; the context group has {exchange.group.size}.")
        index = DynamicIndex.make(pattern, masks, device)
        tiles = {step: replace(t, geometry=index.masked.geometry) for step, t in exchange.tiles(masks, device).items()}
        return ContextAttention(exchange, kernel, tiles, index)

    def again(self) -> ContextAttention:
        """For another batch under the same masks: nothing that this one estimated is kept."""
        return self if self.index is None else replace(self, index=replace(self.index, kept={}, records=[]))

    @property
    def pairs(self) -> int:
        """Query-key pairs that this rank computes per head and layer."""
        return sum(t.pairs for t in self.tiles.values())

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int) -> torch.Tensor:
        """q [batch, tokens, heads, head_dim], k and v [batch, tokens, kv_heads, head_dim] of this rank -> out like q."""
        tiles = self.tiles
        if self.index is not None:
            index = self.index.of(layer, q, k)
            tiles = {step: t.under(index) for step, t in tiles.items()}
        return _Attend.apply(q, k, v, self, tiles, layer)

    def done(self, layer: int) -> None:
        """Backward of a layer has run: its index is needed no more."""
        if self.index is not None:
            self.index.kept.pop(layer, None)

    @staticmethod
    def scale(head_dim: int) -> float:
        return 1.0 / math.sqrt(head_dim)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, call: ContextAttention, tiles: dict[tuple[int, ...], Tiles], layer: int):
        out, lse, kept = call.exchange.forward(q, k, v, tiles, call.kernel, call.scale(q.shape[-1]))
        ctx.call, ctx.tiles, ctx.layer = call, tiles, layer
        ctx.save_for_backward(q, kept, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, kept, out, lse = ctx.saved_tensors
        call: ContextAttention = ctx.call
        dq, dk, dv = call.exchange.backward(dout.contiguous(), q, kept, out, lse, ctx.tiles, call.kernel, call.scale(q.shape[-1]))
        call.done(ctx.layer)
        return dq, dk, dv, None, None, None
