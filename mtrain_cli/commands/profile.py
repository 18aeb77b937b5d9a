"""`mtrain profile`: the group of commands, and the functions that these commands share."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mtrain_cli.commands.options import writing
from mtrain_cli.config.documents import json_object
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch.failures import reporting_out_of_memory

if TYPE_CHECKING:
    from mtrain_cli.console import Console
    from mtrain_cli.profiling.kernel_benchmark import CallTime
    from mtrain_cli.reporting.table import Column

app = typer.Typer(rich_markup_mode="rich", no_args_is_help=True)


@app.callback()
def profile() -> None:
    """Measure attention, messages and training steps on this machine.

    [bold]Examples[/bold]

      [cyan]mtrain profile imbalance model=qwen3b seq=512k sparsity=vertical_slash[/cyan]
          Measure how much each worker computes in each step
      [cyan]mtrain profile step model=qwen3b seq=128k[/cyan]
          Measure where the time of a training step goes
    """


def key_of(word: str) -> str:
    """Return ``chunk`` for ``sparsity.chunk=512``."""
    return word.partition("=")[0].removeprefix("sparsity.")


def require_known_keys(words: Sequence[str], patterns: Sequence[str], shown: Sequence[str]) -> None:
    """Raise ConfigError if no pattern has the key of a setting; name the patterns ``shown``."""
    from mtrain_cli.config.pattern_settings import pattern_keys

    for word in words:
        if not any(key_of(word) in pattern_keys(name) for name in patterns):
            raise ConfigError(f"{word}: none of the patterns {', '.join(shown)} has this key")


def keys_for(pattern: str, words: Sequence[str]) -> list[str]:
    """Return the settings ``sparsity.KEY=...`` whose key the pattern has."""
    from mtrain_cli.config.pattern_settings import pattern_keys

    return [word for word in words if key_of(word) in pattern_keys(pattern)]


def check_output(
    out: Path | None, is_own: Callable[[Path], bool], description: str, option: str = "--out"
) -> None:
    """Check before a measurement that ``out`` can be written, and create its folders.

    Raises ConfigError for anything but a new file, an empty one, or an earlier ``description``.
    is_own: whether a file is one.
    """
    if out is None:
        return
    if out.is_dir():
        raise ConfigError(f"{option} {out}: is a folder; give a file")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        is_new = not os.path.lexists(out)  # a link to a missing file is the user's
        with out.open("ab"):
            pass
        if is_new:
            out.unlink()
        is_foreign = not is_new and out.stat().st_size > 0 and not is_own(out)
    except OSError as error:
        raise ConfigError(
            f"{option} {out}: cannot be written: {error.strerror or error}"
        ) from error
    if is_foreign:
        raise ConfigError(
            f"{option} {out}: exists and is not a {description} of mtrain; give another name, or "
            "remove it"
        )


def pass_columns(*, speed: bool) -> list[Column]:
    """Return the columns of both passes of a kernel. speed: also in TFLOP/s."""
    from mtrain_cli.reporting.table import Column, fixed

    return [
        Column(head, attrgetter(f"{direction}_{unit}"), form)
        for direction in ("forward", "backward")
        for head, unit, form in (
            (f"{direction:>11}", "ms", "{:.3f} ms".format),
            ("TF", "tflops", fixed(1)),
        )
        if speed or unit == "ms"
    ]


def ratio_cell(time: CallTime) -> str | None:
    """Return the ratios of both passes, such as ``2.00x / 1.50x``; None without any."""
    if not time.forward_ratio:
        return None
    return f"{time.forward_ratio:.2f}x / " + (
        f"{time.backward_ratio:.2f}x" if time.backward_ratio else "-"
    )


@contextlib.contextmanager
def calibrating(
    console: Console, out: Path | None, columns: Sequence[Column], **about: Any
) -> Iterator[Callable[..., None]]:
    """Yield a function that prints a measured time as a row and saves all times so far.

    A partial file next to ``out`` replaces it when the measurement is complete. about: arguments of
    `timing.save_times`.
    """
    from mtrain_cli.profiling.timing import save_times

    def is_own(file: Path) -> bool:
        document = json_object(file.read_text(encoding="utf-8", errors="replace")) or {}
        return document.get("kind") == about["kind"] and "schema" in document

    check_output(out, is_own, "calibration")
    times: list[Any] = []
    draft = None if out is None else out.with_name(f"{out.name}.partial")

    def show(cells: Sequence[str]) -> None:
        texts = [
            f"{cell:{'<' if column.words else '>'}{max(8, len(column.name))}}"
            for cell, column in zip(cells, columns, strict=True)
        ]
        console.print(" ".join(texts).rstrip())

    def add(time: Any) -> None:
        show([column.cell(time) for column in columns])
        times.append(time)
        if draft is not None:
            with writing(draft):
                save_times(draft, times, " ".join(["mtrain", *sys.argv[1:]]), **about)

    show([column.name for column in columns])
    try:
        with reporting_out_of_memory(
            lambda _: (
                "The next shape does not fit in memory; give shorter --seq, fewer --heads "
                "or a smaller --head-dim"
            )
        ):
            yield add
    except BaseException:
        if draft is not None and times:
            print(f"stopped: {len(times)} measured times are saved in {draft}", file=sys.stderr)
        raise
    if draft is not None and out is not None:
        with writing(out):
            draft.replace(out)
        console.print(f"{len(times)} measured times in {out}")
