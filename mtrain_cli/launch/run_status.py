"""The state of a run in `state.json`, and its status: what `mtrain status` shows of all its files.

Rank 0 writes the state when a step finishes; the launcher writes it if the workers fail. A process
that is killed writes nothing, so the lock on the run's folder decides whether a run is alive. On
other machines the lock may look free, so the age of its time stamp decides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import math
import os
import re
import socket
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrain_cli.config import documents, plugins, resolved_file
from mtrain_cli.config.documents import replace_text
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch import progress_record, restart
from mtrain_cli.launch.manifest import committed_steps, manifest_file
from mtrain_cli.launch.restart import Restart
from mtrain_cli.launch.rollbacks import Rollback, read_events
from mtrain_cli.launch.run_dir import LOCK, RunDir, list_runs
from mtrain_cli.printable import one_line

HEARTBEAT_S = 10.0  # seconds between two renewals of the lock's time stamp
SILENT_S = 60.0  # a lock this old is not alive; network file systems show it half a minute late
WRITE_S = 1.0  # minimum seconds between two writes of `state.json`
WARNINGS = 20  # number of warnings to keep
STALLED_STEPS = 5.0  # a stalled step takes longer than this many, and than `silent_after`
ENDED = ("finished", "stopped", "failed")
# The fields of `RunState` that describe the last step.
_OF_LAST_STEP = (
    *("stepped", "loss", "grad_norm", "tokens", "tokens_per_second_per_gpu", "seconds"),
    *("targets", "expert_load"),
)
_OF_METRICS = "grad_norm", "tokens_per_second_per_gpu", "seconds", "targets", "expert_load"


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The content of `state.json`. Times are in seconds since the epoch."""

    phase: str  # starting, training, restarting (after a failure), finished, stopped or failed
    time: float
    began: float  # when the run was started, resumed or restarted last
    host: str = ""
    launcher: str = ""
    step: int = 0  # last step done
    steps: int = 0
    stepped: float | None = None  # when the last step finished, which has the next six metrics
    loss: float | None = None
    grad_norm: float | None = None
    tokens: int | None = None
    tokens_per_second_per_gpu: float | None = None
    targets: int | None = None  # labels that count toward the loss
    expert_load: float | None = None  # tokens of the busiest expert / mean
    seconds: float | None = None  # of a typical step
    predicted_seconds: float | None = None
    seconds_left: float | None = None
    workers: tuple[str, ...] = ()  # host and device of each rank
    chosen: dict[str, str] = field(default_factory=dict)  # layout, exchange and kernel, by key
    records: str = ""  # path of the activity records, with {rank} for the rank
    warnings: tuple[tuple[float, str], ...] = ()  # time and text, oldest first
    reason: str = ""  # why the run stopped, failed or restarts


def read_state(run: RunDir) -> RunState | None:
    with contextlib.suppress(OSError, ValueError):
        return read_state_file(run.state)
    return None


def read_state_file(file: Path) -> RunState:
    """Return the state in a file, without unknown keys. NaN of earlier versions counts as null.

    Raises UnreadableError if the file is damaged, and OSError.
    """
    return documents.checked(RunState, documents.finite(documents.read_json(file)))


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
        """Write the state of a run that starts. facts: fields of `RunState`."""
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

    def step(self, *, last: bool, **values: Any) -> None:
        """Record that a step has finished, with new values of fields of `RunState`.

        last: whether it is the last step, which is always written.
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
    """Whether a run is alive."""

    alive: bool
    holder: str  # which took the lock last, such as ``process 12 on node7``; "" if unknown
    silent: float | None  # seconds since the lock's time stamp was renewed; None without a lock


def check_liveness(run: RunDir, now: float) -> Liveness:
    """Return whether a run is alive at the time ``now``, in seconds since the epoch."""
    lock = run.path / LOCK
    try:
        holder = lock.read_text(errors="replace").strip()
        dated = lock.stat().st_mtime
        silent = max(0.0, now - dated)
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
    # The disk dates the lock, and its clock may differ from the one here.
    silent = max(0.0, _disk_time(run.path, now) - dated)
    return Liveness(silent < SILENT_S, holder, silent)


def _disk_time(folder: Path, now: float) -> float:
    """Return the time by the clock that dates files in a folder; ``now`` if it is read-only."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime
    return now


def _is_held(lock: Path) -> bool:
    """Return whether a process holds the lock. Hold it for some microseconds if none does."""
    descriptor = os.open(lock, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@dataclass(frozen=True)
class NewestCheckpoint:
    step: int
    age: float  # seconds


@dataclass(frozen=True)
class RunStatus:
    """The status of a run.

    what: one of starting, running, stalled (no step for a long time), restarting, finished,
        stopped, failed, lost (the run ended without a report), not begun.
    """

    folder: str
    what: str
    detail: str
    step: int
    steps: int
    holder: str  # as silent, of `Liveness`
    silent: float | None
    since_step: float | None  # seconds
    checkpoint: NewestCheckpoint | None
    restarts: tuple[Restart, ...]  # oldest first
    rollbacks: tuple[Rollback, ...]  # oldest first
    skipped: tuple[tuple[int, str], ...]  # of the latest steps, those without an update, and why
    damaged: tuple[str, ...]  # a line for each file that cannot be read
    losses: tuple[float, ...]  # finite training losses of the latest steps
    where: tuple[str, ...]  # what each rank does, if the run is stalled
    notes: tuple[tuple[str, str], ...]  # label and line, of `plugins.watches`
    written: RunState | None  # None if `state.json` cannot be read

    @property
    def alive(self) -> bool:
        return self.what in ("starting", "running", "stalled", "restarting")


def read_status(run: RunDir) -> RunStatus:
    """Return the current status of a run."""
    now = time.time()
    life = check_liveness(run, now)
    # Read the state after the liveness. So if the run has ended, this is its last state.
    written, disk_now = read_state(run), now
    if written is not None and written.host != socket.gethostname():
        # Its times are by the clock of its machine, which wrote it when the disk dated it.
        with contextlib.suppress(OSError):
            disk_now = _disk_time(run.path, now)
            now = disk_now - run.state.stat().st_mtime + written.time
    recent = restart.latest_steps(run)
    step = max(written.step if written else 0, recent[-1].step if recent else 0)
    if life.alive and written is not None and written.phase in ("starting", "training"):
        step = written.step  # metrics.jsonl has later steps, until a restarted run cuts it
        # A run that hangs has not written the steps of the last second.
        if written.records and (last := progress_record.read_activity(_record(written, 0))):
            step = max(step, last.training_step - 1)
    since = None if written is None else now - (written.stepped or written.began)
    # The state is written once a second at most, the metrics at each step.
    if written and (row := next((row for row in reversed(recent) if row.step == step), None)):
        newer = {name: value for name in _OF_METRICS if (value := getattr(row, name)) is not None}
        written = dataclasses.replace(written, **newer)
    steps, damaged, timeout_s = 0, [], math.inf
    try:
        if run.resolved.exists():
            config = resolved_file.load(run.resolved)
            steps, timeout_s = config.train.steps, config.topology.timeout_s
    except ConfigError as error:
        consequence = "the run cannot be resumed or exported until this is fixed"
        damaged.append(f"{error.problems[0]}; {consequence}")
    slow_s = STALLED_STEPS * ((written and written.seconds) or 0.0)
    is_late = (since or 0.0) > max(progress_record.silent_after(timeout_s), slow_s)
    what, detail = _classify(run, written, life.alive, is_late, step)
    restarts, rollbacks, unread = read_events(run)
    damaged += unread
    checkpoint = None
    for saved in committed_steps(run.checkpoints):
        with contextlib.suppress(OSError):
            committed = manifest_file(run.checkpoints, saved).stat().st_mtime
            checkpoint = NewestCheckpoint(saved, max(0.0, disk_now - committed))
            break
    records = {}
    if what == "stalled" and written is not None and written.records:
        files = {rank: _record(written, rank) for rank in range(len(written.workers))}
        records = progress_record.read_activities(files)
    watched = (watch.notes(run, what, written, records, now) for watch in plugins.watches())
    return RunStatus(
        folder=str(run.path),
        what=what,
        detail=detail,
        step=step,
        steps=(written and written.steps) or steps,
        holder=life.holder,
        silent=life.silent,
        since_step=since,
        checkpoint=checkpoint,
        restarts=tuple(restarts),
        damaged=tuple(map(one_line, damaged)),
        rollbacks=tuple(rollbacks),
        skipped=tuple((row.step, row.skip_reason) for row in recent if row.skip_reason),
        losses=tuple(s.loss for s in recent if s.loss is not None and math.isfinite(s.loss)),
        where=tuple(progress_record.activity_lines(records, [], now)),
        notes=tuple((label, one_line(line)) for notes in watched for label, line in notes),
        written=written,
    )


def find_latest_run() -> RunDir:
    """Return the run in ``runs/`` that was active last, or is alive. Raise ConfigError if none."""
    runs = list_runs()
    if not runs:
        raise ConfigError("there are no runs in runs/. Give the folder of a run.")

    def last_activity(run: RunDir) -> tuple[bool, float]:
        written, started = read_state(run), run.resolved.stat().st_mtime
        is_alive = check_liveness(run, time.time()).alive
        return is_alive, max(started, written.time if written else 0.0)

    return max(runs, key=last_activity)


def _record(written: RunState, rank: int) -> Path:
    return Path(written.records.replace("{rank}", str(rank)))


def _classify(
    run: RunDir, written: RunState | None, alive: bool, is_late: bool, step: int
) -> tuple[str, str]:
    if not alive:
        if written is not None and written.phase in ENDED:
            return written.phase, written.reason
        if written is None:
            return ("stopped" if run.metrics.exists() else "not begun"), ""
        return "lost", "it ended without a report: it was killed, or its machine failed"
    if written is None or (written.phase == "starting" and step <= written.step):
        return "starting", ""
    if written.phase == "restarting":
        return "restarting", written.reason
    if written.phase in ENDED:
        return "running", f"about to end: {written.phase}"
    if is_late:
        return "stalled", f"no step since step {step}"
    return "running", ""
