"""Make the plan of a run: on this machine or for absent GPUs, before a run or in its workers."""

from __future__ import annotations

from dataclasses import replace

import torch

from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import with_count
from mtrain_cli.launch.environment import Environment, host_memory
from mtrain_cli.parallel.collectives import share
from mtrain_cli.training.expert_traffic import require_experts_fit
from mtrain_cli.training.hardware import Hardware
from mtrain_cli.training.memory import size
from mtrain_cli.training.memory_search import require_fit, with_auto_memory
from mtrain_cli.training.resolution import ResolvedRun
from mtrain_cli.training.run_plan import RunPlan


def make_plan(config: Config, hardware: Hardware | None = None) -> RunPlan:
    """Plan a run, including `train.memory=auto`.

    hardware: the devices of the run; None for those that `topology.device` names:
        - cpu: the CPU of this machine.
        - cuda: GPUs like those of this machine. On a machine without GPUs, absent GPUs.
        - auto: as for cuda, on a machine with GPUs. On other machines, the absent GPUs of
          `topology.cluster` if that key names a cluster, otherwise the CPU. If the CPU cannot run
          the configuration and `topology.workers` is a number, that number of absent GPUs.

    Raises:
        ConfigError: sizes are inconsistent, or the configured kernel does not support the run.
    """
    plan = RunPlan.on(hardware or _hardware_for(config), config)
    require_experts_fit(plan.config, plan.dims, plan.dtype_bytes, plan.environment.device)
    return plan if config.train.memory == "manual" else with_auto_memory(plan)


def _hardware_for(config: Config) -> Hardware:
    topology = config.topology
    if torch.cuda.is_available() or topology.device == "cpu":
        return Hardware.here(topology.device)
    why: str | None = "this machine has no GPU"
    if topology.device == "cuda":
        why = f"topology.device=cuda, but {why}"
    elif topology.cluster == "auto":
        why = _refusal_here(config) if topology.workers != "auto" else None
    return Hardware.here() if why is None else Hardware.assumed(topology, why)


def _refusal_here(config: Config) -> str | None:
    """Return why this machine's CPU cannot run a configuration, or None if the CPU can."""
    try:
        plan = RunPlan.on(Hardware.here(), config)
    except ConfigError as error:
        return f"this machine has no GPU, and its CPU refuses {error.problems[0]}"
    if plan.fits:
        return None
    needs = f"{with_count(plan.dims.workers, 'CPU worker')} would need {size(plan.host_bytes)}"
    has = f"this machine has {host_memory() / 2**30:,.0f} GiB for this process"
    return f"this machine has no GPU, and {needs}, but {has}"


def checked_plan(config: Config, environment: Environment, choices: ResolvedRun) -> RunPlan:
    """Plan a run in its workers. All ranks call this and get the same plan.

    Raises:
        ConfigError: the run cannot fit. The message is one line that says what would fit.
    """
    plan = RunPlan.of(config, environment, Hardware.here(environment.device), choices)
    require_experts_fit(config, plan.dims, plan.dtype_bytes, environment.device)
    if environment.device == "cuda" and environment.dims.workers > 1:
        # GPUs of one job may differ by some MiB. Plan for the smallest, so that ranks agree.
        everyone: list[list[int]] = share((plan.hardware.memory, plan.host_share))
        smallest = replace(plan.hardware, memory=min(gpu for gpu, _ in everyone))
        plan = replace(plan, hardware=smallest, host_share=min(host for _, host in everyone))
    if config.train.memory == "auto":
        plan = with_auto_memory(plan)
    require_fit(plan)
    return plan
