"""What a worker of a training run has: device, communicators, weights and optimizer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions

from mtrain_cli.config import documents
from mtrain_cli.config.schema import Config
from mtrain_cli.data.loader import Loader
from mtrain_cli.launch.environment import Environment
from mtrain_cli.launch.rollbacks import Rollback
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.huggingface import load_into
from mtrain_cli.model.parallelize import initialize, parallelize
from mtrain_cli.model.rope import rope_factor
from mtrain_cli.model.transformers_decoder import TransformersDecoder
from mtrain_cli.parallel import layer_groups
from mtrain_cli.parallel.activation_offload import ActivationOffload
from mtrain_cli.parallel.collectives import average
from mtrain_cli.parallel.exchange import Exchange, make_chosen_exchange
from mtrain_cli.parallel.layer_groups import make_expert_group, make_expert_mesh, make_tensor_group
from mtrain_cli.parallel.mesh import ContextGroups, make_parameter_mesh
from mtrain_cli.sparsity.pattern import layers_without_learning, learned_state
from mtrain_cli.training.batch import Batches, Layouts, attention_setups
from mtrain_cli.training.callback import SpikeWatch
from mtrain_cli.training.checkpointer import LEARNED, Checkpointer
from mtrain_cli.training.flops import attention_kept
from mtrain_cli.training.hardware import device_of
from mtrain_cli.training.optimizer import DeviceOptimizer, LearningRateSchedule
from mtrain_cli.training.optimizer_offload import OffloadedOptimizer
from mtrain_cli.training.pipeline import make_stage
from mtrain_cli.training.planning import checked_plan
from mtrain_cli.training.resolution import ResolvedRun, resolve_run
from mtrain_cli.training.router_batches import RouterBatches


class Worker:
    """What a worker has before it has a model or data. All ranks make theirs together.

    config: with the memory settings of the plan. host_group: all ranks, in host memory.
    tensor, experts, stage, offload, router: None if the run does not have them.
    """

    def __init__(self, config: Config, environment: Environment) -> None:
        self.environment, dims = environment, environment.dims
        self.device = device_of(environment)
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
        choice, self.groups = self.choices.exchange, ContextGroups(environment.rank, dims, timeout)
        group = self.groups.of(choice, self.device)
        self.exchange: Exchange = make_chosen_exchange(choice, self.choices.layout, group)
        self.tensor = make_tensor_group(environment.rank, dims, self.device, timeout)
        degree = int(self.plan.dealt.config.topology.expert_parallel)
        self.experts = make_expert_group(environment.rank, dims, degree, self.device, timeout)
        self.stage = make_stage(config, environment, self.device, self.choices.dtype, timeout)
        self.offload: ActivationOffload | None = None
        if offloaded := config.train.offload_activations:
            self.offload = ActivationOffload(config.model.num_layers, self.device, offloaded)
        self.router = RouterBatches.make(config, self.exchange.group, self.tensor)

    def batch_makers(self) -> tuple[Batches, Batches]:
        """Return two batch makers: for regular steps, and for dense attention."""
        choices, keep = self.choices, attention_kept(self.config.train)
        layouts = Layouts(self.exchange, choices.balancer)

        def make(choices: ResolvedRun) -> Batches:
            return Batches(
                layouts,
                attention_setups(self.config, choices, keep=keep),
                self.device,
                layers=self.config.model.num_layers,
                offload=self.offload,
                tensor=self.tensor,
                router=self.router,
                prices=choices.stage_prices,
            )

        batches = make(choices)
        if choices.pattern is None:
            return batches, batches
        kernel, _ = choices.dense_kernel or (choices.kernel, "")
        return batches, make(replace(choices, kernel=kernel, pattern=None))


class TrainState:
    """This worker's shards of the weights and of the optimizer's state, and the counters.

    states: the optimizer with its copy of the weights. tokens: of the finished steps.
    nonfinite: latest steps in a row that were not finite. can_roll_back: whether a spike does.
    """

    def __init__(self, worker: Worker, loader: Loader[Any]) -> None:
        """Build the decoder on the meta device, shard it, then fill the shards."""
        config, environment, stage = worker.config, worker.environment, worker.stage
        self._worker, self._loader = worker, loader
        expert_mesh = None
        mesh = make_parameter_mesh(environment.dims, environment.device)
        if (group := worker.experts) is not None:
            expert_mesh = make_expert_mesh(environment.dims, group.size, environment.device)
        self.decoder: Decoder = parallelize(
            self._empty_decoder(),
            config,
            mesh,
            worker.choices.dtype,
            compile=worker.choices.compile,
            offload=worker.offload,
            tensor=worker.tensor,
            experts=group,
            expert_mesh=expert_mesh,
        )
        self.decoder.to_empty(device=worker.device)
        copies = layer_groups.copies if stage is None else stage.copies(self.decoder)
        self.states = (
            OffloadedOptimizer(self.decoder, self._empty_decoder(), config.optim)
            if config.optim.offload
            else DeviceOptimizer(self.decoder, config.optim, copies)
        )
        if isinstance(self.decoder, TransformersDecoder):
            self.decoder.load()
        elif config.train.init_from:
            local = environment.local_rank, environment.local_workers
            load_into(self.states.masters, config.train.init_from, *local)
        else:
            initialize(self.states.masters, config.seed, worker.device)
        self.states.send()
        layers = [int(name) for name, _ in self.decoder.layers.named_children()]
        self._learned = learned_state(worker.choices.pattern, config, layers, worker.device)
        self._has_learned = not config.sparsity.has_learned_state
        self._replicas = mesh.get_group() if self._learned and environment.dims.dp > 1 else None
        frozen = bool(config.train.lora.rank)  # those weights come from train.init_from
        self._options = StateDictOptions(ignore_frozen_params=frozen, strict=not frozen)
        self.spikes = SpikeWatch(config.run.spike_sigma)
        self._schedule = LearningRateSchedule.of(config)
        self.step = self.tokens = self.nonfinite = 0
        self.rollbacks: list[Rollback] = []
        self.can_roll_back = False
        self.earlier_fp8 = config.train.fp8  # of the steps before a resume

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.states.optimizer

    def _empty_decoder(self) -> Decoder:
        config, stage = self._worker.config, self._worker.stage
        factor = rope_factor(config.model.rope, config.seq)
        with torch.device("meta"):
            if config.model.is_foreign:
                return TransformersDecoder(config)
            return Decoder(config.model, factor, stages=() if stage is None else stage.stages)

    def set_rate(self) -> float:
        """Give the optimizer the learning rate of the next step, and return it."""
        rate = self._schedule.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        return rate

    def update(self, grad_norm: float) -> None:
        """Clip the gradients and run the optimizer."""
        clip = self._worker.config.optim.clip_norm
        self.states.step(clip / grad_norm if clip and grad_norm > clip else 1.0)

    def has_learned(self) -> bool:
        """Return whether a pattern that learns has learned. All workers call this together."""
        if not self._has_learned:
            untaught = torch.tensor(layers_without_learning(self._learned))
            dist.all_reduce(untaught, group=self._worker.host_group)
            self._has_learned = not untaught
        return self._has_learned

    def share_learned(self) -> None:
        """Average what the pattern has learned over the replicas, which see other sequences."""
        if self._replicas is not None:
            average(self._learned.values(), self._replicas)

    def checkpoint(self) -> dict[str, Any]:
        """Return everything that a checkpoint holds. Parameters and optimizer states are shards."""
        fresh = not self.optimizer.state
        model, optimizer = state_dict.get_state_dict(
            self.states.masters, self.optimizer, options=self._options
        )
        if fresh:
            # PyTorch creates the states by a step without gradients. That step must not count in
            # the bias correction of the first real step.
            for state in self.optimizer.state.values():
                state["step"].zero_()
        if self._worker.stage is not None:
            del optimizer["param_groups"]  # each stage has other parameters in them
        trainer = {
            "step": self.step,
            "tokens": self.tokens,
            "spikes": self.spikes.state(),
            "nonfinite": self.nonfinite,
            "fp8": self._worker.config.train.fp8,
            "rollbacks": [asdict(rollback) for rollback in self.rollbacks],
            **self._loader.state(),
        }
        learned = {LEARNED: self._learned} if self._learned else {}
        return {"model": model, "optimizer": optimizer, "trainer": trainer, **learned}

    def resume(self, checkpointer: Checkpointer) -> None:
        """Resume from the newest intact checkpoint, whatever number of workers wrote it.

        If the checkpoint is an import, which holds only weights, start at step 0.
        """
        if checkpointer.holds_only_weights():
            weights = self.checkpoint()
            del weights["optimizer"], weights["trainer"]
            checkpointer.load(weights)
            state_dict.set_model_state_dict(
                self.states.masters, weights["model"], options=self._options
            )
            self.states.send()
            return
        state = self.checkpoint()
        # The hyperparameters are those of `config`, and not those of the checkpoint.
        state["optimizer"].pop("param_groups", None)
        groups = state_dict.get_optimizer_state_dict(self.states.masters, self.optimizer)
        checkpointer.load(state)
        state_dict.set_state_dict(
            self.states.masters,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict={**state["optimizer"], "param_groups": groups["param_groups"]},
            options=self._options,
        )
        self.states.send()
        saved = state["trainer"]
        self.step, self.tokens = int(saved["step"]), int(saved["tokens"])
        self.earlier_fp8 = str(saved.get("fp8", self.earlier_fp8))
        self._loader.load_state(saved)
        self._has_learned = not self._worker.config.sparsity.has_learned_state
        self.can_roll_back = self._worker.config.train.rollback.limit > 0
        if "spikes" in saved:  # older checkpoints have none
            self.spikes.load_state(saved["spikes"])
            self.nonfinite = int(saved.get("nonfinite", 0))
            self.add_rollbacks(saved.get("rollbacks", ()))

    def add_rollbacks(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Leave out the data of further rollbacks. rows: `Rollback` as dicts, known ones too."""
        further = {documents.checked(Rollback, row) for row in rows}
        self.rollbacks = sorted({*self.rollbacks, *further}, key=lambda rollback: rollback.time)
        self._loader.leave_out((rollback.first, rollback.end) for rollback in self.rollbacks)
