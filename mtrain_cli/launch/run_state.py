"""The state of a run for other terminals and machines: what it last wrote, and whether it is alive.

The first worker writes `state.json` as steps finish, at most once a second. The launcher writes how
the run ended if the workers cannot. A killed process leaves that file unchanged, so the lock on the
run's folder shows whether the run is alive: the kernel releases it when its holder ends. On another
machine a held lock may look free. That machine checks the lock file's time stamp, which the holder
renews.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import re
import shlex
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain_cli.config import documents
from mtrain_cli.launch.run_dir import LOCK, RUNS, RunDir

HEARTBEAT_S = 10.0  # between renewals of the lock's time stamp
# A run that has not renewed its lock for this long is gone. Network file systems may be half a
# minute late.
SILENT_S = 60.0
WRITE_S = 1.0  # between two writes of the first worker
WARNINGS = 20  # number of latest warnings to keep
ENDED = ("finished", "stopped", "failed")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The content of `state.json`. Times are in seconds since the epoch.

    phase: starting, training, restarting (a worker was lost), finished, stopped (on request) or
        failed.
    time: when the state was written.
    began: start of this attempt.
    step, steps: last step done, and the goal.
    stepped: when the last step finished.
    seconds: duration of a typical step.
    seconds_left: None while unknown.
    workers: host and device of each rank.
    records: path of the ranks' activity records, with {rank} in it (`launch.progress_record`).
    warnings: (time, text), latest last.
    reason: why the run stopped, failed or restarts.
    """

    phase: str
    time: float
    began: float
    host: str = ""
    launcher: str = ""
    step: int = 0
    steps: int = 0
    stepped: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    tokens: int | None = None
    tokens_per_second_per_gpu: float | None = None
    seconds: float | None = None
    seconds_left: float | None = None
    workers: tuple[str, ...] = ()
    records: str = ""
    warnings: tuple[tuple[float, str], ...] = ()
    reason: str = ""


def read_state(run: RunDir) -> RunState | None:
    """Return the state that the run wrote last, or None if none can be read.

    Ignore keys of other versions.
    """
    try:
        return documents.checked(RunState, documents.read_json(run.state))
    except (OSError, ValueError):
        return None


def write_state(run: RunDir, state: RunState) -> None:
    """Write the state atomically. Ignore a full disk."""
    part = run.state.with_suffix(f".{os.getpid()}.part")
    with contextlib.suppress(OSError):
        part.write_text(json.dumps(dataclasses.asdict(state)))
        part.replace(run.state)
    with contextlib.suppress(OSError):
        part.unlink(missing_ok=True)


def set_phase(run: RunDir, phase: str, reason: str = "") -> None:
    """Record a phase for a run whose first worker can no longer do so."""
    now = time.time()
    host = socket.gethostname()
    before = read_state(run) or RunState(phase=phase, time=now, began=now, host=host)
    write_state(run, dataclasses.replace(before, phase=phase, reason=reason, time=now))


class StateReporter:
    """Writes the state on behalf of the first worker."""

    def __init__(
        self,
        run: RunDir,
        *,
        launcher: str,
        steps: int,
        step: int,
        workers: Sequence[str],
        records: str,
    ) -> None:
        before = read_state(run)
        now = time.time()
        self._run = run
        self._state = RunState(
            phase="starting",
            time=now,
            began=now,
            host=socket.gethostname(),
            launcher=launcher,
            step=step,
            steps=steps,
            workers=tuple(workers),
            records=records,
            warnings=before.warnings if before else (),
        )
        self._update()

    @property
    def name(self) -> str:
        """The run's name for `mtrain status`, in the folder where the run was started."""
        path = self._run.path
        return path.name if path.parent == RUNS.absolute() else shlex.quote(str(path))

    def step(self, *, last: bool, **values: Any) -> None:
        """Report a finished step.

        Args:
            last: write it even right after the previous write.
            values: fields of `RunState`.
        """
        due = last or time.monotonic() - self._written >= WRITE_S
        self._update(due, phase="training", stepped=time.time(), **values)

    def warn(self, text: str) -> None:
        latest = (*self._state.warnings, (time.time(), text))
        self._update(warnings=latest[-WARNINGS:])

    def end(self, phase: str) -> None:
        self._update(phase=phase, seconds_left=None)

    def _update(self, write: bool = True, **values: Any) -> None:
        self._state = dataclasses.replace(self._state, time=time.time(), **values)
        if write:
            self._written = time.monotonic()
            write_state(self._run, self._state)


@dataclass(frozen=True)
class Liveness:
    """Whether a run is alive.

    alive: whether a process works on the run.
    holder: that process, such as ``process 12 on node7``.
    silent: seconds since the holder last renewed the lock.
    """

    alive: bool
    holder: str
    silent: float | None


def check_liveness(run: RunDir, now: float) -> Liveness:
    """Return whether the run is alive.

    On the holder's own machine the lock decides. From other machines, or without locks, the
    renewals decide.
    """
    lock = run.path / LOCK
    try:
        holder = lock.read_text(errors="replace").strip()
        silent = max(0.0, now - lock.stat().st_mtime)
    except OSError:
        return Liveness(False, "", None)
    host = re.fullmatch(r"process \d+ on (.+)", holder)
    if host is not None and host[1] == socket.gethostname():
        return Liveness(_is_held(lock), holder, silent)
    if host is None:  # a file system without locks
        state = read_state(run)
        silent = min(silent, now - state.time) if state else silent
        alive = state is not None and state.phase not in ENDED and silent < SILENT_S
        return Liveness(alive, "", silent)
    return Liveness(silent < SILENT_S, holder, silent)


def _is_held(lock: Path) -> bool:
    """Return whether a process holds the lock.

    The test takes the lock for some microseconds; `RunLock` tries again.
    """
    descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
