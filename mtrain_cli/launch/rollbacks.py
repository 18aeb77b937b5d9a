"""The rollbacks of a run: lines of `rollbacks.jsonl`, which every later checkpoint holds, too.

A rollback takes the run back to a checkpoint, and leaves out the data of the steps after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

from mtrain_cli.config import documents
from mtrain_cli.config.sizes import with_count
from mtrain_cli.launch import restart
from mtrain_cli.launch.restart import Restart
from mtrain_cli.launch.run_dir import RunDir


@dataclass(frozen=True)
class Rollback:
    """One rollback. Sequences count from 0 in the order of the data, with those left out."""

    time: float  # seconds since the epoch
    reason: str
    reached: int  # the step that was not applied
    step: int  # of the checkpoint that the run went back to
    first: int  # first sequence that is left out
    end: int  # first sequence after those

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.end:
            raise documents.UnreadableError(f"sequences {self.first} to {self.end} are none")

    def describe(self) -> str:
        left = f"the {with_count(self.end - self.first, 'sequence')} up to step {self.reached}"
        return f"back to the checkpoint of step {self.step}, without {left}: {self.reason}"


def read_events(run: RunDir) -> tuple[list[Restart], list[Rollback], list[str]]:
    """Return restarts and rollbacks, oldest first, and a line on each file with damaged lines."""
    restarts, unread = restart.read_restarts(run)
    rollbacks, unread_too = restart.entries(run.rollbacks, Rollback)
    counts = {run.restarts: unread, run.rollbacks: unread_too}
    lines = (f"{f}: {with_count(n, 'unreadable line')} skipped" for f, n in counts.items() if n)
    return restarts, rollbacks, list(lines)


def write_rollbacks(run: RunDir, rollbacks: Iterable[Rollback]) -> None:
    """Write the file of rollbacks atomically. If the disk is full, the previous file stays."""
    with contextlib.suppress(OSError):
        rows = (documents.json_text(dataclasses.asdict(rollback)) for rollback in rollbacks)
        documents.replace_text(run.rollbacks, "".join(f"{row}\n" for row in rows))
