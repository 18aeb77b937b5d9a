"""The state of a run, which other terminals and machines can read, and whether the run is alive.

`state.json` has the state. Rank 0 writes the file when a step finishes, at most once a second. If
the workers fail, the launcher writes the file.

A process that is killed cannot update `state.json`. Whether the run is alive is therefore decided
by the lock on the run's folder:
- On the same machine: the operating system releases the lock when its process ends.
- On other machines: a held lock may look free, so the age of the lock file's time stamp decides.
  The process that holds the lock renews the time stamp every HEARTBEAT_S seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import shlex
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrain_cli.config import documents
from mtrain_cli.config.atomic_files import replace_text
from mtrain_cli.launch.run_dir import RUNS, RunDir
from mtrain_cli.launch.run_lock import LOCK

HEARTBEAT_S = 10.0  # seconds between two renewals of the lock's time stamp
# A run whose lock has not been renewed for this many seconds is not alive. A network file system
# may show a renewal half a minute late.
SILENT_S = 60.0
WRITE_S = 1.0  # minimum seconds between two writes of `state.json`
WARNINGS = 20  # number of warnings to keep
ENDED = ("finished", "stopped", "failed")
# The fields of `RunState` that describe the last step.
_OF_LAST_STEP = (
    *("stepped", "loss", "grad_norm", "tokens", "tokens_per_second_per_gpu", "seconds"),
    *("targets", "expert_load"),
)


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The content of `state.json`. Times are in seconds since the epoch.

    phase: starting, training, restarting (after a worker was lost), finished, stopped (on request)
        or failed.
    time: when this state was written.
    began: when the run was started, resumed or restarted last.
    step, steps: last step done, and number of steps to do.
    stepped: when the last step finished.
    loss, grad_norm, tokens, tokens_per_second_per_gpu: metrics of the last step.
    targets: labels of the last step that count toward the loss.
    expert_load: the same of a model with experts: tokens of the busiest expert / mean.
    seconds: duration of a typical step.
    predicted_seconds: duration of a step that the simulator predicts; None without a prediction.
    seconds_left: estimate until the end of the run, None while unknown.
    workers: host and device of each rank.
    chosen: layout, exchange and kernel of the run, by the key that may have left it to ``auto``.
    records: path of the activity records, with {rank} for the rank (`launch.progress_record`).
    warnings: time and text of each warning, oldest first.
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
    targets: int | None = None
    expert_load: float | None = None
    seconds: float | None = None
    predicted_seconds: float | None = None
    seconds_left: float | None = None
    workers: tuple[str, ...] = ()
    chosen: dict[str, str] = field(default_factory=dict)
    records: str = ""
    warnings: tuple[tuple[float, str], ...] = ()
    reason: str = ""


def read_state(run: RunDir) -> RunState | None:
    """Return the state that was written last, or None if it cannot be read.

    Keys that this version does not know are ignored.
    """
    try:
        return read_state_file(run.state)
    except (OSError, ValueError):
        return None


def read_state_file(file: Path) -> RunState:
    """Return the state in a file. Earlier versions wrote NaN, which counts as null.

    Raises:
        UnreadableError: the file is damaged.
        OSError: the file cannot be read.
    """
    return documents.checked(RunState, documents.finite(documents.read_json(file)))


def nothing_left(run: RunDir, steps: int) -> bool:
    """Return whether a run finished after ``steps`` steps and still has the last checkpoint."""
    state = read_state(run)
    finished = state is not None and (state.phase, state.step) == ("finished", steps)
    return finished and run.last_step() == steps


def write_state(run: RunDir, state: RunState) -> None:
    """Write the state atomically. If the disk is full, the previous state stays."""
    with contextlib.suppress(OSError):
        replace_text(run.state, documents.json_text(dataclasses.asdict(state)))


def set_phase(run: RunDir, phase: str, reason: str = "") -> None:
    """Write a new phase into the state of a run whose workers have ended."""
    now = time.time()
    host = socket.gethostname()
    before = read_state(run) or RunState(phase=phase, time=now, began=now, host=host)
    write_state(run, dataclasses.replace(before, phase=phase, reason=reason, time=now))


class StateReporter:
    """Keeps the state of a run on rank 0, and writes it to `state.json`."""

    def __init__(self, run: RunDir, **facts: Any) -> None:
        """Write the state of a run that starts.

        Args:
            facts: launcher, steps, step, workers, chosen, records and predicted_seconds of
                `RunState`.
        """
        now, before = time.time(), read_state(run)
        host, warnings = socket.gethostname(), before.warnings if before else ()
        self._run = run
        self._state = RunState(
            phase="starting", time=now, began=now, host=host, warnings=warnings, **facts
        )
        if before is not None and before.step == self._state.step:
            # A run that is resumed at its end does no step, so nothing else would set these.
            last = {name: getattr(before, name) for name in _OF_LAST_STEP}
            self._state = dataclasses.replace(self._state, **last)
        self._update()

    @property
    def name(self) -> str:
        """Argument with which `mtrain status` shows this run, in the folder where it started."""
        path = self._run.path
        return path.name if path.parent == RUNS.absolute() else shlex.quote(str(path))

    def step(self, *, last: bool, **values: Any) -> None:
        """Record that a step has finished.

        Args:
            last: whether it is the last step. The last step is always written.
            values: new values of fields of `RunState`.
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
    holder: the process that took the lock last, such as ``process 12 on node7``. Empty if unknown.
    silent: seconds since the time stamp of the lock was renewed, None without a lock file.
    """

    alive: bool
    holder: str
    silent: float | None


def check_liveness(run: RunDir, now: float) -> Liveness:
    """Return whether a run is alive.

    On the machine of the lock's process, the lock itself decides. On other machines, and on file
    systems without locks, the age of the time stamp decides.

    Args:
        now: current time in seconds since the epoch.
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
    if host is None:  # The file system has no locks.
        state = read_state(run)
        silent = min(silent, now - state.time) if state else silent
        alive = state is not None and state.phase not in ENDED and silent < SILENT_S
        return Liveness(alive, "", silent)
    return Liveness(silent < SILENT_S, holder, silent)


def _is_held(lock: Path) -> bool:
    """Return whether a process holds the lock.

    This function holds the lock for a few microseconds. `RunLock` therefore tries several times.
    """
    descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
