"""Folders in the system's temporary folder that go with the process that made them, or at the next start where that process was killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "mtrain-run-"
_OURS = re.compile(re.escape(_PREFIX) + r"[a-z0-9_]{8}")


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder that only this user can open, removed at the end. Those that killed processes of this user left are removed first.

    A lock on the folder shows that its process lives; it also keeps systemd-tmpfiles from cleaning up below a long run.
    """
    remove_abandoned()
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        descriptor = os.open(folder, os.O_RDONLY)
        # Some network file systems have no locks; there nothing is ever removed for another process.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _lies_at(folder, descriptor):
            break
        os.close(descriptor)  # another start took it for abandoned before it was locked
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def own_folder() -> Path | None:
    """This user's lasting folder for code that was compiled; None where others than this user could write there."""
    try:
        base = Path(tempfile.gettempdir()) / f"mtrain-{os.getuid()}"
        base.mkdir(mode=0o700, exist_ok=True)
        found = base.lstat()
    except OSError:
        return None
    return (
        base
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
        else None
    )


def remove_abandoned() -> None:
    """Remove the folders of this user whose process is gone."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if _OURS.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove_if_abandoned(Path(entry.path))


def _remove_if_abandoned(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process lives
        if _lies_at(folder, descriptor):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _lies_at(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(folder.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
