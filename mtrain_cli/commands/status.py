"""`mtrain status`: show the state of a run, from any terminal that can read its folder."""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from mtrain_cli.commands.completion import complete_runs
from mtrain_cli.commands.options import Json, argument, flag
from mtrain_cli.config.documents import json_text
from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from rich.console import RenderableType

    from mtrain_cli.launch.run_status import RunStatus
    from mtrain_cli.reporting.table import Table

_PIPED = 400  # columns, if the output is not a terminal
LOSSES = 200  # number of latest losses that the curve shows
_COLORS = {
    "running": "green",
    "finished": "green",
    "stalled": "yellow",
    "restarting": "yellow",
    "failed": "red",
    "lost": "red",
}


def status(
    run: Annotated[str | None, argument("RUN", complete_runs)] = None,
    every: Annotated[bool, flag("--all")] = False,
    as_json: Json = False,
) -> None:
    """Show the state of a run.

    Shows step, loss, speed, time left, last checkpoint, workers, restarts, warnings, and whether
    the run is alive. Reads only the run's folder, so it works from any terminal, and from other
    machines that share the disk. Another machine notices a crash after a minute.

    [bold]Examples[/bold]

      [cyan]mtrain status[/cyan]
          Show the run that is active here, or the last one
      [cyan]mtrain status --all[/cyan]
          List all runs under runs/
      [cyan]mtrain status my-run --json | jq .step[/cyan]
          Print one field for a script

    Args:
        run: Folder of a run, or its name under runs/; by default the run that is active, or the
            last one.
        every: Print one line per run under runs/, newest first.
        as_json: Print one JSON object per line and run, for scripts.
    """
    from mtrain_cli.commands.train import find_run
    from mtrain_cli.launch import run_status
    from mtrain_cli.launch.run_dir import RunDir, list_runs

    if every and run is not None:
        raise ConfigError(f"--all: shows every run under runs/; give it without {run}")
    if run is not None:
        chosen = [RunDir(find_run(run).resolve())]
    else:
        chosen = list_runs() if every else [run_status.find_latest_run()]
    if not chosen:
        raise ConfigError("--all: there are no runs in runs/")

    runs = [run_status.read_status(run_dir) for run_dir in chosen]
    if as_json:
        for status_of_run in runs:
            values = dataclasses.asdict(status_of_run) | {"alive": status_of_run.alive}
            del values["losses"]
            print(json_text((values.pop("written") or {}) | values))
    else:
        from mtrain_cli.console import Console
        from mtrain_cli.reporting.terminal import limit, print_table

        console = Console(highlight=False)
        if limit(console) is None:
            console.width = _PIPED  # unknown width: cut nothing
        if every:
            print_table(console, _run_table(runs))
        else:
            console.print(_sheet(runs[0]))


def _run_table(runs: list[RunStatus]) -> Table:
    """Return a row per run. Names are never broken: users copy them into the next command."""
    from rich.text import Text

    from mtrain_cli.reporting.table import Column, Table, count, fixed

    def now(name: str) -> Callable[[RunStatus], float | None]:
        return lambda run: getattr(run.written, name, None) if run.alive else None

    def color(what: str) -> Text:
        return Text(what, style=_COLORS.get(what, ""))

    columns = [
        Column("run", lambda run: Path(run.folder).name, words=True),
        Column("state", lambda run: run.what, color, words=True),
        Column("step", lambda run: f"{run.step}/{run.steps}"),
        Column("loss", lambda run: run.losses[-1] if run.losses else None, fixed(4), missing=""),
        Column("tokens/s/worker", now("tokens_per_second_per_gpu"), count, missing=""),
        Column("left", now("seconds_left"), _duration, missing=""),
        Column("saved", lambda run: run.checkpoint and run.checkpoint.step, missing="none"),
    ]
    return Table("", columns, runs)


def _sheet(run: RunStatus) -> RenderableType:
    from rich.text import Text

    from mtrain_cli.console import grid

    folder, here = Path(run.folder), Path.cwd()
    shown = str(folder.relative_to(here) if folder.is_relative_to(here) else folder)
    state = Text(run.what, style=f"bold {_COLORS.get(run.what, '')}".strip())
    state.append(about_state(run), style="not bold default")
    return grid([("run", shown), ("state", state), *status_rows(run)])


def about_state(run: RunStatus) -> str:
    """Return what follows the name of the state, such as ``; last step 2 s ago``."""
    parts = [run.detail]
    if run.alive and run.since_step is not None and run.step:
        parts.append(f"last step {_duration(run.since_step)} ago")
    if run.alive:
        parts.append(run.holder)
    elif run.written is not None:
        parts.append(_ago(run.written.time))
    return "".join(f"; {part}" for part in parts if part)


def status_rows(run: RunStatus) -> list[tuple[str, str]]:
    """Return (label, text) of each line below the state; a line without a label continues one."""
    written, checkpoint = run.written, "none yet" if run.alive else "none"
    if run.checkpoint is not None:
        behind = run.step - run.checkpoint.step
        lost = f", {behind} step{'s' * (behind > 1)} behind" if behind > 0 else ""
        checkpoint = f"step {run.checkpoint.step:,}, {_duration(run.checkpoint.age)} ago{lost}"
    rows = [*_training_rows(run), ("checkpoint", checkpoint)]
    if written and written.workers:
        rows += _labeled("workers", _workers(written.workers))
    if run.restarts:
        last = run.restarts[-1]
        resumed = f"resumed from step {last.step}, on {last.workers} workers"
        lines = [f"{len(run.restarts)}, the last one {_ago(last.time)}: {last.reason}"]
        rows += _labeled("restarts", [*lines, f"stopped after step {last.reached}; {resumed}"])
    if run.rollbacks:
        count, latest = len(run.rollbacks), run.rollbacks[-1]
        lines = [f"{count}, the last one {_ago(latest.time)}:", latest.describe()]
        rows += _labeled("rollbacks", lines)
    if run.skipped:
        step, why = run.skipped[-1]
        rows.append(("skipped", f"{len(run.skipped)} updates lately, last of step {step}: {why}"))
    if written and written.warnings:
        when, text = written.warnings[-1]
        rows.append(("warnings", f"{len(written.warnings)}, the last one {_ago(when)}: {text}"))
    rows += _labeled("damaged", list(run.damaged))
    for label, notes in groupby(run.notes, key=lambda note: note[0]):
        rows += _labeled(label, [line for _, line in notes])
    rows += _labeled("where", [line.strip() for line in run.where])
    if not run.alive and run.what != "finished" and run.checkpoint is not None:
        from mtrain_cli.launch.run_dir import RunDir

        rows.append(("resume", RunDir(Path(run.folder)).resume_command))
    return rows


def _training_rows(run: RunStatus) -> Iterator[tuple[str, str]]:
    from mtrain_cli.training.progress import exact, sparkline

    written = run.written
    share = f", {run.step / run.steps:.0%}" if run.steps else ""
    left = norm = ""
    if written and run.alive and written.seconds_left is not None:
        left = f", {_duration(written.seconds_left)} left"
    if written and written.grad_norm is not None:
        norm = f", gradient norm {written.grad_norm:.2f}"
    yield "step", f"{run.step:,} of {run.steps:,}{share}{left}"
    if run.losses:
        curve = sparkline(run.losses[-LOSSES:], 24)
        yield "loss", f"{run.losses[-1]:.4f}{norm}  {curve}".rstrip()
    if written and written.tokens_per_second_per_gpu:
        on_gpus = all(", GPU " in place for place in written.workers)
        unit = f"tokens/s/{'GPU' if on_gpus and written.workers else 'worker'}"
        predicted = written.predicted_seconds
        of_predicted = f", {exact(predicted)} predicted" if predicted else ""
        seconds = f" ({written.seconds:.2f} s{of_predicted})" if written.seconds else ""
        yield "speed", f"{written.tokens_per_second_per_gpu:,.0f} {unit} in the last step{seconds}"
    if written and written.targets is not None:
        yield "targets", f"{written.targets:,} labels of the last step count toward the loss"
    if written and written.expert_load is not None:
        yield "experts", f"largest load {written.expert_load:.2f}x the mean in the last step"


def _ago(when: float) -> str:
    return f"{_duration(time.time() - when)} ago"


def _workers(places: tuple[str, ...]) -> list[str]:
    """Return a line per host with its ranks and devices."""
    lines, first = [], 0
    for host, members in groupby(places, key=lambda place: place.partition(", ")[0]):
        devices = [place.partition(", ")[2] for place in members]
        last = first + len(devices) - 1
        ranks = f"ranks {first} to {last}" if last > first else f"rank {first}"
        models = Counter(device.partition("(")[2].rstrip(")") or device for device in devices)
        counts = ", ".join(f"{number} x {model}" for model, number in models.items())
        lines.append(f"{ranks} on {host}: {counts}")
        first = last + 1
    return lines


def _labeled(label: str, lines: list[str]) -> list[tuple[str, str]]:
    return [(label if number == 0 else "", line) for number, line in enumerate(lines)]


def _duration(seconds: float | None) -> str:
    from mtrain_cli.training.progress import format_duration

    if seconds is not None and seconds < 60:
        return f"{max(0.0, seconds):.0f} s"
    return format_duration(seconds)
