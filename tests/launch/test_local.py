"""A run on this machine with real workers: how it ends, what it prints, what it leaves behind."""

from __future__ import annotations

import dataclasses
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import warm
from rich.console import Console
from slow_cases import mostly_slow

import mtrain_cli
from mtrain_cli.composition import compose
from mtrain_cli.config import resolved_file
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch import local, run_dir, run_status, stop_request
from mtrain_cli.launch.environment import Environment, resolve_environment
from mtrain_cli.launch.failures import Failure
from mtrain_cli.launch.local import launch
from mtrain_cli.launch.restart import Restart, RestartDecision
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.records.metrics import StepMetrics
from mtrain_cli.training.checkpointer import Checkpointer
from mtrain_cli.training.progress import TrainingProgress

STEP = StepMetrics(
    step=1,
    loss=5.5,
    grad_norm=1.25,
    lr=1e-3,
    tokens=4096,
    tokens_per_second_per_gpu=1234.5,
    mfu_model=None,
    mfu_executed=None,
    density=1.0,
    peak_memory_gib=None,
    seconds=2.0,
    epoch=0.1,
    consumed=1,
)
LAUNCHER = """
import sys
from mtrain_cli.composition import compose
from mtrain_cli.config import resolved_file
from mtrain_cli.launch.environment import resolve_environment
from mtrain_cli.launch.local import launch
from mtrain_cli.launch.run_dir import RunDir
from pathlib import Path
run = RunDir(Path(sys.argv[1]))
environment = resolve_environment(resolved_file.load(run.resolved))
sys.exit(launch(run, environment, False, target=sys.argv[2]))
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv(
        "PYTHONPATH",
        os.pathsep.join([str(Path(mtrain_cli.__file__).parents[1]), str(Path(__file__).parent)]),
    )
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return run_dir.create(
        compose.compose(
            [
                f"run.dir={tmp_path / 'run'}",
                "topology.device=cpu",
                "topology.workers=2",
                "run.restarts=0",
            ]
        ),
        [],
    )


@pytest.fixture(autouse=True)
def _forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork workers from this process, so that they import nothing anew."""
    monkeypatch.setattr(local, "Popen", warm.ForkedWorker)


@pytest.fixture
def new_programs(_forked_workers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start workers as users do, as new programs."""
    monkeypatch.setattr(local, "Popen", subprocess.Popen)


def launched(run: RunDir, target: str, resume: bool = False, saves: bool = True) -> int:
    return launch(
        run,
        resolve_environment(resolved_file.load(run.resolved)),
        resume,
        target=f"worker_targets:{target}",
        saves=saves,
    )


def worker_pids(run: RunDir) -> list[int]:
    return [int(file.read_text()) for file in sorted(run.path.glob("pid-?"))]


def wait_for(condition: Callable[[], object], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


def test_threads_of_cpu_workers_sleep_soon_unless_the_user_says_otherwise(run, monkeypatch):
    environment = resolve_environment(resolved_file.load(run.resolved))
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert local._variables(environment, run, 60.0)["GOMP_SPINCOUNT"] == "1000"
    on_gpus = dataclasses.replace(environment, device="cuda")
    assert "GOMP_SPINCOUNT" not in local._variables(on_gpus, run, 60.0)
    for name, value in {"GOMP_SPINCOUNT": "5", "OMP_WAIT_POLICY": "active"}.items():
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            assert "GOMP_SPINCOUNT" not in local._variables(environment, run, 60.0)


@pytest.mark.usefixtures("new_programs")
def test_workers_form_one_group_and_leave_the_terminal_to_rank_0(run, capfd):
    assert launched(run, "adds_ranks", resume=True) == 0
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in range(2):
        assert (run.path / f"result-{rank}").read_text() == f"3 {threads} mtrain True {run.path}"
    shown = capfd.readouterr()
    assert shown.out == "words of rank 0\n"
    assert shown.err == ""
    assert (run.logs / "rank-1.log").read_text() == "words of rank 1\n"
    assert not any(map(alive, worker_pids(run)))


@pytest.mark.usefixtures("new_programs")
def test_library_output_is_in_the_logs_and_printed_after_the_reason(run, capfd):
    assert launched(run, "libraries_write") == 1
    logs = [(run.logs / f"rank-{rank}.log").read_text().splitlines() for rank in range(2)]
    assert logs[0][:3] == ["library of rank 0", "child of rank 0", "the last words"]
    assert logs[1][:3] == ["library of rank 1", "Python of rank 1", "child of rank 1"]
    first, reason, *rest = capfd.readouterr().err.splitlines()
    assert first == "Python of rank 0"
    assert reason == "error: rank 0 was killed by SIGABRT"
    assert "  the last words" in rest[rest.index("Last lines of its output:") :]


def test_only_the_exception_of_the_first_failed_worker_is_printed(run, capfd):
    assert launched(run, "rank_1_raises_late") == 1
    shown = capfd.readouterr()
    first_line = "error: rank 1 failed: ValueError: the true cause"
    assert shown.err.splitlines()[:2] == [first_line, "Traceback (most recent call last):"]
    assert "Connection" not in shown.err + shown.out
    assert len(worker_pids(run)) == 2
    assert not any(map(alive, worker_pids(run)))


def launched_with_timeout(run: RunDir, target: str, timeout_s: float) -> int:
    config = resolved_file.load(run.resolved)
    topology = dataclasses.replace(config.topology, timeout_s=timeout_s)
    resolved_file.save(dataclasses.replace(config, topology=topology), run.resolved)
    return launched(run, target)


def test_a_worker_that_hangs_is_named_and_leaves_its_stack(run, capfd):
    assert launched_with_timeout(run, "rank_1_hangs", 5.0) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == (
        "error: topology.timeout_s=5: rank 1 kept the others waiting longer than this without "
        "reporting an error: "
        "it hangs or is slow. If it is slow, increase the value."
    )
    assert lines[1] == "Where each worker was:"
    assert re.fullmatch(r"  rank 1: training step 2 \(\d+ s ago\)", lines[3])
    assert lines[4:] == [
        f"If the worker could still write its stack, {run.logs / 'rank-1.log'} ends with it."
    ]
    assert "in rank_1_hangs" in (run.logs / "rank-1.log").read_text()


def test_an_abort_after_a_long_wait_is_blamed_on_the_worker_that_runs_on(run, capfd):
    assert launched_with_timeout(run, "rank_0_is_aborted_as_by_nccl", 5.0) == 1
    lines = [
        line for line in capfd.readouterr().err.splitlines() if line.startswith(("error", "  rank"))
    ]
    assert lines[0].startswith(
        "error: topology.timeout_s=5: rank 1 kept the others waiting longer than this without "
        "reporting an error"
    )
    assert [line[:25].strip() for line in lines[1:]] == [
        "rank 0: training step 2",
        "rank 1: training step 3",
    ]


@pytest.mark.slow
def test_a_wait_that_neither_gloo_nor_nccl_ends_is_ended_by_the_launcher(run, capfd, monkeypatch):
    monkeypatch.setattr("mtrain_cli.launch.local.OVERDUE_S", 1.0)
    monkeypatch.setattr("mtrain_cli.launch.local.OVERDUE_CHECK_S", 0.2)
    assert launched_with_timeout(run, "rank_0_waits_and_nothing_ends_it", 5.0) == 1
    lines = capfd.readouterr().err.splitlines()
    assert lines[0].startswith(
        "error: topology.timeout_s=5: rank 1 kept the others waiting longer than this without "
        "reporting an error"
    )
    assert lines[2].startswith("  rank 0: training step 2, waits for gradients of all ranks")


def test_a_run_without_workers_still_renews_its_lock(run, monkeypatch):
    lock = run.path / run_dir.LOCK
    seen = []

    def lasts_long(*_: object) -> None:
        os.utime(lock, (1, 1))
        wait_for(lambda: lock.stat().st_mtime > 1, 20)
        seen.append(run_status.check_liveness(run, time.time()).alive)

    def probed(_: object, _failure: Failure, environment: Environment) -> RestartDecision:
        lasts_long()
        return RestartDecision(environment, True, 0.01, Restart(0.0, "why", 1, 3, 2, 2))

    outcomes = iter([(1, Failure(1, -9, "died", "was killed", "", 0.0)), (0, None)])
    monkeypatch.setattr(run_status, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    monkeypatch.setattr(local, "_wait", lambda *_: next(outcomes))
    monkeypatch.setattr(local.restart.RestartPolicy, "after", probed)
    monkeypatch.setattr(local.run_status, "set_phase", lasts_long)  # before the wait
    assert launched(run, "succeed") == 0
    assert seen == [True] * 3, "after the failure, while GPUs are asked, before the restart"


def test_a_killed_worker_ends_the_run_at_once_and_is_named(run, capfd):
    killed_at = []

    def kill() -> None:
        wait_for(lambda: len(worker_pids(run)) == 2)
        os.kill(worker_pids(run)[1], signal.SIGKILL)
        killed_at.append(time.monotonic())

    killer = threading.Thread(target=kill)
    killer.start()
    code = launched(run, "steps_until_stopped")
    killer.join()
    assert (code, time.monotonic() - killed_at[0] < 10) == (1, True)
    shown = capfd.readouterr().err
    assert (
        shown.splitlines()[0]
        == "error: rank 1 was killed by SIGKILL (host out of memory? see dmesg)"
    )
    assert "--resume" not in shown, "there is no checkpoint"
    assert not any(map(alive, worker_pids(run)))


def test_a_mistake_that_workers_find_is_raised_once_and_leaves_no_folder(run, capfd):
    with pytest.raises(ConfigError) as caught:
        launched(run, "all_find_a_mistake")
    assert caught.value.problems == ("data.path=x: too short", "seq=4096: too long")
    shown = capfd.readouterr()
    assert shown.out + shown.err == ""
    assert not run.path.exists()


@pytest.mark.parametrize(
    ("signum", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR2, local.WARNED)],
)
def test_a_signal_makes_the_workers_save_and_stop_and_sets_the_exit_code(run, capfd, signum, code):
    before = signal.getsignal(signum)

    def ask() -> None:
        wait_for(lambda: len(worker_pids(run)) == 2)
        os.kill(os.getpid(), signum)

    threading.Thread(target=ask).start()
    assert launched(run, "steps_until_stopped") == code
    assert (run.path / "stopped-0").exists()
    assert (run.path / "stopped-1").exists()
    assert capfd.readouterr().err.startswith("stopping: the workers save a checkpoint")
    assert signal.getsignal(signum) == before
    assert not run.stop_request.exists()


def test_sigusr1_makes_the_workers_save_and_go_on(run, capfd):
    def ask() -> None:
        wait_for(lambda: len(worker_pids(run)) == 2)
        for number in (1, 2):
            os.kill(os.getpid(), signal.SIGUSR1)
            wait_for((run.path / "saved-1").exists)
            wait_for(lambda n=number: (run.path / "saved-1").read_text() == str(n))
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask).start()
    assert launched(run, "steps_until_stopped") == 143
    assert (run.path / "saved-0").read_text() == "2", "once for each request"
    line = "SIGUSR1: the workers save a checkpoint after this step and go on"
    assert capfd.readouterr().err.splitlines()[:2] == [line, line]
    assert not run.save_requests.exists()


def test_requests_from_before_the_workers_are_kept(run, monkeypatch):
    early = [signal.SIGUSR1, signal.SIGUSR2]
    monkeypatch.setattr(stop_request, "_received", early)
    assert launched(run, "steps_until_stopped") == local.WARNED
    assert (run.path / "stopped-1").exists()
    assert early == [], "another run in this process begins without them"


def test_a_signal_to_a_worker_that_starts_is_kept(run):
    """As if the signal came during the imports of the worker."""
    sent: list[int] = []
    start = local.Popen._execute_child

    def start_and_signal(self, *arguments, **options):
        start(self, *arguments, **options)
        if not sent:
            sent.append(self.pid)
            os.kill(self.pid, signal.SIGUSR2)

    class Signalled(warm.ForkedWorker):
        _execute_child = start_and_signal

    local.Popen = Signalled  # restored by `_forked_workers`
    assert launched(run, "steps_until_stopped") == local.WARNED
    assert (run.path / "stopped-0").exists()


def test_a_measurement_answers_sigusr1_and_takes_sigusr2_as_sigterm(run, capfd):
    def ask() -> None:
        wait_for(lambda: len(worker_pids(run)) == 2)
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGUSR2)

    threading.Thread(target=ask).start()
    assert launched(run, "steps_until_stopped", saves=False) == 143
    assert not (run.path / "saved-0").exists()
    assert capfd.readouterr().err.splitlines() == [
        stop_request.NOTHING_TO_SAVE,
        "stopping: the workers end after this step; press Ctrl-C again to kill them",
    ]


def test_a_request_that_comes_during_the_last_step_is_a_success(run):
    def ask() -> None:
        wait_for(lambda: len(worker_pids(run)) == 2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=ask).start()
    assert launched(run, "finishes_when_asked") == 0


@mostly_slow("lost", ["terminal", "reader"], keep=(0,))
def test_a_run_saves_even_if_its_terminal_or_reader_is_gone(run, lost):
    ours, theirs = os.openpty() if lost == "terminal" else os.pipe()
    command = [
        sys.executable,
        "-c",
        LAUNCHER,
        str(run.path),
        "worker_targets:shows_steps_until_stopped",
    ]
    launcher = subprocess.Popen(
        command, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"}
    )
    os.close(theirs)
    try:
        wait_for(lambda: len(worker_pids(run)) == 2)
        os.close(ours)
        launcher.send_signal(signal.SIGHUP)
        launcher.wait(timeout=60)
    finally:
        launcher.kill()
    assert launcher.returncode == 143
    assert (run.path / "stopped-0").exists()
    assert run.log.read_text().splitlines()[:3] == ["before the steps", "saving", "stopped"]
    assert (run.logs / "rank-0.log").read_text() == ""


class Terminal(io.StringIO):
    """A stream that claims to be a terminal, and the screen it would show, too tall to scroll."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        rows, row, column = [""], 0, 0
        for sequence, letter in re.findall(r"(\x1b\[[?\d;]*[A-Za-z])|(.|\n)", self.getvalue()):
            if letter == "\n":
                row, column = row + 1, 0
                rows += [""] * (row == len(rows))
            elif letter == "\r":
                column = 0
            elif letter:
                rows[row] = rows[row][:column].ljust(column) + letter + rows[row][column + 1 :]
                column += 1
            elif sequence == "\x1b[2K":
                rows[row] = ""
            elif sequence.endswith("A"):
                row -= int(sequence[2:-1])
        return rows


def test_lines_printed_over_the_live_display_stay_on_the_screen(monkeypatch):
    terminal = Terminal()
    console = Console(file=terminal, force_terminal=True, width=60, color_system=None)
    with TrainingProgress(10, 0, True, console=console) as progress:
        progress.step(STEP)
        assert progress._live is not None
        progress._live.refresh()
        monkeypatch.setattr(
            sys, "stderr", terminal
        )  # The launcher is another process, which the display does not know.
        local._print_line(
            "stopping: the workers save a checkpoint after this step; press Ctrl-C again to kill "
            "them",
            over_display=True,
        )
        progress._live.refresh()
        progress._live.refresh()
        assert (
            "stopping: the workers save a checkpoint after this step; press Ctrl-C again to kill "
            "them" in terminal.screen()
        )
        assert sum("step 1/10" in row for row in terminal.screen()) == 2, (
            "the display goes on below"
        )


def test_a_second_ctrl_c_kills_workers_that_do_not_stop(run, capfd):
    def insist() -> None:
        wait_for(lambda: len(worker_pids(run)) == 2)
        os.kill(os.getpid(), signal.SIGINT)
        wait_for(run.stop_request.exists)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=insist).start()
    assert launched(run, "sleeps") == 130
    assert not run.stop_request.exists()
    last = capfd.readouterr().err.splitlines()[-1]
    assert last == "killed; there is no checkpoint to resume from"
    assert len(worker_pids(run)) == 2
    wait_for(lambda: not any(map(alive, worker_pids(run))), seconds=5)


def test_no_worker_outlives_a_killed_launcher(run):
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(run.path), "worker_targets:sleeps"]
    )
    try:
        wait_for(lambda: len(worker_pids(run)) == 2)
    finally:
        launcher.kill()
        launcher.wait()
    wait_for(lambda: not any(map(alive, worker_pids(run))), seconds=5)


def test_a_worker_killed_during_a_save_leaves_the_previous_checkpoint(run, capfd):
    assert launched(run, "rank_1_is_killed_while_saving") == 1
    shown = capfd.readouterr().err.splitlines()
    assert shown[0].startswith("error: rank 1 was killed by SIGKILL")
    assert shown[-1] == f"resume from the checkpoint of step 1: mtrain train --resume {run.path}"
    state = {"model": {f"weight-{rank}": torch.zeros(1000) for rank in range(2)}, "trainer": {}}
    assert Checkpointer(run.checkpoints, keep=1).load(state) == 1
    assert state["trainer"] == {"step": 1}
    assert all(torch.equal(weight, torch.ones(1000)) for weight in state["model"].values())
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-1"]
