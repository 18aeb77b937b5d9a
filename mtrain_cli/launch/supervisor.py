"""Start, watch and stop the workers of one machine.

A failed worker makes its peers fail, too, so failures are collected before workers are stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen, TimeoutExpired

from mtrain_cli.launch import failures, progress_record
from mtrain_cli.launch.failures import Failure
from mtrain_cli.launch.progress_record import WorkerActivity
from mtrain_cli.launch.stop_request import SAVE, SAVE_AND_STOP, STACK_DUMP

POLL_S = 0.1
CAUSE_GRACE_S = 2.0  # wait for the cause if all failures so far may be consequences of another
STOP_GRACE_S = 5  # SIGTERM ends a worker at once, unless it hangs in the operating system
# The launcher ends waits that gloo and NCCL have not ended OVERDUE_S after topology.timeout_s.
OVERDUE_S, OVERDUE_CHECK_S = 30.0, 5.0
STACK_DUMP_S = 0.3  # for a worker that hangs to write its stack, which takes milliseconds


class Supervisor:
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
        """Prepare to start workers.

        Args:
            command: command line of a worker.
            folder: private folder for the failure files and activity files.
            variables: environment variables to add for the workers.
            timeout_s: seconds after which a worker stops waiting for another worker.
        """
        self._workers, self._command, self._folder = workers, command, folder
        self._variables, self._timeout_s = variables, timeout_s
        self._processes: list[Popen] = []  # by rank
        self.failures: list[Failure] = []
        self.where: list[str] = []
        self._last_check = time.monotonic()
        self._overdue: list[Failure] = []

    def run_to_end(self) -> None:
        """Start the workers and wait until all have ended. If one fails, stop the others.

        Raises:
            OSError: a process did not start.
        """
        try:
            self._start()
            while not self.failures:
                # Look first, so that no worker can fail in between.
                running = any(process.poll() is None for process in self._processes)
                if self._failures_so_far() or self._find_overdue():
                    self._determine_failures()
                elif not running:
                    return
                time.sleep(POLL_S)
        finally:
            self.kill_workers()

    def _start(self) -> None:
        # Workers inherit the mask. A request that comes while they start waits for their handlers.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (SAVE, SAVE_AND_STOP))
        try:
            for rank in range(self._workers):
                variables = os.environ | self._variables | self._rank_variables(rank)
                process = Popen(self._command, env=variables, start_new_session=True)
                self._processes.append(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _rank_variables(self, rank: int) -> dict[str, str]:
        """Return the environment variables that torchrun would set, and the failure file."""
        return {
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self._workers)),
            # Nothing listens there: the workers meet in a file.
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "0",
            "TORCHELASTIC_ERROR_FILE": str(self._failure_file(rank)),
        }

    def _failure_file(self, rank: int) -> Path:
        return self._folder / f"failure-{rank}.json"

    def kill_workers(self, signum: int = signal.SIGKILL) -> None:
        """Send a signal to all workers and the processes that they started."""
        for process in self._processes:
            # A worker leads a process group. Its child processes may outlive it in that group.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signum)

    def _stop(self) -> None:
        """Ask the workers that still run to end. Kill them after STOP_GRACE_S."""
        for signum in (signal.SIGTERM, signal.SIGKILL):
            self.kill_workers(signum)
            deadline = time.monotonic() + STOP_GRACE_S
            for process in self._processes:
                # A process that hangs in the operating system does not even react to SIGKILL.
                with contextlib.suppress(TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))

    def _failures_so_far(self) -> list[Failure]:
        records = (
            failures.read_record(rank, process.poll(), self._failure_file(rank))
            for rank, process in enumerate(self._processes)
        )
        return [failure for failure in records if failure is not None]

    def _activities(self) -> dict[int, WorkerActivity]:
        """Return the activity that each worker recorded last, by rank."""
        path = progress_record.launcher_record_path
        ranks = range(self._workers)
        return progress_record.read_activities({r: path(self._failure_file(r), r) for r in ranks})

    def _find_overdue(self) -> list[Failure]:
        """Return a failure for each worker that waits too long. NCCL's watchdog misses some."""
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
        """Set ``failures`` and ``where``, then stop the workers that still run."""
        deadline = time.monotonic() + CAUSE_GRACE_S
        failed = self._failures_so_far() or self._overdue
        while all(failure.is_consequence for failure in failed) and time.monotonic() < deadline:
            time.sleep(POLL_S / 2)
            failed = self._failures_so_far() or self._overdue
        records = self._activities()
        reported = {failure.rank for failure in failed}
        running = {
            rank: process.pid
            for rank, process in enumerate(self._processes)
            if rank not in reported and process.poll() is None
        }
        failed += self._find_silent(failed, running, records)
        cause = failures.find_cause(failed)
        self.where = progress_record.activity_lines(records, [cause.rank], time.time())
        self.failures = failed
        self._stop()

    def _find_silent(
        self, failed: list[Failure], running: dict[int, int], records: dict[int, WorkerActivity]
    ) -> list[Failure]:
        """Return a failure for workers that reported no failure but kept the others waiting."""
        stopped = [rank for rank, pid in running.items() if _is_stopped(pid)]
        not_waiting = progress_record.ranks_not_waiting(running, records)
        # NCCL's watchdog aborts a process that waited too long, whose activity record is then old.
        waited_long = any(
            f.rank in records and time.time() - records[f.rank].time > self._timeout_s / 2
            for f in failed
            if f.is_abort
        )
        limit = f"topology.timeout_s={self._timeout_s:g}" if waited_long else ""
        silent = failures.find_silent_rank(failed, stopped, not_waiting, limit)
        if silent is None:
            return []
        # A worker that hangs writes its stacks to its log. A stopped one reacts only to SIGKILL.
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


def worker_command(module: str, *arguments: str) -> list[str]:
    """Return the command line of a worker that imports the same code as this process."""
    from_here = "" in sys.path or os.getcwd() in sys.path  # otherwise -P keeps this folder off
    return [sys.executable, *([] if from_here else ["-P"]), "-u", "-m", module, *arguments]
