"""Results of an optimizer step: a report from each rank, and one result for all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mtrain_cli.launch.failures import RunError
from mtrain_cli.training.index_metrics import IndexMetrics
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
    index_sums: `index_metrics.local_index_sums` of a sparse step. Empty in a dense step.
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
        """Make a report from a rank's numbers. The numbers are in the order of the fields."""
        loss, norm, stop, save, compute_s, data_s, *index_sums = row
        return StepReport(loss, norm, stop, save, compute_s, data_s, tuple(index_sums))


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, equal on all workers, except `RoutingMetrics.own`.

    loss: mean over the tokens with a label, in nats. None if no token has a label.
    grad_norm: norm of the whole gradient, before clipping.
    lr: learning rate of the step.
    tokens: number of tokens in all sequences of the step.
    pairs: number of computed query-key pairs, averaged over heads and layers, and summed over all
        sequences.
    stop, save: whether any worker received a request to stop, or to save.
    targets: number of labels that count toward the loss.
    allowed: number of query-key pairs that the mask allows, summed over all sequences.
    reports: one report per rank.
    index: metrics of the dynamic index. None for a dense step.
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
