"""The state of a training run: what steps change and checkpoints hold."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint import state_dict

from mtrain_cli.data.loader import Loader
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.huggingface import load_into
from mtrain_cli.model.parallelize import initialize, parallelize
from mtrain_cli.model.rope import rope_factor
from mtrain_cli.parallel import tensor_group
from mtrain_cli.parallel.expert_group import make_expert_mesh
from mtrain_cli.parallel.mesh import make_parameter_mesh
from mtrain_cli.training.checkpointer import Checkpointer
from mtrain_cli.training.optimizer import DeviceOptimizer, LearningRateSchedule
from mtrain_cli.training.optimizer_offload import OffloadedOptimizer
from mtrain_cli.training.watch import SpikeWatch
from mtrain_cli.training.worker import Worker


class TrainState:
    """This worker's shards of the weights and of the optimizer's state, and the counters.

    states: the optimizer with its copy of the weights.
    step, tokens: numbers of finished steps and of their tokens.
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
        copies = tensor_group.copies if stage is None else stage.copies(self.decoder)
        self.states = (
            OffloadedOptimizer(self.decoder, self._empty_decoder(), config.optim)
            if config.optim.offload
            else DeviceOptimizer(self.decoder, config.optim, copies)
        )
        if config.train.init_from:
            local = environment.local_rank, environment.local_workers
            load_into(self.states.masters, config.train.init_from, *local)
        else:
            initialize(self.states.masters, config.seed, worker.device)
        self.states.send()
        self.spikes = SpikeWatch(config.run.spike_sigma)
        self._schedule = LearningRateSchedule.of(config)
        self.step = self.tokens = 0

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.states.optimizer

    def _empty_decoder(self) -> Decoder:
        config, stage = self._worker.config, self._worker.stage
        factor = rope_factor(config.model.rope, config.seq)
        with torch.device("meta"):
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

    def checkpoint(self) -> dict[str, Any]:
        """Return everything that a checkpoint holds. Parameters and optimizer states are shards."""
        fresh = not self.optimizer.state
        model, optimizer = state_dict.get_state_dict(self.states.masters, self.optimizer)
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
            **self._loader.state(),
        }
        return {"model": model, "optimizer": optimizer, "trainer": trainer}

    def resume(self, checkpointer: Checkpointer) -> None:
        """Resume from the newest intact checkpoint, whatever number of workers wrote it.

        If the checkpoint is an import, which holds only weights, start at step 0.
        """
        if checkpointer.holds_only_weights():
            weights = {"model": self.checkpoint()["model"]}
            checkpointer.load(weights)
            state_dict.set_model_state_dict(self.states.masters, weights["model"])
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
        )
        self.states.send()
        saved = state["trainer"]
        self.step, self.tokens = int(saved["step"]), int(saved["tokens"])
        self._loader.load_state(saved)
        if "spikes" in saved:  # older checkpoints have none
            self.spikes.load_state(saved["spikes"])
