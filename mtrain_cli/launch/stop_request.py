"""Tell a worker that the run must save and stop."""

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
    """Whether this worker has received a request to save and stop.

    A request is one of:
    - the file `RunDir.stop_request`
    - under torchrun and srun also a SIGTERM, a SIGHUP or the first Ctrl-C to this process. (Under
      mtrain's own launcher, SIGTERM ends a worker immediately.)

    Ranks may receive a request at different steps. The trainer makes them agree on one step.
    """

    def __init__(self, run_dir: RunDir, environment: Environment) -> None:
        self._path = os.fspath(run_dir.stop_request)
        self._heeds_signals = environment.launcher != "mtrain"

    def requested(self) -> bool:
        """Return whether a stop was requested, by a file or a signal."""
        return (self._heeds_signals and _signalled.is_set()) or os.path.exists(self._path)


def save_and_stop_on_signals() -> None:
    """Let SIGTERM, SIGHUP and the first SIGINT count as requests for `StopFlag`.

    The signals then do not end this process. Call this function in the main thread.
    """
    signal.signal(signal.SIGTERM, _remember)
    signal.signal(signal.SIGINT, _remember)
    # Under nohup, SIGHUP is ignored. Keep it so.
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _remember)


def mark_stopped(error_file: str | os.PathLike[str] | None) -> None:
    """Tell mtrain's launcher that a request stopped the run before its last step.

    The mark is an empty file in the folder of the failure files.

    Args:
        error_file: path of this worker's failure file. Do nothing if it is empty or None.
    """
    if error_file:
        Path(error_file).with_name(_MARK).touch()


def was_stopped(folder: Path) -> bool:
    """Return whether a worker has called `mark_stopped`.

    Args:
        folder: folder of the failure files.
    """
    return (folder / _MARK).exists()


def _remember(signum: int, _frame: FrameType | None) -> None:
    _signalled.set()
    if signum == signal.SIGINT:
        signal.signal(signal.SIGINT, signal.default_int_handler)
