"""Rank 0's hub and the other ranks' ends: strangers, and lost answers."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from dataclasses import replace

import pytest
import torch.distributed as dist
from test_job import free_port, job_at

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch import failure_channel, progress_record
from mtrain_cli.launch import job as jobs
from mtrain_cli.launch.failure_channel import (
    FailureChannel,
    RankZeroDuties,
    _Hub,
    _server,
)
from mtrain_cli.launch.failures import Failure
from mtrain_cli.launch.job import PORT, SECRET
from mtrain_cli.launch.progress_record import SEVERAL, WorkerActivity
from mtrain_extras.watch import roll_call
from mtrain_extras.watch.roll_call import RollCall


def connected(hub: _Hub) -> socket.socket:
    return socket.create_connection(("localhost", hub.port), timeout=10)


def after_clock(connection: socket.socket) -> bytes:
    """Return what rank 0 sends after its clock."""
    assert len(connection.recv(8)) == 8
    return connection.recv(2)


def is_dropped(connection: socket.socket) -> bool:
    """Return whether the other end closes the connection. Unread bytes come back as a reset."""
    with contextlib.suppress(ConnectionResetError):
        return after_clock(connection) == b""
    return True


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: node1\r\nAccept: */*\r\n\r\n",
        b'{"token": \n{"token": 1}\n',
        "é 1\né 1\n".encode(),
        b"x" * 100_000,
        b'{"done": true}\n{"failure": {}}\n',
    ],
    ids=["http", "broken JSON", "not ASCII", "endless line", "orders"],
)
def test_a_stranger_is_dropped_and_workers_stay_connected(data):
    hub = _Hub(2, RankZeroDuties(lambda: None))
    workers = [connected(hub) for _ in range(2)]
    workers[0].sendall(f"{hub.token} 0\n".encode())
    with connected(hub) as stranger:
        with contextlib.suppress(OSError):
            stranger.sendall(data)
        assert is_dropped(stranger)
    with connected(hub) as wrong:
        wrong.sendall(f"{'0' * len(hub.token)} 1\n".encode())
        assert is_dropped(wrong)
    with connected(hub) as nameless:
        nameless.sendall(f"{hub.token} \n".encode())
        assert is_dropped(nameless)
    with connected(hub):  # a stranger that sends nothing
        pass
    # A greeting in pieces, followed directly by a message.
    for piece in (hub.token[:5], hub.token[5:], " 1\n" + json.dumps({"done": True}) + "\n"):
        workers[1].sendall(piece.encode())
    assert hub.thread.is_alive()
    workers[0].sendall(json.dumps({"done": True}).encode() + b"\n")
    hub.thread.join(10)
    assert not hub.thread.is_alive()
    assert hub._expected == set()
    assert hub._failures == []
    for worker in workers:
        worker.close()


class Left(BaseException):
    """Raised in place of the exit of the process."""


@pytest.mark.parametrize(("kind", "code"), [("config", 2), ("error", 1)])
def test_a_rank_without_an_answer_prints_its_own_failure(monkeypatch, kind, code):
    """Rank 0 exits between the failure and its answer, as on a machine that is too busy."""
    with socket.create_server(("localhost", 0)) as rank_0:
        entry = f"{rank_0.getsockname()[1]} token"
        monkeypatch.setattr(failure_channel, "decide_on_rank_zero", lambda *_: entry)
        printed, exit_codes = [], []

        def exit_now(given):
            exit_codes.append(given)
            raise Left

        monkeypatch.setattr(failure_channel, "exit_now", exit_now)
        monkeypatch.setattr(
            failure_channel,
            "print_cause",
            lambda failure, *_: printed.append((failure.rank, failure.message)),
        )
        mine = FailureChannel(
            replace(job_at("127.0.0.1", nodes=1), rank=1),
            RankZeroDuties(lambda: None),
        )
        connection, _ = rank_0.accept()
        failing = threading.Thread(target=_fails, args=(mine, kind))
        failing.start()
        received = b""
        while b"failure" not in received:
            received += connection.recv(65536)
        connection.close()
        failing.join(10)
    assert (printed, exit_codes) == ([(1, "seq=1: too short")], [code])


def test_a_rank_that_fails_since_rank_0_is_gone_names_rank_0_whichever_it_notices_first(
    monkeypatch,
):
    printed = []
    monkeypatch.setattr(failure_channel, "exit_now", lambda _: None)
    monkeypatch.setattr(
        failure_channel, "print_cause", lambda failure, *_: printed.append(failure.rank)
    )
    with socket.create_server(("localhost", 0)) as rank_0:
        entry = f"{rank_0.getsockname()[1]} token"
        monkeypatch.setattr(failure_channel, "decide_on_rank_zero", lambda *_: entry)
        mine = FailureChannel(
            replace(job_at("127.0.0.1", nodes=1), rank=1), RankZeroDuties(lambda: None)
        )
        connection, _ = rank_0.accept()
        failing = threading.Thread(target=_fails, args=(mine, "peer lost"))
        failing.start()
        received = b""
        while b"failure" not in received:
            received += connection.recv(65536)
        connection.close()
        failing.join(10)
    assert printed[0] == 0


def test_a_clock_that_comes_in_pieces_is_not_taken_for_the_end_of_the_job(monkeypatch):
    clocks, codes = [], []
    monkeypatch.setattr(progress_record, "set_clock", lambda *clock: clocks.append(clock))
    monkeypatch.setattr(failure_channel, "exit_now", codes.append)
    with socket.create_server(("localhost", 0)) as rank_0:
        entry = f"{rank_0.getsockname()[1]} token"
        monkeypatch.setattr(failure_channel, "decide_on_rank_zero", lambda *_: entry)
        mine = FailureChannel(
            replace(job_at("127.0.0.1", nodes=1), rank=1), RankZeroDuties(lambda: None)
        )
        connection, _ = rank_0.accept()
        mine._closing = True  # no line on a rank 0 that is gone
        clock = failure_channel._CLOCK.pack(1.5e9)
        connection.sendall(clock[:3])
        time.sleep(0.2)
        connection.sendall(clock[3:])
        time.sleep(0.2)
        connection.sendall(bytes([7]))
        mine._watcher.join(10)
        connection.close()
    assert (clocks, codes) == ([(1.5e9,)], [7])


def test_rank_0_is_named_if_it_does_not_answer(monkeypatch):
    monkeypatch.setattr(failure_channel, "VERDICT_WAIT_S", 0.2)
    printed = []
    monkeypatch.setattr(failure_channel, "print_cause", lambda failure, *_: printed.append(failure))
    monkeypatch.setattr(failure_channel, "exit_now", lambda _: None)
    with socket.create_server(("127.0.0.1", 0)) as rank_0:
        entry = f"{rank_0.getsockname()[1]} token"
        monkeypatch.setattr(failure_channel, "decide_on_rank_zero", lambda *_: entry)
        mine = FailureChannel(
            replace(job_at("127.0.0.1", nodes=1), rank=1), RankZeroDuties(lambda: None)
        )
        connection, _ = rank_0.accept()
        mine.fail(Failure(1, 1, "peer lost", "topology.timeout_s=6: rank 1 waited."))
        connection.close()
        mine._watcher.join(10)
    assert printed[0].message == (
        "topology.timeout_s=6: rank 1 waited. It may be rank 0, which has not answered for 0.2 s."
    )


def _fails(mine: FailureChannel, kind: str) -> None:
    with contextlib.suppress(Left):
        mine.fail(Failure(1, 1, kind, "seq=1: too short", "", 0.0))


@pytest.mark.parametrize(("rank", "tells"), [(1, True), (2, True), (3, False)])
def test_a_rank_on_another_node_tells_if_the_first_node_is_lost(monkeypatch, rank, tells):
    printed, ended = [], threading.Event()
    monkeypatch.setattr(failure_channel, "exit_now", lambda _: ended.set())
    monkeypatch.setattr(
        failure_channel, "print_cause", lambda failure, *_: printed.append(failure.rank)
    )
    with socket.create_server(("127.0.0.1", 0)) as rank_0:
        entry = f"{rank_0.getsockname()[1]} token"
        monkeypatch.setattr(failure_channel, "decide_on_rank_zero", lambda *_: entry)
        two_nodes = replace(job_at("127.0.0.1", nodes=2), world_size=4, local_world_size=2)
        FailureChannel(replace(two_nodes, rank=rank), RankZeroDuties(lambda: None))
        rank_0.accept()[0].close()
        assert ended.wait(10)
    assert printed == [0] * tells


def test_a_rank_that_comes_after_rank_0_has_ended_is_sent_to_its_output(monkeypatch):
    # torchrun's store outlives rank 0.
    entry = f"{free_port()} token"
    monkeypatch.setattr(failure_channel, "decide_on_rank_zero", lambda *_: entry)
    job = replace(job_at("127.0.0.1", nodes=1), rank=1)
    with pytest.raises(ConfigError, match=r"rank 1 cannot .* If rank 0 has ended, its output says"):
        FailureChannel(job, RankZeroDuties(lambda: None))


@pytest.mark.parametrize("order", [(2, 0, 1), (1, 2, 0)], ids=["1 last", "0 last"])
@pytest.mark.parametrize(("kind", "code"), [("config", 2), ("error", 1)])
def test_all_ranks_but_0_get_the_code_in_whatever_order_a_slow_hub_accepts_them(
    monkeypatch, order, kind, code
):
    """Rank 2 fails before the hub accepts the first connection, as on a machine that is busy."""
    events, may_accept = [], threading.Event()

    def exit_now(given):
        events.append(("exit", given))
        hub._expected.clear()  # ends the thread of the hub

    monkeypatch.setattr(failure_channel, "exit_now", exit_now)
    monkeypatch.setattr(failure_channel, "print_cause", lambda *_: None)
    duties = RankZeroDuties(lambda: events.append("discard"), beat=lambda: may_accept.wait(10))
    hub = _Hub(3, duties)
    with contextlib.ExitStack() as connections:
        connections.callback(hub.thread.join, 15)
        ranks = {}
        for rank in order:
            ranks[rank] = connections.enter_context(connected(hub))
            ranks[rank].sendall(f"{hub.token} {rank}\n".encode())
        record = Failure(2, 1, kind, "seq=1: too short").record
        ranks[2].sendall(json.dumps({"failure": record}).encode() + b"\n")
        may_accept.set()
        for rank in (1, 2):
            assert after_clock(ranks[rank]) == bytes([code]), f"rank {rank}"
            assert events == [], "rank 0 stays until the others have ended"
            ranks[rank].close()
        hub.thread.join(15)
        assert events == ["discard"] * (code == 2) + [("exit", code)]
        ranks[0].recv(8)  # the clock
        ranks[0].setblocking(False)
        with pytest.raises(BlockingIOError):
            ranks[0].recv(1)


def test_ranks_get_the_code_at_once_if_another_one_never_connects(monkeypatch):
    events = []

    def exit_now(given):
        events.append(given)
        hub._expected.clear()  # ends the thread of the hub

    monkeypatch.setattr(failure_channel, "exit_now", exit_now)
    monkeypatch.setattr(failure_channel, "print_cause", lambda *_: None)
    monkeypatch.setattr(failure_channel, "FAREWELL_S", 1.0)
    hub = _Hub(3, RankZeroDuties(lambda: None))
    with connected(hub) as rank_0, connected(hub) as rank_2:
        rank_0.sendall(f"{hub.token} 0\n".encode())
        record = Failure(2, 1, "error", "lost").record
        message = json.dumps({"failure": record})
        rank_2.sendall(f"{hub.token} 2\n{message}\n".encode())
        began = time.monotonic()
        rank_2.settimeout(5)
        assert after_clock(rank_2) == bytes([1])
        assert time.monotonic() - began < 0.5
        time.sleep(1.2)  # rank 1 could still have come
        assert events == [], "rank 0 stays until rank 2 has ended"
        rank_2.close()
        hub.thread.join(5)
        assert events == [1]


def hub_with_records(monkeypatch, world, records):
    """Return a hub, and lists that get the cause and the lines on what the ranks did."""
    causes, lines = [], []

    def exit_now(_):
        hub._expected.clear()  # ends the thread of the hub

    def print_cause(failure, where):
        causes.append((failure.rank, failure.message))
        lines.extend(where)

    monkeypatch.setattr(failure_channel, "exit_now", exit_now)
    monkeypatch.setattr(failure_channel, "print_cause", print_cause)
    monkeypatch.setattr(failure_channel, "_records", lambda *_: records)
    hub = _Hub(world, RankZeroDuties(lambda: None))
    return hub, causes, lines


@pytest.mark.parametrize(("began", "silent"), [(-0.5, True), (0.5, True), (1.5, False)])
def test_a_rank_that_was_stopped_while_it_waited_is_named(monkeypatch, began, silent):
    now = time.time()
    waits = {rank: WorkerActivity(now - 8, 3, "waits", SEVERAL) for rank in (0, 1)}
    waits[2] = WorkerActivity(now - 8 + began, 3, "waits", SEVERAL)
    monkeypatch.setattr(failure_channel, "CAUSE_GRACE_S", 2.0)
    hub, causes, _ = hub_with_records(monkeypatch, 3, waits)
    with contextlib.ExitStack() as connections:
        connections.callback(hub.thread.join, 15)
        ranks = {rank: connections.enter_context(connected(hub)) for rank in range(3)}
        for rank, connection in ranks.items():
            connection.sendall(f"{hub.token} {rank}\n".encode())
        for rank in (0, 1):
            failure = Failure(rank, 1, "peer lost", f"topology.timeout_s=6: rank {rank} waited")
            ranks[rank].sendall(json.dumps({"failure": failure.record}).encode() + b"\n")
        for rank in (1, 2):
            after_clock(ranks[rank])
            ranks[rank].close()
    ((rank, message),) = causes
    assert rank == (2 if silent else 0)
    assert message.startswith("topology.timeout_s=6: rank 2 kept the others waiting") is silent


@pytest.mark.parametrize("ahead", [5e3, -5e3, 0.0])
def test_a_rank_dates_its_records_and_failures_by_rank_0s_clock(monkeypatch, tmp_path, ahead):
    monkeypatch.setattr(progress_record, "_ahead", 0.0)
    monkeypatch.setattr(progress_record, "_record", None)
    monkeypatch.setattr(failure_channel, "exit_now", lambda _: None)
    monkeypatch.setattr(failure_channel, "print_cause", lambda *_: None)
    with socket.create_server(("127.0.0.1", 0)) as rank_0:
        entry = f"{rank_0.getsockname()[1]} token"
        monkeypatch.setattr(failure_channel, "decide_on_rank_zero", lambda *_: entry)
        job = replace(job_at("127.0.0.1", nodes=1), rank=1)
        mine = FailureChannel(job, RankZeroDuties(lambda: None))
        connection, _ = rank_0.accept()
        theirs = time.time() - ahead
        connection.sendall(failure_channel._CLOCK.pack(theirs))
        until = time.monotonic() + 10
        while abs(progress_record.now() - theirs) > 1 and time.monotonic() < until:
            time.sleep(0.01)
        progress_record.start_record(tmp_path / "where")
        progress_record.note("computes")
        assert progress_record.read_activity(tmp_path / "where").time == pytest.approx(
            theirs, abs=1
        )
        connection.settimeout(10)
        connection.sendall(b"\0")  # so that `fail` need not wait for an answer
        mine.fail(Failure(1, 1, "error", "lost", "", time.time()))
        received = b""
        while b"failure" not in received or received[-1:] != b"\n":
            received += connection.recv(65536)
        connection.close()
    failure = json.loads(received.splitlines()[-1])["failure"]
    assert failure["time"] == pytest.approx(theirs, abs=1)


def test_the_earliest_failure_is_the_cause(monkeypatch):
    monkeypatch.setattr(failure_channel, "CAUSE_GRACE_S", 0.5)
    hub, causes, _ = hub_with_records(monkeypatch, 3, {})
    now = time.time()
    with contextlib.ExitStack() as connections:
        connections.callback(hub.thread.join, 15)
        ranks = {rank: connections.enter_context(connected(hub)) for rank in range(3)}
        for rank, connection in ranks.items():
            connection.sendall(f"{hub.token} {rank}\n".encode())
        for rank in (2, 1):
            failure = Failure(rank, 1, "peer lost", "lost", "trace", now + rank)
            message = json.dumps({"failure": failure.record}).encode()
            ranks[rank].sendall(message + b"\n")
        for rank in (1, 2):
            after_clock(ranks[rank])
            ranks[rank].close()
    assert causes == [(1, "lost")]


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ("by itself", "rank 1: seq=abc: expected"),
        ("silently", "rank 1 on node1 is gone: it showed"),
    ],
)
def test_the_hub_ends_a_job_of_which_a_rank_does_not_come(ends, expected, monkeypatch):
    causes, codes = [], []

    def exit_now(code):
        codes.append(code)
        hub._expected.clear()  # ends the thread of the hub

    monkeypatch.setattr(failure_channel, "exit_now", exit_now)
    monkeypatch.setattr(failure_channel, "print_cause", lambda cause, _: causes.append(cause))
    monkeypatch.setattr(failure_channel, "FAREWELL_S", 0.1)
    monkeypatch.setattr(roll_call, "UNSEEN_S", 0.3)
    monkeypatch.setattr(roll_call, "BEAT_S", 0.1)
    monkeypatch.setattr(failure_channel, "ROLL_CALL_S", 0.1)
    store, job = dist.HashStore(), job_at("node0", nodes=4)
    if ends == "by itself":
        jobs._leave_note(replace(job, rank=1), store, ["seq=abc: expected a number"])
    else:
        store.set("sign of life/8/1", jobs.seal("sign of life/8/1", "0 node1"))
    calls = [RollCall(job, store).check, lambda _: jobs.require_no_note(store)]
    hub = _Hub(2, RankZeroDuties(lambda: None), roll_calls=calls)
    with connected(hub) as rank_0:
        rank_0.sendall(f"{hub.token} 0\n".encode())
        hub.thread.join(10)
    assert [cause.message.startswith(expected) for cause in causes] == [True]
    assert codes == [2 if ends == "by itself" else 1]


def test_a_store_that_does_not_answer_holds_nothing_up_and_is_asked_every_2_s():
    asked, answers = [], threading.Event()

    def call(missing):
        asked.append(missing())
        answers.wait(20)

    hub = _Hub(2, RankZeroDuties(lambda: None), roll_calls=[call])
    with connected(hub) as first, connected(hub) as second:
        first.sendall(f"{hub.token} 0\n".encode())
        time.sleep(1)
        for rank, worker in enumerate((first, second)):
            greeting = f"{hub.token} 1\n" if rank else ""
            worker.sendall(f'{greeting}{{"done": true}}\n'.encode())
        hub.thread.join(5)
    assert not hub.thread.is_alive()
    answers.set()
    hub = _Hub(2, RankZeroDuties(lambda: None), roll_calls=[lambda _: asked.append(time.time())])
    time.sleep(2.5)
    hub._expected.clear()
    hub._greeted.update(range(2))  # ends both threads
    assert len(asked) == 3
    assert asked[2] - asked[1] >= 2


def test_the_user_can_set_the_hubs_port(monkeypatch):
    port = free_port()
    monkeypatch.setenv(PORT, str(port))
    with _server(job_at("127.0.0.1", nodes=1)) as server:
        assert server.getsockname()[1] == port
        with pytest.raises(
            ConfigError,
            match=rf"{PORT}={port}: rank 0 cannot listen on this port .*\. Give a free port",
        ):
            _server(job_at("127.0.0.1", nodes=1))
    monkeypatch.setenv(PORT, "http")
    with pytest.raises(ConfigError, match=f"{PORT}=http: must be a port"):
        _server(job_at("127.0.0.1", nodes=1))


def test_with_a_secret_the_store_does_not_hold_the_hubs_token(monkeypatch):
    monkeypatch.setenv(SECRET, "one")
    hub = _Hub(2, RankZeroDuties(lambda: None))
    with connected(hub) as stranger, contextlib.suppress(OSError):
        stranger.sendall(b"- 1\n")
        assert is_dropped(stranger)
    monkeypatch.delenv(SECRET)
    assert failure_channel.shared_key("x") is None
