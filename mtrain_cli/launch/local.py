"""Start the workers of one machine, watch and restart them. Under torchrun and srun, be a worker.

A failed worker makes its peers fail, too, so failures are collected before workers are stopped.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from types import FrameType

from mtrain_cli.config import resolved_file
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.launch import (
    failures,
    guarded_streams,
    progress_record,
    restart,
    run_status,
    stop_request,
)
from mtrain_cli.launch.environment import Environment, cpu_cores, loopback_variables, nccl_variables
from mtrain_cli.launch.failures import Failure
from mtrain_cli.launch.progress_record import WorkerActivity
from mtrain_cli.launch.run_dir import RunDir, study_command
from mtrain_cli.launch.stop_request import SAVE, SAVE_AND_STOP, STACK_DUMP
from mtrain_cli.launch.temporary_folders import private_folder

TRAIN = "mtrain_cli.commands.train:run_worker"
KILLED_CODE = 130
# Polls of an OpenMP thread for the others before it sleeps. With the default of 300,000, attention
# on two cores beside a busy process was 4 to 10 times slower; on idle cores it differs by 6 %.
_SPINS = "1000"
NO_CHECKPOINT = "there is no checkpoint to resume from"
DISPLAY_LINES = 2  # number of lines of the live display of `training.progress`
POLL_S = 0.1
CAUSE_GRACE_S = 2.0  # wait for the cause if all failures so far may be consequences of another
STOP_GRACE_S = 5  # SIGTERM ends a worker at once, unless it hangs in the operating system
# The launcher ends waits that gloo and NCCL have not ended OVERDUE_S after topology.timeout_s.
OVERDUE_S, OVERDUE_CHECK_S = 30.0, 5.0
STACK_DUMP_S = 0.3  # for a worker that hangs to write its stack, which takes milliseconds
WARNED, TERMINATED = 140, 143
# 128 + the signal, as in a shell. SIGHUP has the code of SIGTERM: a system that shuts down sends
# both.
_STOP_CODES = {
    signal.SIGINT: KILLED_CODE,
    signal.SIGTERM: TERMINATED,
    signal.SIGHUP: TERMINATED,
    SAVE_AND_STOP: WARNED,
}


def launch(
    run_dir: RunDir,
    environment: Environment,
    resume: bool,
    target: str = TRAIN,
    config: Config | None = None,
    saves: bool = True,
) -> int:
    """Run ``target`` on every worker and wait for the end. Print the cause of a failure.

    SIGUSR2, SIGTERM, SIGHUP and the first Ctrl-C ask the workers to save and stop, SIGUSR1 to save
    and go on; a second Ctrl-C kills them. If a worker is lost, all are restarted, as `run.restarts`
    allows. Under torchrun and srun this process is a worker, and exits here.

    Args:
        resume: whether to resume from the newest checkpoint.
        target: ``module:function``. The function gets config, run_dir, environment and resume. It
            returns True if a stop request ended the function early.
        config: what this process composed, which must be the same on all ranks of a job.
        saves: whether the workers write checkpoints, from which a lost worker's run restarts.

    Returns:
        The exit code: 0 for success, 1 after a failure, 130 after Ctrl-C, 140 after SIGUSR2 with a
        checkpoint, 143 after SIGTERM, SIGHUP, or SIGUSR2 without a checkpoint. A requested stop is
        no success, so that `mtrain train && evaluate` does not evaluate an unfinished run.

    Raises ConfigError if a worker found a user's mistake, such as a corpus that is too short.
    """
    guarded_streams.guard_streams(output_required=False)
    if environment.launcher != "mtrain":
        from mtrain_cli.launch.worker import run_in_job

        run_in_job(run_dir, environment, resume, target, config)

    before = run_status.read_state(run_dir) if resume else None
    saved = resolved_file.load(run_dir.resolved)
    restarts = restart.RestartPolicy(run_dir, saved, resume)
    devices: tuple[str, ...] | None = None
    timeout = saved.topology.timeout_s
    with _heartbeat(run_dir), _SignalRequests(run_dir, saves) as requests:
        while True:
            arguments = [str(run_dir.path), *(["--resume"] if resume else [])]
            arguments += ["--launcher-pid", str(os.getpid()), "--target", target]
            arguments += ["--restarts", str(environment.restarts)]
            variables = _variables(environment, run_dir, timeout)
            if devices is not None:
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
            with private_folder() as folder:
                arguments += ["--store", str(folder)]
                command = worker_command("mtrain_cli.launch.worker", *arguments)
                workers = environment.dims.workers
                supervisor = Supervisor(workers, command, folder, variables, timeout)
                code, failure = _wait(supervisor, run_dir, folder, requests, before)
            if failure is None or not saves:
                return code
            run_status.set_phase(run_dir, "failed", restart.failure_summary(failure))
            decision: restart.RestartDecision | str = ""
            if not requests.requested:
                decision = restarts.after(failure, environment)
            if isinstance(decision, str):
                for line in filter(None, (decision, _resume_hint(run_dir))):
                    _print_line(line)
                return code
            stopped = _wait_for_restart(run_dir, decision, requests)
            if stopped is not None:
                return stopped
            environment, resume, devices = decision.environment, decision.resume, decision.devices


@contextlib.contextmanager
def _heartbeat(run_dir: RunDir) -> Iterator[None]:
    """Renew the time stamp of the run's lock on another thread: this one waits for workers."""
    ended = threading.Event()

    def beat() -> None:
        run_dir.beat()
        while not ended.wait(run_status.HEARTBEAT_S):
            run_dir.beat()

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(1.0)  # not longer, because the disk may hang


def _wait_for_restart(
    run_dir: RunDir, decision: restart.RestartDecision, requests: _SignalRequests
) -> int | None:
    """Announce the restart and wait for it. Return the exit code if the user stops the wait."""
    entry, line = decision.entry, restart.describe_restart(decision)
    requests.waiting = True
    _print_line(line)
    with contextlib.suppress(OSError), run_dir.log.open("a", encoding="utf-8") as log:
        log.write(f"lost a worker after step {entry.reached}: {entry.reason}\n{line}\n")
    run_status.set_phase(run_dir, "restarting", entry.reason)
    deadline = time.monotonic() + decision.wait_s
    while not requests.requested and time.monotonic() < deadline:
        time.sleep(0.1)
    requests.waiting = False
    if not requests.requested:
        return None
    run_status.set_phase(run_dir, "stopped", "on request, before a restart")
    _print_line(_resume_hint(run_dir) or NO_CHECKPOINT)
    return requests.stop_code


def _wait(
    supervisor: Supervisor,
    run_dir: RunDir,
    folder: Path,
    requests: _SignalRequests,
    before: run_status.RunState | None,
) -> tuple[int, Failure | None]:
    """Run the supervisor on another thread, so that this one handles signals. Print a failure."""
    problem: list[Exception] = []

    def run() -> None:
        try:
            supervisor.run_to_end()
        except Exception as error:  # the other thread reports it
            problem.append(error)

    thread = threading.Thread(target=run, name="workers", daemon=True)
    thread.start()
    while thread.is_alive() and not requests.kill:
        thread.join(0.1)
    if requests.kill:
        supervisor.kill_workers()
        thread.join(2.0)
        _restore_terminal()
        run_status.set_phase(run_dir, "failed", "killed by a second Ctrl-C")
        hint = f"killed; {_resume_hint(run_dir) or NO_CHECKPOINT}"
        _print_line(hint if requests.saves else "killed")
        return KILLED_CODE, None
    if supervisor.failures:
        return 1, _report_failure(supervisor, run_dir, before)
    if problem:
        reason = (str(problem[0]).strip() or type(problem[0]).__name__).splitlines()[0]
        _print_line(f"error: cannot start the workers on this machine: {reason}")
        return 1, None
    if stop_request.was_stopped(folder):  # perhaps by a signal that only a worker received
        return requests.stop_code, None
    return 0, None


def _report_failure(
    supervisor: Supervisor, run_dir: RunDir, before: run_status.RunState | None
) -> Failure:
    """Print and return the cause of the failures. Raise ConfigError for a user's mistake.

    before: state of the run that is resumed, which a mistake leaves as it was.
    """
    failure = failures.find_cause(supervisor.failures)
    _restore_terminal()
    if failure.kind == "config":
        run_dir.discard()
        if run_dir.state.exists():
            run_status.set_phase(run_dir, "failed", failure.message.splitlines()[0])
            now = run_status.read_state(run_dir)
            if before is not None and now is not None and now.step == before.step:
                run_status.write_state(run_dir, before)
        raise ConfigError(*failure.message.splitlines())
    log = run_dir.logs / f"rank-{failure.rank}.log"
    progress_record.keep(run_dir.logs, supervisor.record_files, supervisor.gone)
    _print_line(failures.format_report(failure, log, supervisor.where))
    return failure


def _resume_hint(run_dir: RunDir) -> str:
    """Return a line on how to resume; empty for a run without a checkpoint and study."""
    if command := study_command(run_dir.path):
        return f"continue the study: {command}"
    step = run_dir.last_step()
    if step is None:
        return ""
    return f"resume from the checkpoint of step {step}: {run_dir.resume_command}"


class _SignalRequests:
    """Handles the signals to the launcher while workers run.

    requested: the first signal that asks to save and stop.
    kill: whether a Ctrl-C came after it.
    waiting: whether the launcher waits for a restart, so that no worker runs.
    saves: whether the workers write checkpoints.
    """

    def __init__(self, run_dir: RunDir, saves: bool) -> None:
        self._run_dir, self.saves = run_dir, saves
        self.requested: signal.Signals | None = None
        self.kill = False
        self.waiting = False

    def __enter__(self) -> _SignalRequests:
        self._before = {}
        self._run_dir.forget_requests()
        if threading.current_thread() is threading.main_thread():
            for signum in (*_STOP_CODES, SAVE):
                # Under nohup, SIGHUP is ignored. Keep it so.
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._before[signum] = signal.signal(signum, self._handle_signal)
            for number in stop_request.take_received():  # before there were workers
                self._handle_signal(number, None)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._run_dir.forget_requests()

    @property
    def stop_code(self) -> int:
        code = _STOP_CODES[self.requested or SAVE_AND_STOP]
        return TERMINATED if code == WARNED and not self.saves else code

    def _handle_signal(self, signum: int, _frame: FrameType | None) -> None:
        if signum == SAVE:
            line = "SIGUSR1: the workers save a checkpoint after this step and go on"
            if self.saves:
                line = self._ask(self._run_dir.save_requests, line)
            _print_line(line if self.saves else stop_request.NOTHING_TO_SAVE, over_display=True)
        elif self.requested and signum == signal.SIGINT:
            self.kill = True
        elif not self.requested:
            self.requested = signal.Signals(signum)
            if self.waiting:
                _print_line("stopping: the restart is cancelled")
                return
            does = "save a checkpoint" if self.saves else "end"
            line = f"stopping: the workers {does} after this step"
            line = self._ask(self._run_dir.stop_request, line)
            _print_line(f"{line}; press Ctrl-C again to kill them", over_display=True)

    @staticmethod
    def _ask(file: Path, line: str) -> str:
        try:
            with file.open("ab") as opened:
                opened.write(b".")
        except OSError as error:
            return f"cannot ask the workers ({file}: {error.strerror})"
        return line


def _print_line(line: str, over_display: bool = False) -> None:
    if over_display and sys.stderr.isatty():
        # The next refresh clears the lines at and above the cursor, so leave empty lines for it.
        line = f"\n{line}" + "\n" * (DISPLAY_LINES - 1)
    guarded_streams.print_error(line)


def _restore_terminal() -> None:
    """Show the cursor and clear its line. A live display hides the cursor, even if it is killed."""
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            with contextlib.suppress(OSError):
                stream.write("\x1b[?25h\r\x1b[K")
                stream.flush()


def _variables(environment: Environment, run_dir: RunDir, timeout_s: float) -> dict[str, str]:
    """Return the variables to set for the workers. Those that the user has set mostly stay."""
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cpu_cores() // environment.dims.workers)),
        # Without this, c10d prints long warnings about lost sockets before mtrain prints the cause.
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if environment.device == "cuda":
        defaults |= nccl_variables(run_dir.logs, timeout_s)
    elif "OMP_WAIT_POLICY" not in os.environ:
        defaults["GOMP_SPINCOUNT"] = _SPINS
    unset = {name: value for name, value in defaults.items() if name not in os.environ}
    return unset | loopback_variables()


class Supervisor:
    """Runs one command for each rank of this machine, without restarts.

    failures, where: which workers failed, and lines on what all did then, after `run_to_end`.
    gone: ranks that were the first to end, or were stopped.
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

        folder: private folder for the failure files and activity files.
        variables: environment variables to add for the workers.
        timeout_s: seconds after which a worker stops waiting for another worker.
        """
        self._workers, self._command, self._folder = workers, command, folder
        self._variables, self._timeout_s = variables, timeout_s
        self._processes: list[Popen] = []  # by rank
        self.failures: list[Failure] = []
        self.where: list[str] = []
        self.gone: list[int] = []
        self._last_check = time.monotonic()
        self._overdue: list[Failure] = []

    def run_to_end(self) -> None:
        """Start the workers and wait until all have ended. If one fails, stop the others.

        Raises OSError if a process does not start.
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
                env = os.environ | self._variables | self._rank_variables(rank)
                self._processes.append(Popen(self._command, env=env, start_new_session=True))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _rank_variables(self, rank: int) -> dict[str, str]:
        """Return the environment variables that torchrun would set, and the failure file."""
        return {
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(self._workers)),
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"},  # unused: workers meet in a file
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

    def _failures_so_far(self) -> list[Failure]:
        records = (
            failures.read_record(rank, process.pid, process.poll(), self._failure_file(rank))
            for rank, process in enumerate(self._processes)
        )
        return [failure for failure in records if failure is not None]

    @property
    def record_files(self) -> dict[int, Path]:
        """The file of the activities of each rank."""
        path = progress_record.launcher_record_path
        return {rank: path(self._failure_file(rank), rank) for rank in range(self._workers)}

    def _activities(self) -> dict[int, WorkerActivity]:
        """Return the activity that each worker recorded last, by rank."""
        return progress_record.read_activities(self.record_files)

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
        self.gone += [failure.rank for failure in failed if failure.severity < 3]
        self.where = progress_record.activity_lines(records, [cause.rank], time.time())
        self.failures = failed
        # A process that hangs in the operating system does not even react to SIGKILL.
        for signum in (signal.SIGTERM, signal.SIGKILL):
            self.kill_workers(signum)
            deadline = time.monotonic() + STOP_GRACE_S
            for process in self._processes:
                with contextlib.suppress(TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))

    def _find_silent(
        self, failed: list[Failure], running: dict[int, int], records: dict[int, WorkerActivity]
    ) -> list[Failure]:
        """Return a failure for workers that reported no failure but kept the others waiting."""
        self.gone = stopped = [rank for rank, pid in running.items() if _is_stopped(pid)]
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
