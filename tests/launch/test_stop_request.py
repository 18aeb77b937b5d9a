"""A worker sees a request to stop: by the run's file, and under torchrun and srun by a signal."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace

import gloo
import pytest

from mtrain_cli.launch import stop_request
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.launch.stop_request import (
    StopFlag,
    mark_stopped,
    save_and_stop_on_signals,
    was_stopped,
)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore the signal handlers, and forget the signals that were received."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    stop_request._signalled.clear()


def flag(folder, launcher: str) -> StopFlag:
    return StopFlag(RunDir(folder), replace(gloo.environment(0, 1), launcher=launcher))


@pytest.mark.parametrize("launcher", ["mtrain", "torchrun", "slurm"])
def test_the_file_is_a_request_under_every_launcher(tmp_path, launcher):
    stop = flag(tmp_path, launcher)
    assert not stop.requested()
    RunDir(tmp_path).stop_request.touch()
    assert stop.requested()


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_a_request_unless_mtrain_started_the_workers(tmp_path, number):
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    save_and_stop_on_signals()
    os.kill(os.getpid(), number)
    assert flag(tmp_path, "torchrun").requested()
    assert not flag(tmp_path, "mtrain").requested()


@pytest.mark.usefixtures("handlers")
def test_a_second_ctrl_c_interrupts():
    save_and_stop_on_signals()
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("handlers")
def test_a_hangup_that_nohup_ignores_stays_ignored(tmp_path):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    save_and_stop_on_signals()
    os.kill(os.getpid(), signal.SIGHUP)
    assert not flag(tmp_path, "torchrun").requested()


def test_the_launcher_finds_the_mark_of_any_worker(tmp_path):
    mark_stopped(None)
    assert not was_stopped(tmp_path)
    mark_stopped(tmp_path / "failure-1.json")
    assert was_stopped(tmp_path)
