"""One micro-batch of a worker: its tokens according to the layout, and its attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
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
from mtrain_cli.parallel.exchange import Exchange, Plan
from mtrain_cli.parallel.layer_groups import TensorGroup
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.sparsity.pattern import Pattern
from mtrain_cli.training.resolution import ResolvedRun
from mtrain_cli.training.router_batches import RouterBatches
from mtrain_cli.training.stage_prices import StagePrices


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

    numbers: int64 [3, batch, tokens of this worker]: tokens, rotary positions and labels, in layout
        order. For a GPU, the tensor is in pinned memory.
    earlier: int64 [batch, tokens of this worker]: number of earlier tokens in each token's context,
        that is its document or the sequence (`MaskRule.starts`).
    """

    layout: Layout
    samples: Sequence[PackedSample]  # whole sequences
    numbers: torch.Tensor
    earlier: IntArray
    plans: dict[AttentionSetup, Plan]  # for each kind of layers
    valid: int  # labels that count toward the loss, in the whole sequences
    lengths: tuple[int, ...]  # of the sequences without padding; () without experts


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the device.

    tokens, positions, labels: int64 [batch, tokens of this worker], in layout order. With tensor
        parallelism, tokens and labels are [1, own tokens] (`TensorGroup.own`), and positions has
        the tokens of all workers of the tensor group.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    attend: ContextAttention  # of all layers, or of those with a window or index
    valid: int  # labels that count toward the loss, in the whole sequences
    mixed: MixedAttention | None = None  # attention of all layers if two kinds of them differ
    routing: Routing | None = None  # None without experts

    @property
    def masks(self) -> tuple[SequenceMask, ...]:
        return self.attend.plan.masks

    @property
    def attention(self) -> ContextAttention | MixedAttention:
        return self.attend if self.mixed is None else self.mixed

    @property
    def pairs(self) -> int:
        """Pairs that the masks allow per head, in the whole sequences: the mean over layers."""
        mixed, pairs = self.mixed, self.attend.plan.allowed_pairs
        if mixed is None:
            return pairs
        full_share = len(mixed.full_layers) / mixed.layers
        return round(pairs + (mixed.full.plan.allowed_pairs - pairs) * full_share)


@dataclass(frozen=True)
class MixedAttention:
    """Attention of two kinds: ``full_layers`` are full, the others see a window or are sparse."""

    window: ContextAttention
    full: ContextAttention
    full_layers: frozenset[int]
    layers: int

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int, *sinks: torch.Tensor
    ) -> torch.Tensor:
        attend = self.full if layer in self.full_layers else self.window
        return attend(q, k, v, layer, *sinks)

    def for_next_batch(self) -> MixedAttention:
        return replace(self, window=self.window.for_next_batch(), full=self.full.for_next_batch())

    def with_kept_indices(self) -> MixedAttention:
        return replace(self, window=self.window.with_kept_indices())


@dataclass(frozen=True, eq=False)
class AttentionSetup:
    """How the layers of one kind attend."""

    kernel: Kernel
    mask: MaskRule
    pattern: Pattern | None = None  # None for dense attention
    keep: float = 0.0  # share of the queries whose output is saved for backward; see `Plan.make`
    layers: frozenset[int] = frozenset()  # of these layers, if another kind comes first

    def by_kind(
        self,
        layers: int,
        dense_layers: frozenset[int] = frozenset(),
        dense_kernel: Kernel | None = None,
    ) -> dict[str, AttentionSetup]:
        """Return the setup of each kind of layer: this one, and one of full or dense layers if any.

        layers: number of layers of the model. dense_layers: layers without an index.
        dense_kernel: their kernel; None: `kernel`.
        """
        if self.mask.mask.is_mixed:
            rule = MaskRule(self.mask.document_mask)
            full = frozenset(filter(self.mask.mask.is_full, range(layers)))
            return {"window": self, "full": replace(self, mask=rule, pattern=None, layers=full)}
        if self.pattern is None or not dense_layers:
            return {"": self}
        kernel = dense_kernel or self.kernel
        return {"": self, "dense": replace(self, kernel=kernel, pattern=None, layers=dense_layers)}


def attention_setups(
    config: Config, choices: ResolvedRun, *, mask: MaskRule | None = None, keep: float = 0.0
) -> dict[str, AttentionSetup]:
    """Return how the layers of a run attend, by kind. mask: None for the configured mask."""
    setup = AttentionSetup(choices.kernel, mask or MaskRule.of(config), choices.pattern, keep)
    layers, dense = config.model.num_layers, choices.dense_kernel
    return setup.by_kind(layers, config.sparsity.dense_of(layers), dense and dense[0])


@dataclass(frozen=True)
class Layouts:
    """The layouts of batches: that of the exchange, or those that a balancer makes."""

    exchange: Exchange
    balancer: Balancer | None = None
    # Layouts of sequences that are one document, keyed by batch size.
    _undivided: dict[int, Layout] = field(default_factory=dict)

    def of(self, masks: Sequence[Sequence[SequenceMask]], *, undivided: bool) -> Layout:
        """Return the layout of a batch, one for all batches of ``undivided`` sequences.

        masks: the masks of each kind of layer, one per sequence.
        """
        if self.balancer is None:
            return self.exchange.layout
        batch = len(masks[0])
        if undivided and batch in self._undivided:
            return self._undivided[batch]
        layout = self.balancer.layout(masks)
        return self._undivided.setdefault(batch, layout) if undivided else layout


class Batches:
    """Makes micro-batches: cuts this worker's tokens out of whole sequences, in layout order."""

    def __init__(
        self,
        layouts: Layouts,
        setups: Mapping[str, AttentionSetup],
        device: torch.device,
        *,
        layers: int = 0,
        offload: ActivationOffload | None = None,
        tensor: TensorGroup | None = None,
        router: RouterBatches | None = None,
        prices: StagePrices | None = None,
    ) -> None:
        """Prepare to make batches.

        prices: chooses the stages of group casts for each batch; None for those of the exchange.
        setups: how the layers attend, by kind (`AttentionSetup.by_kind`).
        layers: number of layers of the model. Needed only if there are two kinds.
        offload: moves saved tensors to the host; see `ContextAttention`.
        """
        self.layouts, self.exchange = layouts, layouts.exchange
        self.setups, self.device, self.layers = setups, device, layers
        self.offload, self.tensor, self.router, self.prices = offload, tensor, router, prices
        self._first = next(iter(setups.values()))
        # Plan and attention of sequences that are one document, by setup and batch size.
        self._undivided: dict[tuple[AttentionSetup, int], Plan] = {}
        self._undivided_attention: dict[tuple[AttentionSetup, int], ContextAttention] = {}

    @property
    def pattern(self) -> Pattern | None:
        return self._first.pattern

    def __call__(self, samples: Sequence[PackedSample]) -> Batch:
        return self.to_device(self.on_host(samples))

    def on_host(self, samples: Sequence[PackedSample]) -> HostBatch:
        """Prepare a batch. Thread-safe: uses neither the device nor other workers."""
        seq, padded = self.exchange.layout.seq, self.exchange.layout.padded_seq
        # Dense layers of a sparse run have the same rule as the others.
        masks = {
            rule: [rule(s.documents, seq, padded, s.slices) for s in samples]
            for rule in {setup.mask: None for setup in self.setups.values()}
        }
        undivided = all(self._are_undivided(*item) for item in masks.items())
        layout = self.layouts.of(list(masks.values()), undivided=undivided)
        held, rule = layout.positions(self.exchange.group.rank), self._first.mask
        padded = layout.padded_seq
        pairs = zip(samples, masks[rule], strict=True)
        targets = [unseen_labels(sample.labels, mask) for sample, mask in pairs]

        def held_of(values: NDArray[np.int32], padding: int) -> NDArray[np.int32]:
            full_sequence = np.full(padded, padding, dtype=values.dtype)
            full_sequence[: len(values)] = values
            return full_sequence[held]

        tokens = [held_of(s.tokens, 0) for s in samples]
        labels = [held_of(target, IGNORED) for target in targets]
        positions = [held if s.positions is None else held_of(s.positions, 0) for s in samples]
        starts = np.stack([rule.starts(s.documents, padded) for s in samples])
        numbers = torch.from_numpy(np.stack([tokens, positions, labels]).astype(np.int64))
        on_gpu = self.device.type == "cuda"
        # Memory is pinned for the current device, which in a new thread is device 0.
        with torch.cuda.device(self.device) if on_gpu else nullcontext():
            numbers = numbers.pin_memory() if on_gpu else numbers
            plans = {s: self._plan(s, masks[s.mask], layout) for s in self.setups.values()}
        valid = sum(int((target != IGNORED).sum()) for target in targets)
        earlier = held - starts[:, held]
        lengths: tuple[int, ...] = ()
        if self.router is not None:
            lengths = tuple(layout.seq if s.real is None else s.real for s in samples)
        return HostBatch(layout, samples, numbers, earlier, plans, valid, lengths)

    def to_device(self, host: HostBatch) -> Batch:
        """Copy a batch to the device. The copies from pinned memory are asynchronous."""
        tokens, positions, labels = host.numbers.to(self.device, non_blocking=True)
        if self.tensor is not None:
            tokens, labels = self.tensor.own(tokens, 0), self.tensor.own(labels, IGNORED)
        attend, *others = (self._attention(kind, host) for kind in self.setups)
        mixed = None
        if others:
            *_, full = self.setups.values()
            mixed = MixedAttention(attend, others[0], full.layers, self.layers)
        routing = None
        if self.router is not None:
            routing = self.router.of(host.layout, host.lengths, self.device)
        return Batch(tokens, positions, labels, attend, host.valid, mixed, routing)

    def _are_undivided(self, rule: MaskRule, masks: Sequence[SequenceMask]) -> bool:
        """Return whether every sequence is a single document, so that all have the same mask."""
        layout = self.exchange.layout
        undivided = rule.undivided(layout.seq, layout.padded_seq)
        return all(mask.same_as(undivided) for mask in masks)

    def _plan(self, setup: AttentionSetup, masks: Sequence[SequenceMask], layout: Layout) -> Plan:
        """Return the plan of a batch. Batches with equal masks and layout share one plan."""
        key, shared = (setup, len(masks)), self._are_undivided(setup.mask, masks)
        if shared and (plan := self._undivided.get(key)) is not None:
            if plan.placement.layout == layout:
                return plan
            shared = False
        request = None if setup.pattern is None else setup.pattern.request()
        exchange = self.exchange
        if self.prices is not None and request is None:
            exchange = exchange.with_stages(*self.prices.of(layout, masks).best)
        plan = Plan.make(exchange, masks, request, layout=layout, keep=setup.keep)
        plan = plan.pinned() if self.device.type == "cuda" else plan
        return self._undivided.setdefault(key, plan) if shared else plan

    def _attention(self, kind: str, host: HostBatch) -> ContextAttention:
        setup = self.setups[kind]
        plan = host.plans.get(setup)
        if plan is None:
            # After `sparsity.dense_steps`, the run changes to other setups with the same masks.
            # Plan again what was prepared for the previous ones.
            masks = next(p.masks for s, p in host.plans.items() if s.mask == setup.mask)
            plan = self._plan(setup, masks, host.layout)
        key = setup, len(plan.masks)
        if plan is not self._undivided.get(key):
            return self._wrap(kind, plan)
        if key not in self._undivided_attention:
            self._undivided_attention[key] = self._wrap(kind, plan)
        return self._undivided_attention[key].for_next_batch()

    def _wrap(self, kind: str, plan: Plan) -> ContextAttention:
        setup, on_device = self.setups[kind], plan.to(self.device)
        stages = plan.schedule.stages, plan.schedule.stages_backward
        exchange = self.exchange.with_stages(*stages)
        attend = ContextAttention.of(exchange, setup.kernel, on_device, setup.pattern, self.offload)
        return replace(attend, kind="" if kind == "dense" else kind)


def describe_targets(config: Config, sample: PackedSample) -> str:
    """Return a line on the labels of the first sequence that count toward the loss."""
    mask = MaskRule.of(config)(sample.documents, config.seq, config.seq, sample.slices)
    counted = int((unseen_labels(sample.labels, mask) != IGNORED).sum())
    return f"{counted:,} of the {config.seq:,} tokens of the first sequence count toward the loss"


def unseen_labels(labels: NDArray[np.int32], mask: SequenceMask) -> NDArray[np.int32]:
    """Return the labels of a sequence, with those ignored that the mask lets the model see.

    The label at a position is the next token. It counts only if no query up to that position sees a
    later key, so that no layer can carry the label to its own prediction.
    """
    if mask.is_causal_interval:
        return labels
    shown = mask.shows_later_keys()[: len(labels)]
    return np.where(shown, np.int32(IGNORED), labels)
