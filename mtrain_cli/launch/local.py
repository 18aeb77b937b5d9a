"""Starts a run: its own workers on this machine or, under torchrun and srun, this very process as one of them."""

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
from typing import TYPE_CHECKING

from mtrain_cli.config import compose
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.launch import failures, guarded_streams, run_state
from mtrain_cli.launch.environment import Environment, nccl_variables, on_loopback
from mtrain_cli.launch.failures import Failure
from mtrain_cli.launch.restart import RestartDecision, RestartPolicy, describe, one_line
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.launch.stop_request import was_stopped
from mtrain_cli.launch.temporary_folders import private_folder
from mtrain_cli.printable import printable

if TYPE_CHECKING:
    from mtrain_cli.launch.agent import WorkerAgent

TRAIN = "mtrain_cli.commands.train_worker:train"
MEASURING = "mtrain_cli.profiling."  # targets that save nothing
KILLED = 130
DISPLAY_LINES = 2  # of `training.progress`
# 128 + the signal, as shells count. A hangup is an end by the system like SIGTERM; one code for both is easier to test for.
_STOPPED = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}


def launch(
    run_dir: RunDir,
    environment: Environment,
    resume: bool,
    target: str = TRAIN,
    config: Config | None = None,
) -> int:
    """Run ``target`` (``module:function``) on every worker of ``environment`` and wait for the end.

    It is called with config, run_dir, environment and resume, and returns whether a request stopped it before its work was done. config: as
    this process composed it; under torchrun and srun all ranks have to agree on it.

    SIGTERM, SIGHUP and a first Ctrl-C ask the workers to save and stop; a second Ctrl-C kills them. When a worker is lost all are started
    again, as `run.restarts` allows. Under torchrun and srun this process is one of the workers, and ends here.

    Returns:
        Exit code: 0 after success; 130 (SIGINT) or 143 (SIGTERM, SIGHUP) after a requested stop, so that `mtrain train && evaluate` does
        not evaluate half a training; 1 when a worker failed, 130 when killed. Of the latter two stderr tells more, and how to go on from
        the newest checkpoint.

    Raises:
        ConfigError: a worker found a mistake of the user's, such as a corpus that is too short.
    """
    guarded_streams.guard(output_required=False)
    if environment.launcher != "mtrain":
        from mtrain_cli.launch.worker import run_in_job

        run_in_job(run_dir, environment, resume, target, config)

    run_dir.stop_request.unlink(missing_ok=True)
    measuring = target.startswith(MEASURING)
    restarts = RestartPolicy(run_dir, compose.load(run_dir.resolved), resume)
    with (
        _signs_of_life(run_dir),
        _SignalRequests(run_dir, "end" if measuring else "save a checkpoint") as requests,
    ):
        attempt = _Attempt(run_dir, environment, resume, target, requests)
        while True:
            code, failure = attempt.run()
            if failure is None:
                return code
            if not measuring:
                run_state.change(run_dir, "failed", one_line(failure))
            again = (
                "" if requests.asked or measuring else restarts.after(failure, attempt.environment)
            )
            if isinstance(again, str):
                for line in filter(None, (again, _way_on(run_dir))):
                    _say(line)
                return code
            if not _wait_for_restart(run_dir, again, requests):
                return _stopped_before_restart(run_dir, requests)
            attempt = _Attempt(
                run_dir, again.environment, again.resume, target, requests, again.devices
            )


@contextlib.contextmanager
def _signs_of_life(run_dir: RunDir) -> Iterator[None]:
    """Renew the lock of the run now and then, whatever this thread waits for: workers, GPUs that may not answer, the time of a restart."""
    ended = threading.Event()

    def beat() -> None:
        run_dir.beat()
        while not ended.wait(run_state.BEAT_S):
            run_dir.beat()

    thread = threading.Thread(target=beat, name="signs of life", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(1.0)  # a disk that hangs is not waited for


def _wait_for_restart(run_dir: RunDir, again: RestartDecision, requests: _SignalRequests) -> bool:
    """Tell of the restart, here and in the log, and wait; returns whether nobody asked to stop meanwhile."""
    requests.waiting = True
    line = describe(again, again.environment.restarts)
    _say(line)
    with contextlib.suppress(OSError), run_dir.log.open("a", encoding="utf-8") as log:
        log.write(f"lost a worker after step {again.entry.reached}: {again.entry.reason}\n{line}\n")
    run_state.change(run_dir, "restarting", again.entry.reason)
    deadline = time.monotonic() + again.wait_s
    while not requests.asked and time.monotonic() < deadline:
        time.sleep(0.1)
    requests.waiting = False
    return not requests.asked


def _stopped_before_restart(run_dir: RunDir, requests: _SignalRequests) -> int:
    assert requests.asked is not None
    run_dir.stop_request.unlink(missing_ok=True)
    run_state.change(run_dir, "stopped", "on request, before a restart")
    _say(_way_on(run_dir) or "there is no checkpoint to go on from")
    return _STOPPED[requests.asked]


class _Attempt:
    """One start of all workers, up to their end."""

    def __init__(
        self,
        run_dir: RunDir,
        environment: Environment,
        resume: bool,
        target: str,
        requests: _SignalRequests,
        devices: tuple[str, ...] | None = None,
    ) -> None:
        """devices: the GPUs that the workers see; None: all."""
        self.environment = environment
        self._run_dir, self._requests, self._devices = run_dir, requests, devices
        arguments = [
            str(run_dir.path),
            "--launcher-pid",
            str(os.getpid()),
            "--target",
            target,
            *(["--resume"] if resume else []),
        ]
        self._arguments = [*arguments, "--restarts", str(environment.restarts)]
        self._timeout_s = compose.load(run_dir.resolved).topology.timeout_s

    def run(self) -> tuple[int, Failure | None]:
        """Exit code, and the failure that ended it, which has been told.

        Raises:
            ConfigError: a worker found a mistake of the user's.
        """
        from mtrain_cli.launch.agent import WorkerAgent, worker_command

        run_dir, environment = self._run_dir, self.environment
        with private_folder() as folder:
            command = worker_command(
                "mtrain_cli.launch.worker", *self._arguments, "--store", str(folder)
            )
            variables = _variables(environment, run_dir, self._timeout_s)
            if self._devices is not None:
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(self._devices)
            try:
                agent = WorkerAgent(
                    environment.workers, command, folder, variables, self._timeout_s
                )
            except (RuntimeError, OSError) as error:
                return _not_started(error), None
            return _wait(agent, run_dir, folder, self._requests)


def _wait(
    agent: WorkerAgent, run_dir: RunDir, folder: Path, requests: _SignalRequests
) -> tuple[int, Failure | None]:
    """Let the agent run in a thread, so that signals come to this one, and tell how it ended."""
    problem: list[Exception] = []

    def run() -> None:
        try:
            agent.finish()
        except Exception as error:  # handed to the waiting thread
            problem.append(error)

    thread = threading.Thread(target=run, name="workers", daemon=True)
    thread.start()
    while thread.is_alive() and not requests.kill:
        thread.join(0.1)
    if requests.kill:
        agent.kill_workers()
        thread.join(2.0)
        _restore_terminal()
    # Whoever asked has been heard, whatever came of it.
    run_dir.stop_request.unlink(missing_ok=True)
    if requests.kill:
        run_state.change(run_dir, "failed", "ended at once, by a second Ctrl-C")
        _say(
            f"ended at once, nothing was saved; {_way_on(run_dir) or 'there is no checkpoint to go on from'}"
        )
        return KILLED, None
    if agent.failures:
        return 1, _failed(agent, run_dir)
    if problem:
        return _not_started(problem[0]), None
    return _STOPPED[requests.asked] if requests.asked and was_stopped(folder) else 0, None


def _failed(agent: WorkerAgent, run_dir: RunDir) -> Failure:
    """Tell the cause."""
    failure = failures.cause(agent.failures)
    _restore_terminal()
    if failure.kind == "config":
        run_dir.discard()
        if run_dir.state.exists():
            run_state.change(run_dir, "failed", failure.message.splitlines()[0])
        raise ConfigError(*failure.message.splitlines())
    print(
        printable(failures.report(failure, run_dir.logs / f"rank-{failure.rank}.log", agent.where)),
        file=sys.stderr,
        flush=True,
    )
    return failure


def _way_on(run_dir: RunDir) -> str:
    """How to go on from the newest checkpoint; nothing where there is none."""
    step = run_dir.last_step()
    return (
        ""
        if step is None
        else f"go on from the checkpoint of step {step}: {run_dir.resume_command}"
    )


def _not_started(error: Exception) -> int:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    print(f"error: cannot start the workers of this machine: {reason}", file=sys.stderr, flush=True)
    return 1


class _SignalRequests:
    """Signals to the launcher while workers run: the first asks them to save and stop, a second Ctrl-C sets ``kill``."""

    def __init__(self, run_dir: RunDir, then: str) -> None:
        """then: what the workers do when they are asked to stop."""
        self._file = run_dir.stop_request
        self._then = then
        self.asked: signal.Signals | None = None
        self.kill = False
        self.waiting = False  # for a restart, with no workers that could save

    def __enter__(self) -> _SignalRequests:
        self._before = {}
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # A run under nohup has SIGHUP ignored, and that should stay so.
                if signal.getsignal(signum) is not signal.SIG_IGN:
                    self._before[signum] = signal.signal(signum, self._heed)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)

    def _heed(self, signum: int, _frame: FrameType | None) -> None:
        if self.asked and signum == signal.SIGINT:
            self.kill = True
        elif not self.asked:
            self.asked = signal.Signals(signum)
            if self.waiting:
                _say("stopping: there is no restart")
                return
            try:
                self._file.touch()
                _say(
                    f"stopping: the workers {self._then} after this step; Ctrl-C again ends them at once",
                    over_display=True,
                )
            except OSError as error:
                _say(
                    f"cannot ask the workers to stop ({self._file}: {error.strerror}); Ctrl-C again ends them at once",
                    over_display=True,
                )


def _say(line: str, over_display: bool = False) -> None:
    """One line for the user; ``over_display`` where a worker's live display may be on the terminal."""
    line = printable(line)
    if over_display and sys.stderr.isatty():
        # The cursor stands at the end of the display's last line, and the next refresh clears as many lines as the display has, this one
        # and those above: they must not be the ones written here.
        line = f"\n{line}" + "\n" * (DISPLAY_LINES - 1)
    # After a hangup there is no terminal to write to.
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _restore_terminal() -> None:
    """Show the cursor again, at the beginning of a line: a worker that was killed in the middle of its progress display could not."""
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            with contextlib.suppress(OSError):
                stream.write("\x1b[?25h\r\x1b[K")
                stream.flush()


def _variables(environment: Environment, run_dir: RunDir, timeout_s: float) -> dict[str, str]:
    """Environment of the workers beyond the agent's, where the user has not set it."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    defaults = dict(_defaults(cores, environment.workers))
    if environment.device == "cuda":
        defaults |= nccl_variables(run_dir.logs, timeout_s)
    return {name: value for name, value in defaults.items() if name not in os.environ} | dict(
        on_loopback()
    )


def _defaults(cores: int, workers: int) -> Iterator[tuple[str, str]]:
    yield "OMP_NUM_THREADS", str(max(1, cores // workers))
    # When a peer dies, c10d warns at length about lost sockets, on the terminal and before the cause is known.
    yield "TORCH_CPP_LOG_LEVEL", "ERROR"
