"""Records with known content, from a schedule played with given times.

Waits and lateness are therefore consistent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mtrain_cli.parallel.recording import (
    ATTENTION,
    COLUMNS,
    DIRECTIONS,
    GAP,
    INDEX,
    ITERATION,
    KINDS,
    MERGE,
    PASS,
    RECEIVE,
    SEND,
    WAIT,
)
from mtrain_cli.parallel.schedule import Schedule, ScheduleOptions, Steps, Transfer, make_schedule
from mtrain_cli.records.record_files import (
    LINKS,
    PAYLOADS,
    ROW,
    join_parts,
    write_part,
    write_summary,
)

Table = Callable[[str, int, int], float]  # (direction, rank, step) -> ms or pairs


def even(direction: str, rank: int, step: int) -> float:  # noqa: ARG001
    return 1.0 if direction != "backward" else 2.0


@dataclass(frozen=True)
class Play:
    """What is played; times in ms.

    attention, pairs: per (direction, rank, step).
    link: duration of a message, by channel.
    index, columns: before the first step; columns are single columns gathered once.
    merge, gap: in every step.
    gaps: additional gap in every step of a rank.
    starts: delay of a rank's passes.
    slow_into: additional duration of messages, by (channel, receiving rank).
    """

    schedule: Schedule
    attention: Table = even
    pairs: Table = lambda direction, rank, step: 1000.0  # noqa: ARG005
    link: dict[str, float] = field(default_factory=dict)
    index: float = 0.0
    columns: float = 0.0
    merge: float = 0.0
    gap: float = 0.0
    gaps: dict[int, float] = field(default_factory=dict)
    starts: dict[int, float] = field(default_factory=dict)
    slow_into: dict[tuple[str, int], float] = field(default_factory=dict)


def ring(workers: int, per_node: int = 0, exchange: str = "ring", **options: Any) -> Schedule:
    return make_schedule(exchange, ScheduleOptions(workers, per_node or workers, **options))


def play(scenario: Play, direction: str) -> tuple[list[dict[str, Any]], float]:
    """Play one pass of all ranks of a group.

    Returns its rows, from time 0, and the time in ms at which the last rank finishes.
    """
    schedule = scenario.schedule
    steps = schedule.backward if direction == "backward" else schedule.forward
    ranks = [_Rank(scenario, direction, rank, rank_steps) for rank, rank_steps in enumerate(steps)]
    post: dict[tuple[int, str, str, int], float] = {}
    while any(not rank.done for rank in ranks):
        advanced = [rank.advance(post) for rank in ranks]
        assert any(advanced), "the schedule cannot be played"
    return [row for rank in ranks for row in rank.rows], max(rank.now for rank in ranks)


class _Rank:
    def __init__(self, scenario: Play, direction: str, rank: int, steps: Steps) -> None:
        self.scenario, self.direction, self.rank, self.steps = scenario, direction, rank, steps
        self.rows: list[dict[str, Any]] = []
        self.began = self.now = scenario.starts.get(rank, 0.0)
        self.transfers: dict[int, tuple[Transfer, int]] = {}
        self.counts: dict[tuple[str, str], int] = {}
        self.todo: list[tuple[str, int, Any]] = []
        for number, step in enumerate(steps):
            self.todo += (
                [("post", number, t) for t in step.post]
                + [("wait", number, n) for n in step.wait]
                + [("compute", number, step)]
            )
            self.todo += [("wait", number, n) for n in step.collect] + [
                ("post", number, t) for t in step.send
            ]
        self._spend(INDEX, -1, scenario.index)
        self._spend(COLUMNS, -1, scenario.columns, pairs=500)

    @property
    def done(self) -> bool:
        return not self.todo

    def advance(self, post: dict[tuple[int, str, str, int], float]) -> bool:
        """Continue until a message is missing that its sender has not posted.

        Return whether anything was done.
        """
        before = len(self.todo)
        while self.todo:
            kind, step, item = self.todo[0]
            if kind == "post":
                begin = self.now
                if item.after is not None:
                    arrival = self._arrival(item.after, post)
                    if arrival is None:
                        break
                    begin = max(begin, arrival[1])
                key = (item.channel, item.payload)
                number = self.counts[key] = self.counts.get(key, -1) + 1
                self.transfers[item.number] = (item, number)
                post[(self.rank, *key, number)] = begin
                self._message(SEND, step, item, begin)
            elif kind == "wait":
                arrival = self._arrival(item, post)
                if arrival is None:
                    break
                self._wait(step, self.transfers[item][0], *arrival)
            elif item.queries:
                self._spend(
                    ATTENTION,
                    step,
                    self.scenario.attention(self.direction, self.rank, step),
                    pairs=int(self.scenario.pairs(self.direction, self.rank, step)),
                )
                self._spend(MERGE, step, self.scenario.merge)
                self._spend(GAP, step, self.scenario.gap + self.scenario.gaps.get(self.rank, 0.0))
            self.todo.pop(0)
        if not self.todo and before:
            self._add(PASS, -1, self.began, self.now - self.began)
        return len(self.todo) < before

    def _arrival(self, number: int, post: dict) -> tuple[float, float] | None:
        """Return when a transfer's message starts and arrives, or None if that is not known yet."""
        transfer, place = self.transfers[number]
        senders = [transfer.source] if transfer.kind == "p2p" else transfer.peers
        start_times = [
            post.get((sender, transfer.channel, transfer.payload, place)) for sender in senders
        ]
        if any(b is None for b in start_times):
            return None
        begin = max(b for b in start_times if b is not None)
        return begin, begin + self.scenario.link.get(
            transfer.channel, 0.0
        ) + self.scenario.slow_into.get((transfer.channel, self.rank), 0.0)

    def _wait(self, step: int, transfer: Transfer, begin: float, arrival: float) -> None:
        wait = max(0.0, arrival - self.now)
        late = min(wait, max(0.0, begin - self.now))
        self._message(RECEIVE, step, transfer, begin)
        self._add(
            WAIT, step, self.now, wait, late_us=late * 1e3, **self._names(transfer, transfer.source)
        )
        self.now += wait

    def _message(self, kind: str, step: int, transfer: Transfer, begin: float) -> None:
        peer = transfer.to if kind == SEND else transfer.source
        self._add(
            kind,
            step,
            begin,
            self.scenario.link.get(transfer.channel, 0.0),
            **self._names(transfer, peer),
        )

    def _names(self, transfer: Transfer, peer: int | None) -> dict[str, Any]:
        link, payload = LINKS.index(transfer.channel), PAYLOADS.index(transfer.payload)
        return {
            "link": link,
            "payload": payload,
            "peer": -1 if peer is None else peer,
            "bytes": 1 << 20,
        }

    def _spend(self, kind: str, step: int, ms: float, pairs: int = 0) -> None:
        if ms <= 0:
            return
        blocks = pairs // 100 if kind == ATTENTION else 0
        self._add(kind, step, self.now, ms, pairs=pairs, blocks=blocks, flop=512.0 * pairs)
        self.now += ms

    def _add(self, kind: str, step: int, start: float, ms: float, **more: Any) -> None:
        self.rows.append(
            {
                "phase": KINDS.index(kind),
                "step": step,
                "rank": self.rank,
                "start_us": start * 1e3,
                "dur_us": ms * 1e3,
                **more,
            }
        )


def rows_of(
    scenario: Play | Callable[[int, int, int], Play],
    *,
    iteration: int = 0,
    layers: Sequence[int] = (0,),
    micros: int = 1,
    groups: int = 1,
    case: int = 0,
    directions: Sequence[str] = ("forward", "backward"),
) -> np.ndarray:
    """Return the rows of one iteration.

    scenario: one play for all, or a function of (iteration, layer, group).
    """
    parts = []
    for group in range(groups):
        now = 0.0
        size = 0
        for micro in range(micros):
            for direction in directions:
                for layer in layers if direction == "forward" else reversed(layers):
                    one = (
                        scenario
                        if isinstance(scenario, Play)
                        else scenario(iteration, layer, group)
                    )
                    size = one.schedule.workers
                    played, duration = play(one, direction)
                    rows = np.zeros(len(played), ROW)
                    rows["peer"] = rows["shard"] = -1
                    for i, row in enumerate(played):
                        for name, value in row.items():
                            rows[name][i] = value
                    rows["case"], rows["iteration"], rows["micro"], rows["layer"] = (
                        case,
                        iteration,
                        micro,
                        layer,
                    )
                    rows["direction"] = DIRECTIONS.index(direction)
                    rows["rank"] += group * size
                    rows["peer"] = np.where(rows["peer"] >= 0, rows["peer"] + group * size, -1)
                    rows["start_us"] += now * 1e3
                    now += duration
                    parts.append(rows)
        whole = np.zeros(size, ROW)
        whole["case"], whole["iteration"], whole["layer"], whole["step"] = case, iteration, -1, -1
        whole["peer"] = whole["shard"] = -1
        whole["phase"] = KINDS.index(ITERATION)
        whole["rank"] = np.arange(size) + group * size
        whole["dur_us"] = now * 1e3
        parts.append(whole)
    return np.concatenate(parts)


def facts_of(
    schedule: Schedule, *, groups: int = 1, layers: int = 1, **more: Any
) -> dict[str, Any]:
    """Return a case of summary.json."""
    return {
        "label": f"dense striped {schedule.exchange}",
        "layout": "striped",
        "exchange": schedule.exchange,
        "pattern": "dense",
        "kernel": "sdpa",
        "model": "tiny",
        "seq": 4096,
        "micro_batch": 1,
        "workers": schedule.workers * groups,
        "cp": schedule.workers,
        "per_node": schedule.per_node,
        "heads": schedule.heads,
        "layers": layers,
        "steps": {
            "forward": max(map(len, schedule.forward)),
            "backward": max(map(len, schedule.backward)),
        },
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "density": None,
        **more,
    }


def write(
    folder: Path,
    parts: Sequence[np.ndarray],
    cases: Sequence[dict[str, Any]],
    *,
    complete: bool = True,
    wanted: int | None = None,
    **more: Any,
) -> Path:
    """Write a folder as a profile does; without ``complete``, as a profile that was killed."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(parts):
        write_part(rows, folder, number)
    if complete:
        join_parts(folder)
    document = {
        "kind": "profile",
        "mode": "attention",
        "complete": complete,
        "workers": cases[0]["workers"],
        "samples_wanted": len(parts) if wanted is None else wanted,
        "command": ["mtrain", "profile", "imbalance", "seq=4k"],
        "environment": {
            "started": "2026-11-21T12:00:00+0000",
            "host": "here",
            "gpus": [],
            "versions": {"mtrain": "0.1.0", "torch": "2.13.0"},
            "git_revision": None,
        },
        "clock": {"uncertainty_us": 1.0},
        "overhead": 0.01,
        "cases": list(cases),
        **more,
    }
    write_summary(folder, document)
    return folder


def recorded_once(
    folder: Path,
    scenario: Play,
    *,
    layers: Sequence[int] = (0,),
    iterations: int = 1,
    groups: int = 1,
    **more: Any,
) -> Path:
    """Write the usual folder of one case."""
    parts = [
        rows_of(scenario, iteration=i, layers=layers, groups=groups) for i in range(iterations)
    ]
    return write(
        folder, parts, [facts_of(scenario.schedule, groups=groups, layers=len(layers))], **more
    )
