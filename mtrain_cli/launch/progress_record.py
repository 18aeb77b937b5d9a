"""Record what each worker did last, in a small file that outlives its process.

A worker that is killed, hangs or is ended by NCCL's watchdog can no longer report anything. So each
worker keeps a record in memory that is mapped to a file. A note costs about a microsecond and no
system call. The launcher reads the file when it reports a failure. On a GPU the host runs ahead of
the device: the record shows the exchange that the host posted last, and the device may be behind.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

SEVERAL = -1  # waits for the members of a collective, instead of one rank
_NOBODY = -2
# seconds since the epoch, training step, rank that the worker waits for
_HEAD = struct.Struct("<dii")
_SLOT = 256
# The first byte selects the slot that holds the record. The next note goes to the other slot, so a
# reader never sees half a note.
_SLOTS = (_SLOT, 2 * _SLOT)
_SIZE = 3 * _SLOT
_SHOWN = 8


@dataclass(frozen=True)
class WorkerActivity:
    """What a worker did last.

    time: seconds since the epoch.
    training_step: counted from 1; 0 before the first.
    doing: the activity, such as ``ring, layer 3, forward, step 2 of 4``.
    waits_for: the rank that this one waits for, SEVERAL in a collective, else None.
    """

    time: float
    training_step: int
    doing: str
    waits_for: int | None = None

    def text(self, now: float) -> str:
        """Return one line, with the age of the record if that is a second or more."""
        ago = f" ({now - self.time:.0f} s ago)" if now - self.time >= 1 else ""
        number = self.training_step
        step = f"training step {number}" if number else "before the first training step"
        return f"{step}{', ' if self.doing else ''}{self.doing}{ago}"


class _ProgressRecord:
    def __init__(self, path: Path) -> None:
        with path.open("w+b") as file:
            # Allocate the blocks now. A full disk could not fill a hole later, and SIGBUS would end
            # the process.
            file.write(bytes(_SIZE))
            file.flush()
            self._map = mmap.mmap(file.fileno(), _SIZE)
        self._current = 0
        self.training_step = 0

    def write(self, doing: str, waits_for: int) -> None:
        self._current = 1 - self._current
        at = _SLOTS[self._current]
        text = doing.encode()[: _SLOT - _HEAD.size - 1] + b"\0"
        _HEAD.pack_into(self._map, at, time.time(), self.training_step, waits_for)
        self._map[at + _HEAD.size : at + _HEAD.size + len(text)] = text
        self._map[0] = self._current + 1

    def last(self) -> WorkerActivity | None:
        return _parsed(self._map[:])


# The record of this process, which is one worker.
_record: _ProgressRecord | None = None


def start_record(path: Path) -> None:
    """Start this worker's record in an existing folder. If the disk refuses, keep none."""
    global _record
    with contextlib.suppress(OSError):
        _record = _ProgressRecord(path)


def note(doing: str, waits_for: int | None = None) -> None:
    """Record what the host does from here on; do nothing without a record."""
    if _record is not None:
        _record.write(doing, _NOBODY if waits_for is None else waits_for)


def begin_step(training_step: int) -> None:
    """Record that the host begins a training step, counted from 1."""
    if _record is not None:
        _record.training_step = training_step
        _record.write("", _NOBODY)


def launcher_record_path(error_file: str | os.PathLike[str], rank: int | str) -> Path:
    """Return the path of a worker's record under mtrain's launcher, next to the failure files."""
    return Path(error_file).with_name(f"where-{rank}")


def job_record_path(logs: Path, rank: int | str) -> Path:
    """Return the path of a rank's record under torchrun or srun, in the run's folder of logs.

    Rank 0 reads the records of other machines if they share a disk. On a network file system the
    records may be seconds old.
    """
    return logs / f"rank-{rank}.where"


def record_pattern(logs: Path, launcher: str) -> str:
    """Return the path of the ranks' records in this run, with {rank} in place of the number."""
    if launcher != "mtrain":
        return str(job_record_path(logs, "{rank}"))
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return str(launcher_record_path(error_file, "{rank}")) if error_file else ""


def own_activity() -> WorkerActivity | None:
    """Return this worker's last activity, or None without a record."""
    return None if _record is None else _record.last()


def read_activity(path: Path) -> WorkerActivity | None:
    """Return the activity recorded at ``path``, or None if there is none."""
    with contextlib.suppress(OSError):
        return _parsed(path.read_bytes())
    return None


def read_activities(paths: Mapping[int, Path]) -> dict[int, WorkerActivity]:
    """Return the activity of each rank whose record can be read here."""
    records = {rank: read_activity(path) for rank, path in paths.items()}
    return {rank: record for rank, record in records.items() if record}


def ranks_not_waiting(ranks: Iterable[int], records: Mapping[int, WorkerActivity]) -> list[int]:
    """Return the ranks that wait for no other rank, as far as is known."""
    return [rank for rank in ranks if rank not in records or records[rank].waits_for is None]


def _parsed(content: bytes) -> WorkerActivity | None:
    if len(content) < _SIZE or content[0] not in (1, 2):
        return None
    at = _SLOTS[content[0] - 1]
    seconds, step, waits_for = _HEAD.unpack_from(content, at)
    doing = content[at + _HEAD.size : at + _SLOT].split(b"\0", 1)[0].decode(errors="replace")
    return WorkerActivity(seconds, step, doing, None if waits_for == _NOBODY else waits_for)


def activity_lines(
    records: Mapping[int, WorkerActivity], about: Iterable[int], now: float
) -> list[str]:
    """Return a line for each rank, or a single line if all ranks did the same.

    Show up to eight ranks: those in ``about``, those that wait for one of them, then the lowest.
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
