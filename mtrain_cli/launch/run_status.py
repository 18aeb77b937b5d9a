"""The status of a run for `mtrain status`: state, liveness, checkpoints and restarts."""

from __future__ import annotations

import contextlib
import math
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
from mtrain_cli.printable import one_line

# A run is stalled if its current step takes longer than STALLED_S seconds, and longer than
# STALLED_STEPS typical steps.
STALLED_S = 60.0
STALLED_STEPS = 5.0


@dataclass(frozen=True)
class NewestCheckpoint:
    """The step of the newest checkpoint, and its age in seconds."""

    step: int
    age: float


@dataclass(frozen=True)
class RunStatus:
    """The status of a run.

    what: one of starting, running, stalled (no step for a long time), restarting, finished,
        stopped, failed, lost (the run ended without a report), not begun.
    detail: details in a few words, or empty.
    step, steps: last step done, and number of steps to do.
    holder: the process that took the lock last (`run_state.Liveness`).
    silent: seconds since the time stamp of the lock was renewed.
    since_step: seconds since the last step.
    checkpoint: the newest checkpoint.
    restarts: the restarts so far, oldest first.
    damaged: a line for each file that cannot be read.
    losses: finite training losses of the latest steps.
    where: what each rank does, if the run is stalled.
    written: content of `state.json`. None if the file is missing or cannot be read.
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
    """Return the current status of a run."""
    now = time.time()
    life = run_state.check_liveness(run, now)
    # Read the state after the liveness. So if the run has ended, this is its last state.
    written = run_state.read_state(run)
    recent = restart.latest_steps(run)
    step = max(written.step if written else 0, recent[-1][0] if recent else 0)
    if written is not None and written.phase in ("starting", "training"):
        # After a restart this is the step of the checkpoint. metrics.jsonl may still have later
        # steps, until the restarted run cuts it.
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
        damaged=tuple(map(one_line, _damaged(run))),
        losses=tuple(loss for _, loss in recent if loss is not None and math.isfinite(loss)),
        where=tuple(_activities(written, now)) if what == "stalled" else (),
        written=written,
    )


def find_latest_run() -> RunDir:
    """Return the most recently active run in ``runs/``. Prefer runs that are alive.

    Raises:
        ConfigError: there are no runs.
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
    """Yield a line for each file of the run that cannot be read."""
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
    """Return a line for each rank whose activity record this machine can read."""
    if written is None or not written.records:
        return []
    pattern, ranks = written.records, range(len(written.workers))
    records = progress_record.read_activities(
        {rank: Path(pattern.format(rank=rank)) for rank in ranks}
    )
    return progress_record.activity_lines(records, [], now)
