"""`mtrain train`: train, or print the configuration or the plan. Its workers call `run_worker`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mtrain_cli import install_command
from mtrain_cli.commands.completion import complete_runs
from mtrain_cli.commands.options import (
    ConfigDir,
    Overrides,
    flag,
    option,
    warn,
    warn_of_unused_settings,
)
from mtrain_cli.config import plugins
from mtrain_cli.config.keys import show
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.config.suggest import no_such
from mtrain_cli.printable import one_line

if TYPE_CHECKING:
    from mtrain_cli.launch.environment import Environment
    from mtrain_cli.launch.run_dir import RunDir
    from mtrain_cli.training.loop import MakeCallback
    from mtrain_cli.training.progress import StepEstimate
    from mtrain_cli.training.run_plan import RunPlan

RESOLVED = "resolved.yaml"
AUTO = "auto"
SHOWN = 5  # run names in a message


def train(
    overrides: Overrides = None,
    cfg: Annotated[bool, flag("--cfg")] = False,
    dry_run: Annotated[bool, flag("--dry-run")] = False,
    no_data: Annotated[bool, flag("--no-data")] = False,
    resume: Annotated[str | None, option("RUN", complete=complete_runs)] = None,
    config_dir: ConfigDir = None,
) -> None:
    """Train a model, with each sequence shared by several workers.

    [bold]Examples[/bold]

      [cyan]mtrain train[/cyan]
          Train a small model on Python's own sources, on two CPU processes
      [cyan]mtrain train data=text data.path=~/books seq=16k train.steps=500[/cyan]
          Train the same model on your own text
      [cyan]mtrain train model=qwen3b seq=256k --dry-run[/cyan]
          Show whether the run fits, and which kernel and exchange would run and why
      [cyan]mtrain train recipe=stdlib_8k[/cyan]
          Use a recipe for model, data and schedule; you can override any key
      [cyan]mtrain train --resume my-run train.steps=1000[/cyan]
          Resume a run from its last checkpoint and train for longer

    On several nodes, start the same command line with `torchrun` or `srun`. If
    `torchrun --max-restarts=N` or a requeued SLURM job repeats the command, the run resumes from
    the last checkpoint. On one machine, mtrain restarts a run by itself: see run.restarts.

    Ctrl-C, SIGTERM and SIGHUP save a checkpoint and stop the run, with exit code 130 or 143.
    SIGUSR2 does, too, with exit code 0. SIGUSR1 saves a checkpoint, and the run goes on.

    Args:
        overrides: group=option and key=value, such as model=qwen3b seq=512k optim.lr=1e-4. `mtrain
            config list` lists all groups and keys.
        cfg: Print the composed configuration and exit.
        dry_run: Print the plan of the run, with memory, FLOP and time, and exit. Opens the data as
            the run does. The exit code is 1 if the run does not fit.
        no_data: With --dry-run, plan without the data, which may be on another machine.
        resume: Resume a run, given by its folder or its name under runs/. auto: resume the run that
            this command line started earlier, or start a new run if there is none.
        config_dir: Folder with your own option files, such as DIR/model/mine.yaml. mtrain
            searches it before the shipped groups.
    """
    words = list(overrides or ())
    if no_data and not dry_run:
        raise ConfigError("--no-data: a run needs its data; give it with --dry-run")
    plan = cfg or dry_run
    for watch in () if plan else plugins.watches():
        watch.sign_in()
    run_path = _run_to_resume(resume, words, config_dir)
    config = _configuration(words, config_dir, run_path, plan=plan, data_elsewhere=no_data)
    if cfg:
        from rich.text import Text

        from mtrain_cli.composition.compose import compose
        from mtrain_cli.config.resolved_file import annotated_yaml
        from mtrain_cli.console import Console

        warn_of_unused_settings(words, config, config_dir)
        console = Console(highlight=False, soft_wrap=True)
        for line, changed in annotated_yaml(config, compose()):
            console.print(Text(line, style="bold cyan" if changed else ""))
        return
    if dry_run:
        if run_path is None and config.train.init_from is not None:
            from mtrain_cli.model import huggingface, transformers_decoder

            folder = Path(config.train.init_from)
            if config.model.is_foreign:
                transformers_decoder.check_weights(folder)
            elif huggingface.has_weights(folder):  # its config.json is enough to plan a run
                huggingface.verify_sums(huggingface.HuggingFaceFolder(folder).path)
        _print_plan(config, words, config_dir, [] if no_data else _data_rows(config))
        return
    raise typer.Exit(_launch(config, words, run_path, config_dir, resume in (None, AUTO)))


def _configuration(
    overrides: list[str],
    config_dir: Path | None,
    run_path: Path | None,
    plan: bool = False,
    data_elsewhere: bool = False,
    counts: bool = True,
) -> Config:
    from mtrain_cli.composition import compose
    from mtrain_cli.config import resolved_file

    if run_path is None:
        config = compose.compose(overrides, config_dir, plan=plan, data_elsewhere=data_elsewhere)
        return with_epochs(config, overrides) if counts and not data_elsewhere else config
    from mtrain_cli.config.validate import keep_schedule
    from mtrain_cli.launch.job import current_job
    from mtrain_cli.launch.run_dir import RunDir

    saved, job = resolved_file.load(run_path / RESOLVED), current_job()
    step = RunDir(run_path).last_step() or 0
    config = with_epochs(compose.resume(saved, overrides, config_dir), overrides, resumed=True)
    return keep_schedule(
        saved, config, overrides, step, again=job is not None and job.started_again
    )


def with_epochs(config: Config, typed: Sequence[str] = (), resumed: bool = False) -> Config:
    """Return a configuration whose steps pass over the data `train.epochs` times.

    This opens the data, so text is tokenized. typed: a typed train.steps replaces epochs of a file,
    and a resumed run keeps its steps without a typed train.epochs.
    """
    from mtrain_cli.config.validate import problems

    given = {word.partition("=")[0] for word in typed} & {"train.steps", "train.epochs"}
    if config.train.epochs is None or (resumed and not given):
        return config
    if len(given) == 2:
        epochs = f"train.epochs={config.train.epochs:g}"
        raise ConfigError(f"{epochs}: replaces train.steps; leave one of them out")
    if "train.steps" in given:
        return config.changed(train={"epochs": None})
    from mtrain_cli.data.open_dataset import open_dataset

    require_data(config)
    sequences = config.train.epochs * len(open_dataset(config))
    steps = max(1, math.ceil(sequences / config.train.global_batch))
    config = config.changed(train={"steps": steps})
    if lines := problems(config.changed(train={"epochs": None})):
        raise ConfigError(*lines)
    return config


def _run_to_resume(resume: str | None, words: list[str], config_dir: Path | None) -> Path | None:
    """Return the folder of the run to resume, or None to start a new run."""
    if resume not in (None, AUTO):
        for places in plugins.places():
            resume = places.fetch_named(resume, words)
        return find_run(resume, "--resume ")
    from mtrain_cli.launch import run_dir
    from mtrain_cli.launch.job import current_job

    job = current_job()
    if resume is None and (job is None or not job.name):
        return None  # no job would start this command line again
    config = _configuration(words, config_dir, None, counts=False)
    unnamed = config.run.dir == config.run.name == "auto"
    if resume == AUTO and job is None and unnamed:
        raise ConfigError(
            "--resume auto: needs run.name=NAME or run.dir=DIR, so that the same command line "
            "finds its run again"
        )
    if resume is None and job is not None and not job.started_again:
        return None
    for places in plugins.places() if config.run.remote and not unnamed else ():
        places.fetch_run(config)
    started = run_dir.find_earlier_start(config, this_job=resume is None)
    return started.path if started else None


def find_run(run: str, option: str = "") -> Path:
    """Return the folder of a run, given by its path or its name under runs/, or raise ConfigError.

    option: what the user typed before the run.
    """
    from mtrain_cli.launch.run_dir import RUNS, list_runs

    for folder in (Path(run).expanduser(), RUNS / run):
        if (folder / RESOLVED).is_file():
            return folder
    names = [run_dir.path.name for run_dir in list_runs()]
    place = f"a folder with a {RESOLVED}" + ("" if names else "; there are no runs in runs/")
    raise ConfigError(f"{option}{run}: {no_such('run', run, names, place, SHOWN)}")


def _data_rows(config: Config) -> list[tuple[str, str]]:
    """Open the data as a run does. Return rows on them for the plan."""
    data = config.data
    if data.kind != "stdlib" and data.path is None and data.mix is None:
        return [("data", "not opened: data.path is not set, which the run needs")]
    from mtrain_cli.data.open_dataset import look_at_data
    from mtrain_cli.training.batch import describe_targets

    require_data(config)
    (first, *more), sample = look_at_data(config)
    rows = [("data", first), *(("", line) for line in more)]
    return rows if sample is None else [*rows, ("targets", describe_targets(config, sample))]


def _print_plan(
    config: Config, words: list[str], config_dir: Path | None, data: list[tuple[str, str]]
) -> None:
    from mtrain_cli.commands.data_output import print_targets
    from mtrain_cli.console import Console
    from mtrain_cli.data.open_dataset import first_conversation
    from mtrain_cli.simulation.scenario import estimate_step
    from mtrain_cli.training.dry_run import fits, render
    from mtrain_cli.training.planning import make_plan

    require_runnable(config, data=False)
    run_plan = make_plan(config)
    exchange, device = run_plan.exchange.name, run_plan.environment.device
    warn_of_unused_settings(words, config, config_dir, exchange=exchange, device=device)
    Console().print(render(run_plan, estimate_step(run_plan), data))
    if data and (first := first_conversation(config)) is not None:
        print_targets(Console(soft_wrap=True), first[0].ids, first[0].targets, first[1])
    if not fits(run_plan):
        raise typer.Exit(1)


def require_data(config: Config) -> None:
    """Raise ConfigError if the data are missing or of another kind, before workers start."""
    from mtrain_cli.config.data_kinds import KINDS
    from mtrain_cli.config.validate import require_manifest
    from mtrain_cli.data.open_dataset import require_columns
    from mtrain_cli.data.tokenizers import open_tokenizer

    require_manifest(config.data)
    require_columns(config)
    data = config.data
    if KINDS[data.kind].tokenizes and data.path is not None and data.mix is None:
        KINDS[data.kind].corpus(data, open_tokenizer(data.tokenizer))


def require_resolvable(config: Config, environment: Environment) -> None:
    """Raise ConfigError if CPUs cannot run the given kernel or exchange, before workers start.

    On GPUs, the workers check this, because it depends on the GPU.
    """
    topology = config.topology
    exchange = topology.exchange, topology.ulysses, topology.chunks, topology.circulates
    if environment.device == "cpu" and {config.train.kernel, *exchange} != {"auto"}:
        from mtrain_cli.training.resolution import resolve_run

        resolve_run(config, environment)


def require_labels(config: Config) -> None:
    """Raise ConfigError if the mask shows the next token to every query, so that no label counts.

    The last token of a sequence has its label in the next sequence, which no query sees.
    """
    if config.mask.keeps_causal_intervals:
        return
    from mtrain_cli.attention.mask_rule import MaskRule

    whole = MaskRule.of(config).undivided(config.seq, config.seq)
    if whole.shows_later_keys()[:-1].all():
        remedy = config.mask.remedy_without_labels(config.seq)
        raise ConfigError(
            f"mask.kind={config.mask.kind}: shows every query its next token, so no label counts "
            f"toward the loss. {remedy}; `mtrain profile`, `mtrain simulate` and "
            "`mtrain mask show` take any mask"
        )


def require_runnable(config: Config, *, data: bool = True) -> None:
    """Raise ConfigError for what workers would refuse, before they start. data: check them, too."""
    if data:
        require_data(config)  # before anything heavy is imported
    require_labels(config)
    if config.train.eval_tasks:
        from mtrain_cli.evaluation.in_training import require_tasks

        require_tasks(config)
    load_callbacks(config)
    for places in plugins.places() if config.run.remote else ():
        places.require_remote(config)


def load_callbacks(config: Config) -> list[MakeCallback]:
    """Load the entry points in `train.callbacks` and `run.loggers`.

    Raises ConfigError if one cannot be loaded.
    """
    callbacks: list[MakeCallback] = []
    train, loggers = config.train.callbacks, config.run.loggers
    for group, key, names in (
        (plugins.CALLBACKS, "train.callbacks", train), (plugins.TRACKERS, "run.loggers", loggers),
    ):  # fmt: skip
        for entry in plugins.installed(group) if names else ():
            if entry.name in names:
                try:
                    callbacks.append(entry.load())
                except Exception as error:
                    why = f"{plugins.what(entry)} cannot be loaded ({plugins.reason(error)})"
                    own = plugins.distribution(entry) == plugins.OWN_DISTRIBUTION
                    why += f"; {install_command('trackers')}" if own else ""
                    raise ConfigError(f"{key}={show(names)}: {why}") from error
    return callbacks


def run_worker(config: Config, run_dir: RunDir, environment: Environment, resume: bool) -> bool:
    """Train in a worker, as `training.loop.train`, with the callbacks that the settings ask for."""
    from mtrain_cli.training import loop

    callbacks: list[MakeCallback] = []
    if config.profile.every:
        # Imports pandas and pyarrow, which other runs do not need.
        from mtrain_cli.profiling.periodic_profile import TrainingProfile

        callbacks.append(TrainingProfile)
    if config.train.eval_tasks:
        from mtrain_cli.evaluation.in_training import TaskEvaluations

        callbacks.append(TaskEvaluations)
    # Only the first worker follows the run, so other nodes need no trackers.
    followed = config if environment.rank == 0 else config.changed(run={"loggers": ()})
    callbacks += load_callbacks(followed)
    if config.run.remote and environment.local_rank == 0:
        callbacks += [places.follow for places in plugins.places()]
    estimates = estimate if environment.device == "cuda" else None
    return loop.train(config, run_dir, environment, resume, callbacks, estimates)


def estimate(plan: RunPlan) -> StepEstimate:
    """Estimate a step for banner and status. A failure of the prediction must not stop a run."""
    from mtrain_cli.simulation.scenario import estimate_step
    from mtrain_cli.training.progress import StepEstimate

    try:
        return estimate_step(plan)
    except Exception as error:
        return StepEstimate(None, problem=f"{type(error).__name__}: {error}")


def _launch(
    config: Config,
    overrides: list[str],
    run_path: Path | None,
    config_dir: Path | None,
    by_itself: bool = True,
) -> int:
    """Start the workers. by_itself: mtrain found the run to resume, which nobody named."""
    require_runnable(config)
    from mtrain_cli.launch import run_dir
    from mtrain_cli.launch.local import WARNED, launch

    steps = config.train.steps
    for watch in plugins.watches():
        if run_path is not None:
            watch.leave_out(config, run_dir.RunDir(run_path))
    environment = checked_environment(config)
    warn_of_unused_settings(overrides, config, config_dir, device=environment.device)
    resume = False
    if run_path is None:
        run = run_dir.create(config, overrides)
    else:
        run = run_dir.open(run_path)
        run.require_steps_left(steps)
        if overrides:
            run = run.rewrite(config, overrides)
        if not (resume := run.has_checkpoint() or not by_itself):
            # It was lost before its first checkpoint, and the command must not fail for ever.
            warn([f"{run.path}: has no checkpoint yet; the run starts again from step 0"])
    code = launch(run, environment, resume=resume, config=config)
    # After a warning, a script goes on to the next job. A study must not go on to the next cell.
    return 0 if code == WARNED and not run_dir.study_command(run.path) else code


def checked_environment(config: Config) -> Environment:
    """Return the environment of a run that this machine can run, before its folder is created."""
    from mtrain_cli.launch.environment import resolve_environment

    environment = resolve_environment(config)
    require_resolvable(config, environment)
    return environment


def train_new_run(config: Config) -> Path:
    """Train a new run on this machine, and return its folder.

    Raises ConfigError if it cannot run here, and RunError if training failed or was stopped.
    """
    from mtrain_cli.launch import run_dir
    from mtrain_cli.launch.failures import RunError
    from mtrain_cli.launch.local import launch

    config = with_epochs(config)
    require_runnable(config)
    environment = checked_environment(config)
    run = run_dir.create(config, [])
    try:
        code = launch(run, environment, resume=False, config=config)
    finally:
        run.release()
    if code:
        raise RunError(one_line(f"{run.path}: training ended with exit code {code}"))
    return run.path
