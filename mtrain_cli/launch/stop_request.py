"""Signals and files that ask a run to save (SIGUSR1), or to save and stop.

SIGUSR2, which schedulers send before a time limit, stops with success. SIGTERM, SIGHUP and the
first SIGINT stop, too.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # the start of every command imports this module
    from mtrain_cli.launch.run_dir import RunDir

SAVE, SAVE_AND_STOP = signal.SIGUSR1, signal.SIGUSR2
STACK_DUMP = signal.SIGQUIT  # the launcher sends it to a worker that hangs, which writes its stack
NOTHING_TO_SAVE = "SIGUSR1: this command writes no checkpoints; it goes on"
_received: list[int] = []  # signals to this process that no launcher has taken
_MARK = "stopped"


class StopSignal(KeyboardInterrupt):
    """A signal that stops this process as Ctrl-C does.

    The argument is its number: a codec that is interrupted replaces an exception with a text.
    """

    exit_code = 143  # 128 + SIGTERM

    def __str__(self) -> str:
        return f"stopped by {signal.Signals(self.args[0]).name}"


class StopFlag:
    """What files and signals ask of this worker. The trainer makes the ranks agree on one step."""

    def __init__(self, run_dir: RunDir) -> None:
        self._stop, self._saves = os.fspath(run_dir.stop_request), os.fspath(run_dir.save_requests)
        self._answered = 0

    def requested(self) -> bool:
        return any(number != SAVE for number in _received) or os.path.exists(self._stop)

    def save_requested(self) -> bool:
        """Return whether a save was requested since the last call of `answer_saves`."""
        return self._asked() > self._answered

    def answer_saves(self) -> None:
        """Count all requests so far as answered. Call this just before the state is copied."""
        self._answered = self._asked()

    def _asked(self) -> int:
        """Return the number of requests: a byte of the launcher's file, or a signal, is one."""
        size = 0
        with contextlib.suppress(OSError):
            size = os.path.getsize(self._saves)
        return size + _received.count(SAVE)


def remember(*numbers: signal.Signals) -> None:
    """Let signals count as requests for `StopFlag`; a second SIGINT interrupts.

    A signal that is ignored, as SIGHUP under nohup, stays ignored. For the main thread.
    """
    for number in numbers:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _remember)


def stop_on_signals() -> None:
    """Let SIGTERM, SIGHUP and SIGUSR2 raise `StopSignal`, and answer SIGUSR1 with a line."""
    for number in (signal.SIGTERM, signal.SIGHUP, SAVE_AND_STOP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _raise)
    if signal.getsignal(SAVE) is not signal.SIG_IGN:
        # Unlike print, os.write cannot fail because the signal interrupted a print.
        line = f"mtrain: {NOTHING_TO_SAVE}\n".encode()
        signal.signal(SAVE, lambda *_: os.write(2, line) and None)


def call_at(number: signal.Signals, action: Callable[[], object]) -> None:
    """Call ``action`` at a signal that is remembered, also if the main thread is blocked in C++."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)  # as Python asks for
    signal.set_wakeup_fd(writer)

    def answer() -> None:
        while True:
            if os.read(reader, 1)[0] == number:
                action()

    threading.Thread(target=answer, name="signals", daemon=True).start()
    if number in _received:
        action()


def take_received() -> list[int]:
    """Return the signals that were remembered, and forget them."""
    taken = list(_received)
    del _received[: len(taken)]
    return taken


def mark_stopped(error_file: str | os.PathLike[str] | None) -> None:
    """Tell mtrain's launcher, by a file beside the failure file, that a request ended the run."""
    if error_file:
        Path(error_file).with_name(_MARK).touch()


def was_stopped(folder: Path) -> bool:
    """Return whether a worker has called `mark_stopped` in the folder of the failure files."""
    return (folder / _MARK).exists()


def _remember(number: int, _frame: FrameType | None) -> None:
    _received.append(number)
    if number == signal.SIGINT:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _raise(number: int, _frame: FrameType | None) -> None:
    raise StopSignal(number)
