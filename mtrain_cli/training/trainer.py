"""The loop of a training run on one worker: data, callbacks and optimizer steps."""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from typing import Any

import torch

from mtrain_cli.config.schema import Config
from mtrain_cli.data.dataset import Sample
from mtrain_cli.launch import progress_record
from mtrain_cli.launch.environment import Environment
from mtrain_cli.model.decoder import Attend
from mtrain_cli.parallel.exchange import Exchange
from mtrain_cli.parallel.recording import Recorder
from mtrain_cli.records.metrics import StepMetrics
from mtrain_cli.training.batch import Batch, Batches, HostBatch
from mtrain_cli.training.callback import Callback
from mtrain_cli.training.checkpointer import Checkpointer
from mtrain_cli.training.compute_time import ComputeTimer
from mtrain_cli.training.flops import causal_pairs, peak_flops, training_flops
from mtrain_cli.training.step import Step, StepResult
from mtrain_cli.training.train_data import TrainData
from mtrain_cli.training.train_state import TrainState
from mtrain_cli.training.worker import Worker


class Trainer:
    """One worker of a training run: a worker, its data, its state and its steps."""

    def __init__(self, config: Config, environment: Environment) -> None:
        worker = self.worker = Worker(config, environment)
        self.config, self.environment, self.device = worker.config, environment, worker.device
        self.plan, self.choices, self.host_group = worker.plan, worker.choices, worker.host_group
        self.exchange, self.tensor, self.experts = worker.exchange, worker.tensor, worker.experts
        self.stage, self.offload, self.router = worker.stage, worker.offload, worker.router
        self.batch_maker, self._dense_batch_maker = worker.batch_makers()
        self.data = data = TrainData(worker, self._on_host)
        self.dataset, self.sampler, self.loader = data.dataset, data.sampler, data.loader
        self.held_out, self.places = data.held_out, data.places
        self.train_state = state = TrainState(worker, data.loader)
        self.decoder, self.states = state.decoder, state.states
        self.compute_timer = self._make_timer()
        self.callbacks: list[Callback] = [self.compute_timer]
        self.run_step = Step(worker, state, self.compute_timer)
        # Kinds of steps after which garbage was frozen: True for sparse, False for dense.
        self._frozen_after: set[bool] = set()
        on_gpu = self.device.type == "cuda"
        self._peak_flops = peak_flops(torch.cuda.get_device_name(self.device)) if on_gpu else None

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return self.train_state.step

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.states.optimizer

    @property
    def recorder(self) -> Recorder | None:
        return self.run_step.recorder

    def _make_timer(self) -> ComputeTimer:
        """Make the timer of layers. It times the same number of layers on every worker."""
        layers = {int(name): layer for name, layer in self.decoder.layers.named_children()}
        most = len(layers) if self.stage is None else self.stage.fewest_layers
        timer = ComputeTimer(layers, self.device, most)
        for waits in (self.tensor, self.experts, self.router):
            if waits is not None:
                waits.observer.waiting = timer.waiting
        return timer

    def train_step(self, stop: bool, save: bool = False) -> StepResult:
        """Run one optimizer step over `train.global_batch` sequences.

        stop, save: whether this worker received a request, which the step reports to all.

        Raises:
            NonFiniteError: the loss or a gradient of any worker is not finite. The weights did not
                change.
            ConfigError, RunError: a worker cannot read its data. The step has not begun.
        """
        progress_record.begin_step(self.step + 1)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        batches, data_seconds = self.next_batches()
        totals = self.run_step.totals(batches)
        attends = [self.attention_of(batch) for batch in batches]
        result = self.run_step(batches, attends, *totals, (stop, save), data_seconds)
        if (sparse := result.index is not None) not in self._frozen_after:
            # The objects of a kind's first step, mostly compiled code, live on. Exempt them from
            # collections, of which one took 0.3 s of a 4.2 s step (256K tokens, four H200s).
            self._frozen_after.add(sparse)
            gc.unfreeze()
            gc.collect()
            gc.freeze()
        return result

    def next_batches(self) -> tuple[list[Batch], float]:
        """Return this step's micro-batches, and how many seconds this worker waited for data."""
        on_host, seconds = self.data.next_on_host(self.step + 1)
        make = self.next_batch_maker()
        for callback in self.callbacks:
            callback.on_samples([host.samples for host in on_host])
        started = time.perf_counter()
        batches = [make.to_device(host) for host in on_host]
        return batches, seconds + time.perf_counter() - started

    def attention_of(self, batch: Batch) -> Attend:
        """Return the attention of a micro-batch, wrapped by all callbacks."""
        attend: Attend = batch.attention
        # The last callback wraps the exchange itself, and the compute timer, the first, all others.
        for callback in reversed(self.callbacks):
            attend = callback.wrap_attention(batch, attend)
        return attend

    def _on_host(self, samples: list[Sample]) -> HostBatch:
        """Prepare a micro-batch on the loader's thread."""
        host = self.next_batch_maker().on_host(samples)
        # Whole sequences may take gigabytes.
        keep = any(callback.needs_samples for callback in self.callbacks)
        return host if keep else replace(host, samples=())

    def next_batch_maker(self) -> Batches:
        """Return the batch maker of the next step: dense in the first `sparsity.dense_steps`."""
        dense = self.step < self.config.sparsity.dense_steps
        return self._dense_batch_maker if dense else self.batch_maker

    def close(self) -> None:
        """Stop the loader's background thread, and unfreeze garbage collection."""
        self.loader.close()
        gc.unfreeze()

    def record(self, recorder: Recorder | None, exchange: Exchange | None = None) -> None:
        """Record the following steps, and the messages of the run's exchange or another one."""
        self.run_step.recorder = recorder
        (exchange or self.exchange).set_recorder(recorder)
        if self.tensor is not None:
            self.tensor.observer.set_recorder(recorder)

    def metrics(self, result: StepResult, seconds: float) -> StepMetrics:
        """Return the line of metrics.jsonl for a finished step that took `seconds`."""
        config, index, peak = self.config, result.index, self._peak_flops
        pairs, all_pairs = result.pairs / config.train.global_batch, causal_pairs(config.seq)
        flops = training_flops(
            config,
            self.choices.layout,
            sharing=self.choices.exchange.heads,
            dtype_bytes=self.choices.dtype.itemsize,
            pairs=pairs,
        )
        rate = result.tokens / seconds / self.environment.dims.workers
        on_gpu = self.device.type == "cuda"
        memory = torch.cuda.max_memory_allocated(self.device) / 2**30 if on_gpu else None
        return StepMetrics(
            step=self.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens=self.train_state.tokens,
            tokens_per_second_per_gpu=rate,
            mfu_model=rate * flops.model / peak if peak and index is None else None,
            mfu_executed=rate * flops.executed / peak if peak else None,
            density=pairs / all_pairs,
            targets=result.targets,
            targets_per_second_per_gpu=result.targets / seconds / self.environment.dims.workers,
            dense_density=result.allowed / config.train.global_batch / all_pairs if index else None,
            peak_memory_gib=memory,
            seconds=seconds,
            epoch=self.sampler.consumed / len(self.dataset),
            consumed=self.sampler.consumed,
            data_seconds=result.data_seconds,
            slashes=index.slashes if index else None,
            columns=index.columns if index else None,
            index_seconds=index.seconds if index else None,
            density_by_layer=list(index.density_by_layer) if index else None,
            **(result.routing.metrics() if result.routing else {}),
            skipped=result.skipped if config.optim.skip_spikes or result.skipped else None,
        )

    def state(self) -> dict[str, Any]:
        """Return everything that a checkpoint holds."""
        return self.train_state.checkpoint()

    def resume(self, checkpointer: Checkpointer) -> None:
        """Resume from the newest intact checkpoint, as `TrainState.resume`."""
        self.train_state.resume(checkpointer)
