"""What every worker of `mtrain eval` runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from mtrain_cli.config.schema import Config
from mtrain_cli.evaluation.other_kinds import Evaluator, find
from mtrain_cli.evaluation.request import EvaluationRequest
from mtrain_cli.evaluation.runner import STOPPED, Runner, StoppedError
from mtrain_cli.inference.answers import report
from mtrain_cli.launch.environment import Environment
from mtrain_cli.launch.failures import RunError
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.launch.stop_request import StopFlag

TARGET = "mtrain_cli.evaluation.worker:run"


def run(_config: Config, run_dir: RunDir, environment: Environment, _resume: bool) -> bool:
    """Evaluate on one worker. Return whether a stop request ended it early."""
    request, configs = EvaluationRequest.load(run_dir.path)
    flag = StopFlag(run_dir)
    try:
        evaluate(make_runner(request, configs, environment, stop=flag.requested), environment)
    except StoppedError:
        if environment.rank == 0 and environment.launcher != "mtrain":
            report([STOPPED])  # no command goes on after a rank of a job
        return True
    return False


def make_runner(
    request: EvaluationRequest,
    configs: Sequence[Config],
    environment: Environment,
    *,
    stop: Callable[[], bool] = lambda: False,
    tasks: Any = None,
) -> Evaluator:
    """Return what evaluates a request. tasks: see `OtherKind.check`."""
    if (other := find(request.kind)) is not None:
        return other.runner(request, configs, environment, stop, tasks=tasks)
    return Runner(request, configs, environment, stop)


def evaluate(runner: Evaluator, environment: Environment) -> None:
    """Run an evaluation.

    Raises:
        ConfigError: a sample does not fit the memory, or the folder has results of another model.
        RunError: the GPU ran out of memory.
    """
    try:
        runner.run()
    except torch.OutOfMemoryError as error:
        reason = str(error).splitlines()[0]
        raise RunError(
            f"rank {environment.rank} ran out of GPU memory ({reason}). Give a smaller --length or "
            "more topology.workers. The samples so far are kept."
        ) from error
