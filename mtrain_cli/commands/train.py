"""`mtrain train`: compose, then train, print, or plan."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtrain_cli.commands.completion import complete_overrides, complete_runs
from mtrain_cli.commands.options import warn_of_idle
from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from mtrain_cli.config.schema import Config

RUNS = Path("runs")
RESOLVED = "resolved.yaml"
AUTO = "auto"
SHOWN = 5  # names of runs in a message


def train(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OVERRIDES",
            help="group=option and key=value, such as model=qwen3b seq=512k optim.lr=1e-4. `mtrain config list` shows them all.",
            autocompletion=complete_overrides,
            show_default=False,
        ),
    ] = None,
    cfg: Annotated[
        bool, typer.Option("--cfg", help="Print the composed configuration and stop.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Print what would run, with memory and FLOP per worker, and stop; exit code 1 if it does not fit.",
        ),
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="Go on from the last checkpoint of a run: its folder, or its name under runs/. auto: of the run that this very line "
            "began before, if there is one.",
            autocompletion=complete_runs,
        ),
    ] = None,
    config_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Your own groups, such as DIR/model/mine.yaml; searched before mtrain's.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Train a model, with each sequence spread over several workers.

    [bold]Examples[/bold]

      [cyan]mtrain train[/cyan]
          a small model on your Python's own source code; 2 processes on a CPU
      [cyan]mtrain train data=text data.path=~/books seq=16k train.steps=500[/cyan]
          the same model on your own text
      [cyan]mtrain train model=qwen3b seq=256k --dry-run[/cyan]
          does it fit, which kernel and exchange would run, and why
      [cyan]mtrain train recipe=stdlib_8k[/cyan]
          a recipe: model, data, schedule together; any key of it can be given anew
      [cyan]mtrain train --resume my-run train.steps=1000[/cyan]
          go on from the last checkpoint, for longer

    On several nodes start the same line by `torchrun` or `srun`. With `torchrun --max-restarts=N`, or in a job that SLURM requeues, the
    line goes on from the last checkpoint by itself when it is started again. On one machine mtrain does so without either: run.restarts.

    Ctrl-C, SIGTERM and SIGHUP save and stop; the exit code is then 130 or 143, that of a finished training 0.
    """
    words = list(overrides or ())
    run_path = _run_to_resume(resume, words, config_dir)
    config = _configuration(words, config_dir, run_path, plan=cfg or dry_run)
    if cfg:
        warn_of_idle(words, config, config_dir)
        _print_configuration(config)
        return
    if dry_run:
        _print_plan(config, words, config_dir)
        return
    raise typer.Exit(_launch(config, words, run_path, config_dir))


def _configuration(
    overrides: list[str], config_dir: Path | None, run_path: Path | None, plan: bool = False
) -> Config:
    from mtrain_cli.config import compose

    if run_path is None:
        return compose.compose(overrides, config_dir, plan=plan)
    from mtrain_cli.config.resumed_schedule import with_its_schedule
    from mtrain_cli.launch.job import current_job
    from mtrain_cli.launch.run_dir import RunDir

    saved, job = compose.load(run_path / RESOLVED), current_job()
    step = RunDir(run_path).last_step() or 0
    config = compose.resume(saved, overrides, config_dir)
    return with_its_schedule(
        saved, config, overrides, step, again=job is not None and job.started_again
    )


def _run_to_resume(resume: str | None, words: list[str], config_dir: Path | None) -> Path | None:
    """The folder of the run that is to go on; None for a new one.

    Raises:
        ConfigError: there is no such run, or ``auto`` has no way to tell which.
    """
    if resume not in (None, AUTO):
        return find_run(resume, "--resume ")
    from mtrain_cli.launch import run_dir
    from mtrain_cli.launch.job import current_job

    job = current_job()
    if resume is None and (job is None or not job.name):
        return None  # nothing starts this line again
    config = _configuration(words, config_dir, None)
    named = config.run.dir != "auto" or config.run.name != "auto"
    if resume == AUTO and job is None and not named:
        raise ConfigError(
            "--resume auto: needs run.name=NAME or run.dir=FOLDER, so that the same line finds its run again"
        )
    if resume is None and job is not None and not job.started_again:
        return None
    found = run_dir.begun(config, this_job=resume is None)
    return found.path if found else None


def find_run(run: str, option: str = "") -> Path:
    """The folder of a run, given by its path or by its name under runs/.

    Raises:
        ConfigError: neither holds a resolved.yaml.
    """
    from mtrain_cli.config.suggest import did_you_mean

    for folder in (Path(run).expanduser(), RUNS / run):
        if (folder / RESOLVED).is_file():
            return folder
    files = sorted(RUNS.glob(f"*/{RESOLVED}"), key=lambda file: file.stat().st_mtime, reverse=True)
    names = [file.parent.name for file in files if not file.parent.is_symlink()]
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    newest = (
        f"; runs here, newest first: {', '.join(names[:SHOWN])}{more}"
        if names
        else "; there are no runs in runs/"
    )
    hint = did_you_mean(run, names) or newest
    raise ConfigError(f"{option}{run}: no run of that name, and no folder with a {RESOLVED}{hint}")


def _print_configuration(config: Config) -> None:
    from rich.text import Text

    from mtrain_cli.config.compose import compose
    from mtrain_cli.config.listing import annotated_yaml
    from mtrain_cli.console import Console

    console = Console(highlight=False, soft_wrap=True)
    for line, changed in annotated_yaml(config, compose()):
        console.print(Text(line, style="bold cyan" if changed else ""))


def _print_plan(config: Config, words: list[str], config_dir: Path | None) -> None:
    from mtrain_cli.console import Console
    from mtrain_cli.training.dry_run import fits, render
    from mtrain_cli.training.run_plan import make_plan

    found = make_plan(config)
    warn_of_idle(
        words, config, config_dir, exchange=found.exchange.name, device=found.environment.device
    )
    Console().print(render(found))
    if not fits(found):
        raise typer.Exit(1)


def _launch(
    config: Config, overrides: list[str], run_path: Path | None, config_dir: Path | None
) -> int:
    from mtrain_cli.config import compose
    from mtrain_cli.config.validate import require_listed

    require_listed(config.data)  # before anything heavy is imported
    from mtrain_cli.launch import run_dir
    from mtrain_cli.launch.environment import resolve_environment
    from mtrain_cli.launch.local import launch

    environment = resolve_environment(
        config
    )  # first: sizes that do not fit this machine leave no folder behind
    warn_of_idle(overrides, config, config_dir, device=environment.device)
    if run_path is None:
        return launch(run_dir.create(config, overrides), environment, resume=False, config=config)
    run = run_dir.open(run_path)
    run.require_steps_left(config.train.steps)
    if overrides and config != compose.load(run.resolved):
        run = run.rewrite(config, overrides)
    return launch(run, environment, resume=True, config=config)
