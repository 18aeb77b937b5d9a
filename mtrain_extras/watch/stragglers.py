"""The stragglers of a run, lines of `stragglers.jsonl`, and a restart without their nodes.

A node can only be left out as a whole. Its ranks then wait for the end of the job, so that torchrun
or srun, which started them, does not count them as failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from mtrain_cli.config import documents
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.grouping import show_spans, spans
from mtrain_cli.launch import job as jobs
from mtrain_cli.launch import restart
from mtrain_cli.launch.environment import resolve_environment
from mtrain_cli.launch.guarded_streams import print_error
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.launch.run_status import RunState

OPTION = "run.leave_out_stragglers"


@dataclass(frozen=True)
class Straggler:
    """A rank that has become a straggler, or has caught up.

    time: in seconds since the epoch.
    step: the last step that was compared.
    place: host and device.
    worker: its number among those of the same place; ranks change with the number of nodes.
    ratio: its time / that of the others, for the same work; None if it has caught up.
    """

    time: float
    step: int
    rank: int
    place: str
    worker: int
    ratio: float | None

    @property
    def key(self) -> tuple[str, int]:
        return self.place, self.worker

    @property
    def host(self) -> str:
        return self.place.partition(", ")[0]

    def describe(self) -> str:
        return (
            f"rank {self.rank} ({self.place}) took {self.ratio:.2f}x as long as the others for the "
            f"same work, at step {self.step}"
        )


def write(run: RunDir, step: int, rank: int, places: Sequence[str], ratio: float | None) -> None:
    place = places[rank]
    entry = Straggler(time.time(), step, rank, place, places[:rank].count(place), ratio)
    if ratio is None and entry.key not in {s.key for s in current(run)}:
        return
    with contextlib.suppress(OSError), run.stragglers.open("a") as file:
        file.write(documents.json_text(dataclasses.asdict(entry)) + "\n")


def current(run: RunDir) -> list[Straggler]:
    """Return the workers that have not caught up since, also those that were left out."""
    latest = {s.key: s for s in restart.entries(run.stragglers, Straggler)[0]}
    return [latest[key] for key in sorted(latest) if latest[key].ratio is not None]


def lines(run: RunDir, written: RunState) -> Iterator[str]:
    """Yield a line for `mtrain status` on each straggler."""
    hosts = {place.partition(", ")[0] for place in written.workers}
    for straggler in current(run):
        left_out = "" if straggler.host in hosts else f"; {straggler.host} is left out"
        yield straggler.describe() + left_out


def leave_out(config: Config, run: RunDir) -> None:
    """Continue a job on fewer nodes: without those of stragglers, if `OPTION` asks for it.

    All ranks call this. Those of the nodes that are left out wait here for the end of the job, and
    exit. The others get new numbers (`jobs.current_job`). The node of rank 0, which serves the job,
    stays; and so do all if the configuration does not fit those that are left.
    """
    job = jobs.current_job()
    if job is None or job.local_world_size == job.world_size:
        return

    def decide() -> str:
        slow = current(run) if config.run.leave_out_stragglers else []
        if not slow:
            return json.dumps([])
        hosts = jobs.hosts_of_ranks(job)
        slow = [s for s in slow if s.host in hosts]
        if any(s.host == hosts[0] for s in slow):
            print_error(f"{OPTION}: {hosts[0]} stays, because its rank 0 serves the job")
        left = {s.host: s for s in slow if s.host != hosts[0]}
        keep = [rank for rank, host in enumerate(hosts) if host not in left]
        try:
            if left:
                resolve_environment(config, job=replace(job, world_size=len(keep)))
        except ConfigError as error:
            print_error(f"{OPTION}: all nodes stay. Without {', '.join(left)}, {error.problems[0]}")
            keep = []
        for host, straggler in left.items() if keep else ():
            ranks = [rank for rank, name in enumerate(hosts) if name == host]
            line = f"restarts without {host} (rank {show_spans(spans(ranks))} until now): "
            line += straggler.describe()
            print_error(line)
            with contextlib.suppress(OSError), run.log.open("a", encoding="utf-8") as log:
                log.write(line + "\n")
        return json.dumps(keep if left else [])

    jobs.tell_host(job)
    keep: list[int] = json.loads(jobs.decide_on_rank_zero(decide))
    if not keep or len(keep) == job.world_size:
        return
    smaller = jobs.continue_on(job, keep)
    if job.rank not in keep:
        from mtrain_cli.launch.failure_channel import FailureChannel, RankZeroDuties

        print_error(f"rank {job.rank} is left out, because its node has a straggler")
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(signum, signal.SIG_IGN)  # the others save and stop
        FailureChannel(smaller, RankZeroDuties(lambda: None)).wait()
