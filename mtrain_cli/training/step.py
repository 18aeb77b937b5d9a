"""One optimizer step of a worker: forward and backward passes, the update, and the results."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.grouping import grouped
from mtrain_cli.launch import progress_record
from mtrain_cli.launch.failures import RunError
from mtrain_cli.model.decoder import Attend
from mtrain_cli.parallel import layer_groups, profiler_labels
from mtrain_cli.parallel.collectives import all_gather
from mtrain_cli.parallel.context_attention import ContextAttention, IndexRecord
from mtrain_cli.parallel.fsdp import begin_micro_batch
from mtrain_cli.parallel.recording import Recorder
from mtrain_cli.training.batch import Batch
from mtrain_cli.training.callback import ComputeTimer
from mtrain_cli.training.flops import causal_pairs
from mtrain_cli.training.router_batches import RoutingMetrics, routing_metrics
from mtrain_cli.training.worker import TrainState, Worker


class NonFiniteError(RunError):
    """The loss or a gradient is not finite. The step did not change the weights."""


class LossSpikeError(RunError):
    """The loss is too high, `train.rollback.sigma`. The step did not change the weights."""


NOT_FINITE, SPIKE, NO_LABEL = "not finite", "spike", "no label"  # why an update is left out


@dataclass(frozen=True)
class StepReport:
    """Numbers that a rank sends to all ranks at the end of a step, in one float64 all-gather."""

    loss: float  # this rank's part of the mean loss, in nats
    squared_norm: float  # of this rank's gradient shards, before clipping
    stop: float  # 1 if this rank received a request to stop, else 0
    save: float
    compute_seconds: float  # measured by `ComputeTimer` in the previous step, or 0
    data_seconds: float  # spent waiting for data
    index_sums: tuple[float, ...] = ()  # `local_index_sums` of a sparse step

    @staticmethod
    def of(row: Sequence[float]) -> StepReport:
        """Make a report from a rank's numbers, in the order of the fields."""
        loss, norm, stop, save, compute_s, data_s, *index_sums = row
        return StepReport(loss, norm, stop, save, compute_s, data_s, tuple(index_sums))


@dataclass(frozen=True)
class IndexMetrics:
    """Metrics of a step's indices, averaged over heads and sequences."""

    density_by_layer: tuple[float, ...]  # computed pairs / pairs of a causal mask
    slashes: float  # per head, averaged over sparse layers
    columns: float
    seconds: float  # that this worker spent estimating indices
    cut: float | None = None  # share of the blocks that reached the level; None without a cap

    @property
    def density(self) -> float:
        return sum(self.density_by_layer) / len(self.density_by_layer)


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, equal on all workers, except `RoutingMetrics.own`.

    pairs: number of computed query-key pairs, averaged over heads and layers, and summed over all
        sequences.
    allowed: number of query-key pairs that the mask allows, summed over all sequences.
    """

    loss: float | None  # mean over the tokens with a label, in nats; None if none has a label
    grad_norm: float  # of the whole gradient, before clipping
    lr: float
    tokens: int  # in all sequences
    pairs: float
    stop: bool  # whether any worker received a request to stop
    targets: int = 0  # labels that count toward the loss
    allowed: float = 0.0
    reports: tuple[StepReport, ...] = ()  # of each rank
    index: IndexMetrics | None = None  # None for a dense step
    routing: RoutingMetrics | None = None  # None without experts
    skipped: str = ""  # why the optimizer's update was left out
    warnings: tuple[str, ...] = ()
    save: bool = False  # as stop

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


def local_index_sums(
    records: list[IndexRecord], numbers: Sequence[int], device: torch.device
) -> torch.Tensor:
    """Return this worker's part of the step's index counts, to be summed over all workers.

    Float64 [layers + 5]: computed pairs of each layer, slashes and columns summed over layers (all
    averaged over heads, summed over sequences), number of sequences, and `IndexRecord.cut`.

    numbers: layers that have an index.
    """
    layers, place = len(numbers), {number: i for i, number in enumerate(numbers)}
    if not records:
        return torch.zeros(layers + 5, dtype=torch.float64, device=device)
    heads, workers = records[0].counts.pairs.shape[1], records[0].workers
    # Integer sums are exact in any order.
    sums = torch.zeros(layers + 2, dtype=torch.int64, device=device)
    for group in grouped(records, lambda record: len(record.counts.pairs)).values():
        counts = [record.counts for record in group]
        lines = [t for c in counts for t in (c.pairs, c.slashes, c.columns)]
        places = torch.tensor([p for r in group for p in (place[r.layer], layers, layers + 1)])
        sums.index_add_(0, to_device(places, device), torch.stack(lines).sum((1, 2)))
    means = sums.double() / heads
    means[:layers] *= workers
    sequences = sum(len(record.counts.pairs) for record in records) / layers
    cuts = [record.cut for record in records if record.cut is not None]
    cut = torch.stack(cuts).sum(0).double() if cuts else means.new_zeros(2)
    return torch.cat([torch.nn.functional.pad(means, (0, 1), value=sequences), cut])


def index_metrics(
    total: list[float], records: list[IndexRecord], seq: int, dense: Mapping[int, float]
) -> IndexMetrics:
    """Return the index metrics of a step from `local_index_sums`, summed over the workers.

    records: index records of this worker. dense: densities of the dense layers.
    """
    *pairs, slashes, columns, sequences, reached, cut = total
    sparse = (p / sequences / causal_pairs(seq) for p in pairs)
    layers = range(len(pairs) + len(dense))
    return IndexMetrics(
        density_by_layer=tuple(dense[i] if i in dense else next(sparse) for i in layers),
        slashes=slashes / sequences / len(pairs),
        columns=columns / sequences / len(pairs),
        seconds=sum(record.seconds for record in records),
        cut=cut / reached if reached else None,
    )


class Step:
    """Runs optimizer steps over `train.global_batch` sequences."""

    def __init__(self, worker: Worker, state: TrainState, timer: ComputeTimer) -> None:
        self._worker, self._state, self._timer = worker, state, timer
        self.recorder: Recorder | None = None  # records what this worker computes

    def __call__(
        self,
        batches: Sequence[Batch],
        attends: Sequence[Attend],
        valid: int,
        pairs: int,
        requests: tuple[bool, bool],
        data_seconds: float,
    ) -> StepResult:
        """Run one step.

        Args:
            attends: the attention of each micro-batch.
            valid, pairs: results of `totals`.
            requests: whether this worker received a request to stop, and one to save.
            data_seconds: how long this worker waited for the data.

        Raises NonFiniteError, before the weights change, if a loss or gradient is not finite and
        `train.skip_nonfinite` steps before were not either; LossSpikeError for a rollback.
        """
        state, config = self._state, self._worker.config
        lr = state.set_rate()
        loss = self.forward_backward(batches, attends, valid)
        with profiler_labels.label(profiler_labels.OPTIMIZER):
            finite_check = torch.stack([loss.double(), state.states.squared_norm().double()])
        records = index_records(batch.attend for batch in batches)
        reports = self._exchange_reports(finite_check, requests, data_seconds, records)
        grad_norm = math.sqrt(sum(report.squared_norm for report in reports))
        mean_loss = sum(report.loss for report in reports) if valid else None
        # All workers decide from the same numbers, so all skip the update or none does.
        skipped, warning = self._skips_update(reports, mean_loss, grad_norm)
        routing = routing_metrics([b.routing for b in batches if b.routing is not None], config)
        if not skipped:
            with profiler_labels.label(profiler_labels.OPTIMIZER):
                state.update(grad_norm)
            if routing is not None:
                for decoder in {state.decoder, state.states.masters}:
                    routing.change_biases(decoder, config.train.balance_bias)
        state.states.drop_gradients()
        progress_record.note("done")
        tokens = config.train.global_batch * config.seq
        state.step += 1
        state.tokens += tokens
        index, all_pairs = None, causal_pairs(config.seq) * config.train.global_batch
        if records is not None:
            sums = [sum(column) for column in zip(*(r.index_sums for r in reports), strict=True)]
            numbers = config.sparsity.dense_of(config.model.num_layers)
            dense = dict.fromkeys(numbers, pairs / all_pairs)
            index = index_metrics(sums, records, config.seq, dense)
        return StepResult(
            loss=mean_loss if mean_loss is not None and math.isfinite(mean_loss) else None,
            grad_norm=grad_norm,
            lr=lr,
            tokens=tokens,
            pairs=index.density * all_pairs if index else float(pairs),
            stop=any(report.stop for report in reports),
            targets=valid,
            allowed=float(pairs),
            save=any(report.save for report in reports),
            reports=tuple(reports),
            index=index,
            routing=routing,
            skipped=skipped,
            warnings=(warning,) if warning else (),
        )

    def totals(self, batches: Sequence[Batch]) -> tuple[int, int]:
        """Return the counts of valid labels and of allowed pairs per head, in the whole step."""
        valid, pairs = sum(b.valid for b in batches), sum(b.pairs for b in batches)
        dims = self._worker.environment.dims
        if dims.dp == 1:
            return valid, pairs
        totals = torch.tensor([valid, pairs], dtype=torch.int64)
        dist.all_reduce(totals, group=self._worker.host_group)
        # All workers that share a sequence count the same whole sequences.
        sharing = dims.workers // dims.dp
        return int(totals[0]) // sharing, int(totals[1]) // sharing

    def forward_backward(
        self, batches: Sequence[Batch], attends: Sequence[Attend], valid: int
    ) -> torch.Tensor:
        """Accumulate the gradients of a step. Return this worker's part of the mean loss.

        valid: number of labels in the whole step that count toward the loss.
        """
        worker, decoder = self._worker, self._state.decoder
        for batch in batches:
            if batch.routing is not None:
                batch.routing.recorder = self.recorder
        if worker.stage is None:
            loss = self._run_whole_model(batches, attends, valid)
        else:
            loss = worker.stage.forward_backward(decoder, batches, attends, valid, self.recorder)
        if worker.tensor is not None:
            layer_groups.sum_copied_gradients(decoder.parameters(), worker.tensor)
        return loss

    def _run_whole_model(
        self, batches: Sequence[Batch], attends: Sequence[Attend], valid: int
    ) -> torch.Tensor:
        state, shard = self._state, self._worker.config.train.shard
        loss = torch.zeros((), device=self._worker.device)
        with nullcontext() if self.recorder is None else self.recorder.iteration():
            for number, (batch, attend) in enumerate(zip(batches, attends, strict=True)):
                if self.recorder is not None:
                    self.recorder.micro_batch(number)
                last = number == len(batches) - 1
                begin_micro_batch(state.decoder, shard, last=last)
                state.states.last_micro_batch = last
                # Divide the local sum by the global number of valid labels. The sum over workers is
                # then the mean that one worker would compute.
                inputs = batch.tokens, batch.positions, batch.labels
                part = state.decoder(*inputs, attend, 1.0 / max(1, valid), batch.routing)
                part.backward()
                loss += part.detach()
                if batch.attend.index is not None:
                    batch.attend.index.count()
        return loss

    def _exchange_reports(
        self,
        finite_check: torch.Tensor,
        requests: tuple[bool, bool],
        data_seconds: float,
        records: list[IndexRecord] | None,
    ) -> list[StepReport]:
        """Return the report of every rank. finite_check: float64 [2], loss and squared norm."""
        config, device = self._worker.config, self._worker.device
        numbers = [*map(float, requests), self._timer.seconds, data_seconds]
        timing = torch.tensor(numbers, dtype=torch.float64, device=device)
        local = torch.cat([finite_check, timing])
        if records is not None:
            sums = local_index_sums(records, config.pattern_layers, device)
            local = torch.cat([local, sums])
        note = "waits for the loss and gradient norm of all ranks"
        progress_record.note(note, progress_record.SEVERAL)
        rows = all_gather(local, self._worker.environment.dims.workers).tolist()
        progress_record.note("optimizer")
        return [StepReport.of(row) for row in rows]

    def _skips_update(
        self, reports: Sequence[StepReport], loss: float | None, grad_norm: float
    ) -> tuple[str, str]:
        """Return why to skip the update, "" to run it, and a warning, "" for none."""
        state, config = self._state, self._worker.config
        step, train = state.step + 1, config.train
        try:
            check_finite(reports, step)
        except NonFiniteError as error:
            state.nonfinite += 1
            if state.nonfinite > train.skip_nonfinite:
                raise
            count = f"{state.nonfinite} of at most {train.skip_nonfinite} in a row"
            return NOT_FINITE, f"{error} ({count})"
        state.nonfinite = 0
        if loss is None:  # AdamW would still change the weights, by decay and by its moments
            return NO_LABEL, f"step {step}: no token has a label; the update is skipped"
        if state.can_roll_back and (above := state.spikes.far_above(loss, train.rollback.sigma)):
            raise LossSpikeError(f"step {step}: {above} of the last steps")
        spike, line = state.spikes.check(step, loss, grad_norm)
        skipped = SPIKE if spike and config.optim.skip_spikes else ""
        return skipped, line + "; its update is skipped" * bool(skipped) if line else ""
