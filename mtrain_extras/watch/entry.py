"""What the engine calls, as the entry point ``mtrain.watch``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain_extras.watch import flight_record, stragglers
from mtrain_extras.watch import roll_call as ranks

if TYPE_CHECKING:
    from torch.distributed import Store

    from mtrain_cli.config.schema import Config
    from mtrain_cli.launch.job import Job
    from mtrain_cli.launch.progress_record import WorkerActivity
    from mtrain_cli.launch.run_dir import RunDir
    from mtrain_cli.launch.run_status import RunState
    from mtrain_cli.training.trainer import Trainer


def sign_in() -> None:
    """Show from now on that this rank of a job lives. All ranks call this first of all.

    Raises ConfigError as `job.job_store` does.
    """
    ranks.sign_in()


def roll_call(job: Job, store: Store) -> Callable[[Callable[[], Iterable[int]]], None]:
    """Return a function that rank 0 calls often with one that returns the missing ranks.

    It prints now and then for whom rank 0 waits, and raises RunError if one of them has ended.
    """
    return ranks.RollCall(job, store).check


def straggler(run: RunDir, trainer: Trainer, rank: int, ratio: float | None) -> None:
    """Record that a rank takes ``ratio`` times as long as the others, or None: that it does not.

    Rank 0 calls this when a rank becomes slow or catches up, and in each start of the run once for
    the ranks that are not slow.
    """
    stragglers.write(run, trainer.step, rank, trainer.places, ratio)


def failed(logs: Path, files: Mapping[int, Path], gone: Collection[int]) -> None:
    """Keep the activities of all ranks of a run that failed, in its folder ``logs``.

    files: of `progress_record`, by rank. gone: ranks known to be stopped or to have ended.
    """
    flight_record.save(logs, files, gone)


def leave_out(config: Config, run: RunDir) -> None:
    """Continue a job that resumes on fewer nodes. All ranks call this."""
    stragglers.leave_out(config, run)


def notes(
    run: RunDir,
    what: str,
    written: RunState | None,
    records: Mapping[int, WorkerActivity],
    now: float,
) -> Iterator[tuple[str, str]]:
    """Yield a label and a line for `mtrain status`. what: see `RunStatus`.

    records: what each rank does, if the run is stalled. now: the time by the run's own clock.
    """
    if written is None:
        return
    for line in stragglers.lines(run, written):
        yield "stragglers", line
    for line in flight_record.lines(run, what, written, records, now):
        yield "waits", line
