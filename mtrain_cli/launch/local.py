"""Start a run and wait for its end.

mtrain starts the workers on this machine. Under torchrun and srun this process is itself a worker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from mtrain_cli.config import resolved_file
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.launch import failures, guarded_streams, restart, run_status, stop_request
from mtrain_cli.launch.environment import Environment, cpu_cores, loopback_variables, nccl_variables
from mtrain_cli.launch.failures import Failure
from mtrain_cli.launch.run_dir import RunDir, study_command
from mtrain_cli.launch.stop_request import SAVE, SAVE_AND_STOP
from mtrain_cli.launch.supervisor import Supervisor, worker_command
from mtrain_cli.launch.temporary_folders import private_folder

TRAIN = "mtrain_cli.commands.train_worker:train"
TARGETS_WITHOUT_CHECKPOINTS = tuple(
    f"mtrain_cli.{room}." for room in ("profiling", "inference", "evaluation")
)
KILLED_CODE = 130
# Polls of an OpenMP thread for the others before it sleeps. With the default of 300,000, attention
# on two cores beside a busy process was 4 to 10 times slower; on idle cores it differs by 6 %.
_SPINS = "1000"
NO_CHECKPOINT = "there is no checkpoint to resume from"
DISPLAY_LINES = 2  # number of lines of the live display of `training.progress`
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
) -> int:
    """Run ``target`` on every worker and wait for the end. Print the cause of a failure.

    SIGUSR2, SIGTERM, SIGHUP and the first Ctrl-C ask the workers to save and stop, SIGUSR1 to save
    and go on; a second Ctrl-C kills them. If a worker is lost, all are restarted, as `run.restarts`
    allows. Under torchrun and srun this process is a worker, and exits here.

    Args:
        resume: whether to resume from the newest checkpoint.
        target: ``module:function``. The function gets config, run_dir, environment and resume. It
            returns True if a stop request ended the function early.
        config: the configuration that this process composed. Under torchrun and srun it must be the
            same on all ranks.

    Returns:
        The exit code: 0 for success, 1 after a failure, 130 after Ctrl-C, 140 after SIGUSR2 with a
        checkpoint, 143 after SIGTERM, SIGHUP, or SIGUSR2 without a checkpoint. A requested stop is
        no success, so that `mtrain train && evaluate` does not evaluate an unfinished run.

    Raises:
        ConfigError: a worker found a user's mistake, such as a corpus that is too short.
    """
    guarded_streams.guard_streams(output_required=False)
    if environment.launcher != "mtrain":
        from mtrain_cli.launch.worker import run_in_job

        run_in_job(run_dir, environment, resume, target, config)

    saves = not target.startswith(TARGETS_WITHOUT_CHECKPOINTS)
    saved = resolved_file.load(run_dir.resolved)
    restarts = restart.RestartPolicy(run_dir, saved, resume)
    devices: tuple[str, ...] | None = None
    with _heartbeat(run_dir), _SignalRequests(run_dir, saves) as requests:
        while True:
            arguments = [str(run_dir.path), *(["--resume"] if resume else [])]
            arguments += ["--launcher-pid", str(os.getpid()), "--target", target]
            arguments += ["--restarts", str(environment.restarts)]
            timeout = saved.topology.timeout_s
            variables = _variables(environment, run_dir, timeout)
            if devices is not None:
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
            with private_folder() as folder:
                command = worker_command(
                    "mtrain_cli.launch.worker", *arguments, "--store", str(folder)
                )
                workers = environment.dims.workers
                supervisor = Supervisor(workers, command, folder, variables, timeout)
                code, failure = _wait(supervisor, run_dir, folder, requests)
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
    entry = decision.entry
    line = restart.describe_restart(decision, decision.environment.restarts)
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
    supervisor: Supervisor, run_dir: RunDir, folder: Path, requests: _SignalRequests
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
        return 1, _report_failure(supervisor, run_dir)
    if problem:
        reason = (str(problem[0]).strip() or type(problem[0]).__name__).splitlines()[0]
        _print_line(f"error: cannot start the workers on this machine: {reason}")
        return 1, None
    if stop_request.was_stopped(folder):  # perhaps by a signal that only a worker received
        return requests.stop_code, None
    return 0, None


def _report_failure(supervisor: Supervisor, run_dir: RunDir) -> Failure:
    """Print and return the cause of the failures. Raise ConfigError for a user's mistake."""
    failure = failures.find_cause(supervisor.failures)
    _restore_terminal()
    if failure.kind == "config":
        run_dir.discard()
        if run_dir.state.exists():
            run_status.set_phase(run_dir, "failed", failure.message.splitlines()[0])
        raise ConfigError(*failure.message.splitlines())
    log = run_dir.logs / f"rank-{failure.rank}.log"
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

    requested: the first signal, for which the workers were asked to save and stop.
    kill: whether a Ctrl-C came after the first signal.
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
        """The exit code of a run that was stopped."""
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
        """Append a byte to a file of requests. Return ``line``, or a line on why it failed."""
        try:
            with file.open("ab") as opened:
                opened.write(b".")
        except OSError as error:
            return f"cannot ask the workers ({file}: {error.strerror})"
        return line


def _print_line(line: str, over_display: bool = False) -> None:
    """Print a line to stderr. over_display: whether a live display may be below it."""
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
