"""Notice that a rank of a torchrun or srun job is gone, find the cause, and end all ranks.

A rank that waits in NCCL does not notice that a peer died. So every rank keeps a TCP connection to
rank 0, which the system closes when the rank's process ends. Rank 0 then prints the cause once.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from mtrain_cli.config import plugins
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch import failures, progress_record
from mtrain_cli.launch.failures import Failure, RunError
from mtrain_cli.launch.guarded_streams import print_error
from mtrain_cli.launch.job import (
    PORT,
    STORE_TIMEOUT,
    Job,
    connect,
    decide_on_rank_zero,
    hub_port,
    listen,
    require_no_note,
    shared_key,
)
from mtrain_cli.launch.progress_record import WorkerActivity
from mtrain_cli.launch.run_status import HEARTBEAT_S

CAUSE_GRACE_S = 2.0
VERDICT_WAIT_S = 15.0
FAREWELL_S = 10.0
ROLL_CALL_S = 2.0
LAST_FAREWELL_S = 2.0  # at least, after the last rank got the code
# Closes the connection to a machine that lost power after 10 + 3 * 5 seconds without an answer.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_STORE_KEY = "failure_channel"
_CLOCK = struct.Struct("<d")  # what rank 0 sends first: seconds since the epoch
_GREETING_BYTES = 96  # a greeting is a token and a rank, and shorter than this


@dataclass(frozen=True)
class RankZeroDuties:
    """Functions that rank 0 calls for the whole job; other ranks call on_mistake, too.

    on_mistake, on_failure: called before the exit. on_failure returns a line to print, or "".
    beat: called every HEARTBEAT_S seconds.
    """

    on_mistake: Callable[[], object]
    on_failure: Callable[[Failure], str] = lambda _: ""
    beat: Callable[[], object] = lambda: None


class FailureChannel:
    """The connection of this rank to rank 0. On rank 0, creating it also starts the `_Hub`."""

    def __init__(self, job: Job, duties: RankZeroDuties, logs: Path | None = None) -> None:
        """Connect to rank 0. logs: folder of the activity records.

        Raises ConfigError if this machine cannot reach the port of rank 0, and RunError if rank 0
        has ended, or did not come within STORE_TIMEOUT. The ranks end as rank 0 if it refuses.
        """
        self._hub: _Hub | None = None

        def begin() -> str:
            store = connect(job, STORE_TIMEOUT)
            calls = [watch.roll_call(job, store) for watch in plugins.watches()]
            calls.append(lambda _: require_no_note(store))
            self._hub = _Hub(job.world_size, duties, logs, _server(job), calls)
            # Anybody may read the store, so with a secret all ranks derive the token from it.
            return f"{self._hub.port} {'-' if shared_key(_STORE_KEY) else self._hub.token}"

        port, token = decide_on_rank_zero(begin, _STORE_KEY).split()
        self._address = self._hub.host if self._hub else job.address
        try:
            timeout = STORE_TIMEOUT.total_seconds()
            self._socket = socket.create_connection((self._address, int(port)), timeout=timeout)
        except OSError as error:
            raise ConfigError(
                f"MASTER_ADDR={job.master_addr}: rank {job.rank} cannot connect to port {port} of "
                f"rank 0 ({error.strerror or error}). If rank 0 has ended, its output says why. "
                f"Otherwise open all ports between the machines, or set {PORT} to an open port."
            ) from error
        self._socket.settimeout(None)
        _keep_alive(self._socket)
        self._rank, self._world_size, self._logs = job.rank, job.world_size, logs
        self._duties, self._closing, self._failed = duties, False, False
        # If rank 0 is gone: its neighbor, and a rank on another node, as the neighbor may be, too.
        self._tells = job.rank in (1, job.local_world_size)
        self._write(f"{shared_key(_STORE_KEY) or token} {job.rank}")
        self._watcher = threading.Thread(target=self._watch, name="failure channel", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Report that this rank is done. On rank 0, wait until all are: they need its store."""
        self._closing = True
        self._write(json.dumps({"done": True}))
        if self._hub:
            self._hub.thread.join()

    def wait(self) -> NoReturn:
        """Exit as the job ends: as a rank beyond its world size, or after rank 0 has failed."""
        self._watcher.join()
        exit_now(1)

    def fail(self, failure: Failure) -> NoReturn:
        """Report the failure, and exit after rank 0 has printed the cause. Else print it here."""
        self._failed = not failure.is_consequence  # perhaps of the loss of rank 0
        # By rank 0's clock, as the records.
        failure = replace(failure, time=failure.time - time.time() + progress_record.now())
        self._write(json.dumps({"failure": failure.record}))
        self._watcher.join(VERDICT_WAIT_S)
        if self._watcher.is_alive() and failure.kind == "peer lost" and not failure.trace:
            line = failure.message.removesuffix(".")
            line += f". It may be rank 0, which has not answered for {VERDICT_WAIT_S:g} s."
            failure = replace(failure, message=line)
        print_cause(failure)
        exit_now(2 if failure.kind == "config" else 1)

    def _write(self, line: str) -> None:
        # An error means that rank 0 is gone. The thread in `_watch` handles that.
        with contextlib.suppress(OSError):
            self._socket.sendall(line.encode() + b"\n")

    def _watch(self) -> None:
        """Exit with the code that rank 0 sends, or with 1 if rank 0 is gone."""
        try:
            clock = self._socket.recv(_CLOCK.size, socket.MSG_WAITALL)
            if len(clock) == _CLOCK.size and not self._hub:
                progress_record.set_clock(*_CLOCK.unpack(clock))
            verdict = self._socket.recv(1)
        except OSError:
            verdict = b""
        if verdict:
            if verdict[0] == 2:
                self._duties.on_mistake()
            exit_now(verdict[0])
        # A rank that is done may lose rank 0. A rank that failed prints its own failure in `fail`.
        if not self._closing and not self._failed:
            if self._tells:
                records = _records(self._logs, self._world_size, [0])
                where = progress_record.activity_lines(records, [0], progress_record.now())
                print_cause(_lost(0, self._address), where)
            exit_now(1)


@dataclass
class _Peer:
    """A connection to the hub."""

    socket: socket.socket
    address: str
    rank: int | None = None  # until the peer has sent the token
    received: bytes = b""  # of an incomplete line


class _Hub:
    """The thread of rank 0 that is connected to all ranks and ends the job after a failure."""

    def __init__(
        self,
        world_size: int,
        duties: RankZeroDuties,
        logs: Path | None = None,
        server: socket.socket | None = None,
        roll_calls: Sequence[Callable[..., None]] = (),
    ) -> None:
        self._world_size, self._duties, self._logs = world_size, duties, logs
        self._roll_calls = roll_calls
        self._server = server or socket.create_server(("127.0.0.1", 0), backlog=world_size)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._expected = set(range(world_size))
        self._peers: list[_Peer] = []
        self._greeted: set[int] = set()
        self._failures: list[Failure] = []
        host, self.port = self._server.getsockname()[:2]
        self.host = "localhost" if ipaddress.ip_address(host).is_unspecified else host
        self.token = shared_key(_STORE_KEY) or secrets.token_hex(16)
        self.thread = threading.Thread(target=self._serve, name="failure hub", daemon=True)
        self.thread.start()
        if roll_calls:  # not in that thread: a store may not answer for minutes
            threading.Thread(target=self._call_roll, name="roll call", daemon=True).start()

    def _serve(self) -> None:
        deadline = None
        beaten = -HEARTBEAT_S
        while self._expected:
            if time.monotonic() - beaten >= HEARTBEAT_S:
                self._duties.beat()
                beaten = time.monotonic()
            self._receive(timeout=0.2)
            if self._failures:
                deadline = deadline or time.monotonic() + CAUSE_GRACE_S
                only_consequences = all(failure.is_consequence for failure in self._failures)
                if not only_consequences or time.monotonic() > deadline:
                    self._end_job()
        for peer in self._peers:
            if (peer.rank or 0) >= self._world_size:
                with contextlib.suppress(OSError):
                    peer.socket.sendall(bytes([0]))

    def _call_roll(self) -> None:
        """Name ranks that have not come yet. Note it as a failure if one of them does not come."""
        try:
            while self._missing():
                for call in self._roll_calls:
                    call(self._missing)
                time.sleep(ROLL_CALL_S)
        except (ConfigError, RunError) as error:
            if missing := self._missing():
                self._failures.append(replace(failures.failure_from(error), rank=missing[0]))
        except RuntimeError:
            pass  # the store is gone, as is whoever serves it

    def _missing(self) -> list[int]:
        return sorted(set(range(self._world_size)) - self._greeted)

    def _receive(self, timeout: float) -> None:
        for key, _ in self._selector.select(timeout):
            if key.data is None:
                self._accept()
            else:
                self._read(key.data)

    def _accept(self) -> None:
        try:
            connection, address = self._server.accept()
        except OSError:
            # The peer is gone, or too many files are open and a later call accepts the connection.
            return
        _keep_alive(connection)
        with contextlib.suppress(OSError):  # the peer is gone already
            connection.sendall(_CLOCK.pack(time.time()))
        peer = _Peer(connection, address[0])
        self._peers.append(peer)
        self._selector.register(connection, selectors.EVENT_READ, peer)

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
            if peer.rank in self._expected:
                self._failures.append(_lost(peer.rank, peer.address))
            return
        *lines, peer.received = (peer.received + data).split(b"\n")
        if peer.rank is None:
            # Anyone can connect to this port. Only workers of this job have the token.
            if not lines and len(peer.received) <= _GREETING_BYTES:
                return
            token, _, rank = (lines.pop(0) if lines else b"").partition(b" ")
            # Check the token before anything else is parsed.
            if not secrets.compare_digest(token, self.token.encode()) or not rank.isdigit():
                self._drop(peer)
                return
            peer.rank = int(rank)
            self._greeted.add(peer.rank)
        for line in lines:
            message = json.loads(line)
            if "done" in message:
                self._expected.discard(peer.rank)
            else:
                self._failures.append(Failure(peer.rank, exit_code=1, **message["failure"]))

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.socket)
        self._peers.remove(peer)
        peer.socket.close()

    def _end_job(self) -> NoReturn:
        """Print the cause and end all ranks, rank 0 last."""
        gone = [failure.rank for failure in self._failures if not failure.is_consequence]
        records = _records(self._logs, self._world_size, gone)
        # The cause may be a rank that reported no failure but kept the others waiting.
        reported = {failure.rank for failure in self._failures}
        left = self._expected - reported
        not_waiting = progress_record.ranks_not_waiting(left, records)
        quiet = [*left & progress_record.silent_ranks(records)]
        # Or one that was stopped while it waited: it began as early as those that report a timeout.
        first = min((records[rank].time for rank in reported & records.keys()), default=0.0)
        early = {rank for rank in records if records[rank].time < first + CAUSE_GRACE_S / 2}
        silent = failures.find_silent_rank(self._failures, quiet, [*(not_waiting or early & left)])
        cause = failures.find_cause([*self._failures, silent] if silent else self._failures)
        print_cause(cause, progress_record.activity_lines(records, [cause.rank], time.time()))
        code = 2 if cause.kind == "config" else 1
        if code == 1 and (line := self._duties.on_failure(cause)):
            print_error(line)
        self._dismiss_others(code)
        if code == 2:
            # This may delete the run's folder, and the other ranks write to it until they exit.
            self._duties.on_mistake()
        exit_now(code)

    def _dismiss_others(self, code: int) -> None:
        """Send the exit code to the other ranks and wait until they have exited.

        Unread bytes would reset a connection before its rank has the code, so read them.
        """
        deadline = time.monotonic() + FAREWELL_S
        told: list[_Peer] = []

        def tell(*, strangers: bool = False) -> None:
            for peer in self._peers:
                if peer not in told and (strangers if peer.rank is None else peer.rank != 0):
                    told.append(peer)
                    with contextlib.suppress(OSError):
                        peer.socket.sendall(bytes([code]))

        # The failure may arrive before the greetings of some ranks. Wait for them: all but rank 0
        # must get the code, and only its greeting shows which connection is rank 0's.
        tell()
        awaited = set(range(self._world_size))
        while awaited - self._greeted and (left := deadline - time.monotonic()) > 0:
            self._receive(left)
            tell()
        tell(strangers=True)
        deadline = max(deadline, time.monotonic() + LAST_FAREWELL_S)
        for connection in [peer.socket for peer in told if peer in self._peers]:
            with contextlib.suppress(OSError):
                # The deadline also ends the connection of a stranger that sends without end.
                while (left := deadline - time.monotonic()) > 0:
                    connection.settimeout(left)
                    if not connection.recv(65536):
                        break


def _server(job: Job) -> socket.socket:
    """Open the listening socket of the hub, at the port ``MTRAIN_PORT`` or else at a free port."""
    given = hub_port()
    try:
        return listen(job, given)
    except OSError as error:
        reason = f"rank 0 cannot listen on this port ({error.strerror or error})"
        raise ConfigError(f"{PORT}={given}: {reason}. Give a free port.") from error


def _records(logs: Path | None, world_size: int, gone: Sequence[int]) -> dict[int, WorkerActivity]:
    """Return and `keep` the activity of the ranks whose record this machine can read, by rank."""
    if logs is None:
        return {}
    paths = {rank: progress_record.job_record_path(logs, rank) for rank in range(world_size)}
    progress_record.keep(logs, paths, gone)
    return progress_record.read_activities(paths)


def print_cause(failure: Failure, where: Sequence[str] = ()) -> None:
    """Print why the run ended, and give torchrun the first line of it.

    where: what each worker was doing, one line per worker.
    """
    report = "\n".join(f"mtrain: {line}" for line in failure.message.splitlines())
    if failure.kind != "config":
        report = failures.format_report(failure, None, where)
    print_error(report)
    line = report.partition("\n")[0].removeprefix("mtrain: ").removeprefix("error: ")
    failures.write_record(replace(failure, message=line, trace=""))


def exit_now(code: int) -> NoReturn:
    """Exit without Python's shutdown, where threads wait for lost peers and torch may abort."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _lost(rank: int, address: str) -> Failure:
    address = address.removeprefix("::ffff:")  # an IPv4 address on a socket of both families
    local = address.startswith("127.") or address in ("::1", "localhost")
    why = "its process was killed (host out of memory? see dmesg) or its machine or link failed"
    return Failure(rank, None, "died", f"{'' if local else f'on {address} '}is gone: {why}")


def _keep_alive(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the peer is gone already
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
