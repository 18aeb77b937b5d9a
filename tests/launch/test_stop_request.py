"""A worker sees requests to save and to stop: by the run's files and by signals."""

from __future__ import annotations

import codecs
import os
import signal
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist

from mtrain_cli.launch import stop_request
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.launch.stop_request import (
    SAVE,
    SAVE_AND_STOP,
    StopFlag,
    StopSignal,
    mark_stopped,
    remember,
    stop_on_signals,
    was_stopped,
)

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, SAVE_AND_STOP)


@pytest.fixture(autouse=True)
def _own_handlers() -> Iterator[None]:
    """Restore the signal handlers, and forget the signals that were received."""
    before = {number: signal.getsignal(number) for number in (*STOPS, SAVE)}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    stop_request._received.clear()


def test_a_file_asks_to_stop(tmp_path):
    flag = StopFlag(RunDir(tmp_path))
    assert not flag.requested()
    RunDir(tmp_path).stop_request.touch()
    assert flag.requested()
    assert not flag.save_requested()


@pytest.mark.parametrize("number", STOPS)
def test_a_remembered_signal_asks_to_stop(tmp_path, number):
    remember(*STOPS)
    flag = StopFlag(RunDir(tmp_path))
    os.kill(os.getpid(), number)
    assert flag.requested()
    assert not flag.save_requested()


def test_each_save_is_answered_once_and_later_requests_count_again(tmp_path):
    remember(SAVE)
    flag, run = StopFlag(RunDir(tmp_path)), RunDir(tmp_path)
    for ask in (
        lambda: os.kill(os.getpid(), SAVE),
        lambda: run.save_requests.write_bytes(b"."),
        lambda: run.save_requests.write_bytes(b".."),
        lambda: os.kill(os.getpid(), SAVE),
    ):
        assert not flag.save_requested()
        ask()
        assert flag.save_requested()
        assert flag.save_requested(), "asking does not answer"
        flag.answer_saves()
    assert not flag.requested()


def test_a_second_ctrl_c_interrupts():
    remember(signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_hangup_that_nohup_ignores_stays_ignored(tmp_path):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    remember(signal.SIGHUP)
    stop_on_signals()
    os.kill(os.getpid(), signal.SIGHUP)
    assert not StopFlag(RunDir(tmp_path)).requested()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, SAVE_AND_STOP])
def test_other_commands_stop_as_by_ctrl_c_and_name_the_signal(number):
    stop_on_signals()
    with pytest.raises(StopSignal, match=f"stopped by {number.name}"):
        os.kill(os.getpid(), number)


def test_other_commands_answer_a_request_to_save_and_go_on(capfd):
    stop_on_signals()
    os.kill(os.getpid(), SAVE)
    assert capfd.readouterr().err == f"mtrain: {stop_request.NOTHING_TO_SAVE}\n"


@pytest.fixture
def _own_wakeup() -> Iterator[None]:
    yield
    signal.set_wakeup_fd(-1)


@pytest.mark.usefixtures("_own_wakeup")
@pytest.mark.parametrize("early", [True, False])
def test_a_remembered_signal_is_answered_while_the_main_thread_waits_in_c(early):
    store, answered = dist.HashStore(), []

    def answer() -> None:
        answered.append(1)
        store.set("answered", "1")

    remember(signal.SIGTERM, SAVE_AND_STOP)
    if early:
        os.kill(os.getpid(), signal.SIGTERM)
    stop_request.call_at(signal.SIGTERM, answer)
    os.kill(os.getpid(), SAVE_AND_STOP)
    if not early:
        assert not answered
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()
    store.wait(["answered"], timedelta(seconds=20))
    assert answered == [1]


def test_the_launcher_finds_the_mark_of_any_worker(tmp_path):
    mark_stopped(None)
    assert not was_stopped(tmp_path)
    mark_stopped(tmp_path / "failure-1.json")
    assert was_stopped(tmp_path)


def test_a_codec_that_is_interrupted_keeps_the_words_of_the_signal():
    def interrupt(_):
        raise StopSignal(signal.SIGTERM)

    codecs.register_error("interrupt", interrupt)
    with pytest.raises(StopSignal, match=r"^stopped by SIGTERM$"):
        b"\xff".decode("utf-8-sig", "interrupt")
