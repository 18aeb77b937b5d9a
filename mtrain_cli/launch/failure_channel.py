"""Tell all ranks of a torchrun or srun job that a rank is gone, and find which one failed first.

Such a job has no mtrain launcher. A rank that waits inside NCCL cannot see that a peer died, and
srun without --kill-on-bad-exit does not report it. So every rank keeps one TCP connection to rank
0. The kernel closes the connection when the rank's process ends, for any reason. Rank 0 then prints
the cause once, and all ranks exit with the same code.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch import failures, progress_record
from mtrain_cli.launch.failures import Failure
from mtrain_cli.launch.job import PORT, SECRET, STORE_TIMEOUT, Job, job_store, listen, shared_key
from mtrain_cli.launch.progress_record import WorkerActivity
from mtrain_cli.launch.run_state import HEARTBEAT_S
from mtrain_cli.printable import printable

CAUSE_GRACE_S = 2.0
VERDICT_WAIT_S = 15.0
FAREWELL_S = 10.0
# A machine that loses power sends nothing. The kernel gives up after 10 + 3 * 5 seconds of silence.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_STORE_KEY = "failure_channel"
_GREETING_BYTES = 96  # more than a token and a rank take


@dataclass(frozen=True)
class RankZeroDuties:
    """What rank 0 does for the job.

    on_mistake: called before rank 0 exits because of a user's mistake.
    on_failure: called before rank 0 exits because of any other failure. Returns a line to print.
    beat: called every few seconds.
    """

    on_mistake: Callable[[], object]
    on_failure: Callable[[Failure], str] = lambda _: ""
    beat: Callable[[], object] = lambda: None


class FailureChannel:
    """This rank's end of the connection to rank 0. Rank 0 also runs the `_Hub`."""

    def __init__(self, job: Job, duties: RankZeroDuties, logs: Path | None = None) -> None:
        """Connect to rank 0 and return after it answers.

        Args:
            logs: folder of the activity records (`progress_record.job_record_path`). It holds those
                of the ranks that share this disk.

        Raises:
            ConfigError: this machine cannot reach rank 0's port.
        """
        store = job_store(job)
        self._hub = _Hub(job.world_size, duties, logs, _server(job)) if job.rank == 0 else None
        if self._hub:
            # With a job secret, the token never goes through the store, which anybody may read.
            token = "-" if shared_key(_STORE_KEY) else self._hub.token
            store.set(_STORE_KEY, f"{self._hub.port} {token}")
        port, token = _port_and_token(store.get(_STORE_KEY))
        host = self._hub.host if self._hub else job.address
        try:
            timeout = STORE_TIMEOUT.total_seconds()
            self._socket = socket.create_connection((host, port), timeout=timeout)
        except OSError as error:
            raise ConfigError(
                f"MASTER_ADDR={job.master_addr}: rank {job.rank} cannot connect to port {port} of "
                f"rank 0 ({error.strerror or error}). Open all ports between the machines, or set "
                f"{PORT} to an open port."
            ) from error
        self._socket.settimeout(None)
        self._rank, self._world_size, self._logs = job.rank, job.world_size, logs
        self._closing = self._failed = False
        self._write(f"{token} {job.rank}")
        self._watcher = threading.Thread(target=self._watch, name="failure channel", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Report that this rank is done. Rank 0 then waits for the others: they need its store."""
        self._closing = True
        self._write(json.dumps({"done": True}))
        if self._hub:
            self._hub.join()

    def fail(self, failure: Failure) -> NoReturn:
        """Report this rank's failure and exit after rank 0 has printed the cause.

        If rank 0 does not answer, print the failure here.
        """
        self._failed = True
        self._write(json.dumps({"failure": failure.record}))
        self._watcher.join(VERDICT_WAIT_S)
        print_cause(failure)
        exit_now(2 if failure.kind == "config" else 1)

    def _write(self, line: str) -> None:
        # If rank 0 is gone, the watcher notices.
        with contextlib.suppress(OSError):
            self._socket.sendall(line.encode() + b"\n")

    def _watch(self) -> None:
        """Exit with the code that rank 0 sends, or when rank 0 is gone."""
        try:
            verdict = self._socket.recv(1)
        except OSError:
            verdict = b""
        if verdict:
            exit_now(verdict[0])
        # Rank 0 may exit before this rank reads the answer. A failed rank prints its own failure
        # (`fail`).
        if not self._closing and not self._failed:
            if self._rank == 1:
                records = _records(self._logs, self._world_size)
                print_cause(_lost(0), progress_record.activity_lines(records, [0], time.time()))
            exit_now(1)


@dataclass
class _Peer:
    """One connection at the hub. ``rank`` is None until the peer has sent the token."""

    socket: socket.socket
    rank: int | None = None
    received: bytes = b""


class _Hub:
    """Rank 0's thread that listens to all ranks."""

    def __init__(
        self,
        world_size: int,
        duties: RankZeroDuties,
        logs: Path | None = None,
        server: socket.socket | None = None,
    ) -> None:
        """Start to listen.

        Args:
            server: listening socket. None opens one on loopback.
        """
        self._world_size, self._duties, self._logs = world_size, duties, logs
        self._server = server or socket.create_server(("127.0.0.1", 0), backlog=world_size)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._expected = set(range(world_size))
        self._peers: list[_Peer] = []
        self._failures: list[Failure] = []
        host, self.port = self._server.getsockname()[:2]
        self.host = "localhost" if ipaddress.ip_address(host).is_unspecified else host
        self.token = shared_key(_STORE_KEY) or secrets.token_hex(16)
        self._thread = threading.Thread(target=self._serve, name="failure hub", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until every rank is done."""
        self._thread.join()

    def _serve(self) -> None:
        deadline = None
        beaten = -HEARTBEAT_S
        while self._expected:
            if time.monotonic() - beaten >= HEARTBEAT_S:
                self._duties.beat()
                beaten = time.monotonic()
            for key, _ in self._selector.select(timeout=0.2):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            if self._failures:
                deadline = deadline or time.monotonic() + CAUSE_GRACE_S
                only_consequences = all(failure.is_consequence for failure in self._failures)
                if not only_consequences or time.monotonic() > deadline:
                    self._end_job()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        except OSError:
            # The peer is gone already, or this process has too many open files. Then a worker's
            # connection stays in the queue until there is room.
            return
        peer = _Peer(connection)
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
                self._failures.append(_lost(peer.rank))
            return
        *lines, peer.received = (peer.received + data).split(b"\n")
        if peer.rank is None:
            # Anyone may connect to this port. Only the job's workers can read the token from its
            # store.
            if not lines and len(peer.received) <= _GREETING_BYTES:
                return
            peer.rank = self._rank_of(lines.pop(0)) if lines else None
            if peer.rank is None:
                self._drop(peer)
                return
        for line in lines:
            self._handle_message(peer.rank, line)

    def _rank_of(self, greeting: bytes) -> int | None:
        """Return the rank in a greeting with the right token, or None for a stranger.

        A stranger's bytes are never parsed.
        """
        token, _, rank = greeting.partition(b" ")
        is_ours = secrets.compare_digest(token, self.token.encode())
        return int(rank) if is_ours and rank.isdigit() else None

    def _handle_message(self, rank: int, line: bytes) -> None:
        message = json.loads(line)
        if "done" in message:
            self._expected.discard(rank)
        else:
            self._failures.append(Failure(rank=rank, exit_code=1, **message["failure"]))

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.socket)
        self._peers.remove(peer)
        peer.socket.close()

    def _end_job(self) -> NoReturn:
        """Print the cause and make every rank exit, this one last."""
        records = _records(self._logs, self._world_size)
        cause = self._cause(records)
        print_cause(cause, progress_record.activity_lines(records, [cause.rank], time.time()))
        code = 2 if cause.kind == "config" else 1
        if code == 1 and (line := self._duties.on_failure(cause)):
            _print_error(line)
        self._dismiss_others(code)
        if code == 2:
            # Only after the others have exited: they write to the run folder that this may delete.
            self._duties.on_mistake()
        exit_now(code)

    def _dismiss_others(self, code: int) -> None:
        """Send the other ranks their exit code and wait until they have gone.

        Read what they still send: unread bytes would reset their connections.
        """
        deadline = time.monotonic() + FAREWELL_S
        # Includes workers that have not identified themselves yet.
        others = [peer.socket for peer in self._peers if peer.rank != 0]
        # A mistake may be known before the last worker has connected. That worker must get the
        # code, too.
        expected = self._world_size - 1 if code == 2 else 0
        while len(others) < expected and (left := deadline - time.monotonic()) > 0:
            with contextlib.suppress(OSError):
                self._server.settimeout(left)
                others.append(self._server.accept()[0])
        for connection in others:
            with contextlib.suppress(OSError):
                connection.sendall(bytes([code]))
        for connection in others:
            with contextlib.suppress(OSError):
                # The deadline also limits a stranger that never stops sending.
                while (left := deadline - time.monotonic()) > 0:
                    connection.settimeout(left)
                    if not connection.recv(65536):
                        break

    def _cause(self, records: Mapping[int, WorkerActivity]) -> Failure:
        """Return the first failure, or blame a rank that the others waited for."""
        reported = {failure.rank for failure in self._failures}
        not_waiting = progress_record.ranks_not_waiting(self._expected - reported, records)
        silent = failures.find_silent_rank(self._failures, [], not_waiting)
        return failures.find_cause([*self._failures, silent] if silent else self._failures)


def _server(job: Job) -> socket.socket:
    """Open the socket that rank 0's hub listens on, at the port in ``MTRAIN_PORT`` or a free one.

    Raises:
        ConfigError: the port is not a valid number, or taken.
    """
    given = os.environ.get(PORT, "0")
    if not given.isdigit() or int(given) > 65535:
        raise ConfigError(
            f"{PORT}={given}: must be a port, 1 to 65535. Unset it for any free port."
        )
    try:
        return listen(job, int(given))
    except OSError as error:
        reason = f"rank 0 cannot listen there ({error.strerror or error})"
        raise ConfigError(f"{PORT}={given}: {reason}. Give a free port.") from error


def _port_and_token(entry: bytes) -> tuple[int, str]:
    """Parse what rank 0 left in the store.

    Raises:
        ConfigError: the entry is invalid, or only one of rank 0 and this rank has a secret.
    """
    port, _, token = entry.decode(errors="replace").partition(" ")
    key = shared_key(_STORE_KEY)
    if not port.isdigit() or (token == "-") != (key is not None):
        raise ConfigError(
            f"{SECRET}: this rank and rank 0 do not have the same secret. Give all ranks the same "
            "one, or none."
        )
    return int(port), key or token


def _records(logs: Path | None, world_size: int) -> dict[int, WorkerActivity]:
    """Return the activity of each rank whose record this machine can read."""
    if logs is None:
        return {}
    paths = {rank: progress_record.job_record_path(logs, rank) for rank in range(world_size)}
    return progress_record.read_activities(paths)


def print_cause(failure: Failure, where: Sequence[str] = ()) -> None:
    """Print why the run ended.

    Args:
        where: lines on what each worker was doing (`failures.format_report`).
    """
    if failure.kind == "config":
        _print_error("\n".join(f"error: {line}" for line in failure.message.splitlines()))
    else:
        _print_error(failures.format_report(failure, None, where))


def _print_error(text: str) -> None:
    # Even without a terminal, the process must exit with the right code.
    with contextlib.suppress(OSError):
        print(printable(text), file=sys.stderr, flush=True)


def exit_now(code: int) -> NoReturn:
    """Exit without the interpreter's shutdown.

    After a failure, threads of a save or a communicator may wait for peers that are gone. After
    success, torch 2.11 sometimes aborts during shutdown ("terminate called without an active
    exception"), and a good run would look like a failed one.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _lost(rank: int) -> Failure:
    message = (
        "is gone: its process was killed (host out of memory? see dmesg) or its machine failed"
    )
    return Failure(rank, None, "died", message, "", time.time())
