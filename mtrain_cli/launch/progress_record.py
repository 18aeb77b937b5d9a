"""Record the last activities of each worker, in a small file that outlives the worker's process.

The file is mapped to memory, so writing takes a microsecond, and others can read it while the
worker hangs and after it died. The record says what the host does; a GPU may still be at an earlier
activity. A thread renews the time stamp of the file, unless the process is stopped.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mtrain_cli.config import plugins

SEVERAL = -1  # value of waits_for: the worker waits for all other ranks of a collective
_NOBODY = -2
# The file has parts of 256 bytes. Its first byte is the number of the part with the current record,
# from 1; at byte 8 is `WorkerActivity.silent_s`. The next record goes to the next part, and after
# the last to the first, so no reader of the others sees half a record.
# A record is seconds since the epoch by rank 0's clock, training step, rank that the worker waits
# for, then text.
_HEAD, _SILENT = struct.Struct("<dii"), struct.Struct("<d")
_SLOT = 256
_PARTS = 128
_SIZE = (1 + _PARTS) * _SLOT
_SHOWN = 8
BEAT_S = 5.0  # most seconds between two renewals of the time stamp
SILENT_S = 60.0  # a worker this long without one hangs; network file systems show it later
_LEAST_SILENT_S = 5.0  # a library that loads may keep the thread from renewing it this long


@dataclass(frozen=True)
class WorkerActivity:
    """What a worker did last, such as ``ring, layer 3, forward, step 2 of 4``."""

    time: float  # when it began, in seconds since the epoch
    training_step: int  # counted from 1; 0 before the first step
    doing: str
    waits_for: int | None = None  # a rank, SEVERAL in a collective, or None
    # The last sign of life, by the clock of the disk; 0 if unknown.
    seen: float = field(default=0.0, compare=False)
    silent_s: float = field(default=SILENT_S, compare=False)  # this long without one, it hangs

    def text(self, now: float) -> str:
        """Return the activity in one line, with its age at ``now`` if at least one second."""
        ago = f" ({now - self.time:.0f} s ago)" if now - self.time >= 1 else ""
        number = self.training_step
        step = f"training step {number}" if number else "before the first training step"
        return ", ".join(filter(None, (step, self.doing))) + ago


class _ProgressRecord:
    def __init__(self, path: Path, silent_s: float) -> None:
        with path.open("w+b") as file:
            # Write all bytes now. If the disk were full at a later write to the mapped memory,
            # SIGBUS would end the process.
            file.write(bytes(_SIZE))
            file.flush()
            self._map = mmap.mmap(file.fileno(), _SIZE)
        _SILENT.pack_into(self._map, _SILENT.size, silent_s)
        self._current = 0
        self.training_step = 0
        self.place = ""
        beat = (path, min(BEAT_S, silent_s / 4))
        threading.Thread(target=_beat, args=beat, name="signs of life", daemon=True).start()

    def write(self, doing: str, waits_for: int) -> None:
        self._current = self._current % _PARTS + 1
        at = self._current * _SLOT
        text = ": ".join(filter(None, (self.place, doing))).encode()
        text = text[: _SLOT - _HEAD.size - 1] + b"\0"
        _HEAD.pack_into(self._map, at, now(), self.training_step, waits_for)
        self._map[at + _HEAD.size : at + _HEAD.size + len(text)] = text
        self._map[0] = self._current

    def last(self) -> WorkerActivity | None:
        return next(_parsed(self._map[:]), None)


def _beat(path: Path, seconds: float) -> None:
    with contextlib.suppress(OSError):  # the record was removed
        while True:
            time.sleep(seconds)
            os.utime(path)


_record: _ProgressRecord | None = None  # of this process
_ahead = 0.0  # seconds, of the clock of this machine before rank 0's


def set_clock(rank_zero: float) -> None:
    """Date what follows by rank 0's clock, which now shows ``rank_zero`` seconds."""
    global _ahead
    _ahead = time.time() - rank_zero


def now() -> float:
    """Return the time by rank 0's clock, in seconds since the epoch."""
    return time.time() - _ahead


def silent_after(timeout_s: float) -> float:
    """Return the seconds without progress that are suspicious, before ``topology.timeout_s``."""
    return min(SILENT_S, max(_LEAST_SILENT_S, timeout_s / 2))


def start_record(path: Path, timeout_s: float = math.inf) -> None:
    """Start the record of this worker in the file ``path``. If that fails, keep no record."""
    global _record
    with contextlib.suppress(OSError):
        _record = _ProgressRecord(path, silent_after(timeout_s))


def note(doing: str, waits_for: int | None = None) -> None:
    """Record what the host does from now on. Do nothing if this worker keeps no record."""
    if _record is not None:
        _record.write(doing, _NOBODY if waits_for is None else waits_for)


@contextlib.contextmanager
def inside(place: str) -> Iterator[None]:
    """Begin every record of the ``with`` block with ``place``, such as a stage of a pipeline."""
    if _record is None:
        yield
        return
    _record.place = place
    _record.write("", _NOBODY)
    try:
        yield
    finally:
        _record.place = ""


def begin_step(training_step: int) -> None:
    if _record is not None:
        _record.training_step = training_step
        _record.write("", _NOBODY)


def launcher_record_path(error_file: str | os.PathLike[str], rank: int | str) -> Path:
    """Return the path of a worker's record beside its failure file, under mtrain's launcher."""
    return Path(error_file).with_name(f"where-{rank}")


def job_record_path(logs: Path, rank: int | str) -> Path:
    """Return the path of a rank's record under torchrun or srun: in the run's logs, for rank 0."""
    return logs / f"rank-{rank}.where"


def record_pattern(logs: Path, launcher: str) -> str:
    """Return the path of the records of this run, with {rank} in place of the rank's number."""
    if launcher != "mtrain":
        return str(job_record_path(logs, "{rank}"))
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return str(launcher_record_path(error_file, "{rank}")) if error_file else ""


def own_activity() -> WorkerActivity | None:
    return None if _record is None else _record.last()


def read_activity(path: Path) -> WorkerActivity | None:
    return next(read_history(path), None)


def read_history(path: Path) -> Iterator[WorkerActivity]:
    """Yield the last activities of a worker, the newest first."""
    with contextlib.suppress(OSError):
        yield from _parsed(path.read_bytes(), path.stat().st_mtime)


def read_activities(paths: Mapping[int, Path]) -> dict[int, WorkerActivity]:
    records = {rank: read_activity(path) for rank, path in paths.items()}
    return {rank: record for rank, record in records.items() if record}


def silent_ranks(records: Mapping[int, WorkerActivity]) -> set[int]:
    """Return the ranks whose last sign of life is ``silent_s`` older than another rank's."""
    newest = max((a.seen for a in records.values()), default=0.0)  # the clock here may differ
    return {rank for rank, a in records.items() if a.seen and newest - a.seen > a.silent_s}


def ranks_not_waiting(ranks: Iterable[int], records: Mapping[int, WorkerActivity]) -> list[int]:
    """Return the ranks that do not wait for another rank, or that have no record."""
    return [rank for rank in ranks if rank not in records or records[rank].waits_for is None]


def _parsed(content: bytes, seen: float = 0.0) -> Iterator[WorkerActivity]:
    """Yield the activities in a file, the newest first. seen: the last sign of life."""
    if len(content) < _SIZE or not 1 <= content[0] <= _PARTS:
        return
    (silent_s,) = _SILENT.unpack_from(content, _SILENT.size)
    for back in range(_PARTS - 1):  # the next record may be half written to the oldest part
        at = ((content[0] - 1 - back) % _PARTS + 1) * _SLOT
        seconds, step, waits_for = _HEAD.unpack_from(content, at)
        if not seconds:
            return
        doing = content[at + _HEAD.size : at + _SLOT].split(b"\0", 1)[0].decode(errors="replace")
        awaited = None if waits_for == _NOBODY else waits_for
        yield WorkerActivity(seconds, step, doing, awaited, seen, silent_s or SILENT_S)


def keep(logs: Path, files: Mapping[int, Path], gone: Collection[int]) -> None:
    """Keep the records of a run that failed. gone: ranks known to be stopped or to have ended."""
    for watch in plugins.watches():
        watch.failed(logs, files, gone)


def activity_lines(
    records: Mapping[int, WorkerActivity], about: Iterable[int], now: float
) -> list[str]:
    """Return a line for each rank, or a single line if all ranks did the same.

    Show at most eight: those in ``about``, then those that wait for them, then the lowest.
    """
    texts = {rank: record.text(now) for rank, record in records.items()}
    if len(texts) > 1 and len(set(texts.values())) == 1:
        return [f"  all: {next(iter(texts.values()))}"]
    named = set(about)
    ranks = sorted(
        records, key=lambda rank: (rank not in named, records[rank].waits_for not in named, rank)
    )
    shown = sorted(ranks[:_SHOWN])
    lines = [f"  rank {rank}: {texts[rank]}" for rank in shown]
    return lines + [f"  and {len(ranks) - len(shown)} more ranks"] * (len(ranks) > len(shown))
