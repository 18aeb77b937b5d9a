"""How a worker learns that the run must save and stop."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from types import FrameType

from mtrain_cli.launch.environment import Environment
from mtrain_cli.launch.run_dir import RunDir

_signalled = threading.Event()
_MARK = "stopped"


class StopFlag:
    """Whether this worker knows of a request to save and stop.

    Ranks may learn of it at different steps, so the trainer must make them agree. Under torchrun
    and srun, a SIGTERM, SIGHUP or first Ctrl-C to this process counts. Under mtrain's own launcher
    only the file counts, since SIGTERM ends a worker at once.
    """

    def __init__(self, run_dir: RunDir, environment: Environment) -> None:
        self._path = os.fspath(run_dir.stop_request)
        self._heeds_signals = environment.launcher != "mtrain"

    def requested(self) -> bool:
        """Return whether a stop was requested. Costs one file system lookup."""
        return (self._heeds_signals and _signalled.is_set()) or os.path.exists(self._path)


def save_and_stop_on_signals() -> None:
    """Make SIGTERM, SIGHUP and the first SIGINT set `StopFlag` instead of ending this process.

    Call this in the main thread.
    """
    signal.signal(signal.SIGTERM, _remember)
    signal.signal(signal.SIGINT, _remember)
    # nohup ignores SIGHUP, and it should stay ignored.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _remember)


def mark_stopped(error_file: str | os.PathLike[str] | None) -> None:
    """Record for mtrain's launcher that the run stopped on request before its last step.

    Without the mark, the request came too late to matter.

    Args:
        error_file: where this worker would leave a failure. The mark is an empty file next to it.
    """
    if error_file:
        Path(error_file).with_name(_MARK).touch()


def was_stopped(folder: Path) -> bool:
    """Return whether a worker left the mark in the folder of the workers' failures."""
    return (folder / _MARK).exists()


def _remember(signum: int, _frame: FrameType | None) -> None:
    _signalled.set()
    if signum == signal.SIGINT:
        signal.signal(signal.SIGINT, signal.default_int_handler)
