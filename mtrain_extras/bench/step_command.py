"""`mtrain profile step`: break down the time of one training step."""

from __future__ import annotations

from typing import Annotated

import typer

from mtrain_cli.commands.options import (
    MOST_STEPS,
    Overrides,
    SummaryAsJson,
    bounded,
    flag,
    print_summary,
    warn_of_unused_settings,
    with_measurement_folder,
)
from mtrain_cli.commands.train import require_data, require_resolvable
from mtrain_cli.config.schema import Config, ConfigError


def step(
    overrides: Overrides = None,
    warmup: Annotated[int | None, bounded(1, MOST_STEPS)] = None,
    steps: Annotated[int, bounded(1, MOST_STEPS)] = 1,
    trace: Annotated[bool, flag("--trace/--no-trace")] = True,
    as_json: SummaryAsJson = False,
) -> None:
    """Break down one training step into attention, index, matrix products, loss, optimizer,
    exposed communication and idle time.

    Trains like `mtrain train` with the same settings, but without checkpoints, evaluation and
    profiles, and records the step after --warmup on every rank. Each instant counts for one part,
    chosen by the kernel that runs on a GPU or by the operator that runs on a CPU, so the parts add
    up to the step. The records are saved in measurements/, for `mtrain report`.

    [bold]Examples[/bold]

      [cyan]mtrain profile step[/cyan]
          Record the default model, on all GPUs or two CPU processes
      [cyan]mtrain profile step model=qwen3b seq=64k sparsity=vertical_slash --warmup 3[/cyan]
          Record Qwen2.5-3B with a dynamic index, on all GPUs of this machine

    Args:
        warmup: Number of training steps before the first recorded step; by default
            sparsity.dense_steps + 2. These steps also give the step time without recording, except
            the first step, dense steps and the first sparse step, if other steps remain.
        steps: Number of recorded steps; the report shows the means.
        trace: Save the trace of every rank, for Perfetto and chrome://tracing.
    """
    from mtrain_cli.composition.compose import compose
    from mtrain_cli.launch import run_dir
    from mtrain_cli.launch.environment import resolve_environment
    from mtrain_cli.launch.local import launch

    words = list(overrides or ())
    config = with_measurement_folder(compose(words), "step")
    warmup, dense = _warmup(config, warmup, steps)
    require_data(config)
    environment = resolve_environment(config)
    require_resolvable(config, environment)
    warn_of_unused_settings(words, config, device=environment.device)
    # Imported late: it takes seconds, and mistakes are reported above.
    from mtrain_cli.records import record_files
    from mtrain_extras.bench.step import TARGET, StepProfilePlan

    run = run_dir.create(config, words)
    StepProfilePlan(warmup, min(warmup, dense + 2), steps, trace, quiet=as_json).save(run)
    code = launch(run, environment, resume=False, target=TARGET, config=config, saves=False)
    summary = run.path / record_files.SUMMARY
    if code in (130, 143) and not summary.is_file() and run.discard():
        typer.echo("stopped before the recorded step ended: nothing was saved", err=True)
    print_summary(run, as_json)
    raise typer.Exit(code)


def _warmup(config: Config, warmup: int | None, steps: int) -> tuple[int, int]:
    """Return the numbers of steps before the first recorded step, and of dense steps."""
    # The step that is timed without recording must resemble the recorded ones.
    dense = config.sparsity.dense_steps
    if warmup is None:
        warmup = dense + 2
    elif warmup <= dense:
        raise ConfigError(
            f"--warmup {warmup}: with sparsity.dense_steps={dense}, steps 1 to {dense} are dense; "
            f"give --warmup {dense + 1} or more, or sparsity.dense_steps=0"
        )
    if warmup + steps > config.train.steps:
        raise ConfigError(
            f"--warmup {warmup} --steps {steps}: need {warmup + steps} training steps, more than "
            f"train.steps={config.train.steps}; give fewer, or train.steps={warmup + steps}"
        )
    return warmup, dense
