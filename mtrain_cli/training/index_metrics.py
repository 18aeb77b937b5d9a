"""What the dynamic indices of one optimizer step left to compute, for metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mtrain_cli.parallel.context_attention import ContextAttention, IndexRecord
from mtrain_cli.training.flops import causal_pairs


@dataclass(frozen=True)
class IndexMetrics:
    """Means over the heads and sequences of a step. density_by_layer: computed pairs over causal pairs without document mask. slashes,
    bars: lines a head, over all layers. seconds: time that the first worker spent estimating.
    """

    density_by_layer: tuple[float, ...]
    slashes: float
    bars: float
    seconds: float

    @property
    def density(self) -> float:
        return sum(self.density_by_layer) / len(self.density_by_layer)


def index_records(batches: Iterable[ContextAttention]) -> list[IndexRecord]:
    """Every estimate of the micro-batches of a step."""
    return [record for attend in batches if attend.index is not None for record in attend.index.records]


def summed(records: list[IndexRecord], layers: int, device: torch.device) -> torch.Tensor:
    """float64 [layers + 3] on the device: mean pairs of each layer (sum over sequences of means over heads), the same sums of slashes and
    bars over all layers, and sequences. Adding these vectors of several workers gives that of all of them.
    """
    total = torch.zeros(layers + 3, dtype=torch.float64, device=device)
    for record in records:
        counts = record.counts
        total[record.layer] += counts.pairs.double().mean(-1).sum() * record.workers
        total[layers] += counts.slashes.double().mean(-1).sum()
        total[layers + 1] += counts.columns.double().mean(-1).sum()
        total[layers + 2] += counts.pairs.shape[0] / layers
    return total


def index_metrics(total: list[float], records: list[IndexRecord], seq: int) -> IndexMetrics:
    """total: what `summed` gave, added over the workers."""
    *pairs, slashes, bars, sequences = total
    return IndexMetrics(
        density_by_layer=tuple(p / sequences / causal_pairs(seq) for p in pairs),
        slashes=slashes / sequences / len(pairs),
        bars=bars / sequences / len(pairs),
        seconds=sum(record.seconds for record in records),
    )
