"""Density and size of the dynamic indices of one optimizer step, for metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.parallel.context_attention import ContextAttention, IndexRecord
from mtrain_cli.training.flops import causal_pairs


@dataclass(frozen=True)
class IndexMetrics:
    """Means over the heads and sequences of a step.

    density_by_layer: computed pairs / causal pairs without document mask.
    slashes, columns: chosen per head, mean over layers.
    seconds: time that the first worker spent estimating indices.
    """

    density_by_layer: tuple[float, ...]
    slashes: float
    columns: float
    seconds: float

    @property
    def density(self) -> float:
        return sum(self.density_by_layer) / len(self.density_by_layer)


def index_records(batches: Iterable[ContextAttention]) -> list[IndexRecord]:
    """Count and return every index estimate of a step's micro-batches."""
    indices = [attend.index for attend in batches if attend.index is not None]
    for index in indices:
        index.count()
    return [record for index in indices for record in index.records]


def local_index_sums(records: list[IndexRecord], layers: int, device: torch.device) -> torch.Tensor:
    """Sum this worker's counts; adding these vectors over workers gives the total of the step.

    Returns float64 [layers + 3] on the device: computed pairs of each layer, slashes and columns
    over all layers (each a sum over sequences of means over heads), and the number of sequences.

    Args:
        records: index records of one pattern.
    """
    heads, workers = records[0].counts.pairs.shape[1], records[0].workers
    by_batch_size: dict[int, list[IndexRecord]] = {}
    for record in records:
        by_batch_size.setdefault(len(record.counts.pairs), []).append(record)
    # Integer sums are exact in any order.
    sums = torch.zeros(layers + 2, dtype=torch.int64, device=device)
    for group in by_batch_size.values():
        counts = [record.counts for record in group]
        lines = [t for c in counts for t in (c.pairs, c.slashes, c.columns)]
        places = torch.tensor([p for r in group for p in (r.layer, layers, layers + 1)])
        sums.index_add_(0, to_device(places, device), torch.stack(lines).sum((1, 2)))
    means = sums.double() / heads
    means[:layers] *= workers
    return torch.nn.functional.pad(
        means, (0, 1), value=sum(len(record.counts.pairs) for record in records) / layers
    )


def index_metrics(total: list[float], records: list[IndexRecord], seq: int) -> IndexMetrics:
    """Compute the metrics. total: `local_index_sums`, added over the workers."""
    *pairs, slashes, columns, sequences = total
    return IndexMetrics(
        density_by_layer=tuple(p / sequences / causal_pairs(seq) for p in pairs),
        slashes=slashes / sequences / len(pairs),
        columns=columns / sequences / len(pairs),
        seconds=sum(record.seconds for record in records),
    )
