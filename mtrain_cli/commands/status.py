"""`mtrain status`: how a run stands, from any terminal that sees its folder."""

from __future__ import annotations

import dataclasses
import json
import time
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mtrain_cli.commands.completion import complete_runs
from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType
    from rich.text import Text

    from mtrain_cli.console import Console
    from mtrain_cli.launch.run_status import RunStatus

WATCH_S = 2.0
_PIPED = 400  # columns
LOSSES = 200  # latest ones in the curve
_COLOURS = {
    "running": "green",
    "finished": "green",
    "stalled": "yellow",
    "restarting": "yellow",
    "failed": "red",
    "lost": "red",
}


def status(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="RUN",
            help="Folder of a run, or its name under runs/; by default the one that runs, or ran last.",
            autocompletion=complete_runs,
            show_default=False,
        ),
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="A line for each run under runs/, the newest first.")
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on showing it until the run ends, or Ctrl-C.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object a run and line, for scripts.")
    ] = False,
) -> None:
    """Show how a run stands: step, loss, speed, time left, last checkpoint, workers, restarts, warnings, and whether it lives.

    It only reads the run's folder, so it works from any terminal, and from another machine on the same disk (there, a run that dies without
    a word is known to be lost after a minute).

    [bold]Examples[/bold]

      [cyan]mtrain status[/cyan]
          the run that runs here, or ran last
      [cyan]mtrain status my-run --watch[/cyan]
          again every two seconds, until it ends
      [cyan]mtrain status --all[/cyan]
          all runs under runs/
      [cyan]mtrain status my-run --json | jq .step[/cyan]
          for a script
    """
    from mtrain_cli.commands.train import find_run
    from mtrain_cli.launch import run_status as statuses
    from mtrain_cli.launch.run_dir import RunDir

    if every and run is not None:
        raise ConfigError(f"--all: shows every run under runs/; give it without {run}")
    if not every:
        chosen = [
            RunDir(find_run(run).resolve()) if run is not None else statuses.find_latest_run()
        ]
    else:
        chosen = statuses.list_runs()
        if not chosen:
            raise ConfigError("--all: there are no runs in runs/")

    def look() -> list[RunStatus]:
        return [statuses.read_status(one) for one in chosen]

    if as_json:
        _print_json(look, watch)
    elif watch:
        _watch(look, every)
    else:
        from mtrain_cli.console import Console

        console = Console(highlight=False)
        width = _width(console)
        if width is None:
            console.width = _PIPED  # nobody said how wide: nothing is cut
        console.print(_shown(look(), every, width))


def _width(console: Console) -> int | None:
    from mtrain_cli.reporting.terminal_width import limit

    return limit(console)


def _print_json(look: Any, watch: bool) -> None:
    while True:
        found = look()
        for one in found:
            print(json.dumps(_plain(one)), flush=True)
        if not watch or not any(one.alive for one in found):
            return
        time.sleep(WATCH_S)


def _plain(found: RunStatus) -> dict[str, Any]:
    values = dataclasses.asdict(found)
    written = values.pop("written") or {}
    values.pop("losses")
    return {
        **{name: value for name, value in written.items() if name not in ("step", "steps")},
        **values,
        "alive": found.alive,
    }


def _watch(look: Any, every: bool) -> None:
    from rich.live import Live

    from mtrain_cli.console import Console

    console = Console(highlight=False)
    found = look()
    try:
        with Live(
            _shown(found, every, _width(console)), console=console, auto_refresh=False
        ) as live:
            while any(one.alive for one in found):
                time.sleep(WATCH_S)
                found = look()
                live.update(_shown(found, every, _width(console)), refresh=True)
    finally:
        if not console.is_terminal:  # Live ends its last line on a terminal only
            console.line()


def _shown(found: list[RunStatus], every: bool, width: int | None) -> RenderableType:
    return _runs(found, width) if every else _sheet(found[0])


_COLUMNS = ("run", "state", "step", "loss", "tok/s/worker", "left", "saved")


def _runs(found: list[RunStatus], width: int | None) -> RenderableType:
    """One line a run. A name is what the next command needs: it is never broken, and stands on a line of its own where there is no room."""
    from rich import box
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    rows = [_cells(one) for one in found]
    widths = [max(len(name), *(len(row[i]) for row in rows)) for i, name in enumerate(_COLUMNS)]
    if width is None or sum(widths) + 3 * len(widths) <= width:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for name in _COLUMNS:
            table.add_column(
                name, justify="left" if name in ("run", "state") else "right", no_wrap=True
            )
        for row in rows:
            table.add_row(*row)
        return table

    def line(cells: Sequence[Text]) -> Text:
        state, *numbers = zip(cells, widths[1:], strict=True)
        joined = Text("  ").append_text(state[0]).append(" " * (state[1] - len(state[0])))
        for cell, wide in numbers:
            joined.append(" " * (2 + wide - len(cell))).append_text(cell)
        return joined

    head = line([Text(name, style="bold") for name in _COLUMNS[1:]])
    return Group(head, *(part for name, *cells in rows for part in (name, line(cells))))


def _cells(one: RunStatus) -> tuple[Text, ...]:
    """In the order of `_COLUMNS`."""
    from rich.text import Text

    written = one.written
    loss = (
        written.loss
        if written and written.loss is not None
        else one.losses[-1]
        if one.losses
        else None
    )
    return (
        Text(Path(one.folder).name),
        Text(one.what, style=_COLOURS.get(one.what, "")),
        Text(f"{one.step}/{one.steps}"),
        Text("" if loss is None else f"{loss:.4f}"),
        Text(
            f"{written.tokens_per_second_per_gpu:,.0f}"
            if written and written.tokens_per_second_per_gpu and one.alive
            else ""
        ),
        Text(
            _duration(written.seconds_left)
            if written and one.alive and written.seconds_left is not None
            else ""
        ),
        Text(f"{one.checkpoint.step}" if one.checkpoint else "none"),
    )


def _sheet(found: RunStatus) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    folder = Path(found.folder)
    table.add_row(
        "run",
        Text(str(folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder)),
    )
    head = Text(found.what, style=f"bold {_COLOURS.get(found.what, '')}".strip())
    table.add_row(
        "state",
        head.append("".join(f"; {part}" for part in _state_parts(found)), style="not bold default"),
    )
    for label, text in _rows(found):
        table.add_row(label, Text(text))
    return table


def _state_parts(found: RunStatus) -> list[str]:
    parts = [found.detail] if found.detail else []
    if found.alive and found.since_step is not None and found.step:
        parts.append(f"last step {_duration(found.since_step)} ago")
    if found.alive and found.holder:
        parts.append(found.holder)
    if not found.alive and found.written is not None:
        parts.append(f"{_duration(time.time() - found.written.time)} ago")
    return parts


def _rows(found: RunStatus) -> list[tuple[str, str]]:
    from mtrain_cli.training.progress import sparkline

    written = found.written
    share = f", {found.step / found.steps:.0%}" if found.steps else ""
    left = (
        f", {_duration(written.seconds_left)} left"
        if written and found.alive and written.seconds_left is not None
        else ""
    )
    rows = [("step", f"{found.step:,} of {found.steps:,}{share}{left}")]
    if found.losses:
        norm = (
            f", gradient norm {written.grad_norm:.2f}"
            if written and written.grad_norm is not None
            else ""
        )
        rows.append(
            (
                "loss",
                f"{found.losses[-1]:.4f}{norm}  {sparkline(found.losses[-LOSSES:], 24)}".rstrip(),
            )
        )
    if written and written.tokens_per_second_per_gpu:
        seconds = f", {written.seconds:.2f} s a step" if written.seconds else ""
        rows.append(("speed", f"{written.tokens_per_second_per_gpu:,.0f} tokens/s/worker{seconds}"))
    if found.checkpoint is None:
        rows.append(("checkpoint", "none yet" if found.alive else "none"))
    else:
        behind = found.step - found.checkpoint.step
        lost = f", {behind} step{'s' * (behind > 1)} behind" if behind > 0 else ""
        rows.append(
            (
                "checkpoint",
                f"step {found.checkpoint.step:,}, {_duration(found.checkpoint.age)} ago{lost}",
            )
        )
    if written and written.workers:
        rows += _labelled("workers", _workers(written.workers))
    if found.restarts:
        last = found.restarts[-1]
        rows.append(
            (
                "restarts",
                f"{len(found.restarts)}, the last one {_duration(time.time() - last.time)} ago: {last.reason}",
            )
        )
        rows.append(
            (
                "",
                f"after step {last.reached}; from the checkpoint of step {last.step}, on {last.workers} workers",
            )
        )
    if written and written.warnings:
        when, text = written.warnings[-1]
        rows.append(
            (
                "warnings",
                f"{len(written.warnings)}, the last one {_duration(time.time() - when)} ago: {text}",
            )
        )
    rows += _labelled("damaged", list(found.damaged))
    rows += _labelled("where", [line.strip() for line in found.where])
    if not found.alive and found.what != "finished" and found.checkpoint is not None:
        from mtrain_cli.launch.run_dir import RunDir

        rows.append(("go on by", RunDir(Path(found.folder)).resume_command))
    return rows


def _workers(places: tuple[str, ...]) -> list[str]:
    """A line for each host: its ranks and devices."""
    lines = []
    for host, members in groupby(enumerate(places), key=lambda item: item[1].partition(", ")[0]):
        ranks = [(rank, place.partition(", ")[2]) for rank, place in members]
        devices = [device for _, device in ranks]
        first, last = ranks[0][0], ranks[-1][0]
        models = {device.partition(" (")[2].rstrip(")") for device in devices}
        shown = devices[0]
        if len(models) == 1 and (model := models.pop()):
            shown = f"{len(devices)} x {model} ({', '.join(device.partition(' (')[0].removeprefix('GPU ') for device in devices)})"
        lines.append(
            f"rank{'s' * (last > first)} {first}{f' to {last}' if last > first else ''} on {host}: {shown}"
        )
    return lines


def _labelled(label: str, lines: list[str]) -> list[tuple[str, str]]:
    return [(label if number == 0 else "", line) for number, line in enumerate(lines)]


def _duration(seconds: float | None) -> str:
    from mtrain_cli.training.progress import format_duration

    return (
        f"{max(0.0, seconds):.0f} s"
        if seconds is not None and seconds < 60
        else format_duration(seconds)
    )
