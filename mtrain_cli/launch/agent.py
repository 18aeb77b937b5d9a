"""Start, watch and stop the workers of one machine through torch's elastic agent.

torch's agent knows failure times only in whole seconds, and it counts the workers that it stopped
itself as failed. `WorkerAgent` therefore collects the failures before it stops any worker. If every
failure so far may be the consequence of another failure, the agent waits briefly for the cause.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
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
from mtrain_cli.launch.stop_request import SAVE, SAVE_AND_STOP, STACK_DUMP

POLL_S = 0.1
# The launcher may notice a worker that lost its peer before it notices that the peer has exited.
CAUSE_GRACE_S = 2.0
# SIGTERM ends a worker immediately, unless the worker hangs in the operating system.
STOP_GRACE_S = 5
# gloo or NCCL should end a wait after topology.timeout_s. If neither does, the launcher ends the
# wait OVERDUE_S later. It looks for such waits every OVERDUE_CHECK_S.
OVERDUE_S, OVERDUE_CHECK_S = 30.0, 5.0
# A worker that hangs has this long to write its stack to its log. Writing takes milliseconds.
STACK_DUMP_S = 0.3


class WorkerFiles(LogsSpecs):
    """The environment variables and the failure file of each worker.

    Workers redirect their own output to the run's logs. The agent therefore redirects nothing.
    """

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        super().__init__(log_dir=str(folder))
        self._folder = folder
        self._variables = variables

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def failure_file(self, rank: int) -> Path:
        """Return the file to which the worker writes its failure."""
        return self._folder / f"failure-{rank}.json"

    def activity_file(self, rank: int) -> Path:
        """Return the file to which the worker writes its activity."""
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
    """Runs one command for each rank of this machine, without restarts.

    failures: the workers that failed, after `run_to_end`.
    where: what the workers were doing when the run failed, as lines for the user.
    """

    def __init__(
        self,
        workers: int,
        command: Sequence[str],
        folder: Path,
        variables: dict[str, str],
        timeout_s: float,
    ) -> None:
        """Prepare the agent.

        Args:
            workers: number of workers to start.
            command: command line of a worker.
            folder: private folder for the failure files and activity files.
            variables: environment variables to add for the workers.
            timeout_s: seconds after which a worker stops waiting for another worker.
        """
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
        self._overdue: list[Failure] = []

    def run_to_end(self) -> None:
        """Start the workers and wait until all have ended. If one fails, stop the others.

        Raises:
            Exception: the rendezvous failed or a process did not start.
        """
        # Workers inherit the mask. A request that comes while they start waits for their handlers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (SAVE, SAVE_AND_STOP))
        try:
            self.run()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            self.kill_workers()
            self.get_worker_group().spec.rdzv_handler.shutdown()

    def kill_workers(self) -> None:
        """Kill all workers and the processes that they started."""
        for worker in self.get_worker_group().workers:
            # A worker leads a process group. Its child processes may outlive it in that group.
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.killpg(worker.id, signal.SIGKILL)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self.failures and (self._failures_so_far() or self._find_overdue()):
            self._determine_failures()
        return super()._monitor_workers(worker_group)

    def _failures_so_far(self) -> list[Failure]:
        records = (
            failures.read_record(rank, process.poll(), self._files.failure_file(rank))
            for rank, process in self._processes().items()
        )
        return [failure for failure in records if failure is not None]

    def _processes(self) -> dict[int, subprocess.Popen]:
        """Return the process of each worker, by rank."""
        assert self._pcontext is not None
        handlers = self._pcontext.subprocess_handlers  # type: ignore[attr-defined]
        return {rank: handler.proc for rank, handler in handlers.items()}

    def _activities(self) -> dict[int, WorkerActivity]:
        """Return the activity that each worker recorded last, by rank."""
        files = {rank: self._files.activity_file(rank) for rank in self._processes()}
        return progress_record.read_activities(files)

    def _find_overdue(self) -> list[Failure]:
        """Return a failure for each worker that has waited too long for another worker.

        NCCL's watchdog ends most such waits, but not all. A call within OVERDUE_CHECK_S seconds of
        the previous check returns no failures.
        """
        if time.monotonic() - self._last_check < OVERDUE_CHECK_S:
            return []
        self._last_check = time.monotonic()
        latest = time.time() - self._timeout_s - OVERDUE_S
        limit = f"topology.timeout_s={self._timeout_s:g}"
        problem = "waited longer than this for another worker, and nothing ended its wait"
        self._overdue = [
            Failure(rank, None, "peer lost", f"{limit}: rank {rank} {problem}", time=record.time)
            for rank, record in self._activities().items()
            if record.waits_for is not None and record.time <= latest
        ]
        return self._overdue

    def _determine_failures(self) -> None:
        """Set ``failures`` and ``where``, then stop the workers that still run.

        If every failure so far may be a consequence, first wait up to CAUSE_GRACE_S for the cause.
        """
        deadline = time.monotonic() + CAUSE_GRACE_S
        failed = self._failures_so_far() or self._overdue
        while all(failure.is_consequence for failure in failed) and time.monotonic() < deadline:
            time.sleep(POLL_S / 2)
            failed = self._failures_so_far() or self._overdue
        records = self._activities()
        reported = {failure.rank for failure in failed}
        running = {
            rank: process.pid
            for rank, process in self._processes().items()
            if rank not in reported and process.poll() is None
        }
        failed += self._find_silent(failed, running, records)
        cause = failures.find_cause(failed)
        self.where = progress_record.activity_lines(records, [cause.rank], time.time())
        self.failures = failed
        assert self._pcontext is not None
        self._pcontext.close(signal.SIGTERM, STOP_GRACE_S)

    def _find_silent(
        self, failed: list[Failure], running: dict[int, int], records: dict[int, WorkerActivity]
    ) -> list[Failure]:
        """Return a failure for workers that reported no failure but kept the others waiting.

        Args:
            failed: the failures so far.
            running: process id of each worker that still runs, by rank.
            records: activity of each worker, by rank.
        """
        stopped = [rank for rank, pid in running.items() if _is_stopped(pid)]
        not_waiting = progress_record.ranks_not_waiting(running, records)
        # NCCL's watchdog aborts a process that waited too long, and the process leaves no failure.
        # Its activity record is then old. Such a process is not the cause.
        waited_long = any(
            f.rank in records and time.time() - records[f.rank].time > self._timeout_s / 2
            for f in failed
            if f.is_abort
        )
        limit = f"topology.timeout_s={self._timeout_s:g}" if waited_long else ""
        silent = failures.find_silent_rank(failed, stopped, not_waiting, limit)
        if silent is None:
            return []
        # A worker that hangs writes the stacks of its threads to its log. A stopped process reacts
        # only to SIGKILL.
        for rank in stopped or not_waiting:
            with contextlib.suppress(ProcessLookupError):
                os.kill(running[rank], signal.SIGKILL if stopped else STACK_DUMP)
        time.sleep(0 if stopped else STACK_DUMP_S)
        return [silent]


def _is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped the process. Works only on Linux."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state in ("T", "t")


def _silence_agent_logs() -> None:
    """Turn off the log of torch's elastic agent. The launcher reports failures itself."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def worker_command(module: str, *arguments: str) -> list[str]:
    """Return the command line of a worker that imports the same code as this process.

    The option ``-P`` keeps the current folder off the worker's import path. The command has the
    option unless the current folder is on the import path of this process.
    """
    from_here = "" in sys.path or os.getcwd() in sys.path
    return [sys.executable, *([] if from_here else ["-P"]), "-u", "-m", module, *arguments]
