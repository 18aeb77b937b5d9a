"""Replace files atomically: readers see the old content or the complete new content."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a path in the same folder. The file that the block writes there replaces ``path``.

    If the block raises an error, ``path`` stays as it was. An OSError names it.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with naming(path, draft):
            yield draft
            draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def naming(path: Path, draft: Path | None = None) -> Iterator[None]:
    """Name a file in an OSError of its draft, or in one that names no file: that of a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is None or (draft is not None and str(error.filename) == str(draft)):
            if error.errno is None:  # with a file name, str() prints only strerror
                error.strerror = str(error)
            error.filename = str(path)
            if error.filename2 is not None:
                del error.filename2  # str() would print None, too
        raise


def replace_text(path: Path, text: str) -> None:
    """Replace the content of a file."""
    with replacing(path) as draft:
        draft.write_text(text, encoding="utf-8")
