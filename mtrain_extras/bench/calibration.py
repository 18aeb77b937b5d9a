"""What the commands that write a calibration share: their rows, and the file."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from mtrain_cli.commands.options import option, writing
from mtrain_cli.commands.profile import check_output
from mtrain_cli.config.documents import json_object
from mtrain_cli.launch.failures import reporting_out_of_memory

if TYPE_CHECKING:
    from mtrain_cli.console import Console
    from mtrain_cli.reporting.table import Column
    from mtrain_extras.bench.kernels import CallTime

CalibrationOut = Annotated[Path | None, option("FILE", help="Calibration file to write (JSON).")]


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
    from mtrain_extras.bench.timing import save_times

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
