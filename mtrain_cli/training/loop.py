"""The training loop of every worker: steps, metrics, checkpoints and evaluations."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mtrain_cli.config.schema import Config
from mtrain_cli.launch import progress_record
from mtrain_cli.launch.environment import Environment
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.launch.run_state import StateReporter
from mtrain_cli.launch.stop_request import StopFlag
from mtrain_cli.training.banner import banner
from mtrain_cli.training.checkpointer import Checkpointer, CheckpointError
from mtrain_cli.training.evaluation import EvaluationWriter, evaluate
from mtrain_cli.training.metrics import MetricsWriter, read_metrics
from mtrain_cli.training.out_of_memory import explain_out_of_memory
from mtrain_cli.training.progress import TrainingProgress
from mtrain_cli.training.trainer import NonFiniteError, Trainer

if TYPE_CHECKING:
    from mtrain_cli.profiling.periodic_profile import TrainingProfile


def train(config: Config, run_dir: RunDir, environment: Environment, resume: bool) -> bool:
    """Train to `config.train.steps`, from the newest checkpoint of `run_dir` if `resume`.

    Every worker calls this, inside a process group. Returns whether training stopped early, on
    request.
    """
    with explain_out_of_memory(config, environment, run_dir) as run_context:
        trainer = run_context.begin(Trainer(config, environment))
        reports: list[str] = []
        checkpointer = Checkpointer(
            run_dir.checkpoints, config.train.keep_checkpoints, report=reports.append
        )
        if resume:
            trainer.resume(checkpointer)
        return _train(trainer, checkpointer, run_dir, resume, reports)


def _train(
    trainer: Trainer,
    checkpointer: Checkpointer,
    run_dir: RunDir,
    resume: bool,
    reports: Sequence[str],
) -> bool:
    config, environment = trainer.config, trainer.environment
    first = environment.rank == 0
    reporter = _reporter(trainer, run_dir) if first else None
    progress = TrainingProgress(
        config.train.steps,
        trainer.step,
        first,
        log=run_dir.log,
        log_every=config.run.log_every,
        reporter=reporter,
    )
    writer = (
        MetricsWriter(run_dir.path, tensorboard=config.run.tensorboard, start_step=trainer.step)
        if first
        else None
    )
    with progress:
        if not environment.restarts:
            step = trainer.step if resume else None
            progress.show(
                banner(trainer.plan, run_dir.path, trainer.dataset.describe(), resumed=step)
            )
        for report in reports:
            progress.message(report, warning=True)
        if resume:
            restart_note = (
                f", restart {environment.restarts}, on {environment.workers} workers"
                if environment.restarts
                else ""
            )
            progress.message(f"resumed from the checkpoint of step {trainer.step}{restart_note}")
        if first and environment.restarts:
            progress.add_earlier_steps(read_metrics(run_dir.path))
        nothing_left = trainer.step >= config.train.steps
        try:
            ended = _loop(
                trainer, checkpointer, progress, writer, StopFlag(run_dir, environment), run_dir
            )
        finally:
            trainer.close()
            if writer is not None:
                writer.close()
        if nothing_left:
            ended = (
                f"nothing left to train: step {trainer.step} has reached "
                f"train.steps={config.train.steps}. Set a larger train.steps to continue."
            )
        if reporter is not None:
            reporter.end("finished" if trainer.step >= config.train.steps else "stopped")
        progress.summary(ended, files=[str(run_dir.path)], commands=_next_commands(run_dir, config))
    return trainer.step < config.train.steps


def _reporter(trainer: Trainer, run_dir: RunDir) -> StateReporter:
    steps, launcher = trainer.config.train.steps, trainer.environment.launcher
    records = progress_record.record_pattern(run_dir.logs, launcher)
    return StateReporter(
        run_dir,
        launcher=launcher,
        steps=steps,
        step=trainer.step,
        workers=trainer.places,
        records=records,
    )


def _next_commands(run_dir: RunDir, config: Config) -> list[tuple[str, str]]:
    """Return labelled commands that continue from the newest checkpoint; empty without one."""
    step = run_dir.last_step()
    if step is None:
        return []
    longer = f" train.steps={2 * config.train.steps}" if step >= config.train.steps else ""
    export = ["mtrain", "checkpoint", "export", str(run_dir.path), f"{run_dir.path.name}-hf"]
    return [("resume", run_dir.resume_command + longer), ("export", shlex.join(export))]


def _loop(
    trainer: Trainer,
    checkpointer: Checkpointer,
    progress: TrainingProgress,
    writer: MetricsWriter | None,
    stop_flag: StopFlag,
    run_dir: RunDir,
) -> str:
    """Run steps until the end or a stop request; return how it ended, for the user."""
    config = trainer.config
    saved = trainer.step if checkpointer.latest() == trainer.step else -1
    stop = False
    profile = _profile(trainer, run_dir)
    evaluations = Evaluations(trainer, run_dir, progress)
    evaluations.after_step(trainer.step == 0)
    while trainer.step < config.train.steps and not stop:
        if profile is not None:
            profile.before_step()
        started = time.perf_counter()
        try:
            result = trainer.train_step(stop_flag.requested())
        except NonFiniteError as non_finite:
            # All workers raise this together, so the save in progress may finish.
            _wait(checkpointer, progress)
            remedy = "Try a lower optim.lr or more optim.warmup_steps."
            fallback = checkpointer.describe_fallback()
            raise NonFiniteError(f"{non_finite}; {fallback}. {remedy}") from non_finite
        except Exception:
            if trainer.lacks_data:
                # All workers raise together here, too.
                _wait(checkpointer, progress)
            raise
        seconds = time.perf_counter() - started
        stop = result.stop
        metrics = trainer.metrics(result, seconds)
        if writer is not None:
            problem = writer.write(metrics)
            if problem:
                progress.message(problem, warning=True)
        progress.step(metrics)
        for warning in result.warnings:
            progress.message(warning, warning=True)
        if profile is not None:
            profile.after_step(seconds)
            _show_profile_warning(profile, progress)
        evaluations.after_step(trainer.step >= config.train.steps, skip=stop)
        every = config.train.checkpoint_every
        if every and trainer.step % every == 0 and trainer.step < config.train.steps and not stop:
            saved = _save(trainer, checkpointer, progress)
    finish = stop or config.train.checkpoint_at_end
    if finish and saved != trainer.step:
        saved = _save(trainer, checkpointer, progress)
    error = _wait(checkpointer, progress)
    # Finish the profile after the state is saved: it can take a while.
    if profile is not None:
        recorded = profile.finish()
        if recorded:
            progress.message(recorded)
        _show_profile_warning(profile, progress)
    if finish and error:
        raise CheckpointError(
            f"could not save the state of step {trainer.step}; {checkpointer.describe_fallback()}"
        )
    return (
        f"trained to step {trainer.step}"
        if trainer.step >= config.train.steps
        else f"stopped on request after step {trainer.step}, saved"
    )


class Evaluations:
    """Measure the held-out loss at the start and end of training and every `train.eval_every`."""

    def __init__(self, trainer: Trainer, run_dir: RunDir, progress: TrainingProgress) -> None:
        self._trainer, self._progress = trainer, progress
        first = trainer.environment.rank == 0 and bool(trainer.held_out)
        self._writer = EvaluationWriter(run_dir.path, trainer.step) if first else None
        # A run that resumes at the step of its last evaluation has done that one.
        rows = self._writer.kept if self._writer is not None else []
        same = bool(rows) and (rows[-1]["step"], rows[-1].get("sequences")) == (
            trainer.step,
            len(trainer.held_out),
        )
        done = torch.tensor(int(same))
        dist.all_reduce(done, group=trainer.host_group)
        self._done = trainer.step if done else -1

    def after_step(self, at_end: bool, *, skip: bool = False) -> None:
        """Evaluate if due.

        Args:
            at_end: training starts or ends here.
            skip: a stop was requested, and the user waits for the checkpoint.
        """
        trainer, every = self._trainer, self._trainer.config.train.eval_every
        if (
            skip
            or not trainer.held_out
            or trainer.step == self._done
            or not (at_end or (every and trainer.step % every == 0))
        ):
            return
        progress_record.note("evaluation", progress_record.SEVERAL)
        evaluation = evaluate(trainer)
        self._progress.message(evaluation.line())
        problem = self._writer.write(evaluation) if self._writer is not None else None
        if problem:
            self._progress.message(problem, warning=True)


def _profile(trainer: Trainer, run_dir: RunDir) -> TrainingProfile | None:
    """Return the periodic profile, or None if no step is recorded."""
    if not trainer.config.profile.every:
        return None
    from mtrain_cli.profiling.periodic_profile import TrainingProfile

    return TrainingProfile(trainer, run_dir)


def _show_profile_warning(profile: TrainingProfile, progress: TrainingProgress) -> None:
    problem = profile.take_problem()
    if problem:
        progress.message(problem, warning=True)


def _save(trainer: Trainer, checkpointer: Checkpointer, progress: TrainingProgress) -> int:
    """Start a checkpoint of the current step and return that step.

    If the previous save failed, warn and go on.
    """
    try:
        checkpointer.save(trainer.step, trainer.state())
    except CheckpointError as error:
        progress.message(str(error), warning=True)
    progress.message(f"saving the checkpoint of step {trainer.step} in the background")
    return trainer.step


def _wait(checkpointer: Checkpointer, progress: TrainingProgress) -> bool:
    try:
        checkpointer.wait()
    except CheckpointError as error:
        progress.message(str(error), warning=True)
        return True
    return False
