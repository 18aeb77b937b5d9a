"""The lock that keeps a second process out of a folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from pathlib import Path

from mtrain_cli.config.schema import ConfigError

LOCK = ".lock"
_ATTEMPTS = 4


class RunLock:
    """An exclusive lock on the folder of a run, or of a part of a study.

    The operating system releases the lock when the process ends.
    """

    def __init__(self, folder: Path, name: str = "", advice: str = "") -> None:
        """Take the lock of ``folder``.

        Args:
            name: what the folder is, for the error; "" for ``run.dir``.
            advice: what the user can do; "" for that of a run.

        Raises:
            ConfigError: another process holds the lock. The message has its process id and host.
        """
        path = folder / LOCK
        self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            self._take()
        except BlockingIOError:
            holder = path.read_text(errors="replace").strip() or "another process"
            self.release()
            name = name or f"run.dir={folder}"
            advice = advice or "Wait for that run, stop it, or choose another run.dir."
            raise ConfigError(f"{name}: in use by {holder}. {advice}") from None
        except OSError:
            # Some network file systems have no locks. Then the user must avoid two runs in one
            # folder.
            self.release()
            return
        # If the disk is full, the lock holds without this text.
        with contextlib.suppress(OSError):
            os.truncate(self._file, 0)
            os.pwrite(self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def _take(self) -> None:
        assert self._file is not None
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if attempt == _ATTEMPTS:
                    raise
                time.sleep(0.05)  # `run_status.check_liveness` may hold the lock for a moment

    def beat(self) -> None:
        """Set the time stamp of the lock file to the current time of the disk."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.utime(self._file)

    def release(self) -> None:
        """Release the lock. Do nothing if it is already released."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
