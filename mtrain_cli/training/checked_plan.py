"""Plan a run in its workers, and refuse a run that cannot fit."""

from __future__ import annotations

from dataclasses import replace

from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.sizes import format_size
from mtrain_cli.launch.environment import Environment
from mtrain_cli.parallel.collectives import share
from mtrain_cli.training.memory_remedies import PLAN_FOR_GPUS
from mtrain_cli.training.resolution import ResolvedRun
from mtrain_cli.training.run_plan import (
    RunPlan,
    needed_here,
    plan_resolved,
    require_fit,
    with_auto_memory,
)


def checked_plan(config: Config, environment: Environment, choices: ResolvedRun) -> RunPlan:
    """Plan a run, including `train.memory=auto`. All ranks call this and get the same plan.

    Raises:
        ConfigError: the run cannot fit the GPUs or the machine. The message is one line that says
            what would fit.
    """
    _check_host_memory(config, environment, choices)
    plan = plan_resolved(config, environment, choices)
    if environment.device == "cuda" and environment.dims.workers > 1:
        # GPUs of one job may differ by some MiB. Plan for the smallest, so that ranks agree.
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


def _check_host_memory(config: Config, environment: Environment, choices: ResolvedRun) -> None:
    """Refuse CPU workers that need more memory than the machine has.

    Such workers would slow the whole machine down, whereas a full GPU raises an error at once.
    """
    if environment.device != "cpu" or config.train.memory == "auto":
        return
    plan = plan_resolved(config, environment, choices)
    if not plan.fits:
        workers = environment.local_workers
        raise ConfigError(
            f"seq={format_size(config.seq)}: {workers} CPU worker{'s' * (workers > 1)} of "
            f"model={config.model.name} would need {needed_here(plan)}. "
            "`mtrain train ... --dry-run` shows where the memory goes and what would fit; add "
            f"{PLAN_FOR_GPUS}"
        )
