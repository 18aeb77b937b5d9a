"""`mtrain profile step`: break down the time of one training step."""

from __future__ import annotations

from typing import Annotated

import typer

from mtrain_cli.commands.completion import complete_overrides
from mtrain_cli.commands.options import MOST_STEPS, warn_of_unused_settings, with_measurement_folder
from mtrain_cli.commands.profile import app
from mtrain_cli.config.schema import ConfigError


@app.command("step")
def step(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OVERRIDES",
            help="As in `mtrain train`.",
            autocompletion=complete_overrides,
            show_default=False,
        ),
    ] = None,
    warmup: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Training steps before the first recorded one; by default sparsity.dense_steps + "
            "2. The step time comes from those that resemble the recorded one: not the first step, "
            "dense steps before sparse ones, or the first sparse step, unless there is no other.",
            min=1,
            max=MOST_STEPS,
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Number of recorded steps; the figures are their mean per step.",
            min=1,
            max=MOST_STEPS,
        ),
    ] = 1,
    trace: Annotated[
        bool,
        typer.Option(
            "--trace/--no-trace",
            help="Save the trace of every rank, for Perfetto and chrome://tracing.",
        ),
    ] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON only.")
    ] = False,
) -> None:
    """Break down one training step into attention, index, matrix products, loss, optimizer,
    exposed communication and idle time.

    Trains like `mtrain train` with the same settings, but without checkpoints, evaluation and
    profiles, and records the step after --warmup on every rank. Each instant belongs to one part,
    by kernels on GPUs and by operators on CPUs, so the parts add up to the step. The records are
    saved in measurements/, for `mtrain report`.

    [bold]Examples[/bold]

      [cyan]mtrain profile step[/cyan]
          Record the default model, on all GPUs or two CPU processes
      [cyan]mtrain profile step model=qwen3b seq=64k sparsity=vertical_slash --warmup 3[/cyan]
          Record Qwen2.5-3B with a dynamic index, on all GPUs of this machine
      [cyan]mtrain profile step model=qwen3b seq=64k --steps 3 --no-trace --json[/cyan]
          Print the mean of three steps, for scripts
    """
    from mtrain_cli.config.compose import compose
    from mtrain_cli.config.validate import require_manifest
    from mtrain_cli.launch import run_dir
    from mtrain_cli.launch.environment import resolve_environment
    from mtrain_cli.launch.local import launch

    words = list(overrides or ())
    config = with_measurement_folder(compose(words), "step")
    # The step that is timed without recording must resemble the recorded ones.
    dense = (config.sparsity.dense_steps or 0) if config.sparsity.pattern != "dense" else 0
    if warmup is None:
        warmup = dense + 2
    elif warmup <= dense:
        raise ConfigError(
            f"--warmup {warmup}: sparsity.dense_steps={dense} leaves the steps up to {dense} "
            f"dense; give --warmup {dense + 1} or more, or sparsity.dense_steps=0"
        )
    if warmup + steps > config.train.steps:
        raise ConfigError(
            f"--warmup {warmup} --steps {steps}: are {warmup + steps} steps, and "
            f"train.steps={config.train.steps} ends first; give fewer, "
            f"or train.steps={warmup + steps}"
        )
    require_manifest(config.data)
    environment = resolve_environment(config)
    warn_of_unused_settings(words, config, device=environment.device)
    # Imported late: it takes seconds, and mistakes are reported above.
    from mtrain_cli.profiling.step_profile import TARGET, StepProfilePlan
    from mtrain_cli.records import record_files

    run = run_dir.create(config, words)
    StepProfilePlan(warmup, min(warmup, dense + 2), steps, trace, quiet=as_json).save(run)
    code = launch(run, environment, resume=False, target=TARGET, config=config)
    summary = run.path / record_files.SUMMARY
    if code in (130, 143) and not summary.is_file() and run.discard():
        typer.echo("stopped before the recorded step ended: nothing was saved", err=True)
    if as_json and summary.is_file():
        typer.echo(summary.read_text().rstrip())
    raise typer.Exit(code)
