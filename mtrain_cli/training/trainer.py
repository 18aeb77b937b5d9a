"""One worker of a training, and one optimizer step."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import register_fsdp_forward_method

from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.data.dataset import Dataset, Sample
from mtrain_cli.data.loader import Loader
from mtrain_cli.data.open_dataset import open_dataset
from mtrain_cli.launch import progress_record
from mtrain_cli.launch.environment import Environment, describe_host_memory, describe_place
from mtrain_cli.launch.failures import PeerLostError, RunError
from mtrain_cli.model.decoder import Attend, Decoder
from mtrain_cli.model.huggingface import load_into
from mtrain_cli.model.init import initialize
from mtrain_cli.model.rope import rope_factor
from mtrain_cli.parallel import profiler_labels
from mtrain_cli.parallel.activation_offload import ActivationOffload
from mtrain_cli.parallel.collectives import all_gather, share
from mtrain_cli.parallel.context_attention import IndexRecord
from mtrain_cli.parallel.exchange_registry import make_exchange
from mtrain_cli.parallel.fsdp import begin_micro_batch, shard_parameters
from mtrain_cli.parallel.mesh import make_context_group, make_parameter_mesh
from mtrain_cli.parallel.recording import Recorder
from mtrain_cli.records.metrics import StepMetrics
from mtrain_cli.training import garbage_collection
from mtrain_cli.training.batch import Batch, BatchMaker, HostBatch
from mtrain_cli.training.callback import Callback
from mtrain_cli.training.checkpointer import Checkpointer
from mtrain_cli.training.compute_time import ComputeTimer
from mtrain_cli.training.flops import attention_kept, causal_pairs, peak_flops, training_flops
from mtrain_cli.training.index_metrics import (
    IndexMetrics,
    index_metrics,
    index_records,
    local_index_sums,
)
from mtrain_cli.training.optimizer import (
    LearningRateSchedule,
    local_gradients,
    make_optimizer,
    set_hyperparameters,
    squared_norm,
)
from mtrain_cli.training.optimizer_offload import OffloadedOptimizer
from mtrain_cli.training.resolution import ResolvedRun, resolve_run
from mtrain_cli.training.run_plan import RunPlan, plan_resolved, require_fit, with_auto_memory
from mtrain_cli.training.watch import SpikeWatch


class NonFiniteError(RunError):
    """The loss or a gradient is not finite. Nothing of that step is kept."""


@dataclass(frozen=True)
class StepReport:
    """What every rank tells all others at the end of a step, in one all-gather of float64.

    loss: this rank's part of the mean loss, in nats.
    squared_norm: of its gradient shards, before clipping.
    stop: 1 if it was asked to stop.
    compute_seconds: see `compute_time`; 0 if not measured.
    data_seconds: time that it waited for data.
    index_sums: of a sparse step, see `index_metrics.local_index_sums`.
    """

    loss: float
    squared_norm: float
    stop: float
    compute_seconds: float
    data_seconds: float
    index_sums: tuple[float, ...] = ()

    @staticmethod
    def of(row: Sequence[float]) -> StepReport:
        """Read the row of one rank, in the order of the fields."""
        loss, squared_norm, stop, compute_seconds, data_seconds, *index_sums = row
        return StepReport(
            loss, squared_norm, stop, compute_seconds, data_seconds, tuple(index_sums)
        )


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, equal on all workers.

    loss: mean over valid tokens, in nats; None without any.
    pairs: computed query-key pairs, mean over heads and layers, sum over all sequences.
    stop: whether any worker requested a stop.
    reports: of every rank.
    index: None for a dense step.
    skipped: whether the update was skipped.
    warnings: lines for the user.
    """

    loss: float | None
    grad_norm: float
    lr: float
    tokens: int
    pairs: float
    stop: bool
    reports: tuple[StepReport, ...] = ()
    index: IndexMetrics | None = None
    skipped: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def data_seconds(self) -> float:
        """Time that the longest-waiting worker waited for data."""
        return max((report.data_seconds for report in self.reports), default=0.0)


def _check_host_memory(config: Config, environment: Environment, choices: ResolvedRun) -> None:
    """Refuse CPU workers that need more memory than there is, before they stall the machine.

    A GPU that is too small raises its own error at once.
    """
    if environment.device != "cpu" or config.train.memory == "auto":
        return
    plan = plan_resolved(config, environment, choices)
    if not plan.fits:
        raise ConfigError(
            f"seq={config.seq}: {environment.local_workers} CPU workers would need about "
            f"{plan.host_bytes / 2**30:.0f} GiB for model={config.model.name}, but this machine "
            f"{describe_host_memory()}. Give a shorter seq, a smaller model, or GPUs "
            "(mtrain train --dry-run shows where memory goes)."
        )


def _checked_plan(config: Config, environment: Environment, choices: ResolvedRun) -> RunPlan:
    """Plan a run, including `train.memory=auto`, equally on all ranks; all of them call this.

    Raises:
        ConfigError: it cannot fit the GPUs; one line that says what would.
    """
    plan = plan_resolved(config, environment, choices)
    if environment.device == "cuda" and environment.workers > 1:
        # GPUs of one job may differ by some MiB, and so would decisions: use the smallest.
        everyone: list[list[int]] = share((plan.gpu_bytes, plan.host_share))
        plan = replace(
            plan,
            capacity=min(gpu for gpu, _ in everyone),
            host_share=min(host for _, host in everyone),
        )
    if config.train.memory == "auto":
        plan = with_auto_memory(plan)
    require_fit(plan)
    return plan


class Trainer:
    """One worker of a training: its shards of model and optimizer, its data, its current step.

    callbacks: hooks of this training, called in this order.
    """

    def __init__(self, config: Config, environment: Environment) -> None:
        self.config = config
        self.environment = environment
        self.device = (
            torch.device("cuda", torch.cuda.current_device())
            if environment.device == "cuda"
            else torch.device("cpu")
        )
        torch.manual_seed(config.seed)
        if config.train.deterministic:
            # cuBLAS is repeatable only with a workspace per stream, requested by this variable
            # before its first matrix product.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        self.choices: ResolvedRun = resolve_run(config, environment)
        _check_host_memory(config, environment, self.choices)
        self.plan = _checked_plan(config, environment, self.choices)
        self.config = config = self.plan.config
        # A new group does not inherit the default group's timeout.
        timeout = timedelta(seconds=config.topology.timeout_s)
        self.host_group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
        choice = self.choices.exchange
        group = make_context_group(
            environment.rank,
            environment.workers,
            environment.cp,
            self.device,
            timeout,
            per_node=choice.per_node,
            heads=choice.heads,
            channels=choice.channels,
        )
        exchange = make_exchange(
            choice.name,
            self.choices.layout,
            group,
            chunks=choice.chunks,
            prefetch=choice.prefetch,
            circulates=choice.circulates,
            shared_columns=choice.shared_columns,
        )
        self.exchange = exchange
        mask = config.data.document_mask
        offloaded = config.train.offload_activations
        self.offload = (
            ActivationOffload(config.model.num_layers, self.device, offloaded)
            if offloaded
            else None
        )
        make = partial(
            BatchMaker,
            exchange,
            document_mask=mask,
            keep=attention_kept(config.train),
            offload=self.offload,
        )
        self.batch_maker = make(self.choices.kernel, self.device, pattern=self.choices.pattern)
        dense = self.choices.dense_kernel
        self.dense_batch_maker = make(dense[0], self.device) if dense is not None else None
        self.dataset: Dataset = open_dataset(config)
        self.places = self._check_same_data()
        self.sampler = self.dataset.sampler(config.seed)
        self.loader = Loader(
            self.dataset,
            self.sampler,
            dp_rank=environment.rank // environment.cp,
            dp=environment.dp,
            global_batch=config.train.global_batch,
            micro_batch=config.train.micro_batch,
            make_batch=self._on_host,
        )
        self.held_out: list[Sample] = self.dataset.held_out
        self.host_states: OffloadedOptimizer | None = None
        self.decoder = self._make_decoder()
        self.optimizer = (
            self.host_states.optimizer
            if self.host_states
            else make_optimizer(self.decoder, config.optim)
        )
        self._schedule = LearningRateSchedule.of(config)
        self.step = 0
        self.tokens = 0
        self.callbacks: list[Callback] = []
        self.recorder: Recorder | None = None
        self._batches: Any = None
        self.lacks_data = False  # a worker could not read this step's data; all know, and end
        self._compute_timer = ComputeTimer(list(self.decoder.layers), self.device)
        self._spikes = SpikeWatch(config.run.spike_sigma)
        self._frozen_after: set[bool] = set()  # step kinds already seen: with an index, without
        self._peak_flops = (
            peak_flops(torch.cuda.get_device_name(self.device))
            if self.device.type == "cuda"
            else None
        )

    def _check_same_data(self) -> list[str]:
        """Return host and device of each rank, after checking that all read the same corpus.

        Machines with different files, or for data=stdlib another Python, would silently train on
        different tokens.
        """
        answers = share((self.dataset.fingerprint, describe_place(self.device)), self.host_group)
        expected = answers[0][0]
        other = next((rank for rank, (data, _) in enumerate(answers) if data != expected), None)
        if other is not None:
            raise ConfigError(
                f"data.kind={self.config.data.kind}: rank {other} reads a different corpus than "
                "rank 0. Give all machines the same data."
            )
        return [place for _, place in answers]

    def _make_decoder(self) -> Decoder:
        """Build on the meta device, shard, then fill, so no worker ever holds the whole model."""
        config, dtype = self.config, self.choices.dtype
        decoder = self._empty_decoder()
        if config.optim.offload:
            decoder.to(dtype)
        mesh = make_parameter_mesh(self.environment.workers, self.environment.device)
        shard_parameters(
            decoder,
            mesh,
            dtype,
            shard=config.train.shard,
            reduce_dtype=getattr(torch, config.train.reduce_dtype),
        )
        # Evaluation enters here, and needs FSDP to gather the root's parameters, too.
        register_fsdp_forward_method(decoder, "token_losses")
        decoder.to_empty(device=self.device)
        filled = decoder
        if config.optim.offload:
            self.host_states = OffloadedOptimizer(decoder, self._empty_decoder(), config.optim)
            filled = self.host_states.masters
        if config.train.init_from:
            load_into(filled, config.train.init_from)
        else:
            initialize(filled, config.seed, self.device)
        if self.host_states:
            self.host_states.send()
        return decoder

    def _empty_decoder(self) -> Decoder:
        config = self.config
        with torch.device("meta"):
            return Decoder(
                config.model,
                rope_factor=rope_factor(config.model.rope, config.seq),
                loss_chunk_bytes=config.train.loss_chunk_mib << 20,
                activation_checkpoint=config.train.activation_checkpoint,
                compile=self.choices.compile,
                tile_bytes=config.train.tile_mib << 20,
                offload=self.offload,
                loss_gradients=config.train.loss_gradients,
                z_loss=config.train.z_loss,
                keep_mlp=config.train.keep_mlp,
            )

    def train_step(self, stop: bool) -> StepResult:
        """Run one optimizer step over `train.global_batch` sequences.

        Raises:
            NonFiniteError: the loss or a gradient of any worker is not finite; nothing changed.
            ConfigError, RunError: this worker cannot read its data; raised before the step.
            PeerLostError: another worker cannot read its data; raised before the step.
        """
        progress_record.begin_step(self.step + 1)
        compute_seconds = self._compute_timer.start_step()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        lr = self._schedule.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batches, data_seconds = self._next_batches()
        valid, pairs = self.totals(batches)
        attends = [self._attention_of(batch) for batch in batches]
        loss = self.forward_backward(
            batches, [self._compute_timer.wrap_attention(attends[0]), *attends[1:]], valid
        )
        with profiler_labels.label(profiler_labels.OPTIMIZER):
            finite_check = torch.stack([loss.double(), self._squared_norm().double()])
        records = index_records(batch.attend for batch in batches)
        reports = self._exchange_reports(finite_check, stop, compute_seconds, data_seconds, records)
        self._check_finite(reports)
        grad_norm = math.sqrt(sum(report.squared_norm for report in reports))
        mean_loss = sum(report.loss for report in reports) if valid else None
        # All workers decide from the same numbers, so all skip the update or none does.
        skipped, warning = self._skips_update(mean_loss, grad_norm)
        if not skipped:
            self._update(grad_norm)
        self.drop_gradients()
        progress_record.note("done")
        self.step += 1
        tokens = self.config.train.global_batch * self.config.seq
        self.tokens += tokens
        self._freeze_garbage(sparse=bool(records))
        index = self._index_metrics(reports, records)
        computed = (
            index.density * causal_pairs(self.config.seq) * self.config.train.global_batch
            if index
            else float(pairs)
        )
        return StepResult(
            loss=mean_loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=tokens,
            pairs=computed,
            stop=any(report.stop for report in reports),
            reports=tuple(reports),
            index=index,
            skipped=skipped,
            warnings=(warning,) if warning else (),
        )

    def _next_batches(self) -> tuple[list[Batch], float]:
        """Return the micro-batches of this step, and the seconds that this worker waited."""
        if self._batches is None:
            self._batches = iter(self.loader)
        on_host, seconds = self._next_on_host()
        make = self.next_batch_maker()
        for callback in self.callbacks:
            callback.on_samples([host.samples for host in on_host])
        started = time.perf_counter()
        batches = [make.to_device(host) for host in on_host]
        return batches, seconds + time.perf_counter() - started

    def _attention_of(self, batch: Batch) -> Attend:
        attend: Attend = batch.attend
        for callback in self.callbacks:
            attend = callback.wrap_attention(batch, attend)
        return attend

    def _exchange_reports(
        self,
        finite_check: torch.Tensor,
        stop: bool,
        compute_seconds: float,
        data_seconds: float,
        records: list[IndexRecord],
    ) -> list[StepReport]:
        """Return the report of every rank.

        finite_check: float64 [2], this rank's loss and squared gradient norm, on the device.
        """
        timing = torch.tensor(
            [float(stop), compute_seconds, data_seconds], dtype=torch.float64, device=self.device
        )
        local = torch.cat([finite_check, timing])
        if records:
            sums = local_index_sums(records, self.config.model.num_layers, self.device)
            local = torch.cat([local, sums])
        progress_record.note(
            "waits for the loss and gradient norm of all ranks", progress_record.SEVERAL
        )
        rows = all_gather(local, self.environment.workers).tolist()
        progress_record.note("optimizer")
        return [StepReport.of(row) for row in rows]

    def _update(self, grad_norm: float) -> None:
        """Clip the gradients and take the optimizer step."""
        clip = self.config.optim.clip_norm
        scale = clip / grad_norm if clip and grad_norm > clip else 1.0
        with profiler_labels.label(profiler_labels.OPTIMIZER):
            if self.host_states:
                self.host_states.step(scale)
                return
            if scale != 1.0:
                torch._foreach_mul_(self.gradients(), scale)
            self.optimizer.step()

    def _index_metrics(
        self, reports: Sequence[StepReport], records: list[IndexRecord]
    ) -> IndexMetrics | None:
        """Combine the index sums of all ranks; None for a dense step."""
        if not records:
            return None
        sums = [sum(column) for column in zip(*(r.index_sums for r in reports), strict=True)]
        return index_metrics(sums, records, self.config.seq)

    def _freeze_garbage(self, *, sparse: bool) -> None:
        """Freeze what the first dense or sparse step created, above all compiled code: it stays."""
        if sparse not in self._frozen_after:
            self._frozen_after.add(sparse)
            garbage_collection.freeze_garbage()

    def _skips_update(self, loss: float | None, grad_norm: float) -> tuple[bool, str]:
        """Return whether to skip the update, and a warning.

        In a step without labels, AdamW would decay the weights and move them by its moments.
        """
        if loss is None:
            line = f"step {self.step + 1}: no token has a label; the update is skipped"
            return True, line
        spike, line = self._spikes.check(self.step + 1, loss, grad_norm)
        skipped = spike and self.config.optim.skip_spikes
        return skipped, line + "; its update is skipped" * skipped if line else ""

    def _next_on_host(self) -> tuple[Sequence[HostBatch], float]:
        """Return the data of this step, and the seconds that this worker waited for them."""
        wait_started = time.perf_counter()
        on_host: Sequence[HostBatch] = ()
        error = None
        try:
            on_host = next(self._batches)
        except Exception as failure:  # raised below, once all workers know
            error = failure
        waited = time.perf_counter() - wait_started
        first_without = self._first_rank_with(error is not None)
        if first_without is not None:
            self.lacks_data = True
            raise error or PeerLostError(
                f"rank {first_without} has no data for step {self.step + 1}"
            )
        return on_host, waited

    def _first_rank_with(self, flag: bool) -> int | None:
        """Return the first rank whose `flag` is true, or None."""
        ranks = self.environment.workers
        first = torch.tensor(self.environment.rank if flag else ranks)
        if ranks > 1:
            progress_record.note("waits for the data of all ranks", progress_record.SEVERAL)
            dist.all_reduce(first, dist.ReduceOp.MIN, group=self.host_group)
            progress_record.note("")
        return int(first) if int(first) < ranks else None

    def _on_host(self, samples: list[Sample]) -> HostBatch:
        """Prepare a micro-batch on the loader's thread.

        Drops whole sequences, which may take gigabytes, unless a callback needs them.
        """
        host = self.batch_maker.on_host(samples)
        keep = any(callback.needs_samples for callback in self.callbacks)
        return host if keep else replace(host, samples=())

    def next_batch_maker(self) -> BatchMaker:
        """Return the batch maker of the next step; the first steps of a sparse run may be dense."""
        if self.dense_batch_maker is not None and self.step < (
            self.config.sparsity.dense_steps or 0
        ):
            return self.dense_batch_maker
        return self.batch_maker

    def close(self) -> None:
        """Stop the loader's background thread."""
        self.loader.close()
        garbage_collection.unfreeze_garbage()

    def forward_backward(
        self, batches: Sequence[Batch], attends: Sequence[Attend], valid: int
    ) -> torch.Tensor:
        """Accumulate the gradients of a step and return this worker's part of the loss.

        Args:
            attends: the attention of each batch.
            valid: labels that count, summed over all workers.
        """
        loss = torch.zeros((), device=self.device)
        with nullcontext() if self.recorder is None else self.recorder.iteration():
            for number, (batch, attend) in enumerate(zip(batches, attends, strict=True)):
                if self.recorder is not None:
                    self.recorder.micro_batch(number)
                last = number == len(batches) - 1
                begin_micro_batch(self.decoder, self.config.train.shard, last=last)
                if self.host_states:
                    self.host_states.last_micro_batch = last
                # Local sums over the step's global number of valid tokens: summed over workers,
                # this equals one worker's mean.
                part = self.decoder(
                    batch.tokens, batch.positions, batch.labels, attend, 1.0 / max(1, valid)
                )
                part.backward()
                loss += part.detach()
                if batch.attend.index is not None:
                    batch.attend.index.count()
        return loss

    def gradients(self) -> list[torch.Tensor]:
        """Return this worker's shards of the reduced gradients, on the device."""
        return (
            self.host_states.gradients()
            if self.host_states
            else local_gradients(self.decoder.parameters())
        )

    def _squared_norm(self) -> torch.Tensor:
        return (
            self.host_states.squared_norm()
            if self.host_states
            else squared_norm(self.gradients(), self.device)
        )

    def drop_gradients(self) -> None:
        if self.host_states:
            self.host_states.drop_gradients()
        else:
            self.optimizer.zero_grad(set_to_none=True)

    def totals(self, batches: Sequence[Batch]) -> tuple[int, int]:
        """Return labels that count and allowed query-key pairs per head, over all workers."""
        valid, pairs = self._summed([sum(b.valid for b in batches), sum(b.pairs for b in batches)])
        return valid, pairs

    def record(self, recorder: Recorder | None) -> None:
        """Record later steps with `recorder`; stop recording with None."""
        self.recorder = recorder
        self.exchange.set_recorder(recorder)

    def _summed(self, numbers: list[int]) -> list[int]:
        """Sum over data-parallel replicas; a context group counts the same whole sequences."""
        if self.environment.dp == 1:
            return numbers
        totals = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(totals, group=self.host_group)
        return [int(n) // self.environment.cp for n in totals]

    def _check_finite(self, reports: Sequence[StepReport]) -> None:
        """Raise NonFiniteError, which names the ranks, unless every loss and gradient is finite."""
        for name, values in (
            ("loss", [report.loss for report in reports]),
            ("gradient", [report.squared_norm for report in reports]),
        ):
            ranks = [rank for rank, value in enumerate(values) if not math.isfinite(value)]
            if ranks:
                raise NonFiniteError(
                    f"step {self.step + 1}: the {name} is not finite on "
                    f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}; "
                    "the step was not applied"
                )

    def metrics(self, result: StepResult, seconds: float) -> StepMetrics:
        """Build the line of metrics.jsonl for a finished step."""
        config, workers = self.config, self.environment.workers
        pairs = result.pairs / config.train.global_batch
        flops = training_flops(
            config, self.choices.layout, dtype_bytes=self.choices.dtype.itemsize, pairs=pairs
        )
        rate = result.tokens / seconds / workers
        peak = self._peak_flops
        return StepMetrics(
            step=self.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens=self.tokens,
            tokens_per_second_per_gpu=rate,
            mfu_model=rate * flops.model / peak if peak and result.index is None else None,
            mfu_executed=rate * flops.executed / peak if peak else None,
            density=result.pairs / config.train.global_batch / causal_pairs(config.seq),
            peak_memory_gib=torch.cuda.max_memory_allocated(self.device) / 2**30
            if self.device.type == "cuda"
            else None,
            seconds=seconds,
            epoch=self.sampler.consumed / len(self.dataset),
            consumed=self.sampler.consumed,
            data_seconds=result.data_seconds,
            slashes=result.index.slashes if result.index else None,
            columns=result.index.columns if result.index else None,
            index_seconds=result.index.seconds if result.index else None,
            density_by_layer=list(result.index.density_by_layer) if result.index else None,
            skipped=result.skipped if config.optim.skip_spikes or result.skipped else None,
        )

    def _master_decoder(self) -> Decoder:
        """Return the decoder with the optimizer's parameters: this one, or the host's masters."""
        return self.host_states.masters if self.host_states else self.decoder

    def _send_weights(self) -> None:
        if self.host_states:
            self.host_states.send()

    def state(self) -> dict[str, Any]:
        """Return everything that a checkpoint holds; parameters and optimizer states as shards."""
        fresh = not self.optimizer.state
        model, optimizer = get_state_dict(self._master_decoder(), self.optimizer)
        if fresh:
            # PyTorch creates the states by a step without gradients, which would count in the
            # bias correction of the first real step.
            for state in self.optimizer.state.values():
                state["step"].zero_()
        trainer = {
            "step": self.step,
            "tokens": self.tokens,
            "spikes": self._spikes.state(),
            **self.loader.state(),
        }
        return {"model": model, "optimizer": optimizer, "trainer": trainer}

    def resume(self, checkpointer: Checkpointer) -> None:
        """Resume from the newest intact checkpoint, on any number of workers.

        Starts at step 0 if that checkpoint is an import, which holds only weights.
        """
        if checkpointer.holds_only_weights():
            weights = {"model": self.state()["model"]}
            checkpointer.load(weights)
            set_model_state_dict(self._master_decoder(), weights["model"])
            self._send_weights()
            return
        state = self.state()
        checkpointer.load(state)
        set_state_dict(
            self._master_decoder(),
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self._send_weights()
        # The optimizer's state restores hyperparameters, but the resume may configure others.
        set_hyperparameters(self.optimizer, self.config.optim)
        saved = state["trainer"]
        self.step, self.tokens = int(saved["step"]), int(saved["tokens"])
        self.loader.load_state(saved)
        if "spikes" in saved:  # older checkpoints have none
            self._spikes.load_state(saved["spikes"])
        self._batches = None
