"""Start, watch and stop the workers of one machine through torch's elastic agent.

The elastic agent compares failure times in whole seconds, and its failures include the workers that
it stopped itself. `WorkerAgent` therefore reads the failures before it stops any worker. If they
are all consequences, it first waits briefly for their cause.
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

POLL_S = 0.1
# The launcher may see the worker that lost a peer before it sees that the peer has exited.
CAUSE_GRACE_S = 2.0
# SIGTERM ends a worker immediately. This limit is for a worker that hangs in the kernel.
STOP_GRACE_S = 5
# gloo or NCCL should end a wait after topology.timeout_s. If neither does, the launcher ends it
# OVERDUE_S later. The launcher checks every OVERDUE_CHECK_S.
OVERDUE_S, OVERDUE_CHECK_S = 30.0, 5.0
# Time for a worker that hangs to write its stack to its log. It takes milliseconds.
STACK_DUMP_S = 0.3


class WorkerFiles(LogsSpecs):
    """Set each worker's environment variables and failure file.

    Workers send their output to the run's logs themselves, so both streams stay as they are.
    """

    def __init__(self, folder: Path, variables: dict[str, str]) -> None:
        super().__init__(log_dir=str(folder))
        self._folder = folder
        self._variables = variables

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def failure_file(self, rank: int) -> Path:
        """Return the file in which worker ``rank`` leaves its failure."""
        return self._folder / f"failure-{rank}.json"

    def activity_file(self, rank: int) -> Path:
        """Return the file in which worker ``rank`` records its activity."""
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
    """Run ``command`` once for each of the ``workers`` ranks of this machine, without restarts.

    After `run_to_end`, ``failures`` lists the workers that failed. ``where`` lists what each worker
    was doing, one line per worker.
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
            timeout_s: seconds that a worker waits for another before it gives up.
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
        """Start the workers and wait until all have ended. As soon as one fails, stop the others.

        Raises:
            Exception: the rendezvous failed or a process did not start.
        """
        try:
            self.run()
        finally:
            self.kill_workers()
            self.get_worker_group().spec.rdzv_handler.shutdown()

    def kill_workers(self) -> None:
        """Kill every worker and the processes that it started."""
        for worker in self.get_worker_group().workers:
            # Each worker leads a process group, which may outlive the worker through its children.
            with contextlib.suppress(ProcessLookupError, TypeError):
                os.killpg(worker.id, signal.SIGKILL)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self.failures and (self._failures_so_far() or self._find_overdue()):
            self._determine_failures()
        return super()._monitor_workers(worker_group)

    def _failures_so_far(self) -> list[Failure]:
        found = (
            failures.read_record(rank, process.poll(), self._files.failure_file(rank))
            for rank, process in self._processes().items()
        )
        return [failure for failure in found if failure is not None]

    def _processes(self) -> dict[int, subprocess.Popen]:
        """Return the workers' processes by rank."""
        assert self._pcontext is not None
        handlers = self._pcontext.subprocess_handlers  # type: ignore[attr-defined]
        return {rank: handler.proc for rank, handler in handlers.items()}

    def _activities(self) -> dict[int, WorkerActivity]:
        """Return what the workers recorded last, by rank."""
        files = {rank: self._files.activity_file(rank) for rank in self._processes()}
        return progress_record.read_activities(files)

    def _find_overdue(self) -> list[Failure]:
        """Return the workers whose wait for another worker is overdue.

        NCCL's watchdog ends most waits, but not all. Check only every ``OVERDUE_CHECK_S`` seconds.
        """
        if time.monotonic() - self._last_check < OVERDUE_CHECK_S:
            return []
        self._last_check = time.monotonic()
        limit = f"topology.timeout_s={self._timeout_s:g}"
        self._overdue = []
        for rank, record in self._activities().items():
            waited = time.time() - record.time
            if record.waits_for is not None and waited >= self._timeout_s + OVERDUE_S:
                message = f"{limit}: rank {rank} waited longer than this for another worker, and "
                message += "nothing ended its wait"
                self._overdue.append(Failure(rank, None, "peer lost", message, "", record.time))
        return self._overdue

    def _determine_failures(self) -> None:
        """Record who failed and what each worker was doing, then stop the other workers.

        If all failures so far are consequences, first wait up to ``CAUSE_GRACE_S`` for the cause.
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
        """Return the workers that left no failure but kept the others waiting.

        Args:
            running: process ids of the workers that still run, by rank.
        """
        stopped = [rank for rank, pid in running.items() if _is_stopped(pid)]
        not_waiting = progress_record.ranks_not_waiting(running, records)
        # NCCL's watchdog ends a process without a record. If the worker's last note is old, the
        # worker was waiting and is not at fault.
        quiet = [
            f.rank in records and time.time() - records[f.rank].time > self._timeout_s / 2
            for f in failed
            if f.is_abort
        ]
        waited = f"topology.timeout_s={self._timeout_s:g}" if any(quiet) else ""
        silent = failures.find_silent_rank(failed, stopped, not_waiting, waited)
        if silent is None:
            return []
        # Ask a worker that hangs to write the stacks of all its threads to its log. A stopped
        # process reacts to SIGKILL only.
        for rank in stopped or not_waiting:
            with contextlib.suppress(ProcessLookupError):
                os.kill(running[rank], signal.SIGKILL if stopped else signal.SIGUSR1)
        time.sleep(0 if stopped else STACK_DUMP_S)
        return [silent]


def _is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped the process (Linux only, else False)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state in ("T", "t")


def _silence_agent_logs() -> None:
    """Silence the elastic agent's log. The launcher reports what matters."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def worker_command(module: str, *arguments: str) -> list[str]:
    """Return the command line of a worker that imports the same code as this process.

    Pass ``-P``, which keeps the current folder off the import path, unless this process has it
    there.
    """
    from_here = "" in sys.path or os.getcwd() in sys.path
    return [sys.executable, *([] if from_here else ["-P"]), "-u", "-m", module, *arguments]
