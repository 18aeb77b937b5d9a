"""What every worker of `mtrain train` runs: the training loop with the callbacks that are set."""

from __future__ import annotations

from mtrain_cli.config.schema import Config
from mtrain_cli.launch.environment import Environment
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.training import loop


def train(config: Config, run_dir: RunDir, environment: Environment, resume: bool) -> bool:
    """Train as `training.loop.train` does, with the callbacks that the settings ask for.

    With `profile.every`, also record every N-th step. With `train.eval_tasks`, evaluate tasks.
    """
    callbacks: list[loop.MakeCallback] = []
    if config.profile.every:
        # Imports pandas and pyarrow, which other runs do not need.
        from mtrain_cli.profiling.periodic_profile import TrainingProfile

        callbacks.append(TrainingProfile)
    if config.train.eval_tasks:
        from mtrain_cli.evaluation.in_training import TaskEvaluations

        callbacks.append(TaskEvaluations)
    return loop.train(config, run_dir, environment, resume, callbacks)
