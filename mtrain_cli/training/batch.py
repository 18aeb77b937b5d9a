"""One micro-batch of a worker: its slots of every sequence, and the attention of all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from mtrain_cli.attention.kernel import Kernel
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.data.labels import IGNORED
from mtrain_cli.parallel.activation_offload import ActivationOffload
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.parallel.exchange import Exchange
from mtrain_cli.sparsity.pattern import Pattern


class PackedSample(Protocol):
    """One sequence; arrays are [seq]. Labels are already shifted; -100 marks an ignored label."""

    @property
    def tokens(self) -> NDArray[np.int32]: ...
    @property
    def labels(self) -> NDArray[np.int32]: ...
    @property
    def documents(self) -> NDArray[np.int32]: ...


@dataclass(frozen=True)
class HostBatch:
    """A micro-batch in host memory, prepared while the device computes another step.

    samples: the whole sequences.
    numbers: int64 [3, batch, tokens of this worker], tokens, positions and labels in layout order;
        pinned if the device is a GPU.
    masks, pairs, valid: as in `Batch`.
    """

    samples: Sequence[PackedSample]
    numbers: torch.Tensor
    masks: list[SequenceMask]
    pairs: int
    valid: int


@dataclass(frozen=True)
class Batch:
    """A micro-batch on the device.

    tokens, positions, labels: int64 [batch, tokens of this worker], in layout order.
    attend: attention over the whole sequences, shared by all layers.
    pairs: query-key pairs that the masks allow, per head, summed over the whole sequences.
    valid: labels that count towards the loss, summed over the whole sequences.
    masks: one per sequence.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    labels: torch.Tensor
    attend: ContextAttention
    pairs: int
    valid: int
    masks: list[SequenceMask]


class BatchMaker:
    """Shard samples into layout order when they are loaded; activations stay in that order."""

    def __init__(
        self,
        exchange: Exchange,
        kernel: Kernel,
        device: torch.device,
        *,
        document_mask: bool,
        pattern: Pattern | None = None,
        keep: float = 0.0,
        offload: ActivationOffload | None = None,
    ) -> None:
        """keep, offload: which attention outputs to save and where; see `ContextAttention.make`."""
        self.exchange = exchange
        self.kernel = kernel
        self.device = device
        self.document_mask = document_mask
        self.pattern = pattern
        self.keep, self.offload = keep, offload
        self._positions = exchange.layout.positions(exchange.group.rank)
        self._plain = SequenceMask.causal(exchange.layout.seq, exchange.layout.padded_seq)
        self._causal: dict[int, ContextAttention] = {}

    def __call__(self, samples: Sequence[PackedSample]) -> Batch:
        return self.to_device(self.on_host(samples))

    def on_host(self, samples: Sequence[PackedSample]) -> HostBatch:
        """Prepare a batch. Thread-safe: uses neither the device nor other workers."""
        tokens = np.stack([self._shard(s.tokens, 0) for s in samples])
        labels = np.stack([self._shard(s.labels, IGNORED) for s in samples])
        positions = np.broadcast_to(self._positions, tokens.shape)
        numbers = torch.from_numpy(np.stack([tokens, positions, labels]).astype(np.int64))
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):  # new threads start on device 0
                numbers = numbers.pin_memory()
        masks = self._masks(samples)
        return HostBatch(
            samples, numbers, masks, sum(mask.pairs for mask in masks), valid_labels(samples)
        )

    def to_device(self, host: HostBatch) -> Batch:
        """Copy a batch to the device. The copy from pinned memory is asynchronous."""
        numbers = host.numbers.to(self.device, non_blocking=True)
        return Batch(
            numbers[0],
            numbers[1],
            numbers[2],
            self._attention(host.masks),
            host.pairs,
            host.valid,
            host.masks,
        )

    def _shard(self, values: NDArray[np.int32], padding: int) -> NDArray[np.int32]:
        layout = self.exchange.layout
        padded = np.full(layout.padded_seq, padding, dtype=values.dtype)
        padded[: len(values)] = values
        return padded[self._positions]

    def _masks(self, samples: Sequence[PackedSample]) -> list[SequenceMask]:
        layout = self.exchange.layout
        if self.document_mask:
            return [SequenceMask.from_documents(s.documents, layout.padded_seq) for s in samples]
        return [self._plain] * len(samples)

    def _attention(self, masks: list[SequenceMask]) -> ContextAttention:
        if any(mask.length < self.exchange.layout.seq or mask.first.any() for mask in masks):
            return self._make(masks)
        # Batches of one size share the plain causal mask, also if each document fills its sequence.
        if len(masks) not in self._causal:
            self._causal[len(masks)] = self._make(masks)
        return self._causal[len(masks)].for_next_batch()

    def _make(self, masks: list[SequenceMask]) -> ContextAttention:
        return ContextAttention.make(
            self.exchange,
            self.kernel,
            masks,
            self.device,
            self.pattern,
            keep=self.keep,
            offload=self.offload,
        )


def valid_labels(samples: Sequence[PackedSample]) -> int:
    """Count the labels of whole sequences that are not ignored."""
    return sum(int((s.labels != IGNORED).sum()) for s in samples)
