"""Files with one JSON object per line, each with the number of an optimizer step.

A crash may cut the last line short. Such a line has no newline and does not count. Any other line
that is not a step is damaged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from mtrain_cli.config import documents
from mtrain_cli.config.atomic_files import replacing

T = TypeVar("T")


def read_steps(path: Path, parse: Callable[[dict[str, Any]], T]) -> tuple[list[T], list[int]]:
    """Read the steps of a file, in its order.

    Args:
        parse: makes a step of a row. It raises UnreadableError for a row that is no step.

    Returns:
        The steps, and the numbers of the damaged lines, from 1.
    """
    steps, damaged = [], []
    for number, _, row in _lines(path):
        try:
            if _step_of(row) is None:
                raise documents.UnreadableError("step is missing")
            steps.append(parse(row or {}))
        except documents.UnreadableError:
            damaged.append(number)
    return steps, damaged


def drop_later_steps(path: Path, last: int) -> list[dict[str, Any]]:
    """Remove the steps after `last` from a file. Replace the file atomically.

    Damaged lines before these steps stay as they are: they may be earlier steps.

    Returns:
        The rows of the steps that stay.
    """
    kept: list[bytes] = []
    rows: list[dict[str, Any]] = []
    is_later = False
    for _, line, row in _lines(path):
        step = _step_of(row)
        is_later = is_later or (step is not None and step > last)
        if row is not None and step is not None and step <= last:
            kept.append(line)
            rows.append(row)
        elif step is None and not is_later:
            kept.append(line)
    with replacing(path) as draft, draft.open("wb") as file:
        file.writelines(line + b"\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    return rows


def _lines(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """Yield the number, content and JSON object of each line that is not blank.

    Only a newline ends a line: a carriage return inside of a line is white space of its JSON. A
    line that is not an object has None.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            row = documents.json_object(line)
            if row is not None or line.endswith(b"\n"):
                yield number, line.rstrip(b"\r\n"), row


def _step_of(row: dict[str, Any] | None) -> int | None:
    step = None if row is None else row.get("step")
    return step if isinstance(step, int) and documents.is_number(step) and step >= 0 else None
