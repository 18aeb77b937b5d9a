"""The flight record: what all workers did last, and in plain words who waits for whom.

The workers write their activities while they run (`progress_record`). After a failure, one process
copies those of all workers to `logs/flight.json`, before a restart overwrites them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from mtrain_cli.config import documents
from mtrain_cli.grouping import grouped, show_spans, spans
from mtrain_cli.launch import progress_record
from mtrain_cli.launch.progress_record import SEVERAL, WorkerActivity

if TYPE_CHECKING:
    from mtrain_cli.launch.run_dir import RunDir
    from mtrain_cli.launch.run_status import RunState

FILE = "flight.json"
_MOST = 8  # most groups of waiting ranks that are shown


@dataclass(frozen=True, kw_only=True)
class FlightRecord:
    """The content of `flight.json`.

    time: in seconds since the epoch, by rank 0's clock, whichever rank wrote the file.
    explained: lines on who waits for whom.
    ranks: activities of each rank, the oldest first: seconds before ``time``, training step, text,
        and the awaited rank, -1 for all of a collective, or None.
    """

    time: float
    explained: tuple[str, ...]
    ranks: dict[str, tuple[tuple[float, int, str, int | None], ...]] = field(default_factory=dict)


def save(logs: Path, files: Mapping[int, Path], gone: Collection[int] = ()) -> None:
    """Copy the activities of all ranks to the folder ``logs`` of a run. A full disk keeps none.

    files: of the activities, by rank.
    gone: ranks that are known to be stopped or to have ended.
    """
    now, places = progress_record.now(), ()
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        places = tuple(documents.read_json(logs.parent / "state.json")["workers"])
    histories = {rank: [*progress_record.read_history(file)][::-1] for rank, file in files.items()}
    histories = {rank: history for rank, history in histories.items() if history}
    latest = {rank: history[-1] for rank, history in histories.items()}
    document = {
        "time": now,
        "explained": explain(latest, places, now, gone),
        "ranks": {
            str(rank): [
                (round(a.time - now, 3), a.training_step, a.doing, a.waits_for) for a in history
            ]
            for rank, history in histories.items()
        },
    }
    with contextlib.suppress(OSError):
        documents.replace_text(logs / FILE, documents.json_text(document) + "\n")


def read(logs: Path, since: float) -> FlightRecord | None:
    """Return the flight record that was written after ``since``, if it is there and intact."""
    with contextlib.suppress(OSError, ValueError):
        found = documents.checked(FlightRecord, documents.read_json(logs / FILE))
        return found if found.time >= since else None
    return None


def lines(
    run: RunDir,
    what: str,
    written: RunState,
    records: Mapping[int, WorkerActivity],
    now: float,
) -> Sequence[str]:
    """Return who waits for whom in a run that is stalled, or did so when it failed."""
    if what == "stalled":
        return explain(records, written.workers, now)
    ended = what == "lost" or written.phase in ("failed", "restarting")
    flight = read(run.logs, written.began) if ended else None
    return () if flight is None else (*flight.explained, f"all activities: {run.logs / FILE}")


def explain(
    records: Mapping[int, WorkerActivity],
    places: Sequence[str],
    now: float,
    gone: Collection[int] = (),
) -> list[str]:
    """Return lines that say which ranks keep the others waiting, and who waits where.

    Return none if no rank waits. records: current activity by rank. For the rest see `save`.
    """
    silent = progress_record.silent_ranks(records) | set(gone)
    waiting = {r: a for r, a in records.items() if a.waits_for is not None and r not in silent}
    if not waiting:
        return []
    name, newest = _names(places), max(a.seen for a in records.values())
    culprits = silent or records.keys() - waiting
    awaited = {a.waits_for for a in waiting.values()}
    if SEVERAL not in awaited and culprits & awaited:
        culprits = culprits & awaited  # the others wait for nobody, and nobody waits for them
    lines = []
    if not culprits:
        where = {(a.training_step, a.doing.partition(": ")[0]) for a in waiting.values()}
        first = min(waiting.values(), key=lambda a: (a.training_step, a.time))
        culprits = {r for r, a in waiting.items() if len(where) > 1 and a is first}
        lines += ["all ranks wait for each other" + ", in different places" * (len(where) > 1)]
        if len(where) == 1:
            lines[0] += ", in the same place: a message does not arrive"
    for rank in sorted(culprits)[:_MOST]:
        a = records.get(rank)
        if rank in silent:
            age = f" for {newest - a.seen:.0f} s" if a and a.seen and rank not in gone else ""
            why = f"shows no sign of life{age}: its process is stopped or ended, or its machine or "
            why += "link is gone"
        elif rank in waiting:
            why = "is behind the others, or in another collective"
        else:
            why = "does not wait for another rank: it computes, reads data, or hangs"
        lines.append(f"{name([rank])} keeps others waiting. It {why}")
        lines.append(f"its last activity: {a.text(now)}" if a else "it recorded no activity")
    groups = grouped(
        sorted(set(waiting) - culprits),
        lambda rank: (waiting[rank].training_step, waiting[rank].doing),
    )
    for (_, doing), ranks in islice(groups.items(), _MOST):
        since = min(waiting[rank].time for rank in ranks)
        step = waiting[ranks[0]].training_step
        place = f"training step {step}, {doing}" if step else doing
        lines.append(f"{name(ranks)}, for {now - since:.0f} s: {place}")
    return lines


def _names(places: Sequence[str]):
    def name(ranks: Iterable[int]) -> str:
        found = list(ranks)
        if len(found) > 1:
            return f"ranks {show_spans(spans(found))}"
        (rank,) = found
        return f"rank {rank}" + (f" ({places[rank]})" if rank < len(places) else "")

    return name
