"""A folder has one lock, which its holder renews and which ends with the holder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket

import pytest

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch import run_lock
from mtrain_cli.launch.run_lock import LOCK, RunLock

HOLDER = f"process {os.getpid()} on {socket.gethostname()}"


def test_a_second_lock_is_refused_until_the_first_is_released(tmp_path):
    first = RunLock(tmp_path)
    with pytest.raises(ConfigError, match=f"in use by {HOLDER}"):
        RunLock(tmp_path)
    first.release()
    first.release()
    RunLock(tmp_path).release()


def test_a_lock_that_is_held_for_a_moment_is_waited_for(tmp_path, monkeypatch):
    descriptor = os.open(tmp_path / LOCK, os.O_RDONLY | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    monkeypatch.setattr(run_lock.time, "sleep", lambda _: fcntl.flock(descriptor, fcntl.LOCK_UN))
    RunLock(tmp_path).release()
    os.close(descriptor)
    assert (tmp_path / LOCK).read_text() == f"{HOLDER}\n"


def test_a_beat_renews_the_time_stamp_only_while_the_lock_is_held(tmp_path):
    lock, file = RunLock(tmp_path), tmp_path / LOCK
    os.utime(file, (1, 1))
    lock.beat()
    assert file.stat().st_mtime > 1
    lock.release()
    os.utime(file, (1, 1))
    lock.beat()
    assert file.stat().st_mtime == 1


def test_a_file_system_without_locks_does_not_stop_a_run(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(run_lock.fcntl, "flock", refuse)
    RunLock(tmp_path).beat()
    assert (tmp_path / LOCK).read_text() == ""
