"""Find the cause among many failures, and report it."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch import failures
from mtrain_cli.launch.failures import Failure, not_written


def failed(rank: int, kind: str, time: float = 0.0, exit_code: int | None = 1) -> Failure:
    return Failure(rank, exit_code, kind, "what happened", "Traceback ...", time)


@pytest.mark.parametrize(
    ("cause", "consequences"),
    [
        (
            failed(1, "died", 9.0, -signal.SIGKILL),
            [failed(0, "peer lost", 1.0), failed(2, "error", 2.0)],
        ),
        (
            failed(1, "error", 5.0),
            [
                failed(0, "peer lost", 1.0),
                failed(2, "died", 1.0, -signal.SIGABRT),
                failed(3, "error", 6.0),
            ],
        ),
        (failed(1, "died", 5.0, -signal.SIGABRT), [failed(0, "peer lost", 1.0)]),
        (failed(1, "died", 9.0, -signal.SIGTERM), [failed(0, "peer lost", 1.0)]),
        (failed(1, "config", 9.0), [failed(0, "peer lost", 1.0), failed(2, "error", 2.0)]),
        (failed(1, "peer lost", 1.0), [failed(0, "peer lost", 2.0)]),
    ],
    ids=["killed", "exception", "abort", "terminated from outside", "mistake", "earliest"],
)
def test_the_cause_is_found_in_any_order(cause, consequences):
    for order in itertools.permutations([cause, *consequences]):
        assert failures.find_cause(order) is cause


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("bad"), "error"),
        (ConfigError("seq=1: too short", "seed=x: no number"), "config"),
        (
            RuntimeError(
                "[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer "
                "[127.0.0.1]:1"
            ),
            "peer lost",
        ),
        (RuntimeError("Timed out waiting 600000ms for recv operation to complete"), "peer lost"),
        (
            RuntimeError("NCCL error: remote process exited or there was a network error"),
            "peer lost",
        ),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), "error"),
    ],
)
def test_a_record_is_read_back_unchanged(tmp_path, monkeypatch, error, kind):
    left = failures.failure_from(error)
    assert left.kind == kind
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "record"))
    failures.write_record(left)
    back = failures.read_record(3, os.getpid(), 1, tmp_path / "record")
    assert back == replace(left, rank=3)
    assert [path.name for path in tmp_path.iterdir()] == ["record"]


@pytest.mark.parametrize("before", ["of another process", "of torch", "cut off", None])
def test_the_first_failure_of_a_process_replaces_the_record_of_an_earlier_one(
    tmp_path, monkeypatch, before
):
    file = tmp_path / "record"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    if before == "of another process":
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: 1)
            failures.write_record(failed(-1, "config"))
    elif before:
        file.write_text('{"message": "failed"}' if before == "of torch" else '{"message')
    cause = failed(-1, "error", 2.0)
    for failure in (cause, replace(cause, message="a consequence")):
        failures.write_record(failure)
        assert failures.read_record(-1, os.getpid(), 1, file) == cause


@pytest.mark.parametrize("trace", ["", "Traceback: \x1b[2J\x07"])
def test_torchrun_shows_no_control_characters_of_a_failure(tmp_path, monkeypatch, trace):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "record"))
    failures.write_record(Failure(-1, 1, "error", "no file \x1b[2J\x07", trace))
    message = json.loads((tmp_path / "record").read_text())["message"]
    for shown in (message["message"], message["extraInfo"]["py_callstack"]):
        assert shown.isprintable(), shown
        assert "[2J" in shown


@pytest.mark.parametrize(
    ("exit_code", "reason"),
    [
        (-signal.SIGKILL, "rank 2 was killed by SIGKILL (host out of memory? see dmesg)"),
        (-signal.SIGSEGV, "rank 2 was killed by SIGSEGV"),
        (7, "rank 2 ended with exit code 7 and no exception"),
    ],
)
def test_a_death_without_a_record_is_reported_with_the_last_output(tmp_path, exit_code, reason):
    log = tmp_path / "rank-2.log"
    log.write_text("".join(f"line {n}\n" for n in range(100)))
    failure = failures.read_record(2, os.getpid(), exit_code, tmp_path / "no record")
    lines = failures.format_report(failure, log).splitlines()
    assert lines[0] == f"error: {reason}"
    assert lines[2:22] == [f"  line {n}" for n in range(80, 100)]
    assert lines[-1] == f"Its output is in {log}; the other workers were stopped."


def test_an_exception_is_reported_in_one_line_and_then_its_traceback():
    try:
        raise ValueError("bad\nvery bad")
    except ValueError as error:
        failure = failures.failure_from(error)
    lines = failures.format_report(failure, None).splitlines()
    assert lines[0] == "error: rank -1 failed: ValueError: bad"
    assert lines[1].startswith("Traceback")
    assert lines[-2:] == ["ValueError: bad", "very bad"]


def test_an_explained_failure_is_reported_without_a_traceback(tmp_path):
    class Explained(failures.RunError):
        pass

    try:
        raise Explained("step 3: the loss is not finite on rank 1")
    except Explained as error:
        failure = failures.failure_from(error)
    log = tmp_path / "rank-1.log"
    log.write_text("something")
    assert failures.format_report(failure, log) == "error: step 3: the loss is not finite on rank 1"


LATE = Failure(0, 1, "peer lost", "topology.timeout_s=6: rank 0 waited longer than this", "", 1.0)
ABORTED = failed(3, "died", exit_code=-signal.SIGABRT)


@pytest.mark.parametrize(
    ("failures_so_far", "stopped", "running", "message"),
    [
        (
            [LATE],
            [1],
            [1, 2],
            "topology.timeout_s=6: rank 1 kept the others waiting longer than this: its process is "
            "stopped",
        ),
        (
            [LATE, ABORTED],
            [],
            [2],
            "topology.timeout_s=6: rank 2 kept the others waiting longer than this without "
            "reporting an error: it hangs",
        ),
        (
            [LATE],
            [],
            [2, 1],
            "topology.timeout_s=6: ranks 1 and 2 kept the others waiting longer than this without "
            "reporting an error: one of them",
        ),
        ([ABORTED], [1], [], "rank 1 kept the others waiting: its process is stopped"),
        ([ABORTED], [], [1], None),
        ([failed(0, "peer lost")], [], [1], None),
        ([LATE], [], [], None),
        ([LATE, failed(2, "error")], [1], [], None),
        ([LATE, failed(2, "died", exit_code=-signal.SIGKILL)], [1], [], None),
    ],
)
def test_a_silent_rank_is_blamed_if_nothing_else_explains_the_waits(
    failures_so_far, stopped, running, message
):
    silent = failures.find_silent_rank(failures_so_far, stopped, running)
    if message is None:
        assert silent is None
        return
    assert silent.message.startswith(message)
    assert failures.find_cause([*failures_so_far, silent]) is silent
    lines = failures.format_report(silent, None, ["  rank 0: training step 1"]).splitlines()
    assert lines == [
        f"error: {silent.message}",
        "Where each worker was:",
        "  rank 0: training step 1",
    ]


def test_an_abort_after_a_long_wait_is_a_consequence_of_a_silent_rank():
    assert failures.find_silent_rank([ABORTED], [], [1]) is None
    silent = failures.find_silent_rank([ABORTED], [], [1], "topology.timeout_s=6")
    assert silent is not None
    assert failures.find_cause([ABORTED, silent]) is silent


def test_errors_of_a_lost_peer_are_recognised_and_shortened():
    gloo = RuntimeError(
        "[/w/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:34710: Connection reset by "
        "peer. This is typical. 🏖️"
    )
    assert failures.is_peer_loss(gloo)
    assert failures.first_sentence(gloo) == "Read error [127.0.0.1]:34710: Connection reset by peer"
    assert not failures.is_peer_loss(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert failures.first_sentence(RuntimeError()) == "RuntimeError"


def test_an_error_of_writing_names_the_file_once():
    denied = OSError(errno.EACCES, "Permission denied", "runs/a/tables/x.csv")
    for place, named in [
        (Path("runs/a"), "runs/a/tables/x.csv:"),
        ("--out runs/a", "--out runs/a: runs/a/tables/x.csv"),
        ("--plot runs/a/tables/x.csv", "--plot runs/a/tables/x.csv:"),
    ]:
        assert not_written(denied, place) == f"{named} could not be written (Permission denied)"
    full = OSError(errno.ENOSPC, "No space left on device")
    assert not_written(full, Path("a")) == "a: could not be written (No space left on device)"
    assert not_written(OSError("odd"), "--out a") == "--out a: could not be written (odd)"
