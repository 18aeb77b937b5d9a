"""The training loop of every worker: steps, callbacks and checkpoints."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

import torch
import torch.distributed as dist

from mtrain_cli.config import plugins
from mtrain_cli.config.schema import Config
from mtrain_cli.launch import progress_record
from mtrain_cli.launch.environment import Environment
from mtrain_cli.launch.rollbacks import read_events, write_rollbacks
from mtrain_cli.launch.run_dir import RunDir, study_command
from mtrain_cli.launch.run_status import StateReporter
from mtrain_cli.launch.stop_request import StopFlag
from mtrain_cli.parallel.collectives import share
from mtrain_cli.printable import one_line
from mtrain_cli.records.metrics import MetricsWriter
from mtrain_cli.sparsity.index_maps import FIRST_UPDATES
from mtrain_cli.training.batch import describe_targets
from mtrain_cli.training.callback import (
    Callback,
    FinishedStep,
    PeriodicEvaluation,
    StragglerWatch,
)
from mtrain_cli.training.checkpointer import Checkpointer, CheckpointError
from mtrain_cli.training.conversion import record_begin
from mtrain_cli.training.dry_run import banner
from mtrain_cli.training.evaluation import EvaluationWriter, evaluate
from mtrain_cli.training.out_of_memory import explain_out_of_memory
from mtrain_cli.training.progress import StepEstimate, TrainingProgress
from mtrain_cli.training.run_plan import RunPlan
from mtrain_cli.training.step import LossSpikeError, NonFiniteError
from mtrain_cli.training.trainer import Trainer

MakeCallback = Callable[[Trainer, RunDir, Callable[..., None]], Callback]
"""Function that makes a callback from (trainer, run folder, `TrainingProgress.message`)."""
Estimate = Callable[[RunPlan], StepEstimate]
"""Function that estimates a step of a plan, such as `simulation.scenario.estimate_step`."""


def train(
    config: Config,
    run_dir: RunDir,
    environment: Environment,
    resume: bool,
    more_callbacks: Sequence[MakeCallback] = (),
    estimate: Estimate | None = None,
) -> bool:
    """Train until step `config.train.steps`. Return whether a stop request ended training early.

    Every worker calls this function, inside a process group. resume: start from the newest
    checkpoint. estimate: estimates a step, for banner and status.
    """
    first = environment.rank == 0
    config = config.changed(run={"dir": str(run_dir.path)})  # the folder may have moved
    with explain_out_of_memory(config, environment, run_dir) as run_context:
        trainer = run_context.begin(Trainer(config, environment))
        config = trainer.config
        trainer.data.check(resumed=resume)
        reports: list[str] = []
        checkpointer = Checkpointer(
            run_dir.checkpoints,
            config.train.keep_checkpoints,
            report=reports.append,
            keep_every=config.train.keep_every,
        )
        if resume:
            rows = [asdict(rollback) for rollback in read_events(run_dir)[1]] if first else []
            trainer.train_state.add_rollbacks(share(rows, trainer.host_group)[0])
            trainer.resume(checkpointer)
        if first:
            record_begin(config, run_dir.path)
        estimated = estimate(trainer.plan) if estimate is not None and first else None
        steps, every = config.train.steps, config.run.log_every
        reporter = _reporter(trainer, run_dir, estimated) if first else None
        progress = TrainingProgress(
            steps, trainer.step, first, log=run_dir.log, log_every=every, reporter=reporter
        )
        metrics = MetricsLog(trainer, run_dir, progress)
        with progress:
            _announce(trainer, run_dir, progress, resume, reports, estimated)
            nothing_left = trainer.step >= steps
            trainer.callbacks.append(metrics)
            if first:
                warn = partial(progress.message, warning=True)
                records = [partial(w.straggler, run_dir, trainer) for w in plugins.watches()]
                watch = StragglerWatch(
                    config.run.straggler, environment.device, trainer.places, warn, records
                )
                trainer.callbacks.append(watch)
            try:
                for make in more_callbacks:
                    trainer.callbacks.append(make(trainer, run_dir, progress.message))
                trainer.callbacks.append(Evaluations(trainer, run_dir, progress))
                ended = _loop(trainer, checkpointer, progress, run_dir)
            except Exception as error:
                for callback in trainer.callbacks:
                    try:
                        callback.on_error(error)
                    except Exception as failed:
                        error.add_note(f"{type(callback).__name__}.on_error failed: {failed}")
                raise
            finally:
                trainer.close()
                metrics.release()
            if nothing_left:
                ended = (
                    f"nothing left to train: step {trainer.step} has reached train.steps={steps}. "
                    "Set a larger train.steps to continue."
                )
            if reporter is not None:
                reporter.end("finished" if trainer.step >= steps else "stopped")
            commands = _next_commands(run_dir, config)
            progress.summary(ended, files=[str(run_dir.path)], commands=commands)
        return trainer.step < steps


def _announce(
    trainer: Trainer,
    run_dir: RunDir,
    progress: TrainingProgress,
    resume: bool,
    reports: Sequence[str],
    estimate: StepEstimate | None,
) -> None:
    """Show the banner, the reports of loading a checkpoint, and the step where training resumes."""
    first, restarts = trainer.environment.rank == 0, trainer.environment.restarts
    if first and not restarts:
        about = trainer.dataset.describe(), describe_targets(trainer.config, trainer.dataset[0])
        step = trainer.step if resume else None
        page = banner(trainer.plan, run_dir.path, *about, resumed=step, estimate=estimate)
        progress.show(page)
    for report in reports:
        progress.message(report, warning=True)
    if resume:
        line = f"resumed from the checkpoint of step {trainer.step}"
        if restarts:
            line += f", restart {restarts}, on {trainer.environment.dims.workers} workers"
        now, before = trainer.config.train.fp8, trainer.train_state.earlier_fp8
        if now != before:
            line += f"; train.fp8={now} from here on, train.fp8={one_line(before)} before"
        progress.message(line)


def _reporter(trainer: Trainer, run_dir: RunDir, estimate: StepEstimate | None) -> StateReporter:
    launcher = trainer.environment.launcher
    return StateReporter(
        run_dir,
        launcher=launcher,
        steps=trainer.config.train.steps,
        step=trainer.step,
        workers=trainer.places,
        chosen=trainer.plan.chosen,
        predicted_seconds=estimate.seconds[0] if estimate and estimate.seconds else None,
        records=progress_record.record_pattern(run_dir.logs, launcher),
    )


def _next_commands(run_dir: RunDir, config: Config) -> list[tuple[str, str]]:
    """Return the label and command of each use of the newest checkpoint. Empty if there is none."""
    step = run_dir.last_step()
    if step is None:
        return []
    # A study goes on by itself after a finished run, and deletes the checkpoint.
    if study_command(run_dir.path):
        return [("resume", run_dir.resume_command)] if step < config.train.steps else []
    longer = f" train.steps={2 * config.train.steps}" if step >= config.train.steps else ""
    export = ["mtrain", "checkpoint", "export", str(run_dir.path), f"{run_dir.path.name}-hf"]
    return [("resume", run_dir.resume_command + longer), ("export", shlex.join(export))]


def _loop(
    trainer: Trainer, checkpointer: Checkpointer, progress: TrainingProgress, run_dir: RunDir
) -> str:
    """Run steps until the last step or a stop request. Return a line on how training ended."""
    config, callbacks, stop_flag = trainer.config, trainer.callbacks, StopFlag(run_dir)
    saved = trainer.step if checkpointer.latest() == trainer.step else -1
    stop = save = False
    for callback in callbacks:
        callback.before_training()
    while trainer.step < config.train.steps and not stop:
        for callback in callbacks:
            callback.before_step()
        started = time.perf_counter()
        try:
            result = trainer.train_step(stop_flag.requested(), stop_flag.save_requested())
        except Exception as error:
            # Let the save in progress finish if all workers stop together. After any other error,
            # some workers may be gone, and the save would never finish.
            is_bad_loss = isinstance(error, NonFiniteError | LossSpikeError)
            if is_bad_loss or trainer.data.lacking:
                _wait(checkpointer, progress)
            if not is_bad_loss:
                raise
            state, most = trainer.train_state, config.train.rollback.limit
            if state.can_roll_back and len(state.rollbacks) < most:
                progress.message(_roll_back(trainer, checkpointer, run_dir, error), warning=True)
                saved = trainer.step
                continue
            reached = f"train.rollback.limit={most} is reached; " * state.can_roll_back
            remedy = "Try a lower optim.lr or more optim.warmup_steps."
            fallback = checkpointer.describe_fallback()
            raise type(error)(f"{error}; {reached}{fallback}. {remedy}") from error
        stop, save = result.stop, result.save
        metrics = trainer.metrics(result, time.perf_counter() - started)
        finished = FinishedStep(result, metrics, trainer.step >= config.train.steps)
        for callback in callbacks:
            callback.after_step(finished)
        every = config.train.checkpoint_every
        due = save or (every and trainer.step % every == 0)
        if due and not finished.last and not stop:
            stop_flag.answer_saves()
            saved = _save(trainer, checkpointer, progress)
    finish = stop or save or config.train.checkpoint_at_end
    if finish and saved != trainer.step:
        saved = _save(trainer, checkpointer, progress)
    save_failed = _wait(checkpointer, progress)
    # Close callbacks after the save, since completing a profile can take a while.
    for callback in callbacks:
        callback.close()
    if finish and save_failed:
        raise CheckpointError(
            f"could not save the state of step {trainer.step}; {checkpointer.describe_fallback()}"
        )
    if trainer.step >= config.train.steps:
        return f"trained to step {trainer.step}"
    return f"stopped on request after step {trainer.step}, saved"


def _roll_back(trainer: Trainer, checkpointer: Checkpointer, run: RunDir, error: Exception) -> str:
    """Go back to the newest checkpoint, record this, tell the callbacks, and return a line."""
    rollback, known = trainer.roll_back(checkpointer, str(error)), trainer.train_state.rollbacks
    if trainer.environment.rank == 0:
        write_rollbacks(run, known)
    for callback in trainer.callbacks:
        callback.on_rollback(trainer.step)
    most = trainer.config.train.rollback.limit
    return f"rollback {len(known)} of at most {most}: {rollback.describe()}"


class MetricsLog(Callback):
    """Show every step and its warnings. The first worker also writes the step to metrics.jsonl."""

    def __init__(self, trainer: Trainer, run_dir: RunDir, progress: TrainingProgress) -> None:
        self._trainer, self._progress, self._writer = trainer, progress, None
        if trainer.environment.rank == 0:
            self._writer = MetricsWriter(run_dir.path, start_step=trainer.step)

    def before_step(self) -> None:
        step, dense = self._trainer.step, self._trainer.config.sparsity.dense_steps
        if step >= dense and not self._trainer.train_state.has_learned():
            self._progress.message(
                f"step {step + 1} begins with {FIRST_UPDATES} updates of each layer's learned "
                "scores, so it takes longer than others"
            )

    def after_step(self, step: FinishedStep) -> None:
        problem = self._writer.write(step.metrics) if self._writer is not None else None
        if problem:
            self._progress.message(problem, warning=True)
        self._progress.step(step.metrics)
        for warning in step.result.warnings:
            self._progress.message(warning, warning=True)

    def on_rollback(self, step: int) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = MetricsWriter(self._writer.path.parent, start_step=step)

    def release(self) -> None:
        """Close the file, however training ended."""
        if self._writer is not None:
            self._writer.close()


class Evaluations(PeriodicEvaluation):
    """Measures the held-out loss."""

    def __init__(self, trainer: Trainer, run_dir: RunDir, progress: TrainingProgress) -> None:
        super().__init__(trainer)
        self._progress = progress
        first = trainer.environment.rank == 0 and bool(trainer.held_out)
        self._writer = EvaluationWriter(run_dir.path, trainer.step) if first else None
        # A run that resumes at the step of its last evaluation must not repeat it.
        last = self._writer.kept[-1:] if self._writer is not None else []
        this = trainer.step, len(trainer.held_out)
        done = torch.tensor(int([(row["step"], row.get("sequences")) for row in last] == [this]))
        dist.all_reduce(done, group=trainer.host_group)
        self._done = trainer.step if done else -1

    def on_rollback(self, step: int) -> None:
        if self._writer is not None:
            self._writer = EvaluationWriter(self._writer.path.parent, step)

    def evaluate(self, *, due: bool) -> None:
        trainer = self._trainer
        if not trainer.held_out or trainer.step == self._done or not due:
            return
        progress_record.note("evaluation", progress_record.SEVERAL)
        evaluation = evaluate(trainer)
        self._progress.message(evaluation.line())
        problem = self._writer.write(evaluation) if self._writer is not None else None
        if problem:
            self._progress.message(problem, warning=True)


def _save(trainer: Trainer, checkpointer: Checkpointer, progress: TrainingProgress) -> int:
    """Start to save a checkpoint. Return its step. Warn if the previous save failed."""
    try:
        checkpointer.save(trainer.step, trainer.state())
    except CheckpointError as error:
        progress.message(str(error), warning=True)
    trainer.train_state.can_roll_back = trainer.config.train.rollback.limit > 0
    progress.message(f"saving the checkpoint of step {trainer.step} in the background")
    for callback in trainer.callbacks:
        callback.on_checkpoint(trainer.step)
    return trainer.step


def _wait(checkpointer: Checkpointer, progress: TrainingProgress) -> bool:
    """Wait for the save in progress. If the save failed, show a warning and return True."""
    try:
        checkpointer.wait()
    except CheckpointError as error:
        progress.message(str(error), warning=True)
        return True
    return False
