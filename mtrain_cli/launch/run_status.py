"""The status of a run as other processes see it: state, liveness, checkpoints and restarts."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mtrain_cli.config import resolved_file
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch import progress_record, restart, run_state
from mtrain_cli.launch.manifest import committed_steps, manifest_file
from mtrain_cli.launch.restart import Restart
from mtrain_cli.launch.run_dir import RunDir, list_runs
from mtrain_cli.launch.run_state import RunState

# A step counts as stalled if it takes longer than STALLED_S and STALLED_STEPS typical steps.
STALLED_S = 60.0
STALLED_STEPS = 5.0


@dataclass(frozen=True)
class NewestCheckpoint:
    """The newest checkpoint. ``age`` is in seconds."""

    step: int
    age: float


@dataclass(frozen=True)
class RunStatus:
    """A run as seen from outside.

    what: starting, running, stalled (no step for long), restarting, finished, stopped, failed, lost
        (it ended without a report) or not begun.
    detail: a further sentence, or empty.
    step, steps: last step done, and the goal.
    holder: the process that holds the lock.
    silent: seconds since the holder last renewed the lock.
    since_step: seconds since the last step.
    damaged: a line for each file that cannot be read.
    losses: training losses of the latest steps.
    where: what each rank does, if the run is stalled.
    written: the run's own state, None before its first write and for runs of older versions.
    """

    folder: str
    what: str
    detail: str
    step: int
    steps: int
    holder: str
    silent: float | None
    since_step: float | None
    checkpoint: NewestCheckpoint | None
    restarts: tuple[Restart, ...]
    damaged: tuple[str, ...]
    losses: tuple[float, ...]
    where: tuple[str, ...]
    written: RunState | None

    @property
    def alive(self) -> bool:
        return self.what in ("starting", "running", "stalled", "restarting")


def read_status(run: RunDir) -> RunStatus:
    """Return the status of the run now."""
    now = time.time()
    life = run_state.check_liveness(run, now)
    # Read the state after the liveness check: a dead run has written its last state.
    written = run_state.read_state(run)
    recent = restart.latest_steps(run)
    step = max(written.step if written else 0, recent[-1][0] if recent else 0)
    if written is not None and written.phase in ("starting", "training"):
        # After a restart this is the checkpoint's step, to which metrics.jsonl is cut back.
        step = written.step
    since = None if written is None else now - (written.stepped or written.began)
    what, detail = _classify(run, written, life.alive, since, step)
    return RunStatus(
        folder=str(run.path),
        what=what,
        detail=detail,
        step=step,
        steps=_steps(run, written),
        holder=life.holder,
        silent=life.silent,
        since_step=since,
        checkpoint=_checkpoint(run, now),
        restarts=tuple(restart.read_restarts(run)),
        damaged=tuple(_damaged(run)),
        losses=tuple(loss for _, loss in recent if loss is not None),
        where=tuple(_activities(written, now)) if what == "stalled" else (),
        written=written,
    )


def find_latest_run() -> RunDir:
    """Return the run that was last started or resumed in this folder; prefer one that is alive.

    Raises:
        ConfigError: there is none.
    """
    runs = list_runs()
    if not runs:
        raise ConfigError("there are no runs in runs/. Give the folder of a run.")

    def last_activity(run: RunDir) -> tuple[bool, float]:
        written, started = run_state.read_state(run), run.resolved.stat().st_mtime
        is_alive = run_state.check_liveness(run, time.time()).alive
        return is_alive, max(started, written.time if written else 0.0)

    return max(runs, key=last_activity)


def _classify(
    run: RunDir, written: RunState | None, alive: bool, since: float | None, step: int
) -> tuple[str, str]:
    if not alive:
        if written is not None and written.phase in run_state.ENDED:
            return written.phase, written.reason
        if written is None:
            return ("stopped" if run.metrics.exists() else "not begun"), ""
        return "lost", "it ended without a report: it was killed, or its machine failed"
    if written is None or written.phase == "starting":
        return "starting", ""
    if written.phase == "restarting":
        return "restarting", written.reason
    if written.phase in run_state.ENDED:
        return "running", f"about to end: {written.phase}"
    if since is not None and since > max(STALLED_S, STALLED_STEPS * (written.seconds or 0.0)):
        return "stalled", f"no step since step {step}"
    return "running", ""


def _damaged(run: RunDir) -> Iterator[str]:
    """Yield a line for each file of the run that cannot be read.

    Without resolved.yaml the run cannot be resumed.
    """
    try:
        if run.resolved.exists():
            resolved_file.load(run.resolved)
    except ConfigError as error:
        yield f"{error.problems[0]}; the run cannot be resumed or exported until this is fixed"
    if lines := restart.count_unreadable_lines(run):
        yield f"{run.restarts}: {lines} unreadable line{'s' * (lines > 1)} skipped"


def _steps(run: RunDir, written: RunState | None) -> int:
    if written is not None and written.steps:
        return written.steps
    with contextlib.suppress(ConfigError):
        return resolved_file.load(run.resolved).train.steps
    return 0


def _checkpoint(run: RunDir, now: float) -> NewestCheckpoint | None:
    for step in committed_steps(run.checkpoints):
        with contextlib.suppress(OSError):
            committed = manifest_file(run.checkpoints, step).stat().st_mtime
            return NewestCheckpoint(step, max(0.0, now - committed))
    return None


def _activities(written: RunState | None, now: float) -> list[str]:
    """Return what the ranks do whose records this machine can read."""
    if written is None or not written.records:
        return []
    pattern, ranks = written.records, range(len(written.workers))
    records = progress_record.read_activities(
        {rank: Path(pattern.format(rank=rank)) for rank in ranks}
    )
    return progress_record.activity_lines(records, [], now)
