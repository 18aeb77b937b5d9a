"""Attention over a sequence that is spread over a context group, as one differentiable attention."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch

from mtrain_cli.attention.index import BlockBitmap, Index, IndexCounts, MaskWork, VerticalSlash
from mtrain_cli.attention.kernel import Kernel
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.parallel import nvtx_ranges, profiler_labels
from mtrain_cli.parallel.activation_offload import ActivationOffload, Kept
from mtrain_cli.parallel.exchange import Exchange, ShardTiles
from mtrain_cli.parallel.index_group import gather_rows, make_index_group, record_index_messages
from mtrain_cli.parallel.layout import Layout, early_queries
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.recording import BACKWARD, FORWARD, INDEX, Recorder
from mtrain_cli.parallel.transport import explain_peer_loss
from mtrain_cli.sparsity.pattern import MaskedPositions, Pattern

_COUNTED_AT_ONCE = (
    1 << 21
)  # diagonals and columns of all heads, each of which takes some 15 numbers of 8 bytes while they are counted


@dataclass(frozen=True)
class IndexRecord:
    """One estimate of an index: what it leaves to compute, and how long it took.

    counts_or_index: what it leaves, or, until `DynamicIndex.count`, the index itself.
    workers: among how many the counts are divided, each counting for its own queries; 1 where each counts everything.
    """

    layer: int
    counts_or_index: IndexCounts | VerticalSlash
    workers: int
    started: torch.cuda.Event | float
    ended: torch.cuda.Event | float

    @property
    def counts(self) -> IndexCounts:
        """What the index leaves to compute, once it is counted."""
        assert isinstance(self.counts_or_index, IndexCounts)
        return self.counts_or_index

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

    foreign_queries: listed blocks of all queries are wanted, since this worker computes for those of others, too. kept: the index of every
    layer between its forward and backward pass, so that recomputation finds it. records: one per estimate. estimated: the index of every
    layer, for a profile; None: not kept.
    """

    pattern: Pattern
    masked: MaskedPositions
    work: MaskWork
    foreign_queries: bool = False
    kept: dict[int, Index] = field(default_factory=dict)
    records: list[IndexRecord] = field(default_factory=list)
    estimated: dict[int, Index] | None = None

    @staticmethod
    def make(
        pattern: Pattern,
        masks: Sequence[SequenceMask],
        device: torch.device | str,
        layout: Layout | None = None,
        group: ContextGroup | None = None,
        *,
        foreign_queries: bool = False,
    ) -> DynamicIndex:
        """masks: one per sequence of the batch. layout, group: who holds which tokens; None: one worker holds all.

        Raises:
            ValueError: the layout does not give every worker whole blocks of the pattern, as many to each.
        """
        request = pattern.request()
        shards = (
            None if layout is None else [layout.positions(rank) for rank in range(layout.workers)]
        )
        masked = MaskedPositions.make(
            masks, request.block, device, shards, make_index_group(group or ContextGroup.alone())
        )
        work = MaskWork.make(masks, request.block, device, request.bitmap, masked.numbers)
        return DynamicIndex(pattern, masked, work, foreign_queries)

    def of(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, recorder: Recorder | None = None
    ) -> Index:
        """The index of a layer: estimated once, then kept."""
        if layer not in self.kept:
            started = _now(q.device)
            span = (
                nvtx_ranges.span(INDEX, "", "", -1)
                if recorder is None or not recorder.recording
                else recorder.span(INDEX, -1)
            )
            peer_errors = explain_peer_loss(
                f"index, layer {layer}",
                "estimates",
                "the part of another worker did not peer_errors",
            )
            with torch.no_grad(), profiler_labels.label(profiler_labels.INDEX), span, peer_errors:
                record_index_messages(self.masked.group, recorder)
                index = self.pattern.estimate(q.detach(), k.detach(), self.masked, layer)
                counts_or_index: IndexCounts | VerticalSlash
                if isinstance(index, VerticalSlash):
                    counts_or_index, workers = index, 1
                else:
                    # Not kept to be counted later: unlike lines, bitmaps are large.
                    counts_or_index, workers = index.counts(self.work), self.masked.group.size
                    assert isinstance(index, BlockBitmap)
                    index = gather_rows(index, self.masked) if self.foreign_queries else index
            ended = _now(q.device)
            self.kept[layer] = index
            if self.estimated is not None:
                self.estimated[layer] = index
            self.records.append(IndexRecord(layer, counts_or_index, workers, started, ended))
        return self.kept[layer]

    def count(self) -> None:
        """Counts what the lines of all layers leave to compute, together: a metric, of which no layer is to wait for some fifty kernels."""
        with profiler_labels.label(profiler_labels.INDEX):
            self._count()

    def _count(self) -> None:
        waiting = [
            (i, r.counts_or_index)
            for i, r in enumerate(self.records)
            if isinstance(r.counts_or_index, VerticalSlash)
        ]
        while waiting:
            # As many layers as the budget allows, with columns filled up to the widest.
            size = max(lines.slashes.numel() + lines.columns.numel() for _, lines in waiting)
            at_once = max(1, _COUNTED_AT_ONCE // size)
            batch, waiting = waiting[:at_once], waiting[at_once:]
            counts = (
                VerticalSlash.joined([lines for _, lines in batch])
                .counts(self.work)
                .parts(len(batch))
            )
            for (i, _), counts_or_index in zip(batch, counts, strict=True):
                self.records[i] = replace(self.records[i], counts_or_index=counts_or_index)


def _now(device: torch.device) -> torch.cuda.Event | float:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@dataclass(frozen=True)
class ContextAttention:
    """Attention of one batch: ``attend(q, k, v, layer)`` for every layer of the model. Exact over what mask and index allow.

    work: what this rank computes, made once per batch. index: None for dense attention.
    early: how many queries, the first of this rank, a second forward pass computes again; of the others output and lse stay from the first
    pass. None: nothing stays. early_tiles: what batch queries compute. kept: by layer, what stays. offload: where it stays, None: on the
    device.
    narrowed: work and early work under the index of a layer, with what kernels derive from it (`Tiles.of_index`), until its backward pass.
    """

    exchange: Exchange
    kernel: Kernel
    tiles: ShardTiles
    index: DynamicIndex | None = None
    early: int | None = None
    early_tiles: ShardTiles | None = None
    kept: dict[int, tuple[Kept, ...]] = field(default_factory=dict, repr=False, compare=False)
    offload: ActivationOffload | None = None
    narrowed: dict[int, tuple[ShardTiles, ShardTiles | None]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @staticmethod
    def make(
        exchange: Exchange,
        kernel: Kernel,
        masks: Sequence[SequenceMask],
        device: torch.device | str,
        pattern: Pattern | None = None,
        *,
        keep: float = 0.0,
        offload: ActivationOffload | None = None,
    ) -> ContextAttention:
        """masks: one per sequence of the batch. pattern: None for dense attention. keep: the share of the queries of this rank, its last
        ones, whose output and lse a second forward pass takes from the first.

        Raises:
            ValueError: the shards of the layout are not whole blocks of the pattern.
        """
        index = block = None
        if pattern is not None:
            index = DynamicIndex.make(
                pattern,
                masks,
                device,
                exchange.layout,
                exchange.group,
                foreign_queries=exchange.foreign_queries,
            )
            block = pattern.request().block
        early = early_queries(exchange.num_queries, keep, block)
        if early == exchange.num_queries:
            return ContextAttention(
                exchange, kernel, exchange.make_tiles(masks, device, block), index
            )
        early_tiles = exchange.make_tiles(masks, device, block, early=early) if early else None
        return ContextAttention(
            exchange,
            kernel,
            exchange.make_tiles(masks, device, block),
            index,
            early,
            early_tiles,
            offload=offload,
        )

    def for_next_batch(self) -> ContextAttention:
        """For another batch under the same masks: nothing that this one estimated or kept is there."""
        index = (
            None if self.index is None else replace(self.index, kept={}, records=[], estimated=None)
        )
        return replace(self, index=index, kept={}, narrowed={})

    def with_kept_indices(self) -> ContextAttention:
        """The same batch, whose indices stay after the backward pass."""
        return (
            self if self.index is None else replace(self, index=replace(self.index, estimated={}))
        )

    @property
    def pairs(self) -> float:
        """Query-key pairs that the masks leave this rank, per head and layer."""
        return self.exchange.pairs(self.tiles)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """q [batch, tokens, heads, head_dim], k and v [batch, tokens, kv_heads, head_dim] of this rank -> out like q."""
        recorder = self.exchange.recorder
        # Without a computation or a message there is nothing to record.
        quiet = layer in self.kept and self.early == 0 and self.exchange.recompute_is_local
        with (
            profiler_labels.label(profiler_labels.ATTENTION),
            nullcontext() if recorder is None or quiet else recorder.attention_pass(layer, FORWARD),
        ):
            tiles, early_tiles = self._narrowed(layer, q, k, recorder)
            return _Attend.apply(q, k, v, self, tiles, layer, early_tiles, torch.is_grad_enabled())

    def _narrowed(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, recorder: Recorder | None
    ) -> tuple[ShardTiles, ShardTiles | None]:
        """Work and early work of a layer."""
        if self.index is None:
            return self.tiles, self.early_tiles
        index = self.index.of(layer, q, k, recorder)
        if layer not in self.narrowed:
            self.narrowed[layer] = (
                self.tiles.under(index),
                None if self.early_tiles is None else self.early_tiles.under(index),
            )
        return self.narrowed[layer]

    def release(self, layer: int) -> None:
        """Backward of a layer has run: its index, and what was kept, are needed no more."""
        self.kept.pop(layer, None)
        self.narrowed.pop(layer, None)
        if self.index is not None:
            self.index.kept.pop(layer, None)

    @staticmethod
    def scale(head_dim: int) -> float:
        return 1.0 / math.sqrt(head_dim)

    def keep_for_recompute(self, layer: int, saved: tuple[torch.Tensor, ...]) -> None:
        """Has what a second forward pass takes over stay. saved: by the first one."""
        if self.early is None:
            return
        # Detached: the output of a differentiable call would keep all that it comes from.
        stays = [t.detach() for t in self.exchange.kept_for_recompute(saved, self.early)]
        self.kept[layer] = tuple(
            stays if self.offload is None else [self.offload.put(layer, t) for t in stays]
        )

    def load_kept(self, layer: int) -> tuple[torch.Tensor, ...]:
        """What stayed of a layer."""
        return tuple(
            t.detach() if isinstance(t, torch.Tensor) else t.get() for t in self.kept[layer]
        )


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q,
        k,
        v,
        attention: ContextAttention,
        tiles: ShardTiles,
        layer: int,
        early_tiles: ShardTiles | None = None,
        keep: bool = False,
    ):
        scale, label = attention.scale(q.shape[-1]), f"layer {layer}"
        if layer in attention.kept:
            assert attention.early is not None
            early = early_tiles or tiles  # of no queries
            out, saved = attention.exchange.recompute(
                q,
                k,
                v,
                attention.load_kept(layer),
                attention.early,
                early,
                attention.kernel,
                scale,
                label,
            )
        else:
            out, _, saved = attention.exchange.forward(
                q, k, v, tiles, attention.kernel, scale, label
            )
            if keep:
                attention.keep_for_recompute(layer, saved)
        ctx.attention, ctx.tiles, ctx.layer, ctx.scale = attention, tiles, layer, scale
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    def backward(ctx, dout):
        attention: ContextAttention = ctx.attention
        recorder = attention.exchange.recorder
        saved = ctx.saved_tensors  # where they were not kept, this runs the forward pass once more
        with (
            profiler_labels.label(profiler_labels.ATTENTION),
            nullcontext() if recorder is None else recorder.attention_pass(ctx.layer, BACKWARD),
        ):
            gradients = attention.exchange.backward(
                dout.contiguous(),
                saved,
                ctx.tiles,
                attention.kernel,
                ctx.scale,
                f"layer {ctx.layer}",
            )
        attention.release(ctx.layer)
        return *gradients, None, None, None, None, None
