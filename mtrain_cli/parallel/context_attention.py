"""Attention over a sequence that is sharded over a context group, as one differentiable call."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.attention.index import BlockBitmap, Index, IndexCounts, VerticalSlash
from mtrain_cli.attention.kernel import Kernel
from mtrain_cli.parallel import nvtx_ranges, profiler_labels
from mtrain_cli.parallel.activation_offload import ActivationOffload, Kept
from mtrain_cli.parallel.collectives import all_gather
from mtrain_cli.parallel.exchange import Exchange, Plan, ShardTiles
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.program import Recompute
from mtrain_cli.parallel.recording import (
    BACKWARD,
    FORWARD,
    INDEX,
    WAIT,
    MessageTag,
    Moment,
    Recorder,
    elapsed,
    moment,
)
from mtrain_cli.parallel.schedule import CONTEXT, UNSCHEDULED
from mtrain_cli.parallel.transport import explain_peer_loss
from mtrain_cli.sparsity.pattern import IndexGroup, MaskedPositions, Pattern, SingleWorkerGroup

# Slashes and columns, over all heads, to count at once. Counting takes about 15 int64 for each.
_COUNTED_AT_ONCE = 1 << 21


@dataclass(frozen=True)
class IndexRecord:
    """One estimate of an index: the work that the index leaves and the time that the estimate took.

    counts_or_index: a `VerticalSlash` until `DynamicIndex.count` counts its work.
    workers: number of workers whose counts add up to all queries.
    cut: blocks that reached a level, and those that a cap cut, int64 [2]; None without a cap.
    """

    layer: int
    counts_or_index: IndexCounts | VerticalSlash
    workers: int
    started: Moment
    ended: Moment
    cut: Tensor | None = None

    @property
    def counts(self) -> IndexCounts:
        """The work that the index leaves. `DynamicIndex.count` must have run."""
        assert isinstance(self.counts_or_index, IndexCounts)
        return self.counts_or_index

    @property
    def seconds(self) -> float:
        """Time of the estimate in seconds. On a GPU the estimate must have finished."""
        return elapsed(self.started, self.ended)


@dataclass(frozen=True)
class DynamicIndex:
    """A sparsity pattern applied to one batch.

    foreign_queries: whether this worker also computes for other workers' queries, so that block
        bitmaps are gathered from all workers.
    kept: the index of each layer from its forward to its backward pass, for recomputation, too.
    """

    pattern: Pattern
    masked: MaskedPositions
    foreign_queries: bool = False
    kept: dict[int, Index] = field(default_factory=dict)
    records: list[IndexRecord] = field(default_factory=list)
    estimated: dict[int, Index] | None = None

    def of(self, layer: int, q: Tensor, k: Tensor, recorder: Recorder | None = None) -> Index:
        """Return the index of a layer. Only the first call for a layer estimates the index."""
        if layer not in self.kept:
            started = moment(q.device)
            if recorder is not None and recorder.recording:
                span = recorder.span(INDEX, -1)
            else:
                span = nvtx_ranges.span(INDEX, "", "", -1)
            peer_errors = explain_peer_loss(
                f"index, layer {layer}", "estimates", "a message of another worker did not arrive"
            )
            with torch.no_grad(), profiler_labels.label(profiler_labels.INDEX), span, peer_errors:
                if isinstance(self.masked.group, DistributedIndexGroup):
                    self.masked.group.set_recorder(recorder)
                index = self.pattern.estimate(q.detach(), k.detach(), self.masked, layer)
                counts_or_index: IndexCounts | VerticalSlash
                if isinstance(index, VerticalSlash):
                    counts_or_index, workers = index, 1
                else:
                    # Count now: unlike slashes and columns, bitmaps are too large to keep.
                    counts_or_index = index.counts(self.masked.tables)
                    workers = self.masked.group.size
                    assert isinstance(index, BlockBitmap)
                    index = gather_rows(index, self.masked) if self.foreign_queries else index
            ended = moment(q.device)
            self.kept[layer] = index
            if self.estimated is not None:
                self.estimated[layer] = index
            cut = getattr(self.pattern, "cut", None)
            self.records.append(IndexRecord(layer, counts_or_index, workers, started, ended, cut))
        return self.kept[layer]

    def count(self) -> None:
        """Replace each `VerticalSlash` in ``records`` by counts, once at the end of a step.

        Counting launches about fifty kernels, and no layer should wait for a metric.
        """
        with profiler_labels.label(profiler_labels.INDEX):
            named = ((i, record.counts_or_index) for i, record in enumerate(self.records))
            waiting = {i: lines for i, lines in named if isinstance(lines, VerticalSlash)}
            while waiting:
                # Layers in a batch are padded to the widest.
                size = max(n.slashes.numel() + n.columns.numel() for n in waiting.values())
                batch = list(waiting)[: max(1, _COUNTED_AT_ONCE // size)]
                lines = VerticalSlash.joined([waiting.pop(i) for i in batch])
                counts = lines.counts(self.masked.tables).parts(len(batch))
                for i, of_layer in zip(batch, counts, strict=True):
                    self.records[i] = replace(self.records[i], counts_or_index=of_layer)


@dataclass(frozen=True)
class ContextAttention:
    """Attention of one batch: ``attend(q, k, v, layer)``, exact over what mask and index allow.

    narrowed: for each layer, the tiles and early tiles of `plan`, narrowed by the layer's index. An
        entry lives until the layer's backward pass, because kernels cache in the tiles what they
        derive from the index (`Tiles.index_cache`).
    kind: kind of the layers (`LAYER_KINDS`), for profilers; empty if all layers are alike.
    micro: number of the micro-batch, where several may be under way; None if the loop counts them.
    """

    exchange: Exchange
    kernel: Kernel
    plan: Plan
    index: DynamicIndex | None = None
    kept: dict[int, tuple[Kept, ...]] = field(default_factory=dict, repr=False, compare=False)
    offload: ActivationOffload | None = None
    narrowed: dict[int, tuple[ShardTiles, ShardTiles | None]] = field(
        default_factory=dict, repr=False, compare=False
    )
    kind: str = ""
    micro: int | None = None

    @staticmethod
    def of(
        exchange: Exchange,
        kernel: Kernel,
        plan: Plan,
        pattern: Pattern | None = None,
        offload: ActivationOffload | None = None,
    ) -> ContextAttention:
        index = None
        if pattern is not None:
            assert plan.masked is not None, "a pattern needs a plan for its index"
            masked = plan.masked.with_group(make_index_group(exchange.group))
            index = DynamicIndex(pattern, masked, exchange.foreign_queries)
        return ContextAttention(exchange, kernel, plan, index, offload=offload)

    def for_next_batch(self) -> ContextAttention:
        """Return a copy for another batch with the same masks, without any index or kept tensor."""
        index = self.index
        if index is not None:
            index = replace(index, kept={}, records=[], estimated=None)
        return replace(self, index=index, kept={}, narrowed={})

    def with_kept_indices(self) -> ContextAttention:
        """Return a copy for the same batch that keeps every index after the backward pass."""
        if self.index is None:
            return self
        return replace(self, index=replace(self.index, estimated={}))

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, sinks: Tensor | None = None
    ) -> Tensor:
        """Compute attention of this rank's queries over the whole sequence.

        sinks: [heads], a learnable score of each head that takes a share of the softmax and adds
            nothing to the output. Not with partial recomputation.
        """
        assert sinks is None or not self.plan.early
        # This call only joins kept tensors: no computation and no message to record.
        again = Recompute.of(self.plan.early, self.exchange.schedule.heads)
        quiet = layer in self.kept and again is Recompute.NOTHING
        with _recorded(self, layer, FORWARD, quiet=quiet):
            tiles, early_tiles = self.plan.tiles, self.plan.early_tiles
            if self.index is not None:
                index = self.index.of(layer, q, k, self.exchange.recorder)
                if layer not in self.narrowed:
                    early = None if early_tiles is None else early_tiles.under(index)
                    self.narrowed[layer] = tiles.under(index), early
                tiles, early_tiles = self.narrowed[layer]
            more = early_tiles, torch.is_grad_enabled(), sinks
            return _Attend.apply(q, k, v, self, tiles, layer, *more)

    def release(self, layer: int) -> None:
        self.kept.pop(layer, None)
        self.narrowed.pop(layer, None)
        if self.index is not None:
            self.index.kept.pop(layer, None)

    @staticmethod
    def scale(head_dim: int) -> float:
        return 1.0 / math.sqrt(head_dim)

    def keep_for_recompute(self, layer: int, saved: tuple[Tensor, ...]) -> None:
        """Keep the tensors that recomputation needs. saved: what the first forward pass saved."""
        early = self.plan.early
        if early is None:
            return
        # Detach: out would keep its whole autograd graph alive.
        stays = [t.detach() for t in self.exchange.kept_for_recompute(saved, early)]
        self.kept[layer] = tuple(
            stays if self.offload is None else [self.offload.put(layer, t) for t in stays]
        )


@contextmanager
def _recorded(
    attention: ContextAttention, layer: int, direction: str, *, quiet: bool = False
) -> Iterator[None]:
    """Record a pass of a layer, with an NVTX range such as ``window layer.forward``."""
    recorder, kind = attention.exchange.recorder, attention.kind
    if recorder is not None and attention.micro is not None:
        recorder.micro_batch(attention.micro)
    with (
        profiler_labels.label(profiler_labels.ATTENTION),
        nvtx_ranges.span(f"{kind} layer", direction, "", layer) if kind else nullcontext(),
        nullcontext() if not recorder or quiet else recorder.attention_pass(layer, direction),
    ):
        yield


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, attention, tiles, layer, early_tiles=None, keep=False, sinks=None):
        call: tuple[Any, ...] = attention.kernel, attention.scale(q.shape[-1]), f"layer {layer}"
        if layer in attention.kept:
            early = attention.plan.early
            # Offloaded tensors can be loaded only once.
            stored = attention.kept[layer]
            kept = tuple(t.detach() if isinstance(t, Tensor) else t.get() for t in stored)
            rows = early_tiles or tiles  # without early queries the tiles are not used
            out, saved = attention.exchange.recompute(q, k, v, kept, early, rows, *call)
        else:
            out, _, saved = attention.exchange.forward(q, k, v, tiles, *call, sinks)
            if keep:
                attention.keep_for_recompute(layer, saved)
        ctx.attention, ctx.tiles, ctx.layer, ctx.call = attention, tiles, layer, call
        ctx.has_sinks = sinks is not None
        ctx.save_for_backward(*saved, *([sinks] if ctx.has_sinks else []))
        return out

    @staticmethod
    def backward(ctx, dout):
        attention: ContextAttention = ctx.attention
        saved, call = ctx.saved_tensors, ctx.call  # under checkpointing, this runs forward again
        if ctx.has_sinks:
            *saved, sinks = saved
            call = *call, sinks
        with _recorded(attention, ctx.layer, BACKWARD):
            dq, dk, dv, *dsinks = attention.exchange.backward(
                dout.contiguous(), saved, ctx.tiles, *call
            )
        attention.release(ctx.layer)
        return dq, dk, dv, None, None, None, None, None, dsinks[0] if dsinks else None


@dataclass
class DistributedIndexGroup:
    rank: int
    size: int
    process_group: dist.ProcessGroup
    ranks: tuple[int, ...] = ()
    _recorder: Recorder | None = None
    _messages: int = 0

    def set_recorder(self, recorder: Recorder | None) -> None:
        """Record the messages of the next estimate; None records nothing."""
        self._recorder, self._messages = recorder, 0

    def sum(self, own: Tensor) -> Tensor:
        with self._recorded_wait(own.nbytes):
            dist.all_reduce(own, group=self.process_group)
        return own

    def max(self, own: Tensor) -> Tensor:
        with self._recorded_wait(own.nbytes):
            dist.all_reduce(own, dist.ReduceOp.MAX, group=self.process_group)
        return own

    def gather(self, own: Tensor) -> Tensor:
        with self._recorded_wait(own.nbytes * (self.size - 1)):
            return all_gather(own.contiguous(), self.size, self.process_group)

    @contextmanager
    def _recorded_wait(self, nbytes: int) -> Iterator[None]:
        recorder = self._recorder
        if recorder is None:
            yield
            return
        self._messages += 1
        number = UNSCHEDULED - self._messages
        message = MessageTag(CONTEXT, INDEX, size=nbytes, number=number, peers=self.ranks)
        recorder.posted(-1, message)
        with recorder.span(WAIT, -1, message):
            yield
        recorder.arrived(number)


def make_index_group(group: ContextGroup) -> IndexGroup:
    if group.size == 1:
        return SingleWorkerGroup()
    assert group.whole is not None
    return DistributedIndexGroup(group.rank, group.size, group.whole, group.ranks)


def gather_rows(index: BlockBitmap, masked: MaskedPositions) -> BlockBitmap:
    """Gather the rows of a bitmap: each worker has estimated the rows of its own queries."""
    if masked.group.size == 1:
        return index
    order = to_device(np.argsort(np.concatenate(masked.shards)), index.rows.device)

    def gathered(tensor: Tensor) -> Tensor:
        own = tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
        # [batch, heads, workers * blocks held * rows of a block, ...]
        everyone = masked.group.gather(own).movedim(0, 2).flatten(2, 3).view(tensor.dtype)
        return everyone.unflatten(2, (len(order), -1)).index_select(2, order).flatten(2, 3)

    rows = torch.arange(index.blocks, dtype=torch.int32, device=order.device)
    return index.with_rows(rows, gathered)
