"""Attention over a sequence spread over a context group, as one differentiable call."""

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

# Diagonals and columns, over all heads, to count at once: counting takes about 15 int64 for each.
_COUNTED_AT_ONCE = 1 << 21


@dataclass(frozen=True)
class IndexRecord:
    """One estimate of an index: what it leaves to compute, and how long the estimate took.

    counts_or_index: the counts; until `DynamicIndex.count` runs, the index itself.
    workers: how many workers divide the counts, each counting its own queries; 1 if this worker's
        counts cover all queries.
    started, ended: CUDA events, or seconds on a CPU.
    """

    layer: int
    counts_or_index: IndexCounts | VerticalSlash
    workers: int
    started: torch.cuda.Event | float
    ended: torch.cuda.Event | float

    @property
    def counts(self) -> IndexCounts:
        """What the index leaves to compute. `DynamicIndex.count` must have run."""
        assert isinstance(self.counts_or_index, IndexCounts)
        return self.counts_or_index

    @property
    def seconds(self) -> float:
        """Seconds on the device. On a GPU the work must have finished."""
        if isinstance(self.started, float):
            assert isinstance(self.ended, float)
            return self.ended - self.started
        assert not isinstance(self.ended, float)
        return self.started.elapsed_time(self.ended) / 1e3


@dataclass(frozen=True)
class DynamicIndex:
    """A sparsity pattern applied to one batch.

    foreign_queries: whether to gather block bitmaps from all workers, because this worker also
        computes for other workers' queries.
    kept: by layer, the index from the forward to the backward pass; recomputation reuses it.
    records: one per estimate.
    estimated: by layer, every index, for a profile; None keeps none.
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
        """Make the index of a batch.

        Args:
            masks: one per sequence of the batch.
            layout, group: who holds which tokens; None if one worker holds all.

        Raises:
            ValueError: the layout does not give every worker the same number of whole blocks.
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
        """Return the index of a layer. Estimate it on the first call, then reuse it."""
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
                "a message of another worker did not arrive",
            )
            with torch.no_grad(), profiler_labels.label(profiler_labels.INDEX), span, peer_errors:
                record_index_messages(self.masked.group, recorder)
                index = self.pattern.estimate(q.detach(), k.detach(), self.masked, layer)
                counts_or_index: IndexCounts | VerticalSlash
                if isinstance(index, VerticalSlash):
                    counts_or_index, workers = index, 1
                else:
                    # Count now: unlike slashes and columns, bitmaps are too large to keep.
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
        """Count what the slashes and columns of all layers leave to compute.

        One batch for all layers, at the end of a step: counting launches about fifty kernels, and
        no layer should wait for a metric.
        """
        with profiler_labels.label(profiler_labels.INDEX):
            self._count()

    def _count(self) -> None:
        waiting = [
            (i, r.counts_or_index)
            for i, r in enumerate(self.records)
            if isinstance(r.counts_or_index, VerticalSlash)
        ]
        while waiting:
            # Layers in a batch are padded to the widest.
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
    """Attention of one batch: ``attend(q, k, v, layer)``, exact over what mask and index allow.

    tiles: what this rank computes, made once per batch.
    index: None for dense attention.
    early: number of queries, the first of this rank, to compute again in recomputation; out and lse
        of the others are kept from the first pass. None keeps nothing.
    early_tiles: the tiles of these early queries.
    kept: by layer, what is kept for recomputation.
    offload: host memory for `kept`; None keeps it on the device.
    narrowed: by layer, `tiles` and `early_tiles` under its index, with what kernels derive from it
        (`Tiles.of_index`), until its backward pass.
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
        """Make the attention of a batch.

        Args:
            masks: one per sequence of the batch.
            pattern: None for dense attention.
            keep: share of this rank's queries, the last ones, whose out and lse recomputation takes
                from the first forward pass.

        Raises:
            ValueError: the layout's shards are not whole blocks of the pattern.
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
        """Return a copy for another batch under the same masks, with nothing estimated or kept."""
        index = (
            None if self.index is None else replace(self.index, kept={}, records=[], estimated=None)
        )
        return replace(self, index=index, kept={}, narrowed={})

    def with_kept_indices(self) -> ContextAttention:
        """Return a copy for the same batch that keeps every index after the backward pass."""
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
        """Compute attention of this rank's queries over the whole sequence.

        Args:
            q: [batch, tokens, heads, head_dim], of this rank.
            k, v: [batch, tokens, kv_heads, head_dim], of this rank.

        Returns:
            out, like q.
        """
        recorder = self.exchange.recorder
        # This call only joins kept tensors: no computation and no message to record.
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
        """Return the tiles and the early tiles under the layer's index."""
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
        """Drop the index and the kept tensors of a layer whose backward pass has run."""
        self.kept.pop(layer, None)
        self.narrowed.pop(layer, None)
        if self.index is not None:
            self.index.kept.pop(layer, None)

    @staticmethod
    def scale(head_dim: int) -> float:
        return 1.0 / math.sqrt(head_dim)

    def keep_for_recompute(self, layer: int, saved: tuple[torch.Tensor, ...]) -> None:
        """Keep what recomputation takes from a first pass. saved: by that pass."""
        if self.early is None:
            return
        # Detach: out would keep its whole autograd graph alive.
        stays = [t.detach() for t in self.exchange.kept_for_recompute(saved, self.early)]
        self.kept[layer] = tuple(
            stays if self.offload is None else [self.offload.put(layer, t) for t in stays]
        )

    def load_kept(self, layer: int) -> tuple[torch.Tensor, ...]:
        """Return what was kept of a layer. It can be loaded once if it is offloaded."""
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
            early = early_tiles or tiles  # without early queries the tiles are not used
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
        saved = ctx.saved_tensors  # under checkpointing, this recomputes the forward pass
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
