"""One worker of a training run: its data, callbacks and optimizer steps."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.data import checked_files
from mtrain_cli.data.dataset import Sample
from mtrain_cli.data.loader import Loader
from mtrain_cli.data.mixture import Dataset
from mtrain_cli.data.open_dataset import open_dataset
from mtrain_cli.launch import progress_record
from mtrain_cli.launch.environment import Environment, describe_place
from mtrain_cli.launch.failures import PeerLostError
from mtrain_cli.launch.rollbacks import Rollback
from mtrain_cli.launch.run_dir import NoCheckpointError
from mtrain_cli.model.decoder import Attend
from mtrain_cli.parallel.collectives import share
from mtrain_cli.parallel.exchange import Exchange
from mtrain_cli.parallel.recording import Recorder
from mtrain_cli.records.metrics import StepMetrics
from mtrain_cli.sparsity.pattern import learning
from mtrain_cli.training.batch import Batch, Batches, HostBatch
from mtrain_cli.training.callback import Callback, ComputeTimer
from mtrain_cli.training.checkpointer import Checkpointer
from mtrain_cli.training.flops import causal_pairs, peak_flops, training_flops
from mtrain_cli.training.step import Step, StepResult
from mtrain_cli.training.worker import TrainState, Worker

_QUICKLY_READ = 1 << 28  # tokens: at most 1 GiB, whose checksums take 1.1 s on two cores


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

        stop, save: whether this worker received a request, which the step reports to all. Raises
        NonFiniteError as `Step`, and ConfigError or RunError if a worker cannot read its data.
        """
        progress_record.begin_step(self.step + 1)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        batches, data_seconds = self.next_batches()
        totals = self.run_step.totals(batches)
        attends = [self.attention_of(batch) for batch in batches]
        with learning(self.choices.pattern):
            result = self.run_step(batches, attends, *totals, (stop, save), data_seconds)
        self.train_state.share_learned()
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

    def evaluation_batch_maker(self) -> Batches:
        """Return that of the next step, but a dense one until the pattern has learned."""
        learned = self.train_state.has_learned()
        return self.next_batch_maker() if learned else self._dense_batch_maker

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
        rate = result.tokens / seconds / self.environment.dims.workers
        mfu_model = mfu_executed = None
        if peak and not config.model.is_foreign:
            sharing, e = self.choices.exchange.heads, self.choices.dtype.itemsize
            options: Any = {"sharing": sharing, "dtype_bytes": e, "pairs": pairs}
            flops = training_flops(config, self.choices.layout, **options)
            mfu_model = rate * flops.model / peak if index is None else None
            mfu_executed = rate * flops.executed / peak
        on_gpu = self.device.type == "cuda"
        memory = torch.cuda.max_memory_allocated(self.device) / 2**30 if on_gpu else None
        return StepMetrics(
            step=self.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens=self.train_state.tokens,
            tokens_per_second_per_gpu=rate,
            mfu_model=mfu_model,
            mfu_executed=mfu_executed,
            density=pairs / all_pairs,
            targets=result.targets,
            targets_per_second_per_gpu=result.targets / seconds / self.environment.dims.workers,
            dense_density=result.allowed / config.train.global_batch / all_pairs if index else None,
            peak_memory_gib=memory,
            seconds=seconds,
            epoch=self.sampler.position(self.sampler.consumed) / len(self.dataset),
            consumed=self.sampler.consumed,
            data_seconds=result.data_seconds,
            slashes=index.slashes if index else None,
            columns=index.columns if index else None,
            index_seconds=index.seconds if index else None,
            index_cut=index.cut if index else None,
            density_by_layer=list(index.density_by_layer) if index else None,
            **(result.routing.metrics() if result.routing else {}),
            skipped=bool(result.skipped) if config.optim.skip_spikes or result.skipped else None,
            skip_reason=result.skipped or None,
        )

    def state(self) -> dict[str, Any]:
        return self.train_state.checkpoint()

    def resume(self, checkpointer: Checkpointer) -> None:
        self.train_state.resume(checkpointer)

    def roll_back(self, checkpointer: Checkpointer, reason: str) -> Rollback:
        """Go back to the newest checkpoint, without the data read since, and return what happened.

        The next step trains on the data after those of the step that failed. All workers call this.
        Raises NoCheckpointError if none is intact.
        """
        state, sampler = self.train_state, self.sampler
        reached, end = self.step + 1, sampler.position(sampler.consumed - 1) + 1
        if checkpointer.holds_only_weights():
            raise NoCheckpointError("no checkpoint of this run could be saved")
        self.states.drop_gradients()
        self.resume(checkpointer)
        when, first = share(time.time(), self.host_group)[0], sampler.position(sampler.consumed)
        rollback = Rollback(when, reason, reached, self.step, first, end)
        state.add_rollbacks([asdict(rollback)])
        return rollback


class TrainData:
    """The dataset of a run, and the micro-batches that this worker takes from it.

    places: host and device of each rank.
    lacking: whether a worker could not read its data, so that all stop.
    """

    def __init__(self, worker: Worker, make_batch: Callable[[list[Sample]], HostBatch]) -> None:
        config, environment = worker.config, worker.environment
        self._worker = worker
        self.dataset: Dataset = open_dataset(config)
        self.places = check_same_data(
            config, self.dataset.fingerprint, worker.device, worker.host_group
        )
        self.sampler = self.dataset.sampler(config.seed)
        self.loader = Loader(
            self.dataset,
            self.sampler,
            dp_rank=environment.dims.coordinate("dp", environment.rank),
            dp=environment.dims.dp,
            global_batch=config.train.global_batch,
            micro_batch=config.train.micro_batch,
            make_batch=make_batch,
        )
        self.held_out: list[Sample] = self.dataset.held_out
        self.lacking = self._checked_layouts = False

    def check(self, *, resumed: bool) -> None:
        """Verify the data's checksums if ``data.verify`` asks for it, shared by local workers."""
        choice, environment = self._worker.config.data.verify, self._worker.environment
        asked = choice == "full"
        if choice == "auto" and not environment.restarts:  # a restart read the data moments ago
            asked = resumed or self.dataset.num_tokens < _QUICKLY_READ
        if asked:
            progress_record.note("checks the data")
            say = partial(print, flush=True) if environment.rank == 0 else lambda _: None
            report = checked_files.lines(say, "data.verify=sampled skips this")
            self.dataset.verify(environment.local_rank, environment.local_workers, report)
            progress_record.note("")

    def next_on_host(self, step: int) -> tuple[Sequence[HostBatch], float]:
        """Return the data of a step in host memory, and how many seconds this worker waited."""
        worker, started = self._worker, time.perf_counter()
        on_host: Sequence[HostBatch] = ()
        error = None
        try:
            on_host = next(self.loader)
        except Exception as failure:  # raised below, after all workers know
            error = failure
        waited = time.perf_counter() - started
        first_without = first_rank_without_data(
            worker.environment, worker.host_group, has_data=error is None
        )
        if first_without is not None:
            self.lacking = True
            raise error or PeerLostError(f"rank {first_without} has no data for step {step}")
        if worker.choices.balancer is not None and not self._checked_layouts:
            self._checked_layouts = True
            check_same_layouts(worker.config, worker.environment, on_host, worker.host_group)
        return on_host, waited


def check_same_data(
    config: Config, fingerprint: str, device: torch.device, group: dist.ProcessGroup
) -> list[str]:
    """Return host and device of each rank. Raise ConfigError if one reads another corpus.

    Corpora differ if machines have different files or, for data=stdlib, versions of Python.
    """
    answers = share((fingerprint, describe_place(device)), group)
    other = next((rank for rank, (data, _) in enumerate(answers) if data != answers[0][0]), None)
    if other is not None:
        raise ConfigError(
            f"data.kind={config.data.kind}: rank {other} reads a different corpus than "
            "rank 0. Give all machines the same data."
        )
    return [place for _, place in answers]


def check_same_layouts(
    config: Config, environment: Environment, batches: Sequence[HostBatch], group: dist.ProcessGroup
) -> None:
    """Raise ConfigError if ranks of a context group gave the first batches different layouts.

    Every rank balances its batches itself, and versions of NumPy might differ.
    """
    layouts = repr([host.layout for host in batches])
    digest, rank = hashlib.sha256(layouts.encode()).hexdigest(), environment.rank
    sequences = environment.dims.coordinate("dp", rank)
    answers = share((sequences, digest), group)
    other = next((r for r, (s, d) in enumerate(answers) if s == sequences and d != digest), None)
    if other is not None:
        raise ConfigError(
            f"topology.layout={config.topology.layout}: ranks {rank} and {other} balance "
            "the same batch differently. Give all machines the same versions of mtrain and "
            "NumPy, or set topology.layout=striped."
        )


def first_rank_without_data(
    environment: Environment, group: dist.ProcessGroup, *, has_data: bool
) -> int | None:
    """Return the first rank that has no data for this step, or None."""
    ranks = environment.dims.workers
    first = torch.tensor(ranks if has_data else environment.rank)
    if ranks > 1:
        progress_record.note("waits for the data of all ranks", progress_record.SEVERAL)
        dist.all_reduce(first, dist.ReduceOp.MIN, group=group)
        progress_record.note("")
    return int(first) if int(first) < ranks else None
