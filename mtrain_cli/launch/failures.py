"""Write and read the failures of workers, find the cause, and report it.

After one worker fails, its peers soon fail, too: with a lost connection, as a consequence.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mtrain_cli.config.documents import replace_text
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.printable import one_line, printable

# Error messages of gloo, NCCL and the store when a peer is gone, or when the wait for a peer
# exceeds topology.timeout_s.
_PEER_LOST = re.compile(
    r"gloo/transport|Connection (closed|reset|refused)|Broken pipe|Socket (closed|timeout)"
    r"|recvValue|sendBytes|recvBytes|remote process exited"
    r"|NCCL (communicator was aborted|error: (remote|unhandled system))"
    r"|ncclRemoteError|ncclSystemError"
    r"|[Tt]imed out waiting|Timeout waiting for key|collective operation timeout"
)
_TIMED_OUT = re.compile(
    r"[Tt]imed out waiting|Timeout waiting for key|[Tt]imed out after|wait timeout after"
    r"|Socket Timeout|connectFullMesh failed.*timed out"
)
_OUT_OF_MEMORY = re.compile(
    r"out of memory|DefaultCPUAllocator: (can't allocate|not enough) memory", re.IGNORECASE
)
_LOG_TAIL_LINES = 20
# Disk errors while writing. They are not the user's mistake.
_DISK_FAILURES = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO})
# Errors of a disk or its network while reading a file that exists. `restart` knows their texts.
READ_FAILURES = frozenset(
    getattr(errno, name)
    for name in ("EIO", "ESTALE", "ENOTCONN", "ENODEV", "ETIMEDOUT", "EREMOTEIO", "EHOSTDOWN")
    if hasattr(errno, name)
)


class RunError(RuntimeError):
    """A failure, such as a full disk, that the message explains: the user sees no traceback."""


@contextlib.contextmanager
def reporting_out_of_memory(explain: Callable[[BaseException], str]) -> Iterator[None]:
    """Raise RunError with the text of ``explain(error)`` for a failed allocation."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        known = isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(str(error))
        if isinstance(error, RunError) or not known:
            raise
        raise RunError(explain(error)) from error


class PeerLostError(RunError):
    """Another worker did not answer in time."""


def not_written(error: OSError, place: object) -> str:
    """Return ``FILE: could not be written (No space left on device)``.

    place: the folder or file that is written, if the error names no file; or what the user typed,
        such as ``--out DIR``, which is always in the line.
    """
    text, file = str(place), error.filename
    name = os.fsdecode(file) if isinstance(file, str | bytes) else ""
    named = f"{text}:" if not name or text.endswith(name) else f"{text}: {name}"
    if name and isinstance(place, Path):
        named = f"{name}:"
    return f"{named} could not be written ({error.strerror or error})"


def write_failure(error: OSError, text: str) -> RunError | ConfigError:
    """Return a RunError if the disk is full or failed, else a ConfigError about the path."""
    return RunError(one_line(text)) if error.errno in _DISK_FAILURES else ConfigError(text)


def read_failure(error: OSError, text: str) -> RunError | ConfigError:
    """Return a RunError if the disk or its network failed, else a ConfigError."""
    return RunError(one_line(text)) if error.errno in READ_FAILURES else ConfigError(text)


@dataclass(frozen=True)
class Failure:
    """The failure of one worker.

    exit_code: of its process: negative after a signal, None while it runs.
    kind: ``config`` (a user's mistake), ``error`` (an exception), ``peer lost`` (the connection to
        another worker is lost or the wait was too long), ``died`` (without a failure record) or
        ``silent`` (it kept the others waiting and reported nothing).
    time: in seconds since the epoch.
    """

    rank: int
    exit_code: int | None
    kind: str
    message: str
    trace: str = ""
    time: float = field(default_factory=time.time)

    @property
    def record(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("kind", "message", "trace", "time")}

    @property
    def is_consequence(self) -> bool:
        return self.severity >= 4

    @property
    def severity(self) -> int:
        """How likely this failure is a consequence, from 0 to 5.

        NCCL's watchdog aborts a process whose peer is gone.
        """
        if self.kind == "died":
            return 4 if self.is_abort else 1
        return {"config": 0, "error": 2, "silent": 3}.get(self.kind, 5)

    @property
    def is_abort(self) -> bool:
        """Whether the process ended by SIGABRT, from NCCL's watchdog or a failed check in C++."""
        return self.kind == "died" and self.exit_code == -signal.SIGABRT


def failure_from(error: BaseException) -> Failure:
    """Describe ``error`` as a failure of rank -1. `read_record` sets the actual rank."""
    lost = isinstance(error, PeerLostError) or getattr(error, "peer_lost", False)
    lost = lost or _PEER_LOST.search(str(error)) is not None
    kind = "config" if isinstance(error, ConfigError) else "peer lost" if lost else "error"
    if isinstance(error, ConfigError | RunError):
        message = str(error)
    else:
        message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    trace = "" if isinstance(error, RunError) else "".join(traceback.format_exception(error))
    return Failure(-1, 1, kind, message, trace)


def is_peer_loss(error: BaseException) -> bool:
    """Return whether the error means that a peer is gone or did not answer in time."""
    return _PEER_LOST.search(str(error)) is not None or is_timeout(error)


def first_sentence(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[[^]]*:\d+\] ", "", lines[0]).split(". ")[0]


def find_silent_rank(
    failed: Sequence[Failure], stopped: Sequence[int], running: Sequence[int], waited: str = ""
) -> Failure | None:
    """Return a failure for ranks that kept the others waiting without a report, if there are any.

    Args:
        stopped: ranks whose process was stopped by a signal.
        running: ranks that still run and, as far as is known, do not wait for another rank.
        waited: such as ``topology.timeout_s=60``, if some worker is known to have waited that long.
    """
    # The line on a wait that was too long begins with the setting.
    lines = (f.message for f in failed if f.kind == "peer lost" and not f.trace)
    waited = next((line.partition(":")[0] for line in lines), waited)
    ranks = sorted(stopped or (running if waited else ()))
    if not ranks or not all(failure.is_consequence for failure in failed):
        return None
    names = f"rank{'s' * (len(ranks) > 1)} {' and '.join(map(str, ranks))}"
    message = f"{names} kept the others waiting"
    if waited:
        message = f"{waited}: {message} longer than this"
    if stopped:
        message += ": its process is stopped (SIGSTOP or a debugger)"
    else:
        which = "one of them" if len(ranks) > 1 else "it"
        message += f" without reporting an error: {which} hangs or is slow. "
        message += "If it is slow, increase the value."
    return Failure(ranks[0], None, "silent", message)


def is_timeout(error: BaseException) -> bool:
    return _TIMED_OUT.search(str(error)) is not None


def write_record(failure: Failure) -> None:
    """Write ``failure`` to the file that the launcher reads, unless this process has written one.

    The failure of an earlier command of this rank, which the user's script ignored, is replaced.
    torchrun ends its report with the call stack, or else with the message, of the first failure.
    """
    path, pid = os.environ.get("TORCHELASTIC_ERROR_FILE"), os.getpid()
    if not path or _record_in(Path(path)).get("pid") == pid:
        return
    stack = failure.trace.rstrip() if failure.kind == "error" else ""  # a mistake needs none
    extra = {
        "py_callstack": printable(stack or failure.message), "timestamp": str(int(failure.time))
    }  # fmt: skip
    message = {"message": printable(failure.message), "extraInfo": extra}
    # On a full disk no record is written. The exit code still reports the failure.
    with contextlib.suppress(OSError):
        record = {**failure.record, "pid": pid}
        replace_text(Path(path), json.dumps({"message": message, "mtrain": record}))


def _record_in(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        return json.loads(path.read_text())["mtrain"]
    return {}


def read_record(rank: int, pid: int, exit_code: int | None, path: Path) -> Failure | None:
    """Return the failure of a worker from its record or exit code. None: it runs or succeeded.

    pid: of the worker. A record of another process, such as a command that it ran, does not count.
    """
    record = _record_in(path)
    if record.pop("pid", None) == pid:
        return Failure(rank, exit_code, **record)
    if not exit_code:
        return None
    return Failure(rank, exit_code, "died", _describe_exit(exit_code))


def find_cause(failures: Iterable[Failure]) -> Failure:
    """Return the most likely cause: the lowest `Failure.severity`, then the earliest time."""
    return min(failures, key=lambda failure: (failure.severity, failure.time))


def format_report(failure: Failure, log: Path | None, where: Sequence[str] = ()) -> str:
    """Return the report for the user on the failure that ended the run.

    log: of the worker. where: lines on what each worker was doing, shown unless it is an exception.
    """
    died, lost_peer = failure.kind == "died", failure.kind == "peer lost"
    explained = not died and not failure.trace
    if died:
        lines = [f"error: rank {failure.rank} {failure.message}"]
    elif explained:
        lines = [f"error: {failure.message}"]
    else:
        first = failure.message.splitlines()[0]
        lines = [f"error: rank {failure.rank} failed: {first}", failure.trace.rstrip()]
    if where and (died or lost_peer or failure.kind == "silent"):
        lines += ["Where each worker was:", *where]
    has_output = log is not None and log.is_file() and log.stat().st_size > 0
    if died and log and has_output:
        tail = log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        lines += ["Last lines of its output:", *(f"  {line}" for line in tail)]
    if lost_peer and not explained:
        lines.append(
            "No worker reported another error: a wait exceeded topology.timeout_s, or a worker on "
            "another machine is gone."
        )
    if has_output and failure.kind == "silent":
        lines.append(f"If the worker could still write its stack, {log} ends with it.")
    elif has_output and not explained:
        lines.append(f"Its output is in {log}; the other workers were stopped.")
    return "\n".join(lines)


def _describe_exit(exit_code: int) -> str:
    if exit_code > 0:
        return f"ended with exit code {exit_code} and no exception"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = " (host out of memory? see dmesg)" if -exit_code == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
