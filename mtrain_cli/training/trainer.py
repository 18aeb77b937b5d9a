"""What one worker of a training holds, and one step of it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
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
from mtrain_cli.data.dataset import Dataset, Sample, open_dataset
from mtrain_cli.data.loader import Loader
from mtrain_cli.launch import progress_record
from mtrain_cli.launch.environment import Environment, describe_place, machine_has
from mtrain_cli.launch.failures import PeerLostError, RunError
from mtrain_cli.model.decoder import Attend, Decoder
from mtrain_cli.model.huggingface import load_into
from mtrain_cli.model.init import initialize
from mtrain_cli.model.rope import rope_factor
from mtrain_cli.parallel import profiler_labels
from mtrain_cli.parallel.activation_offload import ActivationOffload
from mtrain_cli.parallel.collectives import all_gather, share
from mtrain_cli.parallel.exchange_registry import make_exchange
from mtrain_cli.parallel.fsdp import begin_micro_batch, shard_parameters
from mtrain_cli.parallel.mesh import make_context_group, make_parameter_mesh
from mtrain_cli.parallel.recording import Recorder
from mtrain_cli.training import garbage_collection
from mtrain_cli.training.batch import Batch, BatchMaker, HostBatch, PackedSample
from mtrain_cli.training.checkpointer import Checkpointer
from mtrain_cli.training.compute_time import ComputeTimer
from mtrain_cli.training.flops import attention_kept, causal_pairs, peak_flops, training_flops
from mtrain_cli.training.index_metrics import IndexMetrics, index_metrics, index_records, summed
from mtrain_cli.training.metrics import StepMetrics
from mtrain_cli.training.optimizer import (
    LearningRateSchedule,
    local_gradients,
    make_optimizer,
    set_hyperparameters,
    squared_norm,
)
from mtrain_cli.training.optimizer_offload import OffloadedOptimizer
from mtrain_cli.training.resolution import ResolvedRun, resolve_run
from mtrain_cli.training.run_plan import RunPlan, decided, planned, require_fit
from mtrain_cli.training.watch import SpikeWatch, StragglerWatch


class NonFiniteError(RunError):
    """A step gave a loss or gradient that is not a number. Nothing of that step is kept."""


@dataclass(frozen=True)
class StepResult:
    """One optimizer step, the same on all workers. loss: mean over valid tokens; None without any. pairs: computed query-key pairs, the
    mean over heads and layers, over all sequences. index: None for a dense step. data_seconds: how long the worker that waited longest
    waited for data. skipped: whether the update was left out. warnings: lines, on the first worker.
    """

    loss: float | None
    grad_norm: float
    lr: float
    tokens: int
    pairs: float
    stop: bool
    index: IndexMetrics | None = None
    data_seconds: float = 0.0
    skipped: bool = False
    warnings: tuple[str, ...] = ()


def _check_host_memory(config: Config, environment: Environment, choices: ResolvedRun) -> None:
    """CPU workers that need more memory than there is make the whole machine crawl before they are killed: refused at the start.

    A GPU that is too small says so itself, at once.
    """
    if environment.device != "cpu" or config.train.memory == "auto":
        return
    found = planned(config, environment, choices)
    needed = found.host_bytes
    if not found.fits:
        raise ConfigError(
            f"seq={config.seq}: {environment.local_workers} CPU workers would need about {needed / 2**30:.0f} GiB "
            f"for model={config.model.name}, this machine {machine_has()}; give a shorter seq, a smaller model, "
            "or GPUs (mtrain train --dry-run shows where memory goes)"
        )


def _checked_plan(config: Config, environment: Environment, choices: ResolvedRun) -> RunPlan:
    """The plan of a run, with what ``train.memory=auto`` decides, the same on all ranks; called by all of them.

    Raises:
        ConfigError: it cannot fit the GPUs; one line with what would.
    """
    found = planned(config, environment, choices)
    if environment.device == "cuda" and environment.workers > 1:
        # GPUs of one job may differ by some MiB, and so would decisions; the smallest counts.
        everyone: list[list[int]] = share((found.gpu_bytes, found.host_share))
        found = replace(
            found,
            capacity=min(gpu for gpu, _ in everyone),
            host_share=min(host for _, host in everyone),
        )
    if config.train.memory == "auto":
        found = decided(found)
    require_fit(found)
    return found


class Trainer:
    """What one worker holds: its shard of the model and optimizer, its slice of the data, and the step it has reached.

    observe: gives the attention of a batch instead of the batch's own, for measurements. rehearse: called with the samples of a step, by
    micro-batch, before they are trained on; has to leave no gradients, and needs keeps_samples from before the first step.
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
            # cuBLAS is repeatable with a workspace of its own per stream only, and asks for it by this variable before its first product.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        self.choices: ResolvedRun = resolve_run(config, environment)
        _check_host_memory(config, environment, self.choices)
        self.plan = _checked_plan(config, environment, self.choices)
        self.config = config = self.plan.config
        # A new group does not take over the default group's.
        timeout = timedelta(seconds=config.topology.timeout_s)
        self.host_group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
        how = self.choices.exchange
        group = make_context_group(
            environment.rank, environment.workers, environment.cp, self.device, timeout,
            per_node=how.per_node, heads=how.heads, channels=how.channels,
        )  # fmt: skip
        exchange = make_exchange(
            how.name, self.choices.layout, group,
            chunks=how.chunks, prefetch=how.prefetch, circulates=how.circulates, shared_columns=how.shared_columns,
        )  # fmt: skip
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
            make=self._on_host,
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
        self.observe: Callable[[Batch], Attend] | None = None
        self.rehearse: Callable[[Sequence[Sequence[PackedSample]]], None] | None = None
        self.keeps_samples = False
        self.recorder: Recorder | None = None
        self._batches: Any = None
        self.lacks_data = False  # a worker could not read the step at hand; all know, and end
        self._own_time = ComputeTimer(list(self.decoder.layers), self.device)
        self._spikes = SpikeWatch(config.run.spike_sigma)
        self._seen: set[bool] = set()  # whether steps under an index, and without one, have been
        share = config.run.straggler
        share = (0.1 if environment.device == "cuda" else 0.5) if isinstance(share, str) else share
        self._slow_devices = StragglerWatch(share, self.places, "the same part of a layer")
        self._slow_loaders = StragglerWatch(share, self.places, "the data of a step")
        self._step_began = 0.0
        self._peak_flops = (
            peak_flops(torch.cuda.get_device_name(self.device))
            if self.device.type == "cuda"
            else None
        )

    def _check_same_data(self) -> list[str]:
        """Host and device of each rank. Machines with other files, or for data=stdlib another Python, would train on different tokens
        without anyone noticing.
        """
        told = share((self.dataset.fingerprint, describe_place(self.device)), self.host_group)
        other = next((rank for rank, (found, _) in enumerate(told) if found != told[0][0]), None)
        if other is not None:
            raise ConfigError(
                f"data.kind={self.config.data.kind}: rank {other} reads another corpus than rank 0; give all machines the same data"
            )
        return [place for _, place in told]

    def _make_decoder(self) -> Decoder:
        """Built on the meta device, sharded, then filled: no worker ever holds the whole model."""
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
        register_fsdp_forward_method(
            decoder, "token_losses"
        )  # evaluation enters here and needs the root's parameters gathered too
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
        """One optimizer step over config.train.global_batch sequences.

        Raises NonFiniteError, before anything is changed, if the loss or a gradient of any worker is not finite. Where a worker cannot read
        its data that raises the reason (ConfigError, RunError), the others PeerLostError, all before the step.
        """
        progress_record.begin(self.step + 1)
        began, own_seconds = time.perf_counter(), self._own_time.begin()
        last_seconds, self._step_began = began - self._step_began, began
        if self._batches is None:
            self._batches = iter(self.loader)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        lr = self._schedule.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        on_host, waited = self._next_on_host()
        make = self.next_batch_maker()
        if self.rehearse is not None:
            self.rehearse([host.samples for host in on_host])
        asked = time.perf_counter()
        batches = [make.to_device(host) for host in on_host]
        waited += time.perf_counter() - asked
        valid, pairs = self.totals(batches)
        attends: list[Attend] = [
            batch.attend if self.observe is None else self.observe(batch) for batch in batches
        ]
        loss = self.forward_backward(
            batches, [self._own_time.around(attends[0]), *attends[1:]], valid
        )
        with profiler_labels.label(profiler_labels.OPTIMIZER):
            found = torch.stack([loss.double(), self._squared_norm().double()])
        told = torch.tensor(
            [float(stop), own_seconds, waited], dtype=torch.float64, device=self.device
        )
        mine = torch.cat([found, told])
        records = index_records(batch.attend for batch in batches)
        if records:
            mine = torch.cat([mine, summed(records, self.config.model.num_layers, self.device)])
        progress_record.note(
            "waits for loss and gradient norm of all ranks", progress_record.SEVERAL
        )
        rows = all_gather(mine, self.environment.workers).tolist()
        progress_record.note("optimizer")
        self._check_finite(rows)
        grad_norm = math.sqrt(sum(row[1] for row in rows))
        mean_loss = sum(row[0] for row in rows) if valid else None
        # Of the same numbers on all workers, which therefore all leave the update out, or none.
        skipped, warning = self._leaves_out(mean_loss, grad_norm)
        if not skipped:
            clip = self.config.optim.clip_norm
            scale = clip / grad_norm if clip and grad_norm > clip else 1.0
            with profiler_labels.label(profiler_labels.OPTIMIZER):
                if self.host_states:
                    self.host_states.step(scale)
                else:
                    if scale != 1.0:
                        torch._foreach_mul_(self.gradients(), scale)
                    self.optimizer.step()
        self.drop_gradients()
        progress_record.note("done")
        self.step += 1
        tokens = self.config.train.global_batch * self.config.seq
        self.tokens += tokens
        index = None
        if records:
            index = index_metrics(
                [sum(column) for column in zip(*(row[5:] for row in rows), strict=True)],
                records,
                self.config.seq,
            )
        computed = (
            index.density * causal_pairs(self.config.seq) * self.config.train.global_batch
            if index
            else float(pairs)
        )
        waits = [row[4] for row in rows]
        warnings = [warning] if warning else []
        if self.environment.rank == 0:
            warnings += self._slow_devices.see([row[3] for row in rows])
            warnings += self._slow_loaders.see(waits, last_seconds)
        stopping = any(row[2] for row in rows)
        if bool(records) not in self._seen:
            # The first dense step, or the first under an index: what both leave behind, compiled code above all, stays.
            self._seen.add(bool(records))
            garbage_collection.freeze_garbage()
        return StepResult(
            mean_loss,
            grad_norm,
            lr,
            tokens,
            computed,
            stopping,
            index,
            max(waits),
            skipped,
            tuple(warnings),
        )

    def _leaves_out(self, loss: float | None, grad_norm: float) -> tuple[bool, str]:
        """Whether the step at hand is not applied, and a line on it.

        AdamW would decay weights, and move them by its moments, under the zero gradients of a step without labels.
        """
        if loss is None:
            return (
                True,
                f"step {self.step + 1}: no token has a label, so there is no loss and the weights stay as they are",
            )
        spike, line = self._spikes.see(self.step + 1, loss, grad_norm)
        skipped = spike and self.config.optim.skip_spikes
        return skipped, line + "; its update is left out" * skipped if line else ""

    def _next_on_host(self) -> tuple[Sequence[HostBatch], float]:
        """The data of the step at hand, and for how many seconds this worker waited for them."""
        asked = time.perf_counter()
        on_host: Sequence[HostBatch] = ()
        error = None
        try:
            on_host = next(self._batches)
        except Exception as found:  # raised below, when all know of it
            error = found
        waited = time.perf_counter() - asked
        first_without = self._first_rank_with(error is not None)
        if first_without is not None:
            self.lacks_data = True
            raise error or PeerLostError(
                f"rank {first_without} has no data for step {self.step + 1}"
            )
        return on_host, waited

    def _first_rank_with(self, mine: bool) -> int | None:
        """The first rank that says so; None: none does."""
        ranks = self.environment.workers
        told = torch.tensor(self.environment.rank if mine else ranks)
        if ranks > 1:
            progress_record.note("waits for the data of all ranks", progress_record.SEVERAL)
            dist.all_reduce(told, dist.ReduceOp.MIN, group=self.host_group)
            progress_record.note("")
        return int(told) if int(told) < ranks else None

    def _on_host(self, samples: list[Sample]) -> HostBatch:
        """Called in the loader's thread. Whole sequences stay only for those who asked for them: a step may have gigabytes of them."""
        host = self.batch_maker.on_host(samples)
        return host if self.keeps_samples else replace(host, samples=())

    def next_batch_maker(self) -> BatchMaker:
        """For the step to come: the first ones of a sparse run may be dense."""
        if self.dense_batch_maker is not None and self.step < (
            self.config.sparsity.dense_steps or 0
        ):
            return self.dense_batch_maker
        return self.batch_maker

    def close(self) -> None:
        """Ends what runs in the background."""
        self.loader.close()
        garbage_collection.unfreeze_garbage()

    def forward_backward(
        self, batches: Sequence[Batch], attends: Sequence[Attend], valid: int
    ) -> torch.Tensor:
        """Adds the gradients of a step -> this worker's part of the loss.

        attends: the attention of each batch. valid: labels that count, of all workers.
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
                # The sum over all workers of local sums over the number of valid tokens of the whole step: equal to one worker's mean.
                part = self.decoder(
                    batch.tokens, batch.positions, batch.labels, attend, 1.0 / max(1, valid)
                )
                part.backward()
                loss += part.detach()
                if batch.attend.index is not None:
                    batch.attend.index.count()
        return loss

    def gradients(self) -> list[torch.Tensor]:
        """What this worker holds of the reduced gradients, on the device."""
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
        """Labels that count and query-key pairs per head that the masks allow, of all workers in a step."""
        valid, pairs = self._summed([sum(b.valid for b in batches), sum(b.pairs for b in batches)])
        return valid, pairs

    def record(self, recorder: Recorder | None) -> None:
        """Has what later steps do recorded, until it is called with None."""
        self.recorder = recorder
        self.exchange.set_recorder(recorder)

    def _summed(self, numbers: list[int]) -> list[int]:
        """Sums over data-parallel replicas; the workers of a context group count the same whole sequences."""
        if self.environment.dp == 1:
            return numbers
        totals = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(totals, group=self.host_group)
        return [int(n) // self.environment.cp for n in totals]

    def _check_finite(self, rows: list[list[float]]) -> None:
        for column, what in ((0, "loss"), (1, "gradient")):
            ranks = [rank for rank, row in enumerate(rows) if not math.isfinite(row[column])]
            if ranks:
                raise NonFiniteError(
                    f"step {self.step + 1}: the {what} is not finite on rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}; "
                    "the step was not applied"
                )

    def metrics(self, result: StepResult, seconds: float) -> StepMetrics:
        """The line of metrics.jsonl for a finished step."""
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

    def _float32(self) -> Decoder:
        """Where the parameters of the optimizer are: the decoder itself, or its masters on the host."""
        return self.host_states.masters if self.host_states else self.decoder

    def _send_weights(self) -> None:
        if self.host_states:
            self.host_states.send()

    def state(self) -> dict[str, Any]:
        """Everything a checkpoint holds; parameters and optimizer states as shards."""
        fresh = not self.optimizer.state
        model, optimizer = get_state_dict(self._float32(), self.optimizer)
        if fresh:
            # PyTorch makes the states by a step without gradients, which would count in the first real one's bias correction.
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
        """Goes on from the newest valid checkpoint, on any number of workers; from step 0 where that holds imported weights alone."""
        if checkpointer.weights_alone():
            weights = {"model": self.state()["model"]}
            checkpointer.load(weights)
            set_model_state_dict(self._float32(), weights["model"])
            self._send_weights()
            return
        state = self.state()
        checkpointer.load(state)
        set_state_dict(
            self._float32(),
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self._send_weights()
        # They came with the optimizer's state, and the configuration of the resume may have others.
        set_hyperparameters(self.optimizer, self.config.optim)
        saved = state["trainer"]
        self.step, self.tokens = int(saved["step"]), int(saved["tokens"])
        self.loader.load_state(saved)
        if "spikes" in saved:  # checkpoints of earlier versions have none
            self._spikes.load_state(saved["spikes"])
        self._batches = None
