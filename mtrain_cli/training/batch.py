"""One micro-batch of a worker: its tokens according to the layout, and its attention."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mtrain_cli.attention.kernel import Kernel
from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.config.schema import Config
from mtrain_cli.data.labels import IGNORED
from mtrain_cli.model.routing import Routing
from mtrain_cli.parallel.activation_offload import ActivationOffload
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.parallel.dispatch import Balancer
from mtrain_cli.parallel.exchange import Exchange
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.plan import Plan
from mtrain_cli.parallel.tensor_group import TensorGroup
from mtrain_cli.sparsity.pattern import Pattern
from mtrain_cli.training.router_batches import RouterBatches


class PackedSample(Protocol):
    """One sequence as arrays [seq]. Labels are already shifted. Label -100 is ignored.

    slices: slices of the sequence's mask, int64 [slices, 5]; None if the documents give the mask.
    positions: rotary position of each token; None for its position in the sequence.
    real: number of tokens before padding; None if there is no padding.
    """

    @property
    def tokens(self) -> NDArray[np.int32]: ...
    @property
    def labels(self) -> NDArray[np.int32]: ...
    @property
    def documents(self) -> NDArray[np.int32]: ...
    @property
    def slices(self) -> IntArray | None: ...
    @property
    def positions(self) -> NDArray[np.int32] | None: ...
    @property
    def real(self) -> int | None: ...


@dataclass(frozen=True)
class HostBatch:
    """A micro-batch in host memory, prepared while the device computes another step.

    layout: which rank holds which tokens.
    samples: the whole sequences.
    numbers: int64 [3, batch, tokens of this worker]: tokens, rotary positions and labels, in layout
        order. For a GPU, the tensor is in pinned memory.
    earlier: int64 [batch, tokens of this worker]: number of earlier tokens in each token's context,
        that is its document or the sequence (`MaskRule.starts`).
    plan: what this worker's attention computes.
    full_plan: the same for the layers that see all earlier tokens instead of a window, or that are
        dense in a sparse run; None if all layers are alike.
    valid: number of labels that count toward the loss, in the whole sequences.
    lengths: number of tokens of each sequence, without padding. Empty if the model has no experts.
    maker: the `BatchMaker` that made this batch.
    """

    layout: Layout
    samples: Sequence[PackedSample]
    numbers: torch.Tensor
    earlier: IntArray
    plan: Plan
    full_plan: Plan | None
    valid: int
    lengths: tuple[int, ...]
    maker: BatchMaker


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the device.

    tokens, positions, labels: int64 [batch, tokens of this worker], in layout order. The positions
        are for the rotary embedding. With tensor parallelism, tokens and labels are [1, own tokens]
        (`TensorGroup.own`), and positions has the tokens of all workers of the tensor group.
    attend: attention over the whole sequences, shared by all layers, or by all with a sliding
        window or an index if others have none.
    mixed: attention of all layers if two kinds of them differ; None if they are alike.
    routing: the sequences of the tokens, for routers; None if the model has no experts.
    valid: number of labels that count toward the loss, in the whole sequences.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    attend: ContextAttention
    valid: int
    mixed: MixedAttention | None = None
    routing: Routing | None = None

    @property
    def masks(self) -> tuple[SequenceMask, ...]:
        """The masks, one per sequence."""
        return self.attend.plan.masks

    @property
    def attention(self) -> ContextAttention | MixedAttention:
        """The attention of each layer."""
        return self.attend if self.mixed is None else self.mixed

    @property
    def pairs(self) -> int:
        """Number of query-key pairs that the masks allow, per head, in the whole sequences.

        If layers have different masks, this is the mean over layers, rounded.
        """
        mixed, pairs = self.mixed, self.attend.plan.allowed_pairs
        if mixed is None:
            return pairs
        full = mixed.full.plan.allowed_pairs
        return round(pairs + (full - pairs) * mixed.full_share)


@dataclass(frozen=True)
class MixedAttention:
    """Attention of two kinds: some layers are full, the others see a window or are sparse.

    window: attention of the layers that are not full.
    full_layers: numbers of the layers that are full.
    layers: number of layers of the model.
    """

    window: ContextAttention
    full: ContextAttention
    full_layers: frozenset[int]
    layers: int

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int
    ) -> torch.Tensor:
        attend = self.full if layer in self.full_layers else self.window
        return attend(q, k, v, layer)

    def for_next_batch(self) -> MixedAttention:
        """As `ContextAttention.for_next_batch`, for both kinds of layers."""
        return replace(self, window=self.window.for_next_batch(), full=self.full.for_next_batch())

    def with_kept_indices(self) -> MixedAttention:
        """As `ContextAttention.with_kept_indices`."""
        return replace(self, window=self.window.with_kept_indices())

    @property
    def full_share(self) -> float:
        """Share of the layers that are full."""
        return len(self.full_layers) / self.layers


class BatchMaker:
    """Makes micro-batches: cuts this worker's tokens out of whole sequences, in layout order.

    Activations keep the layout order through the whole model.
    """

    def __init__(
        self,
        exchange: Exchange,
        kernel: Kernel,
        device: torch.device,
        *,
        mask: MaskRule,
        pattern: Pattern | None = None,
        dense_layers: frozenset[int] = frozenset(),
        dense_kernel: Kernel | None = None,
        keep: float = 0.0,
        offload: ActivationOffload | None = None,
        layers: int = 0,
        balancer: Balancer | None = None,
        tensor: TensorGroup | None = None,
        router: RouterBatches | None = None,
    ) -> None:
        """Prepare to make batches.

        Args:
            mask: function that makes the mask of a sequence from its documents.
            pattern: method that estimates a dynamic index. None for dense attention.
            dense_layers: numbers of the layers without index. Needs a pattern.
            dense_kernel: kernel of these layers; None for ``kernel``.
            keep: share of this worker's queries whose attention output is saved for backward; see
                `Plan.make`.
            offload: moves saved tensors to the host; see `ContextAttention`.
            layers: number of layers of the model. Needed only if they have different masks.
            balancer: makes the layout of each batch. None for the layout of ``exchange``.
            tensor: the workers that share each layer; None if this worker computes whole layers.
            router: describes batches to routers; None if the model has no experts.
        """
        self.layers, self.router = layers, router
        self.full: BatchMaker | None = None
        self.full_layers = dense_layers
        self.kind = ""
        if mask.mask.is_mixed:
            self.kind = "window"
            self.full_layers = frozenset(filter(mask.mask.is_full, range(layers)))
            rule = MaskRule(mask.document_mask)
            self.full = BatchMaker(exchange, kernel, device, mask=rule, keep=keep, offload=offload)
            self.full.kind = "full"
        elif dense_layers:
            dense = dense_kernel or kernel
            self.full = BatchMaker(exchange, dense, device, mask=mask, keep=keep, offload=offload)
        self.exchange = exchange
        self.kernel = kernel
        self.device = device
        self.mask = mask
        self.pattern = pattern
        self.keep, self.offload = keep, offload
        self.balancer = balancer
        self.tensor = tensor
        # Layout, plan and attention of sequences that are one document, keyed by batch size.
        self._undivided_layout: dict[int, Layout] = {}
        self._undivided: dict[int, Plan] = {}
        self._undivided_attention: dict[int, ContextAttention] = {}

    def __call__(self, samples: Sequence[PackedSample]) -> Batch:
        return self.to_device(self.on_host(samples))

    def on_host(self, samples: Sequence[PackedSample]) -> HostBatch:
        """Prepare a batch. Thread-safe: uses neither the device nor other workers."""
        masks = self._masks(samples)
        full_masks = self.full._masks(samples) if self.full else None
        # Dense layers of a sparse run have the same masks, which a layout needs only once.
        other_masks = full_masks if self.pattern is None else None
        layout = self._layout(masks, other_masks)
        held = layout.positions(self.exchange.group.rank)
        targets = [unseen_labels(s.labels, mask) for s, mask in zip(samples, masks, strict=True)]
        padded = layout.padded_seq
        tokens = np.stack([_padded(s.tokens, padded, 0)[held] for s in samples])
        labels = np.stack([_padded(each, padded, IGNORED)[held] for each in targets])
        starts = np.stack([self.mask.starts(s.documents, padded) for s in samples])
        positions = np.stack(
            [
                held if s.positions is None else _padded(s.positions, padded, 0)[held]
                for s in samples
            ]
        )
        numbers = torch.from_numpy(np.stack([tokens, positions, labels]).astype(np.int64))
        on_gpu = self.device.type == "cuda"
        # Memory is pinned for the current device, which in a new thread is device 0.
        with torch.cuda.device(self.device) if on_gpu else nullcontext():
            numbers = numbers.pin_memory() if on_gpu else numbers
            plan, full_plan = self._plan(masks, layout), None
            if self.full is not None and full_masks is not None:
                full_plan = self.full._plan(full_masks, layout)
        valid = sum(int((each != IGNORED).sum()) for each in targets)
        earlier = held - starts[:, held]
        lengths: tuple[int, ...] = ()
        if self.router is not None:
            lengths = tuple(layout.seq if s.real is None else s.real for s in samples)
        return HostBatch(layout, samples, numbers, earlier, plan, full_plan, valid, lengths, self)

    def to_device(self, host: HostBatch) -> Batch:
        """Copy a batch to the device. The copies from pinned memory are asynchronous."""
        # After `train.dense_steps`, the run changes to another maker, whose plans differ. Plan
        # again what the previous maker has prepared.
        plan = host.plan if host.maker is self else self._plan(host.plan.masks, host.layout)
        tokens, positions, labels = host.numbers.to(self.device, non_blocking=True)
        if self.tensor is not None:
            tokens, labels = self.tensor.own(tokens, 0), self.tensor.own(labels, IGNORED)
        attend, mixed = self._attention(plan), None
        if self.full is not None:
            full_plan = host.full_plan
            if full_plan is None or host.maker is not self:
                assert self.pattern is not None, "only sparse runs change to another maker"
                full_plan = self.full._plan(host.plan.masks, host.layout)
            full = self.full._attention(full_plan)
            mixed = MixedAttention(attend, full, self.full_layers, self.layers)
        routing = None
        if self.router is not None:
            routing = self.router.of(host.layout, host.lengths, self.device)
        return Batch(tokens, positions, labels, attend, host.valid, mixed, routing)

    def _masks(self, samples: Sequence[PackedSample]) -> list[SequenceMask]:
        layout = self.exchange.layout
        return [self.mask(s.documents, layout.seq, layout.padded_seq, s.slices) for s in samples]

    def _undivided_only(self, masks: Sequence[SequenceMask]) -> bool:
        """Return whether every sequence is a single document, so that all have the same mask."""
        layout = self.exchange.layout
        undivided = self.mask.undivided(layout.seq, layout.padded_seq)
        return all(mask.same_as(undivided) for mask in masks)

    def _layout(
        self, masks: Sequence[SequenceMask], full_masks: Sequence[SequenceMask] | None
    ) -> Layout:
        """Return the layout of a batch. Batches with equal masks share one layout."""
        if self.balancer is None:
            return self.exchange.layout
        shared, batch = self._undivided_only(masks), len(masks)
        if self.full is not None and full_masks is not None:
            shared = shared and self.full._undivided_only(full_masks)
        if shared and batch in self._undivided_layout:
            return self._undivided_layout[batch]
        layout = self.balancer.layout([masks, full_masks] if full_masks else [masks])
        return self._undivided_layout.setdefault(batch, layout) if shared else layout

    def _plan(self, masks: Sequence[SequenceMask], layout: Layout) -> Plan:
        """Return the plan of a batch. Batches with equal masks and layout share one plan."""
        shared, batch = self._undivided_only(masks), len(masks)
        if batch in self._undivided:
            shared = shared and self._undivided[batch].placement.layout == layout
            if shared:
                return self._undivided[batch]
        request = None if self.pattern is None else self.pattern.request()
        plan = Plan.make(self.exchange, masks, request, layout=layout, keep=self.keep)
        plan = plan.pinned() if self.device.type == "cuda" else plan
        return self._undivided.setdefault(batch, plan) if shared else plan

    def _attention(self, plan: Plan) -> ContextAttention:
        batch = len(plan.masks)
        if plan is not self._undivided.get(batch):
            return self._wrap(plan)
        if batch not in self._undivided_attention:
            self._undivided_attention[batch] = self._wrap(plan)
        return self._undivided_attention[batch].for_next_batch()

    def _wrap(self, plan: Plan) -> ContextAttention:
        on_device = plan.to(self.device)
        attend = ContextAttention.of(
            self.exchange, self.kernel, on_device, self.pattern, self.offload
        )
        return replace(attend, kind=self.kind)


def _padded(values: NDArray[np.int32], length: int, padding: int) -> NDArray[np.int32]:
    whole = np.full(length, padding, dtype=values.dtype)
    whole[: len(values)] = values
    return whole


def describe_targets(config: Config, sample: PackedSample) -> str:
    """Return a line on the labels of the first sequence that count toward the loss."""
    mask = MaskRule.of(config)(sample.documents, config.seq, config.seq, sample.slices)
    counted = int((unseen_labels(sample.labels, mask) != IGNORED).sum())
    return f"{counted:,} of the {config.seq:,} tokens of the first sequence count toward the loss"


def unseen_labels(labels: NDArray[np.int32], mask: SequenceMask) -> NDArray[np.int32]:
    """Return the labels, with those ignored that the mask lets the model see.

    The label at a position is the next token. It counts only if no query up to that position sees a
    later key, so that no layer can carry the label to its own prediction.

    labels: labels of a whole sequence.
    """
    if mask.is_causal_interval:
        return labels
    shown = mask.shows_later_keys()[: len(labels)]
    return np.where(shown, np.int32(IGNORED), labels)
