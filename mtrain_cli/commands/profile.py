"""`mtrain profile`: the group of commands, and the functions that these commands share."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import typer

from mtrain_cli.commands.options import writing
from mtrain_cli.config.schema import ConfigError

if TYPE_CHECKING:
    from mtrain_cli.console import Console
    from mtrain_cli.profiling.kernel_benchmark import CallTime
    from mtrain_cli.profiling.timing import ResultFile

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
    """Raise ConfigError if no pattern has the key of a setting ``sparsity.KEY=...``.

    shown: the patterns to name in the message.
    """
    from mtrain_cli.config.pattern_settings import pattern_keys

    for word in words:
        if not any(key_of(word) in pattern_keys(name) for name in patterns):
            raise ConfigError(f"{word}: none of the patterns {', '.join(shown)} has this key")


def keys_for(pattern: str, words: Sequence[str]) -> list[str]:
    """Return the settings ``sparsity.KEY=...`` whose key the pattern has."""
    from mtrain_cli.config.pattern_settings import pattern_keys

    return [word for word in words if key_of(word) in pattern_keys(pattern)]


def set_threads(threads: int | None, device: str) -> None:
    """Limit the CPU threads of torch; None keeps torch's default.

    Raises:
        ConfigError: the device is a GPU.
    """
    import torch

    if threads is None:
        return
    if device == "cuda":
        raise ConfigError(f"--threads {threads}: only for CPUs; leave it out")
    torch.set_num_threads(threads)


def is_calibration(out: Path, kind: str) -> bool:
    """Return whether a file is a calibration of this kind."""
    try:
        document = json.loads(out.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(document, dict) and document.get("kind") == kind and "schema" in document


def check_output(
    out: Path | None, is_own: Callable[[Path], bool], description: str, option: str = "--out"
) -> str:
    """Check before a long measurement that a file can be written, and create its folders.

    Args:
        out: the file; None if the command writes no file.
        is_own: returns whether an existing file is an earlier result, which may be replaced.
        description: noun for the content of the file, for messages.

    Returns:
        A remark that an earlier result will be replaced, or "".

    Raises:
        ConfigError: the file cannot be written, or holds something else.
    """
    if out is None:
        return ""
    try:
        if out.is_dir():
            raise ConfigError(f"{option} {out}: is a folder; give a file")
        if out.exists():
            with out.open("r+b"):
                pass
            if not out.is_file() or not out.stat().st_size:
                return ""
            if not is_own(out):
                raise ConfigError(
                    f"{option} {out}: exists and is not a {description} of mtrain; "
                    "give another name, or remove it"
                )
            return f", replacing an earlier {description}"
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("xb"):
            pass
        out.unlink()
    except (FileExistsError, NotADirectoryError) as error:
        raise ConfigError(f"{option} {out}: a part of the path is a file, not a folder") from error
    except OSError as error:
        raise ConfigError(
            f"{option} {out}: cannot be written: {error.strerror or error}"
        ) from error
    return ""


# (heading, format such as ">8", function of a measured time that returns the cell)
Column = tuple[str, str, Callable[[Any], object]]


@dataclass(frozen=True)
class Lines:
    """A table that is printed while it is measured, line by line.

    narrow: whether columns are left out to fit the terminal.
    """

    columns: Sequence[Column]
    narrow: bool = False

    @classmethod
    def fitting(cls, width: int | None, wide: Sequence[Column], narrow: Sequence[Column]) -> Self:
        """Return the wide table if it fits ``width`` characters, else the narrow one.

        width: None if any width fits.
        """
        lines = cls(wide)
        return lines if width is None or len(lines.header) <= width else cls(narrow, True)

    @property
    def header(self) -> str:
        return self._joined(heading for heading, _, _ in self.columns)

    def line(self, time: Any) -> str:
        return self._joined(cell(time) for _, _, cell in self.columns)

    def _joined(self, cells: Iterable[object]) -> str:
        formats = [format for _, format, _ in self.columns]
        return " ".join(map("{:{}}".format, cells, formats)).rstrip()


def pass_columns(*, speed: bool, missing: str = "") -> list[Column]:
    """Return the columns of the forward and backward time of a kernel.

    Args:
        speed: whether to show FLOP/s.
        missing: the cell of a time that is None.
    """

    def cell(ms: float | None, tflops: float | None) -> str:
        if ms is None:
            return missing
        return f"{ms:>9.3f} ms" + (f" {tflops:>6.1f} TF" if speed else "")

    layout = ">22" if speed else ">12"
    return [
        ("forward", layout, lambda time: cell(time.forward_ms, time.forward_tflops)),
        ("backward", layout, lambda time: cell(time.backward_ms, time.backward_tflops)),
    ]


def heads_column(time: CallTime) -> str:
    return f"{time.case.heads:>3}/{time.case.kv_heads:<2}"


@contextlib.contextmanager
def reporting_out_of_memory() -> Iterator[None]:
    """Turn an out-of-memory error of torch into a `RunError` that suggests smaller shapes."""
    import torch

    from mtrain_cli.launch.failures import RunError

    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if (
            isinstance(error, RuntimeError)
            and not isinstance(error, torch.OutOfMemoryError)
            and "allocate memory" not in str(error)
        ):
            raise
        raise RunError(
            "The next shape does not fit in memory; give shorter --seq, fewer --heads "
            "or a smaller --head-dim"
        ) from error


@contextlib.contextmanager
def calibrating(
    console: Console, out: Path | None, file: ResultFile, lines: Lines
) -> Iterator[Callable[..., None]]:
    """Yield a function that shows a line of a measured time and saves all times so far.

    The times are saved in a partial file next to ``out``. The partial file replaces ``out`` when
    the measurement is complete. If the measurement stops early, an earlier ``out`` stays, and a
    message names the partial file. With out=None nothing is saved.

    Args:
        file: what the file says besides the times.
        lines: the table that shows them.

    Raises:
        ConfigError: ``out`` cannot be written, or holds something else.
    """
    replaced = check_output(out, lambda path: is_calibration(path, file.kind), "calibration")
    console.print(lines.header)
    times: list[Any] = []
    draft = None if out is None else out.with_name(f"{out.name}.partial")

    def add(time: Any, more: str = "") -> None:
        """Add a time. more: text at the end of its line."""
        console.print(lines.line(time) + more)
        times.append(time)
        if draft is not None:
            with writing(draft):
                file.save(draft, times, " ".join(["mtrain", *sys.argv[1:]]))

    try:
        with reporting_out_of_memory():
            yield add
    except BaseException:
        if draft is not None and times:
            print(f"stopped: {len(times)} measured times are saved in {draft}", file=sys.stderr)
        raise
    if draft is not None and out is not None:
        with writing(out):
            draft.replace(out)
        console.print(f"{len(times)} measured times in {out}{replaced}")
