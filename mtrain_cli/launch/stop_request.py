"""How a worker learns that the run is to save and stop."""

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
    """Whether someone asked this run to save and stop, as far as this worker knows.

    Ranks may learn of it at different steps, so the trainer must let them agree. Under torchrun and srun a SIGTERM, SIGHUP or first Ctrl-C
    that reached this process counts; under mtrain's own launcher only the file does, since there SIGTERM ends a worker at once.
    """

    def __init__(self, run_dir: RunDir, environment: Environment) -> None:
        self._path = os.fspath(run_dir.stop_request)
        self._heeds_signals = environment.launcher != "mtrain"

    def requested(self) -> bool:
        """True once a stop was asked for; costs one look at the file system."""
        return (self._heeds_signals and _signalled.is_set()) or os.path.exists(self._path)


def save_and_stop_on_signals() -> None:
    """Let SIGTERM, SIGHUP and the first SIGINT of this process raise `StopFlag` instead of ending it. Call in the main thread."""
    signal.signal(signal.SIGTERM, _remember)
    signal.signal(signal.SIGINT, _remember)
    # A run under nohup has SIGHUP ignored, and that should stay so.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _remember)


def mark_stopped(error_file: str | os.PathLike[str] | None) -> None:
    """Tell mtrain's own launcher that the run stopped on request, before its last step: a request may also come too late to matter.

    ``error_file`` is where this worker would leave a failure; the mark is an empty file beside it.
    """
    if error_file:
        Path(error_file).with_name(_MARK).touch()


def was_stopped(folder: Path) -> bool:
    """Whether a worker left the mark in the folder of the workers' failures."""
    return (folder / _MARK).exists()


def _remember(signum: int, _frame: FrameType | None) -> None:
    _signalled.set()
    if signum == signal.SIGINT:
        signal.signal(signal.SIGINT, signal.default_int_handler)
