"""What the dynamic indices of one optimizer step left to compute, for metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.parallel.context_attention import ContextAttention, IndexRecord
from mtrain_cli.training.flops import causal_pairs


@dataclass(frozen=True)
class IndexMetrics:
    """Means over the heads and sequences of a step. density_by_layer: computed pairs over causal pairs without document mask. slashes,
    columns: lines a head, over all layers. seconds: time that the first worker spent estimating.
    """

    density_by_layer: tuple[float, ...]
    slashes: float
    columns: float
    seconds: float

    @property
    def density(self) -> float:
        return sum(self.density_by_layer) / len(self.density_by_layer)


def index_records(batches: Iterable[ContextAttention]) -> list[IndexRecord]:
    """Every estimate of the micro-batches of a step, counted."""
    indices = [attend.index for attend in batches if attend.index is not None]
    for index in indices:
        index.count()
    return [record for index in indices for record in index.records]


def local_index_sums(records: list[IndexRecord], layers: int, device: torch.device) -> torch.Tensor:
    """float64 [layers + 3] on the device: mean pairs of each layer (sum over sequences of means over heads), the same sums of slashes and
    columns over all layers, and sequences. Adding these vectors of several workers gives that of all of them. records: of one pattern.
    """
    heads, workers = records[0].counts.pairs.shape[1], records[0].workers
    by_batch_size: dict[int, list[IndexRecord]] = {}
    for record in records:
        by_batch_size.setdefault(len(record.counts.pairs), []).append(record)
    sums = torch.zeros(
        layers + 2, dtype=torch.int64, device=device
    )  # of integers, exact in any order
    for group in by_batch_size.values():
        lines = [
            t
            for record in group
            for t in (record.counts.pairs, record.counts.slashes, record.counts.columns)
        ]
        places = torch.tensor(
            [place for record in group for place in (record.layer, layers, layers + 1)]
        )
        sums.index_add_(0, to_device(places, device), torch.stack(lines).sum((1, 2)))
    means = sums.double() / heads
    means[:layers] *= workers
    return torch.nn.functional.pad(
        means, (0, 1), value=sum(len(record.counts.pairs) for record in records) / layers
    )


def index_metrics(total: list[float], records: list[IndexRecord], seq: int) -> IndexMetrics:
    """total: what `summed` gave, added over the workers."""
    *pairs, slashes, columns, sequences = total
    return IndexMetrics(
        density_by_layer=tuple(p / sequences / causal_pairs(seq) for p in pairs),
        slashes=slashes / sequences / len(pairs),
        columns=columns / sequences / len(pairs),
        seconds=sum(record.seconds for record in records),
    )
