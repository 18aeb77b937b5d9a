"""Why a worker ended: the record that it leaves, which of many failures is the cause, and how that is told.

When one worker dies its peers fail within moments, with a closed connection or an aborted collective. Those are consequences.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import signal
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mtrain_cli.config.schema import ConfigError

# What gloo, NCCL and the store say when a peer has gone, or has kept them waiting for longer than topology.timeout_s.
_PEER_LOST = re.compile(
    r"gloo/transport|Connection (closed|reset|refused)|Broken pipe|Socket (closed|timeout)|recvValue|sendBytes|recvBytes"
    r"|remote process exited|NCCL (communicator was aborted|error: (remote|unhandled system))|ncclRemoteError|ncclSystemError"
    r"|[Tt]imed out waiting|Timeout waiting for key|collective operation timeout",
)
_TIMED_OUT = re.compile(
    r"[Tt]imed out waiting|Timeout waiting for key|[Tt]imed out after|wait timeout after|Socket Timeout|connectFullMesh failed.*timed out"
)
_LOG_TAIL_LINES = 20
# What a disk may do to a command that was given in good order.
_DISK_FAILURES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
# What a disk or its network may do to a file that is there; `restart` begins again after their texts.
READ_FAILURES = frozenset(
    getattr(errno, name)
    for name in ("EIO", "ESTALE", "ENOTCONN", "ENODEV", "ETIMEDOUT", "EREMOTEIO", "EHOSTDOWN")
    if hasattr(errno, name)
)


class RunError(RuntimeError):
    """The run cannot go on for a reason that its text explains in full, such as a full disk or a loss that is no number: no traceback."""


class PeerLostError(RunError):
    """Another worker did not answer in time."""


def write_failure(error: OSError, text: str) -> RunError | ConfigError:
    """What a failed write is to the user: a failure of the disk, such as a full one, or a mistake, such as a folder of another user."""
    return RunError(text) if error.errno in _DISK_FAILURES else ConfigError(text)


def read_failure(error: OSError, text: str) -> RunError | ConfigError:
    """What a failed read is to the user: a failure of the disk or its network, or a mistake, such as a file of another user."""
    return RunError(text) if error.errno in READ_FAILURES else ConfigError(text)


@dataclass(frozen=True)
class Failure:
    """How one worker ended. ``kind`` is ``config``, ``error``, ``peer lost``, ``died`` (without a record of its own) or ``silent`` (it ran
    on without a word while the others waited for it).

    ``exit_code`` is negative for a signal and None while the process still ran; ``first`` tells that it ended, or left its record, before
    the launcher began to stop the others.
    """

    rank: int
    exit_code: int | None
    kind: str
    message: str
    trace: str
    time: float
    before_shutdown: bool = True

    @property
    def is_consequence(self) -> bool:
        """Whether another worker's failure may explain this one."""
        return self.severity >= 4

    @property
    def severity(self) -> int:
        """Place in the search for the cause, 0 first: a user's mistake, a death by signal or unexplained exit, an exception, a worker that
        keeps the others waiting, an abort (NCCL's watchdog ends a process that way when a peer is gone), a lost connection, and what the
        launcher itself ended."""
        if self.kind == "died":
            if not self.before_shutdown:
                return 6
            return 4 if self.is_abort else 1
        return {"config": 0, "error": 2, "silent": 3}.get(self.kind, 5)

    @property
    def is_abort(self) -> bool:
        """Whether the process aborted itself, as NCCL's watchdog does after a wait that was too long; so does a failed check in C++."""
        return self.kind == "died" and self.exit_code == -signal.SIGABRT

    @property
    def waited(self) -> str:
        """``topology.timeout_s=60`` where it waited for longer than that; a peer that only went away leaves a traceback, too."""
        return self.message.partition(":")[0] if self.kind == "peer lost" and not self.trace else ""


def failure_from(error: BaseException) -> Failure:
    """The failure that ``error`` makes of this worker; its rank is for whoever collects failures to fill in."""
    lost = (
        isinstance(error, PeerLostError)
        or getattr(error, "peer_lost", False)
        or _PEER_LOST.search(str(error))
    )
    kind = "config" if isinstance(error, ConfigError) else "peer lost" if lost else "error"
    name = type(error).__name__
    explained = isinstance(error, RunError)
    message = (
        str(error) if kind == "config" or explained else f"{name}: {error}" if str(error) else name
    )
    return Failure(
        -1,
        1,
        kind,
        message,
        "" if explained else "".join(traceback.format_exception(error)),
        time.time(),
    )


def is_peer_loss(error: BaseException) -> bool:
    """Whether gloo, NCCL or the store says that a peer has gone or did not answer in time."""
    return _PEER_LOST.search(str(error)) is not None or is_timeout(error)


def first_sentence(error: BaseException) -> str:
    """What such an error says, without the line of C++ that says so and without advice."""
    lines = str(error).strip().splitlines()
    return (
        re.sub(r"^\[[^]]*:\d+\] ", "", lines[0]).split(". ")[0] if lines else type(error).__name__
    )


def find_silent_rank(
    failed: Sequence[Failure], stopped: Sequence[int], running: Sequence[int], waited: str = ""
) -> Failure | None:
    """What is to be said of ranks without a failure of their own for which the others may have waited; None: nothing.

    stopped: whose processes a signal has stopped. running: that go on and, as far as is known, wait for nobody. waited: as
    `Failure.waited`, where that is known of a worker that could not say so.
    """
    waited = next((failure.waited for failure in failed if failure.waited), waited)
    if not all(failure.is_consequence for failure in failed) or not (
        stopped or (waited and running)
    ):
        return None
    ranks = sorted(stopped or running)
    one = len(ranks) == 1
    message = f"rank{'s' * (not one)} {' and '.join(map(str, ranks))} kept the others waiting"
    if waited:
        message = f"{waited}: {message} longer than that"
    if stopped:
        message += f": {'its process is' if one else 'their processes are'} stopped (SIGSTOP, or a debugger)"
    else:
        message += f" and gave no sign: {'it' if one else 'one of them'} hangs or is slow; if it is slow, give more seconds"
    return Failure(ranks[0], None, "silent", message, "", time.time())


def is_timeout(error: BaseException) -> bool:
    """Whether gloo or the store gave up waiting for another worker."""
    return _TIMED_OUT.search(str(error)) is not None


def write_record(failure: Failure, path: str | os.PathLike[str] | None) -> None:
    """Write ``failure`` to ``path``, if there is one, in one move and in the layout of torch's elastic agent, so that torchrun shows it."""
    if not path:
        return
    own = {name: getattr(failure, name) for name in ("kind", "message", "trace", "time")}
    extra = {"py_callstack": failure.trace, "timestamp": str(int(failure.time))}
    partial = Path(f"{os.fspath(path)}.partial")
    # On a full disk the exit code alone has to tell that this worker failed.
    with contextlib.suppress(OSError):
        partial.write_text(
            json.dumps({"message": {"message": failure.message, "extraInfo": extra}, "mtrain": own})
        )
        os.replace(partial, path)


def read_record(
    rank: int, exit_code: int | None, path: Path, before_shutdown: bool
) -> Failure | None:
    """The failure of a worker that may have left a record at ``path``; None if it did not fail. It still runs if ``exit_code`` is None."""
    if path.exists():
        return Failure(
            rank,
            exit_code,
            **json.loads(path.read_text())["mtrain"],
            before_shutdown=before_shutdown,
        )
    if not exit_code:
        return None
    return Failure(
        rank, exit_code, "died", _describe_exit(exit_code), "", time.time(), before_shutdown
    )


def find_cause(failures: Iterable[Failure]) -> Failure:
    """The failure that explains the others: by `Failure.severity`, then the earliest."""
    return min(failures, key=lambda failure: (failure.severity, failure.time))


def format_report(failure: Failure, log: Path | None, where: Sequence[str] = ()) -> str:
    """What to tell the user about the cause: rank and reason in the first line, then the traceback or the worker's last words.

    where: lines that tell where each worker was. They are shown where a worker ended without an exception, or lost a peer.
    """
    explained = failure.kind != "died" and not failure.trace
    if failure.kind == "died":
        lines = [f"error: rank {failure.rank} {failure.message}"]
    elif explained:
        lines = [f"error: {failure.message}"]
    else:
        lines = [
            f"error: rank {failure.rank} failed: {failure.message.splitlines()[0]}",
            failure.trace.rstrip(),
        ]
    if where and failure.kind in ("died", "silent", "peer lost"):
        lines += ["Where each worker was:", *where]
    if failure.kind == "died":
        words = (
            log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
            if log and log.is_file()
            else []
        )
        lines += (
            ["The last lines of its output:", *(f"  {line}" for line in words)] if words else []
        )
    if failure.kind == "peer lost" and not explained:
        lines.append(
            "No worker left another error: one waited longer than topology.timeout_s, or a worker on another machine is gone."
        )
    if log and log.is_file() and log.stat().st_size:
        if failure.kind == "silent":
            lines.append(f"What it was at, if it could still tell, is at the end of {log}.")
        elif not explained:
            what = (
                "What libraries wrote, and its traceback, are in"
                if failure.rank == 0
                else "All of its output is in"
            )
            lines.append(f"{what} {log}; the other workers were stopped.")
    return "\n".join(lines)


def _describe_exit(exit_code: int) -> str:
    if exit_code > 0:
        return f"ended with exit code {exit_code} and no exception"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"was killed by {name}" + " (out of memory killer?)" * (-exit_code == signal.SIGKILL)
