"""Replace files atomically: readers see the old content or the complete new content."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path in the same folder. The file that the block writes there replaces ``path``.

    If the block raises an error, ``path`` stays as it was.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Replace the content of a file."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")
