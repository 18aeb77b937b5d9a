"""One worker of a training run, and its optimizer step."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict

from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.config.schema import Config
from mtrain_cli.data import file_sums
from mtrain_cli.data.dataset import Dataset, Sample
from mtrain_cli.data.loader import Loader
from mtrain_cli.data.open_dataset import open_dataset
from mtrain_cli.launch import progress_record
from mtrain_cli.launch.environment import Environment
from mtrain_cli.launch.failures import PeerLostError
from mtrain_cli.model.decoder import Attend, Decoder
from mtrain_cli.model.expert_parallel import ExpertSharing
from mtrain_cli.model.huggingface import load_into
from mtrain_cli.model.init import initialize
from mtrain_cli.model.parallelize import parallelize
from mtrain_cli.model.rope import rope_factor
from mtrain_cli.model.stages import StageDecoder
from mtrain_cli.parallel import parameter_shards, profiler_labels
from mtrain_cli.parallel.activation_offload import ActivationOffload
from mtrain_cli.parallel.collectives import all_gather
from mtrain_cli.parallel.context_attention import IndexRecord
from mtrain_cli.parallel.exchange import Exchange
from mtrain_cli.parallel.exchange_registry import make_chosen_exchange
from mtrain_cli.parallel.expert_group import ExpertGroup, make_expert_group, make_expert_mesh
from mtrain_cli.parallel.fsdp import begin_micro_batch
from mtrain_cli.parallel.mesh import make_context_group, make_parameter_mesh
from mtrain_cli.parallel.recording import Recorder
from mtrain_cli.parallel.tensor_group import make_tensor_group
from mtrain_cli.records.metrics import StepMetrics
from mtrain_cli.training import garbage_collection
from mtrain_cli.training.batch import Batch, BatchMaker, HostBatch
from mtrain_cli.training.callback import Callback
from mtrain_cli.training.checkpointer import Checkpointer
from mtrain_cli.training.compute_time import ComputeTimer
from mtrain_cli.training.expert_price import expert_degree
from mtrain_cli.training.expert_traffic import require_experts_fit
from mtrain_cli.training.flops import attention_kept, causal_pairs, peak_flops, training_flops
from mtrain_cli.training.index_metrics import (
    IndexMetrics,
    index_metrics,
    index_records,
    local_index_sums,
)
from mtrain_cli.training.layout_choice import layout_advice
from mtrain_cli.training.optimizer import DeviceOptimizer, LearningRateSchedule
from mtrain_cli.training.optimizer_offload import OffloadedOptimizer
from mtrain_cli.training.pipeline import make_stage
from mtrain_cli.training.planning import checked_plan
from mtrain_cli.training.rank_agreement import (
    check_same_data,
    check_same_layouts,
    first_rank_without_data,
)
from mtrain_cli.training.resolution import ResolvedRun, resolve_run
from mtrain_cli.training.router_batches import RouterBatches, routing_metrics
from mtrain_cli.training.step_result import StepReport, StepResult, check_finite
from mtrain_cli.training.watch import SpikeWatch


class Trainer:
    """One worker of a training run: its model and optimizer shards, its data, and its steps.

    callbacks: the objects that follow this run (`Callback`), in call order.
    """

    def __init__(self, config: Config, environment: Environment) -> None:
        self.config = config
        self.environment = environment
        self.device = torch.device("cpu")
        if environment.device == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        torch.manual_seed(config.seed)
        if config.train.deterministic:
            # cuBLAS is deterministic only with a workspace per stream. It reads this variable
            # before its first matrix product.
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        self.choices: ResolvedRun = resolve_run(config, environment)
        self.plan = checked_plan(config, environment, self.choices)
        self.config = config = self.plan.config
        # A new group does not inherit the default group's timeout.
        timeout = timedelta(seconds=config.topology.timeout_s)
        self.host_group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
        self.exchange = self._make_exchange(timeout)
        self.tensor = make_tensor_group(environment.rank, environment.dims, self.device, timeout)
        self.experts = self._make_expert_group(timeout)
        self.stage = make_stage(config, environment, self.device, self.choices.dtype, timeout)
        self.offload: ActivationOffload | None = None
        if offloaded := config.train.offload_activations:
            self.offload = ActivationOffload(config.model.num_layers, self.device, offloaded)
        self.router = RouterBatches.make(config, self.exchange.group, self.tensor)
        make = partial(
            BatchMaker,
            self.exchange,
            mask=MaskRule.of(config),
            layers=config.model.num_layers,
            balancer=self.choices.balancer,
            keep=attention_kept(config.train),
            offload=self.offload,
            tensor=self.tensor,
            router=self.router,
        )
        dense = self.choices.dense_kernel
        self.batch_maker = make(
            self.choices.kernel,
            self.device,
            pattern=self.choices.pattern,
            dense_layers=config.sparsity.dense_of(config.model.num_layers),
            dense_kernel=None if dense is None else dense[0],
        )
        self.dense_batch_maker = make(dense[0], self.device) if dense is not None else None
        self._make_data()
        self.decoder, self.states = self._make_decoder()
        self.optimizer = self.states.optimizer
        self._schedule = LearningRateSchedule.of(config)
        self.step = 0
        self.tokens = 0
        self.compute_timer = self._make_timer()
        self.callbacks: list[Callback] = [self.compute_timer]
        self.recorder: Recorder | None = None
        self._batches: Any = None
        self.lacks_data = False  # whether a worker could not read its data, so that all stop
        self._spikes = SpikeWatch(config.run.spike_sigma)
        # Kinds of steps after which garbage was frozen: True for sparse, False for dense.
        self._frozen_after: set[bool] = set()
        self._checked_layouts = False
        self._advice = ""  # a line about the layout, shown after the first step
        on_gpu = self.device.type == "cuda"
        self._peak_flops = peak_flops(torch.cuda.get_device_name(self.device)) if on_gpu else None

    def _make_exchange(self, timeout: timedelta) -> Exchange:
        choice = self.choices.exchange
        group = make_context_group(
            self.environment.rank,
            self.environment.dims,
            self.device,
            timeout,
            per_node=choice.per_node,
            heads=choice.heads,
            channels=choice.channels,
        )
        return make_chosen_exchange(choice, self.choices.layout, group)

    def _make_expert_group(self, timeout: timedelta) -> ExpertGroup | None:
        dims, itemsize = self.environment.dims, self.choices.dtype.itemsize
        require_experts_fit(self.config, dims, itemsize, self.device.type)
        layout, per_node = self.choices.layout, self.environment.workers_per_node
        degree = expert_degree(self.config, dims, layout, itemsize, per_node)
        return make_expert_group(self.environment.rank, dims, degree, self.device, timeout)

    def _make_data(self) -> None:
        config, environment = self.config, self.environment
        self.dataset: Dataset = open_dataset(config)
        self.places = check_same_data(
            config, self.dataset.fingerprint, self.device, self.host_group
        )
        self.sampler = self.dataset.sampler(config.seed)
        self.loader = Loader(
            self.dataset,
            self.sampler,
            dp_rank=environment.dims.coordinate("dp", environment.rank),
            dp=environment.dims.dp,
            global_batch=config.train.global_batch,
            micro_batch=config.train.micro_batch,
            make_batch=self._on_host,
        )
        self.held_out: list[Sample] = self.dataset.held_out

    def check_data(self, *, resumed: bool) -> None:
        """Read all data and verify their checksums, if ``data.verify`` asks for it.

        The workers of a machine share the work.

        Raises:
            ConfigError: a file has changed.
        """
        choice, environment = self.config.data.verify, self.environment
        # After an automatic restart, the data were read moments ago.
        asked = resumed and not environment.restarts if choice == "auto" else choice == "full"
        if asked:
            progress_record.note("checks the data")
            say = partial(print, flush=True) if environment.rank == 0 else lambda _: None
            report = file_sums.lines(say, "data.verify=sampled skips this")
            self.dataset.verify(environment.local_rank, environment.local_workers, report)
            progress_record.note("")

    def _make_decoder(self) -> tuple[Decoder, DeviceOptimizer | OffloadedOptimizer]:
        """Build the decoder on the meta device, shard it, then fill the shards.

        No worker ever holds the whole model. Return the decoder and its optimizer.
        """
        config = self.config
        mesh = make_parameter_mesh(self.environment.dims, self.environment.device)
        sharing = expert_mesh = None
        if (group := self.experts) is not None:
            sharing = ExpertSharing(group)
            expert_mesh = make_expert_mesh(
                self.environment.dims, group.size, self.environment.device
            )
        decoder = parallelize(
            self._empty_decoder(),
            config,
            mesh,
            self.choices.dtype,
            compile=self.choices.compile,
            offload=self.offload,
            tensor=self.tensor,
            experts=sharing,
            expert_mesh=expert_mesh,
        )
        decoder.to_empty(device=self.device)
        copies = parameter_shards.copies if self.stage is None else self.stage.copies(decoder)
        states = (
            OffloadedOptimizer(decoder, self._empty_decoder(), config.optim)
            if config.optim.offload
            else DeviceOptimizer(decoder, config.optim, copies)
        )
        if config.train.init_from:
            local = self.environment.local_rank, self.environment.local_workers
            load_into(states.masters, config.train.init_from, *local)
        else:
            initialize(states.masters, config.seed, self.device)
        states.send()
        return decoder, states

    def _empty_decoder(self) -> Decoder:
        model, stage = self.config.model, self.stage
        factor = rope_factor(model.rope, self.config.seq)
        with torch.device("meta"):
            if stage is None:
                return Decoder(model, factor)
            return StageDecoder(model, factor, stage.stages)

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

        Args:
            stop, save: whether this worker received a request to stop or to save. The step reports
                the requests to all workers.

        Raises:
            NonFiniteError: the loss or a gradient of any worker is not finite. The weights did not
                change.
            ConfigError, RunError: this worker cannot read its data. The step has not begun.
            PeerLostError: another worker cannot read its data. The step has not begun.
        """
        progress_record.begin_step(self.step + 1)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        lr = self._schedule.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        batches, data_seconds = self.next_batches()
        valid, pairs = self.totals(batches)
        attends = [self.attention_of(batch) for batch in batches]
        loss = self.forward_backward(batches, attends, valid)
        with profiler_labels.label(profiler_labels.OPTIMIZER):
            finite_check = torch.stack([loss.double(), self.states.squared_norm().double()])
        records = index_records(batch.attend for batch in batches)
        reports = self._exchange_reports(finite_check, (stop, save), data_seconds, records)
        check_finite(reports, self.step + 1)
        routing = routing_metrics(
            [b.routing for b in batches if b.routing is not None], self.config
        )
        grad_norm = math.sqrt(sum(report.squared_norm for report in reports))
        mean_loss = sum(report.loss for report in reports) if valid else None
        # All workers decide from the same numbers, so all skip the update or none does.
        skipped, warning = self._skips_update(mean_loss, grad_norm)
        advice, self._advice = self._advice, ""
        if not skipped:
            self._update(grad_norm)
            if routing is not None:
                for decoder in {self.decoder, self.states.masters}:
                    routing.change_biases(decoder, self.config.train.balance_bias)
        self.states.drop_gradients()
        progress_record.note("done")
        self.step += 1
        batch, seq = self.config.train.global_batch, self.config.seq
        self.tokens += batch * seq
        self._freeze_garbage(sparse=records is not None)
        index = self._index_metrics(reports, records, pairs)
        return StepResult(
            loss=mean_loss,
            grad_norm=grad_norm,
            lr=lr,
            tokens=batch * seq,
            pairs=index.density * causal_pairs(seq) * batch if index else float(pairs),
            stop=any(report.stop for report in reports),
            targets=valid,
            allowed=float(pairs),
            save=any(report.save for report in reports),
            reports=tuple(reports),
            index=index,
            routing=routing,
            skipped=skipped,
            warnings=tuple(line for line in (warning, advice) if line),
        )

    def next_batches(self) -> tuple[list[Batch], float]:
        """Return this step's micro-batches, and how many seconds this worker waited for data."""
        if self._batches is None:
            self._batches = iter(self.loader)
        on_host, seconds = self._next_on_host()
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

    def _exchange_reports(
        self,
        finite_check: torch.Tensor,
        requests: tuple[bool, bool],
        data_seconds: float,
        records: list[IndexRecord] | None,
    ) -> list[StepReport]:
        """Return the report of every rank.

        Args:
            finite_check: float64 [2], this rank's loss and squared gradient norm, on the device.
            requests: whether this rank received a request to stop, and one to save.
            records: index estimates of this step on this rank. None for a dense step.
        """
        numbers = [*map(float, requests), self.compute_timer.seconds, data_seconds]
        timing = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        local = torch.cat([finite_check, timing])
        if records is not None:
            layers = self.config.model.num_layers - self.config.sparsity.dense_layers
            sums = local_index_sums(records, layers, self.device)
            local = torch.cat([local, sums])
        progress_record.note(
            "waits for the loss and gradient norm of all ranks", progress_record.SEVERAL
        )
        rows = all_gather(local, self.environment.dims.workers).tolist()
        progress_record.note("optimizer")
        return [StepReport.of(row) for row in rows]

    def _update(self, grad_norm: float) -> None:
        """Clip the gradients and run the optimizer."""
        clip = self.config.optim.clip_norm
        scale = clip / grad_norm if clip and grad_norm > clip else 1.0
        with profiler_labels.label(profiler_labels.OPTIMIZER):
            self.states.step(scale)

    def _index_metrics(
        self, reports: Sequence[StepReport], records: list[IndexRecord] | None, pairs: int
    ) -> IndexMetrics | None:
        """Combine the index sums of all ranks. Return None for a dense step.

        pairs: allowed pairs per head, of all sequences.
        """
        if records is None:
            return None
        sums = [sum(column) for column in zip(*(r.index_sums for r in reports), strict=True)]
        return index_metrics(sums, records, self.config.seq).with_dense_layers(
            self.config.sparsity.dense_layers,
            pairs / (self.config.train.global_batch * causal_pairs(self.config.seq)),
        )

    def _freeze_garbage(self, *, sparse: bool) -> None:
        """Freeze garbage collection after the first dense step and after the first sparse step.

        Either step creates objects that live until the end of the run, mostly compiled code.
        """
        if sparse not in self._frozen_after:
            self._frozen_after.add(sparse)
            garbage_collection.freeze_garbage()

    def _skips_update(self, loss: float | None, grad_norm: float) -> tuple[bool, str]:
        """Return whether to skip the update, and a warning. "" means no warning.

        A step without labels has no gradient and must skip the update. AdamW would still change the
        weights, by weight decay and by its moments.
        """
        if loss is None:
            return True, f"step {self.step + 1}: no token has a label; the update is skipped"
        spike, line = self._spikes.check(self.step + 1, loss, grad_norm)
        skipped = spike and self.config.optim.skip_spikes
        return skipped, line + "; its update is skipped" * skipped if line else ""

    def _next_on_host(self) -> tuple[Sequence[HostBatch], float]:
        """Return the data of this step in host memory, and how many seconds this worker waited."""
        wait_started = time.perf_counter()
        on_host: Sequence[HostBatch] = ()
        error = None
        try:
            on_host = next(self._batches)
        except Exception as failure:  # raised below, after all workers know
            error = failure
        waited = time.perf_counter() - wait_started
        first_without = first_rank_without_data(
            self.environment, self.host_group, has_data=error is None
        )
        if first_without is not None:
            self.lacks_data = True
            raise error or PeerLostError(
                f"rank {first_without} has no data for step {self.step + 1}"
            )
        if not self._checked_layouts:
            self._checked_layouts = True
            if self.choices.balancer is not None:
                check_same_layouts(self.config, self.environment, on_host, self.host_group)
            elif self.environment.rank == 0 and self.device.type == "cuda":
                self._advice = self._layout_advice(on_host[0])
        return on_host, waited

    def _layout_advice(self, batch: HostBatch) -> str:
        """Return a line if a balanced layout would suit this batch better, else ""."""
        cp, per_node = self.environment.dims.cp, self.environment.context_per_node
        masks = [plan.masks for plan in (batch.plan, batch.full_plan) if plan is not None]
        return layout_advice(self.config, cp, per_node, masks)

    def _on_host(self, samples: list[Sample]) -> HostBatch:
        """Prepare a micro-batch on the loader's thread.

        Drop the whole sequences, which may take gigabytes, unless a callback needs them.
        """
        host = self.next_batch_maker().on_host(samples)
        keep = any(callback.needs_samples for callback in self.callbacks)
        return host if keep else replace(host, samples=())

    def next_batch_maker(self) -> BatchMaker:
        """Return the batch maker of the next step: dense in the first `sparsity.dense_steps`."""
        dense = self.step < self.config.sparsity.dense_steps
        return self.dense_batch_maker if dense and self.dense_batch_maker else self.batch_maker

    def close(self) -> None:
        """Stop the loader's background thread, and unfreeze garbage collection."""
        self.loader.close()
        garbage_collection.unfreeze_garbage()

    def forward_backward(
        self, batches: Sequence[Batch], attends: Sequence[Attend], valid: int
    ) -> torch.Tensor:
        """Accumulate the gradients of a step. Return this worker's part of the mean loss.

        Args:
            attends: the attention of each micro-batch.
            valid: number of labels in the whole step that count toward the loss.
        """
        for batch in batches:
            if batch.routing is not None:
                batch.routing.recorder = self.recorder
        if self.stage is None:
            loss = self._forward_backward(batches, attends, valid)
        else:
            loss = self.stage.forward_backward(self.decoder, batches, attends, valid, self.recorder)
        if self.tensor is not None:
            parameter_shards.sum_copied_gradients(self.decoder.parameters(), self.tensor)
        return loss

    def _forward_backward(
        self, batches: Sequence[Batch], attends: Sequence[Attend], valid: int
    ) -> torch.Tensor:
        """Run one micro-batch after another through the whole model."""
        loss = torch.zeros((), device=self.device)
        with nullcontext() if self.recorder is None else self.recorder.iteration():
            for number, (batch, attend) in enumerate(zip(batches, attends, strict=True)):
                if self.recorder is not None:
                    self.recorder.micro_batch(number)
                last = number == len(batches) - 1
                begin_micro_batch(self.decoder, self.config.train.shard, last=last)
                self.states.last_micro_batch = last
                # Divide the local sum by the global number of valid labels. The sum over workers is
                # then the mean that one worker would compute.
                part = self.decoder(
                    batch.tokens,
                    batch.positions,
                    batch.labels,
                    attend,
                    1.0 / max(1, valid),
                    batch.routing,
                )
                part.backward()
                loss += part.detach()
                if batch.attend.index is not None:
                    batch.attend.index.count()
        return loss

    def totals(self, batches: Sequence[Batch]) -> tuple[int, int]:
        """Return the counts of valid labels and of allowed pairs per head, in the whole step."""
        valid, pairs = sum(b.valid for b in batches), sum(b.pairs for b in batches)
        if self.environment.dims.dp == 1:
            return valid, pairs
        totals = torch.tensor([valid, pairs], dtype=torch.int64)
        dist.all_reduce(totals, group=self.host_group)
        # All workers that share a sequence count the same whole sequences.
        sharing = self.environment.dims.workers // self.environment.dims.dp
        return int(totals[0]) // sharing, int(totals[1]) // sharing

    def record(self, recorder: Recorder | None) -> None:
        """Record the following steps with `recorder`. None stops recording."""
        self.record_messages(recorder, self.exchange)

    def record_messages(self, recorder: Recorder | None, exchange: Exchange) -> None:
        """Record what this worker computes with an exchange, and its messages."""
        self.recorder = recorder
        exchange.set_recorder(recorder)
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
            tokens=self.tokens,
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
        """Return everything that a checkpoint holds. Parameters and optimizer states are shards."""
        fresh = not self.optimizer.state
        model, optimizer = state_dict.get_state_dict(self.states.masters, self.optimizer)
        if fresh:
            # PyTorch creates the states by a step without gradients. That step must not count in
            # the bias correction of the first real step.
            for state in self.optimizer.state.values():
                state["step"].zero_()
        if self.stage is not None:
            del optimizer["param_groups"]  # each stage has other parameters in them
        trainer = {
            "step": self.step,
            "tokens": self.tokens,
            "spikes": self._spikes.state(),
            **self.loader.state(),
        }
        return {"model": model, "optimizer": optimizer, "trainer": trainer}

    def resume(self, checkpointer: Checkpointer) -> None:
        """Resume from the newest intact checkpoint, whatever number of workers wrote it.

        If the checkpoint is an import, which holds only weights, start at step 0.
        """
        if checkpointer.holds_only_weights():
            weights = {"model": self.state()["model"]}
            checkpointer.load(weights)
            state_dict.set_model_state_dict(self.states.masters, weights["model"])
            self.states.send()
            return
        state = self.state()
        # The hyperparameters are those of `config`, and not those of the checkpoint.
        state["optimizer"].pop("param_groups", None)
        groups = state_dict.get_optimizer_state_dict(self.states.masters, self.optimizer)
        checkpointer.load(state)
        state_dict.set_state_dict(
            self.states.masters,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict={**state["optimizer"], "param_groups": groups["param_groups"]},
        )
        self.states.send()
        saved = state["trainer"]
        self.step, self.tokens = int(saved["step"]), int(saved["tokens"])
        self.loader.load_state(saved)
        if "spikes" in saved:  # older checkpoints have none
            self._spikes.load_state(saved["spikes"])
        self._batches = None
