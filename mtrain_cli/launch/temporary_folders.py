"""Temporary folders that end with the process that made them.

If that process was killed, the next start of mtrain removes its folder.
"""

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
    """Make a folder that only this user can open, and remove it at the end.

    First remove the folders that killed processes of this user left behind. A lock on the folder
    shows that its process is alive, and keeps systemd-tmpfiles from cleaning up during a long run.
    """
    remove_abandoned()
    folder, descriptor = _locked_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _locked_folder() -> tuple[Path, int]:
    """Make a folder and lock it: its path and the descriptor that holds the lock.

    Until the lock is held, a process that starts at the same time may take the folder for abandoned
    and remove it. Then make another one.
    """
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        # Some network file systems have no locks. There nobody removes the folders of others.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _lies_at(folder, descriptor):
            return folder, descriptor
        os.close(descriptor)


def own_folder() -> Path | None:
    """Return this user's permanent folder for compiled code, or None if others can write there."""
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
    """Remove this user's folders whose process has ended."""
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
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process is alive
        if _lies_at(folder, descriptor):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _lies_at(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(folder.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
