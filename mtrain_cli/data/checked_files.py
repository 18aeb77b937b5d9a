"""Open the files of a corpus. Every error is one line that names the file."""

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
    """Replace an OSError in the ``with`` block by an error of one line about ``subject``.

    missing: the whole line for a missing file.

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
    """Raise ConfigError, a line that begins with ``origin``, unless ``folder`` is a folder.

    wanted: description of the right folder, to follow "Give a folder".
    """
    if not folder.is_dir():
        problem = "is not a folder" if folder.exists() else "no such folder"
        raise ConfigError(f"{origin}: {problem}. Give a folder {wanted}.")


def read_metadata(path: Path, origin: str, version: int, advice: str) -> dict[str, Any]:
    """Return the JSON object in ``path``, whose key ``version`` must have this value.

    Args:
        origin: how the user named the folder of the file. Every message begins with it.
        advice: end of every message.

    Raises:
        ConfigError: the file is missing, unreadable, not JSON or of another version.
    """
    place = f"{origin}: {path.name}"
    with explain_read_errors(place, f"{origin}: no {path.name} in it. {advice}"):
        try:
            content = documents.read_json(path)
        except ValueError as error:
            why = f"is not JSON ({documents.reason(error)})"
            raise ConfigError(f"{place} {why}. {advice}") from None
    given = content.get("version") if isinstance(content, dict) else None
    if given != version:
        raise ConfigError(
            f"{place} has version {given}, but mtrain reads version {version}. {advice}"
        )
    return content
