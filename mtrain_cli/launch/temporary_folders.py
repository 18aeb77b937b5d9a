"""Temporary folders that exist as long as the process that made them, or until the next process."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_PREFIX = "mtrain-run-"
_OURS = re.compile(re.escape(_PREFIX) + r"[a-z0-9_]{8}")


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """Make a folder that only this user can open, and remove it at the end.

    First remove the folders of this user's killed processes. A lock shows that a process is alive,
    and keeps systemd-tmpfiles from removing its folder during a long run.
    """
    remove_abandoned()
    folder, descriptor = _locked_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _locked_folder() -> tuple[Path, int]:
    """Make a folder and lock it. Return its path and the file descriptor of the lock."""
    while True:  # until no other process removes the unlocked folder as abandoned
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except FileNotFoundError:
            continue
        # On a file system without locks, no process removes the folder of another one.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if lies_at(folder, descriptor):
            return folder, descriptor
        os.close(descriptor)


def own_folder() -> Path | None:
    """Return this user's permanent folder for compiled code, None if other users can open it."""
    try:
        base = Path(tempfile.gettempdir()) / f"mtrain-{os.getuid()}"
        base.mkdir(mode=0o700, exist_ok=True)
        return base if is_private(base) else None
    except OSError:
        return None


def compiled(function: Callable[..., Any], dynamic: bool | None = None) -> Callable[..., Any]:
    """Call torch.compile, which keeps its code in a folder that only this user can open.

    By default it runs code from a known name in the temporary folder, which anyone could have made.
    """
    import torch

    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        folder = own_folder() or _locked_folder()[0]  # the lock lasts as long as the process
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    return torch.compile(function, dynamic=dynamic)


def is_private(folder: Path) -> bool:
    """Return whether the path is a folder of this user that no other user can open."""
    status = folder.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    return is_own and not status.st_mode & 0o077


def remove_abandoned() -> None:
    """Remove the temporary folders of this user's processes that have ended."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if _OURS.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    _remove_if_abandoned(Path(entry.path))


def _remove_if_abandoned(folder: Path) -> None:
    if not is_private(folder):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while its process is alive
        if lies_at(folder, descriptor):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def lies_at(path: Path, descriptor: int) -> bool:
    """Return whether ``path`` still leads to the open file ``descriptor``, which may be locked."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
