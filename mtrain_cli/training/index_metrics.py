"""Density and size of the dynamic indices of one optimizer step, for metrics.jsonl."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.grouping import grouped
from mtrain_cli.parallel.context_attention import ContextAttention, IndexRecord
from mtrain_cli.training.flops import causal_pairs


@dataclass(frozen=True)
class IndexMetrics:
    """Metrics of a step's indices, averaged over heads and sequences.

    density_by_layer: computed pairs / pairs of a causal mask without documents.
    slashes, columns: number of slashes and of columns per head, averaged over sparse layers.
    seconds: time that this worker spent estimating indices.
    """

    density_by_layer: tuple[float, ...]
    slashes: float
    columns: float
    seconds: float

    @property
    def density(self) -> float:
        return sum(self.density_by_layer) / len(self.density_by_layer)

    def with_dense_layers(self, number: int, density: float) -> IndexMetrics:
        """Return the metrics of a model with more layers, which are dense.

        density: of a dense layer.
        """
        return replace(self, density_by_layer=self.density_by_layer + (density,) * number)


def index_records(batches: Iterable[ContextAttention]) -> list[IndexRecord] | None:
    """Count the pairs of the indices of a step's micro-batches. Return a record per index.

    Return None for a dense step. In a sparse step, a stage of only dense layers has no record.
    """
    indices = [attend.index for attend in batches if attend.index is not None]
    if not indices:
        return None
    for index in indices:
        index.count()
    return [record for index in indices for record in index.records]


def local_index_sums(records: list[IndexRecord], layers: int, device: torch.device) -> torch.Tensor:
    """Return this worker's part of the step's index counts, to be summed over all workers.

    The result is a float64 vector [layers + 3] on the device:
    - number of computed pairs in each layer
    - number of slashes, summed over layers
    - number of columns, summed over layers
    - number of sequences

    The numbers of pairs, slashes and columns are averaged over heads and summed over sequences.

    Args:
        records: index records of one pattern. Empty on a stage of only dense layers.
        layers: number of layers that have an index, the first of the model.
    """
    if not records:
        return torch.zeros(layers + 3, dtype=torch.float64, device=device)
    heads, workers = records[0].counts.pairs.shape[1], records[0].workers
    # Integer sums are exact in any order.
    sums = torch.zeros(layers + 2, dtype=torch.int64, device=device)
    for group in grouped(records, lambda record: len(record.counts.pairs)).values():
        counts = [record.counts for record in group]
        lines = [t for c in counts for t in (c.pairs, c.slashes, c.columns)]
        places = torch.tensor([p for r in group for p in (r.layer, layers, layers + 1)])
        sums.index_add_(0, to_device(places, device), torch.stack(lines).sum((1, 2)))
    means = sums.double() / heads
    means[:layers] *= workers
    sequences = sum(len(record.counts.pairs) for record in records) / layers
    return torch.nn.functional.pad(means, (0, 1), value=sequences)


def index_metrics(total: list[float], records: list[IndexRecord], seq: int) -> IndexMetrics:
    """Return the index metrics of a step.

    Args:
        total: `local_index_sums`, summed over the workers.
        records: index records of this worker.
    """
    *pairs, slashes, columns, sequences = total
    return IndexMetrics(
        density_by_layer=tuple(p / sequences / causal_pairs(seq) for p in pairs),
        slashes=slashes / sequences / len(pairs),
        columns=columns / sequences / len(pairs),
        seconds=sum(record.seconds for record in records),
    )
