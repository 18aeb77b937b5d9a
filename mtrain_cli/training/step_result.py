"""Results of an optimizer step: a report from each rank, and one result for all ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.grouping import grouped
from mtrain_cli.launch.failures import RunError
from mtrain_cli.parallel.context_attention import ContextAttention, IndexRecord
from mtrain_cli.training.flops import causal_pairs
from mtrain_cli.training.router_batches import RoutingMetrics


class NonFiniteError(RunError):
    """The loss or a gradient is not finite. The step did not change the weights."""


@dataclass(frozen=True)
class StepReport:
    """Numbers that a rank sends to all ranks at the end of a step, in one float64 all-gather.

    loss: this rank's part of the mean loss, in nats.
    squared_norm: squared norm of this rank's gradient shards, before clipping.
    stop, save: 1 if this rank received a request to stop, or to save, else 0.
    compute_seconds: time that `ComputeTimer` measured in the previous step. 0 if not measured.
    data_seconds: time that this rank waited for data.
    index_sums: `local_index_sums` of a sparse step. Empty in a dense step.
    """

    loss: float
    squared_norm: float
    stop: float
    save: float
    compute_seconds: float
    data_seconds: float
    index_sums: tuple[float, ...] = ()

    @staticmethod
    def of(row: Sequence[float]) -> StepReport:
        """Make a report from a rank's numbers, in the order of the fields."""
        loss, norm, stop, save, compute_s, data_s, *index_sums = row
        return StepReport(loss, norm, stop, save, compute_s, data_s, tuple(index_sums))


@dataclass(frozen=True)
class IndexMetrics:
    """Metrics of a step's indices, averaged over heads and sequences.

    density_by_layer: computed pairs / pairs of a causal mask without documents.
    slashes, columns: their numbers per head, averaged over sparse layers.
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
        """Return the metrics of a model with ``number`` more layers of this density."""
        return replace(self, density_by_layer=self.density_by_layer + (density,) * number)


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, equal on all workers, except `RoutingMetrics.own`.

    loss: mean over the tokens with a label, in nats. None if no token has a label.
    grad_norm: norm of the whole gradient, before clipping.
    tokens: number of tokens in all sequences of the step.
    pairs: number of computed query-key pairs, averaged over heads and layers, and summed over all
        sequences.
    stop, save: whether any worker received a request to stop, or to save.
    targets: number of labels that count toward the loss.
    allowed: number of query-key pairs that the mask allows, summed over all sequences.
    reports: one report per rank.
    index: None for a dense step.
    routing: loads of the experts. None if the model has none.
    skipped: whether the optimizer update was skipped.
    warnings: lines for the user.
    """

    loss: float | None
    grad_norm: float
    lr: float
    tokens: int
    pairs: float
    stop: bool
    targets: int = 0
    allowed: float = 0.0
    reports: tuple[StepReport, ...] = ()
    index: IndexMetrics | None = None
    routing: RoutingMetrics | None = None
    skipped: bool = False
    warnings: tuple[str, ...] = ()
    save: bool = False

    @property
    def data_seconds(self) -> float:
        """Time that the worker with the slowest loader waited for data."""
        return max((report.data_seconds for report in self.reports), default=0.0)


def check_finite(reports: Sequence[StepReport], step: int) -> None:
    """Raise NonFiniteError if a loss or gradient is not finite. The error names the ranks."""
    for name, field in (("loss", "loss"), ("gradient", "squared_norm")):
        ranks = [str(n) for n, r in enumerate(reports) if not math.isfinite(getattr(r, field))]
        if ranks:
            on = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
            raise NonFiniteError(
                f"step {step}: the {name} is not finite on {on}; the step was not applied"
            )


def index_records(batches: Iterable[ContextAttention]) -> list[IndexRecord] | None:
    """Count the pairs of the indices of a step's micro-batches. Return a record per index.

    Return None for a dense step. In a sparse step, a stage of only dense layers has no record.
    """
    indices = [attend.index for attend in batches if attend.index is not None]
    for index in indices:
        index.count()
    return [record for index in indices for record in index.records] if indices else None


def local_index_sums(records: list[IndexRecord], layers: int, device: torch.device) -> torch.Tensor:
    """Return this worker's part of the step's index counts, to be summed over all workers.

    The result is a float64 vector [layers + 3]: computed pairs of each layer, slashes and columns
    summed over layers (all averaged over heads, summed over sequences), and number of sequences.

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
    """Return the index metrics of a step from `local_index_sums`, summed over the workers.

    records: index records of this worker.
    """
    *pairs, slashes, columns, sequences = total
    return IndexMetrics(
        density_by_layer=tuple(p / sequences / causal_pairs(seq) for p in pairs),
        slashes=slashes / sequences / len(pairs),
        columns=columns / sequences / len(pairs),
        seconds=sum(record.seconds for record in records),
    )
