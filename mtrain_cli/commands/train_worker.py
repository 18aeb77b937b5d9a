"""What every worker of `mtrain train` runs: the training loop with the callbacks that are set."""

from __future__ import annotations

from mtrain_cli.config import plugins
from mtrain_cli.config.keys import show
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.launch.environment import Environment
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.training import loop
from mtrain_cli.training.run_plan import RunPlan
from mtrain_cli.training.step_estimate import StepEstimate


def train(config: Config, run_dir: RunDir, environment: Environment, resume: bool) -> bool:
    """Train as `training.loop.train` does, with the callbacks that the settings ask for."""
    on_gpu = environment.device == "cuda"
    callbacks = load_callbacks(config)
    return loop.train(config, run_dir, environment, resume, callbacks, estimate if on_gpu else None)


def load_callbacks(config: Config) -> list[loop.MakeCallback]:
    """Load the callbacks that the settings ask for. Raise ConfigError if one cannot be loaded."""
    callbacks: list[loop.MakeCallback] = []
    if config.profile.every:
        # Imports pandas and pyarrow, which other runs do not need.
        from mtrain_cli.profiling.periodic_profile import TrainingProfile

        callbacks.append(TrainingProfile)
    if config.train.eval_tasks:
        from mtrain_cli.evaluation.in_training import TaskEvaluations

        callbacks.append(TaskEvaluations)
    for entry in plugins.installed(plugins.CALLBACKS):
        if entry.name in config.train.callbacks:
            try:
                callbacks.append(entry.load())
            except Exception as error:
                given = f"train.callbacks={show(config.train.callbacks)}"
                why = plugins.reason(error)
                raise ConfigError(
                    f"{given}: {plugins.what(entry)} cannot be loaded ({why})"
                ) from error
    return callbacks


def estimate(plan: RunPlan) -> StepEstimate:
    """Estimate a step for banner and status. A failure of the prediction must not stop a run."""
    from mtrain_cli.simulation.scenario import estimate_step

    try:
        return estimate_step(plan)
    except Exception as error:
        return StepEstimate(None, problem=f"{type(error).__name__}: {error}")
