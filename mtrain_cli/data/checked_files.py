"""Open the files of a corpus. Every problem is a one-line error that names the file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mtrain_cli.config import documents
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch.failures import read_failure


@contextlib.contextmanager
def explain_read_errors(subject: str, missing: str = "") -> Iterator[None]:
    """Turn an OSError into one line that begins with ``subject``.

    Args:
        missing: the whole line for a missing file. If empty, report it like any other error.

    Raises:
        RunError: the disk or its network failed.
        ConfigError: any other OSError.
    """
    try:
        yield
    except OSError as error:
        if missing and isinstance(error, FileNotFoundError):
            raise ConfigError(missing) from None
        reason = error.strerror or " ".join(str(error).split())[:200]
        raise read_failure(error, f"{subject} cannot be read ({reason})") from None


def require_folder(folder: Path, origin: str, wanted: str) -> None:
    """Raise ConfigError unless ``folder`` is a folder. ``wanted`` says what to give instead."""
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "no such folder"
        raise ConfigError(f"{origin}: {problem}. Give a folder {wanted}.")


def read_metadata(
    path: Path, origin: str, version: int, *, missing: str, unsupported: str, advice: str = ""
) -> dict[str, Any]:
    """Return the JSON object in ``path``, whose key ``version`` must be ``version``.

    Args:
        missing, unsupported, advice: end of the message for a missing file, for another version,
            and for invalid JSON.

    Raises:
        ConfigError: the file is missing, unreadable, not JSON or of another version.
    """
    place = f"{origin}: {path.name}"
    with explain_read_errors(place, f"{origin}: no {path.name} in it. {missing}"):
        try:
            content = documents.read_json(path)
        except ValueError as error:
            raise ConfigError(f"{place} is not JSON ({documents.reason(error)}){advice}") from None
    found = content.get("version") if isinstance(content, dict) else None
    if found != version:
        raise ConfigError(f"{place} has version {found}{unsupported}")
    return content
