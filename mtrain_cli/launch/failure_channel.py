"""How the workers of a torchrun or srun job learn that one of them is gone, and which one failed first.

There is no launcher of ours above them. A worker that waits inside NCCL cannot see that a peer died, and srun without --kill-on-bad-exit
does not tell it. So every rank keeps one TCP connection to rank 0: the kernel closes it when its process ends, however that ends, and
however busy its interpreter is. Rank 0 tells the cause once, and all ranks leave with the same exit code.
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
from mtrain_cli.printable import printable

CAUSE_GRACE_S = 2.0
VERDICT_WAIT_S = 15.0
FAREWELL_S = 10.0
BEAT_S = 10.0  # as `launch.run_state`, which cannot be read before rank 0 has a run
# A machine that loses power says nothing; the kernel then gives up after 10 + 3 * 5 seconds of silence.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_STORE_KEY = "lifeline"
_GREETING_BYTES = 96  # the token and a rank are shorter


class FailureChannel:
    """This rank's end of the connection to rank 0, which also runs the `_Hub`."""

    def __init__(
        self,
        job: Job,
        on_mistake: Callable[[], object],
        logs: Path | None = None,
        on_failure: Callable[[Failure], str] = lambda _: "",
        beat: Callable[[], object] = lambda: None,
    ) -> None:
        """Connect; returns once rank 0 answers. Rank 0 calls ``on_mistake`` before it leaves because of a user's mistake, ``on_failure``
        before it leaves because of another failure, and shows the line that this gives; ``beat`` every few seconds.

        logs: where ranks keep their records (`progress_record.in_logs`), as far as they share a disk.

        Raises:
            ConfigError: rank 0's port cannot be reached from this machine.
        """
        store = job_store(job)
        self._hub = (
            _Hub(job.world_size, on_mistake, logs, on_failure, beat, _server(job))
            if job.rank == 0
            else None
        )
        if self._hub:
            # With a secret of the job, what shows that a rank is one of it never goes through the store, which anybody may read.
            store.set(
                _STORE_KEY, f"{self._hub.port} {'-' if shared_key(_STORE_KEY) else self._hub.token}"
            )
        port, token = _port_and_token(store.get(_STORE_KEY))
        host = self._hub.host if self._hub else job.address
        try:
            self._socket = socket.create_connection(
                (host, port), timeout=STORE_TIMEOUT.total_seconds()
            )
        except OSError as error:
            raise ConfigError(
                f"MASTER_ADDR={job.master_addr}: rank {job.rank} cannot connect to port {port} of rank 0 ({error.strerror or error}); "
                f"workers must reach each other on any port, or on the one that {PORT} names"
            ) from error
        self._socket.settimeout(None)
        self._rank = job.rank
        self._world_size = job.world_size
        self._logs = logs
        self._closing = self._failed = False
        self._write(f"{token} {job.rank}")
        self._watcher = threading.Thread(target=self._watch, name="lifeline", daemon=True)
        self._watcher.start()

    def close(self) -> None:
        """Report that this rank is done; on rank 0 also wait for the others, which lose their store when it leaves."""
        self._closing = True
        self._send({"done": True})
        if self._hub:
            self._hub.join()

    def fail(self, failure: Failure) -> NoReturn:
        """Report this rank's failure, and leave when rank 0 has told the user the cause; without an answer tell it here."""
        self._failed = True
        own = {
            "kind": failure.kind,
            "message": failure.message,
            "trace": failure.trace,
            "time": failure.time,
        }
        self._send({"failure": own})
        self._watcher.join(VERDICT_WAIT_S)
        print_cause(failure)
        exit_now(2 if failure.kind == "config" else 1)

    def _send(self, message: dict[str, object]) -> None:
        self._write(json.dumps(message))

    def _write(self, line: str) -> None:
        # When rank 0 is gone the watcher knows.
        with contextlib.suppress(OSError):
            self._socket.sendall(line.encode() + b"\n")

    def _watch(self) -> None:
        """Leave with the exit code that rank 0 sends, or when rank 0 is gone."""
        try:
            verdict = self._socket.recv(1)
        except OSError:
            verdict = b""
        if verdict:
            exit_now(verdict[0])
        # Who has failed tells that itself (`fail`): rank 0 may have left before its answer was read.
        if not self._closing and not self._failed:
            if self._rank == 1:
                print_cause(_lost(0), _activity_lines(_records(self._logs, self._world_size), 0))
            exit_now(1)


@dataclass
class _Peer:
    """One connection at the hub; ``rank`` is None until it has shown the token."""

    socket: socket.socket
    rank: int | None = None
    received: bytes = b""


class _Hub:
    """Rank 0's thread that hears all ranks."""

    def __init__(
        self,
        world_size: int,
        on_mistake: Callable[[], object],
        logs: Path | None = None,
        on_failure: Callable[[Failure], str] = lambda _: "",
        beat: Callable[[], object] = lambda: None,
        server: socket.socket | None = None,
    ) -> None:
        """server: that listens; None: one of its own, on loopback."""
        self._on_mistake = on_mistake
        self._on_failure = on_failure
        self._beat = beat
        self._world_size = world_size
        self._logs = logs
        self._server = server or socket.create_server(("127.0.0.1", 0), backlog=world_size)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._expected = set(range(world_size))
        self._peers: list[_Peer] = []
        self._failures: list[Failure] = []
        bound = self._server.getsockname()
        self.host, self.port = (
            "localhost" if ipaddress.ip_address(bound[0]).is_unspecified else bound[0],
            bound[1],
        )
        self.token = shared_key(_STORE_KEY) or secrets.token_hex(16)
        self._thread = threading.Thread(target=self._serve, name="lifeline hub", daemon=True)
        self._thread.start()

    def join(self) -> None:
        """Wait until every rank is done."""
        self._thread.join()

    def _serve(self) -> None:
        deadline = None
        beaten = -BEAT_S
        while self._expected:
            if time.monotonic() - beaten >= BEAT_S:
                self._beat()
                beaten = time.monotonic()
            for key, _ in self._selector.select(timeout=0.2):
                if key.data is None:
                    self._accept()
                else:
                    self._read(key.data)
            if self._failures:
                deadline = deadline or time.monotonic() + CAUSE_GRACE_S
                if time.monotonic() > deadline or not all(
                    failure.is_consequence for failure in self._failures
                ):
                    self._end_job()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in _KEEPALIVE.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        except OSError:
            # Gone again already, or too many files are open here: that of a worker stays in the queue until there is room.
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
            # Anyone may connect to this port; only the job's workers can read the token from its store.
            greeting = lines.pop(0) if lines else None
            peer.rank = None if greeting is None else self._rank_of(greeting)
            if peer.rank is None:
                if greeting is not None or len(peer.received) > _GREETING_BYTES:
                    self._drop(peer)
                return
        for line in lines:
            self._handle_message(peer.rank, line)

    def _rank_of(self, greeting: bytes) -> int | None:
        """The rank that shows the token; None for a stranger, whose bytes may be anything and are never parsed."""
        token, _, rank = greeting.partition(b" ")
        return (
            int(rank)
            if secrets.compare_digest(token, self.token.encode()) and rank.isdigit()
            else None
        )

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
        """Tell the cause, then have every rank leave, this one last: what it has not read by then would reset the others' connections."""
        records = _records(self._logs, self._world_size)
        cause = self._cause(records)
        print_cause(cause, _activity_lines(records, cause.rank))
        code = 2 if cause.kind == "config" else 1
        if code == 1 and (line := self._on_failure(cause)):
            with contextlib.suppress(OSError):
                print(printable(line), file=sys.stderr, flush=True)
        deadline = time.monotonic() + FAREWELL_S
        others = [
            peer.socket for peer in self._peers if peer.rank != 0
        ]  # also workers that were not heard yet
        # A mistake may be known before the last worker has come; it is to end alike.
        while (
            code == 2
            and len(others) < self._world_size - 1
            and (left := deadline - time.monotonic()) > 0
        ):
            with contextlib.suppress(OSError):
                self._server.settimeout(left)
                others.append(self._server.accept()[0])
        for connection in others:
            with contextlib.suppress(OSError):
                connection.sendall(bytes([code]))
        for connection in others:
            with contextlib.suppress(OSError):
                # The deadline holds against a stranger that never stops to talk, too.
                while (left := deadline - time.monotonic()) > 0:
                    connection.settimeout(left)
                    if not connection.recv(65536):
                        break
        if code == 2:
            # Not before the others have left, who write into the folder of the run that goes with this.
            self._on_mistake()
        exit_now(code)

    def _cause(self, records: Mapping[int, WorkerActivity]) -> Failure:
        """Whoever failed first, or a rank for which the others waited in vain."""
        heard = {failure.rank for failure in self._failures}
        going = [
            rank
            for rank in self._expected - heard
            if rank not in records or records[rank].waits_for is None
        ]
        silent = failures.find_silent_rank(self._failures, [], going)
        return failures.find_cause([*self._failures, silent] if silent else self._failures)


def _server(job: Job) -> socket.socket:
    """What rank 0's hub listens with, at the port that the user names or a free one.

    Raises:
        ConfigError: the port is none, or taken.
    """
    given = os.environ.get(PORT, "0")
    if not given.isdigit() or int(given) > 65535:
        raise ConfigError(f"{PORT}={given}: must be a port, 1 to 65535, or unset for any free one")
    try:
        return listen(job, int(given))
    except OSError as error:
        raise ConfigError(
            f"{PORT}={given}: rank 0 cannot listen there ({error.strerror or error}); give a free port"
        ) from error


def _port_and_token(said: bytes) -> tuple[int, str]:
    """What rank 0 has left in the store.

    Raises:
        ConfigError: it is no such thing, or rank 0 has no secret where this rank has one, or the other way round.
    """
    port, _, token = said.decode(errors="replace").partition(" ")
    key = shared_key(_STORE_KEY)
    if not port.isdigit() or (token == "-") != (key is not None):
        raise ConfigError(
            f"{SECRET}: this rank and rank 0 do not have the same secret; give all ranks the same one, or none"
        )
    return int(port), key or token


def _records(logs: Path | None, world_size: int) -> dict[int, WorkerActivity]:
    """Where each rank was, as far as this machine sees the files of the others."""
    if logs is None:
        return {}
    return {
        rank: record
        for rank in range(world_size)
        if (record := progress_record.read_activity(progress_record.job_record_path(logs, rank)))
    }


def _activity_lines(records: Mapping[int, WorkerActivity], about: int) -> list[str]:
    return progress_record.activity_lines(records, [about], time.time())


def print_cause(failure: Failure, where: Sequence[str] = ()) -> None:
    """Print the cause of a run's end. where: of each rank, see `failures.report`."""
    config = failure.kind == "config"
    lines = (
        [f"error: {line}" for line in failure.message.splitlines()]
        if config
        else [failures.format_report(failure, None, where)]
    )
    # Whatever became of the terminal, the exit code still has to be given.
    with contextlib.suppress(OSError):
        print(printable("\n".join(lines)), file=sys.stderr, flush=True)


def exit_now(code: int) -> NoReturn:
    """End without the interpreter's farewell.

    After a failure, threads of a save or a communicator may wait for peers that are gone. After success, torch 2.11 now and then aborts
    there ("terminate called without an active exception"), which would make a good run look like a failed one.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _lost(rank: int) -> Failure:
    return Failure(
        rank,
        None,
        "died",
        "is gone: it was killed (out of memory killer?) or its machine failed",
        "",
        time.time(),
    )
