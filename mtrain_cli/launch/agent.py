"""The workers of one machine, as torch's elastic agent starts, watches and stops them.

The agent's own choice of the first failure has a resolution of one second and counts what it ended itself. This one looks before it stops
anything, and gives the worker whose failure explains the others a moment to show itself.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
import uuid
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs

from mtrain_cli.launch import failures, progress_record
from mtrain_cli.launch.failures import Failure
from mtrain_cli.launch.progress_record import WorkerActivity
from mtrain_cli.launch.rendezvous import SingleMachineRendezvous

POLL_S = 0.1
# A worker whose peer died may be reaped before the peer is.
CAUSE_GRACE_S = 2.0
# Workers leave SIGTERM at its default and die of it at once; this is for one that hangs in the kernel.
STOP_GRACE_S = 5
# Beyond topology.timeout_s, for a wait that gloo or NCCL should have ended by itself; and how often that is looked at.
OVERDUE_S, OVERDUE_CHECK_S = 30.0, 5.0
# For a worker that hangs to write its stack into its log, which takes milliseconds.
STACK_DUMP_S = 0.3


class WorkerFiles(LogsSpecs):
    """Where workers leave their failures, and what their environment holds beside the agent's variables.

    Workers send their own output to the run's logs, so both streams stay as they are here.
    """

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        super().__init__(log_dir=str(folder))
        self._folder = folder
        self._variables = variables

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def failure_file(self, rank: int) -> Path:
        """The file in which worker ``rank`` leaves its failure."""
        return self._folder / f"failure-{rank}.json"

    def activity_file(self, rank: int) -> Path:
        """The file in which worker ``rank`` keeps where it is."""
        return progress_record.launcher_record_path(self.failure_file(rank), rank)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        for rank, variables in envs.items():
            variables.update(self._variables, TORCHELASTIC_ERROR_FILE=str(self.failure_file(rank)))
        terminal = dict.fromkeys(envs, "")
        return LogsDest(
            stdouts=terminal,
            stderrs=terminal,
            error_files={rank: str(self.failure_file(rank)) for rank in envs},
        )


class WorkerAgent(LocalElasticAgent):
    """Runs ``command`` once for each of ``workers`` ranks of this machine, without restarts."""

    def __init__(
        self,
        workers: int,
        command: Sequence[str],
        folder: Path,
        variables: dict[str, str],
        timeout_s: float,
    ) -> None:
        """timeout_s: how long a worker waits for another before it gives up."""
        _silence_agent_logs()
        spec = WorkerSpec(
            role="worker",
            local_world_size=workers,
            entrypoint=command[0],
            args=tuple(command[1:]),
            rdzv_handler=SingleMachineRendezvous(uuid.uuid4().hex),
            max_restarts=0,
            monitor_interval=POLL_S,
            local_addr="127.0.0.1",
        )
        self._files = WorkerFiles(folder, variables)
        super().__init__(spec, self._files, exit_barrier_timeout=10)
        self.failures: list[Failure] = []
        self.where: list[str] = []
        self._timeout_s = timeout_s
        self._last_check = time.monotonic()
        self._overdue_found: list[Failure] = []

    def finish(self) -> None:
        """Start the workers, wait for all to end, and stop the rest as soon as one fails; `failures` then says who did.

        Raises:
            Exception: the rendezvous or the start of a process failed.
        """
        try:
            self.run()
        finally:
            self.kill_workers()
            self.get_worker_group().spec.rdzv_handler.shutdown()

    def kill_workers(self) -> None:
        """End every worker at once, with the processes that it started."""
        for worker in self.get_worker_group().workers:
            # Each worker leads a process group, which outlives it as long as a child of its own does.
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.killpg(worker.id, signal.SIGKILL)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self.failures and (self._failures_so_far() or self._find_overdue()):
            self._determine_failures()
        return super()._monitor_workers(worker_group)

    def _failures_so_far(self, before_shutdown: bool = True) -> list[Failure]:
        assert self._pcontext is not None
        handlers = self._pcontext.subprocess_handlers  # type: ignore[attr-defined]
        found = (
            failures.read_record(
                rank, handler.proc.poll(), self._files.failure_file(rank), before_shutdown
            )
            for rank, handler in handlers.items()
        )
        return [failure for failure in found if failure is not None]

    def _find_overdue(self) -> list[Failure]:
        """Workers that wait for another for longer than they should have let themselves: NCCL's watchdog ends most waits, not all.

        They are looked at now and then only.
        """
        if time.monotonic() - self._last_check < OVERDUE_CHECK_S:
            return []
        self._last_check = time.monotonic()
        assert self._pcontext is not None
        found = []
        for rank in self._pcontext.subprocess_handlers:  # type: ignore[attr-defined]
            record = progress_record.read_activity(self._files.activity_file(rank))
            if (
                record is None
                or record.waits_for is None
                or time.time() - record.time < self._timeout_s + OVERDUE_S
            ):
                continue
            given = f"topology.timeout_s={self._timeout_s:g}"
            message = f"{given}: rank {rank} waited longer than that for another worker, and nothing ended it"
            found.append(Failure(rank, None, "peer lost", message, "", record.time))
        self._overdue_found = found
        return found

    def _determine_failures(self) -> None:
        """Note who failed, after a wait for the cause where there are only consequences so far; then stop the others.

        With it, where each worker was.
        """
        deadline = time.monotonic() + CAUSE_GRACE_S
        failed = self._failures_so_far() or self._overdue_found
        while all(failure.is_consequence for failure in failed) and time.monotonic() < deadline:
            time.sleep(POLL_S / 2)
            failed = self._failures_so_far() or self._overdue_found
        assert self._pcontext is not None
        handlers = self._pcontext.subprocess_handlers  # type: ignore[attr-defined]
        processes = {rank: handler.proc for rank, handler in handlers.items()}
        records = {
            rank: record
            for rank in processes
            if (record := progress_record.read_activity(self._files.activity_file(rank)))
        }
        heard = {failure.rank for failure in failed}
        running = {
            rank: process.pid
            for rank, process in processes.items()
            if rank not in heard and process.poll() is None
        }
        failed += self._find_silent(failed, running, records)
        self.where = progress_record.activity_lines(
            records, [failures.find_cause(failed).rank], time.time()
        )
        self.failures = failed
        self._pcontext.close(signal.SIGTERM, STOP_GRACE_S)

    def _find_silent(
        self, failed: list[Failure], running: dict[int, int], records: dict[int, WorkerActivity]
    ) -> list[Failure]:
        """Whom the others waited for, among workers that left no failure. running: their process ids."""
        stopped = [rank for rank, pid in running.items() if _is_stopped(pid)]
        going = [rank for rank in running if rank not in records or records[rank].waits_for is None]
        # NCCL's watchdog ends a process without a record. One that had noted nothing for long was waiting, not at fault.
        quiet = [
            f.rank in records and time.time() - records[f.rank].time > self._timeout_s / 2
            for f in failed
            if f.is_abort
        ]
        found = failures.find_silent_rank(
            failed, stopped, going, f"topology.timeout_s={self._timeout_s:g}" if any(quiet) else ""
        )
        if found is None:
            return []
        # A worker that hangs is asked to write the stacks of all its threads into its log; one that is stopped heeds nothing but this.
        for rank in stopped or going:
            with contextlib.suppress(ProcessLookupError):
                os.kill(running[rank], signal.SIGKILL if stopped else signal.SIGUSR1)
        time.sleep(0 if stopped else STACK_DUMP_S)
        return [found]


def _is_stopped(pid: int) -> bool:
    """Whether a signal or a debugger holds the process (Linux; elsewhere that is not known)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state in ("T", "t")


def _silence_agent_logs() -> None:
    """Keep the elastic agent's narration off the terminal: what matters of it is told by the launcher."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def worker_command(module: str, *arguments: str) -> list[str]:
    """The command of a worker that imports what this process would import: the current folder only where it is on the path here."""
    from_here = "" in sys.path or os.getcwd() in sys.path
    return [sys.executable, *([] if from_here else ["-P"]), "-u", "-m", module, *arguments]
