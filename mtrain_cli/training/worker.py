"""One worker of a training run: its settings, its device and its communicators."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist

from mtrain_cli.config.schema import Config
from mtrain_cli.launch.environment import Environment
from mtrain_cli.parallel.activation_offload import ActivationOffload
from mtrain_cli.parallel.exchange import Exchange, make_chosen_exchange
from mtrain_cli.parallel.layer_groups import make_expert_group, make_tensor_group
from mtrain_cli.parallel.mesh import make_context_group
from mtrain_cli.training.batch import Batches, Layouts, attention_setups
from mtrain_cli.training.flops import attention_kept
from mtrain_cli.training.pipeline import make_stage
from mtrain_cli.training.planning import checked_plan
from mtrain_cli.training.resolution import ResolvedRun, resolve_run
from mtrain_cli.training.router_batches import RouterBatches


class Worker:
    """What a worker has before it has a model or data. All ranks make theirs together.

    config: the configuration with the memory settings of the plan.
    host_group: all ranks, in host memory.
    tensor, experts, stage, offload, router: None if the run does not have them.
    """

    def __init__(self, config: Config, environment: Environment) -> None:
        self.environment, dims = environment, environment.dims
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
        choice = self.choices.exchange
        group = make_context_group(
            environment.rank,
            dims,
            self.device,
            timeout,
            per_node=choice.per_node,
            heads=choice.heads,
            channels=choice.channels,
        )
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
        """Return the makers of the batches of all steps and of the dense first steps of a run."""
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
            )

        batches = make(choices)
        if choices.dense_kernel is None:
            return batches, batches
        return batches, make(replace(choices, kernel=choices.dense_kernel[0], pattern=None))
