"""Where a run stands, for whoever looks from another terminal or machine: what it wrote last, and whether it lives.

The first worker writes `state.json` as steps finish, at most once a second; the launcher writes how the run ended, where the workers cannot
any more. Whether the run lives is not asked of that file, which a killed process leaves as it was, but of the lock on the run's folder: the
kernel lets go of it when its holder ends, however it ends. From another machine the lock may look free though it is held; there the time of
its file counts, which the holder renews.
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

HEARTBEAT_S = 10.0  # between signs of life of the lock's holder
SILENT_S = 60.0  # without one: gone. Network file systems may show them half a minute late
WRITE_S = 1.0  # between writes of the first worker
WARNINGS = 20  # latest ones that are kept
ENDED = ("finished", "stopped", "failed")


@dataclass(frozen=True, kw_only=True)
class RunState:
    """phase: starting, training, restarting (a worker was lost), finished, stopped (on request) or failed; reason: of the latter two of
    these, and of a restart. time: of the last write, began: of this attempt (seconds since the epoch). step: the last one that is done;
    stepped: when. seconds_left: None while not known. workers: host and device of each rank. records: where ranks keep what they do
    (`launch.progress_record`), a path with {rank} in it. warnings: [time, text], latest last.
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
    """What the run wrote last; None where it has written nothing that can be read. Keys of other versions are left out."""
    try:
        return documents.checked(RunState, documents.read_json(run.state))
    except (OSError, ValueError):
        return None


def write_state(run: RunDir, state: RunState) -> None:
    """In one move. What a full disk does not take is no reason to end a run."""
    part = run.state.with_suffix(f".{os.getpid()}.part")
    with contextlib.suppress(OSError):
        try:
            part.write_text(json.dumps(dataclasses.asdict(state)))
            part.replace(run.state)
        finally:
            part.unlink(missing_ok=True)


def set_phase(run: RunDir, phase: str, reason: str = "") -> None:
    """How a run goes on or ended, when its first worker cannot say so any more."""
    now = time.time()
    before = read_state(run) or RunState(
        phase=phase, time=now, began=now, host=socket.gethostname()
    )
    write_state(run, dataclasses.replace(before, phase=phase, reason=reason, time=now))


class StateReporter:
    """The first worker's hand on the state."""

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
        self._written = 0.0
        self._state = RunState(
            phase="starting", time=now, began=now, host=socket.gethostname(), launcher=launcher, step=step, steps=steps,
            workers=tuple(workers), records=records, warnings=before.warnings if before else (),
        )  # fmt: skip
        self._write()

    @property
    def name(self) -> str:
        """What `mtrain status` takes in the folder that the run was started in."""
        path = self._run.path
        return path.name if path.parent == RUNS.absolute() else shlex.quote(str(path))

    def step(self, *, last: bool, **values: Any) -> None:
        """A finished step: fields of `RunState`. last: it has to be written, however soon after the one before."""
        now = time.time()
        self._state = dataclasses.replace(
            self._state, phase="training", time=now, stepped=now, **values
        )
        if last or time.monotonic() - self._written >= WRITE_S:
            self._write()

    def warn(self, text: str) -> None:
        now = time.time()
        self._state = dataclasses.replace(
            self._state, time=now, warnings=(*self._state.warnings, (now, text))[-WARNINGS:]
        )
        self._write()

    def end(self, phase: str) -> None:
        self._state = dataclasses.replace(
            self._state, phase=phase, time=time.time(), seconds_left=None
        )
        self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        write_state(self._run, self._state)


@dataclass(frozen=True)
class Liveness:
    """alive: whether a process works on the run. holder: which, such as ``process 12 on node7``. silent: seconds since its last sign."""

    alive: bool
    holder: str
    silent: float | None


def check_liveness(run: RunDir, now: float) -> Liveness:
    """Whether the run lives. On the holder's own machine the lock tells; from elsewhere, or where locks do not work, its signs of life."""
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
        found = read_state(run)
        silent = min(silent, now - found.time) if found else silent
        return Liveness(
            found is not None and found.phase not in ENDED and silent < SILENT_S, "", silent
        )
    return Liveness(silent < SILENT_S, holder, silent)


def _is_held(lock: Path) -> bool:
    """By a look of some microseconds, for which `RunLock` waits."""
    descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
