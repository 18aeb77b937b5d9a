"""Sum the rows of a profile into dense arrays, one iteration of a case at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.parallel.pipeline_schedule import Pipeline
from mtrain_cli.parallel.recording import (
    ARRANGE,
    ATTENTION,
    COLUMNS,
    DIRECTIONS,
    EXPERTS,
    GAP,
    INDEX,
    ITERATION,
    KINDS,
    MERGE,
    PASS,
    WAIT,
)
from mtrain_cli.parallel.schedule import GRADIENTS, TENSOR
from mtrain_cli.records.pipeline_times import PipelineTimes, StepSums, pipeline_of
from mtrain_cli.records.record_files import LINKS, PAYLOADS, SUMMARY, WORDS, RecordedFolder

# The categories of a pass's time. A wait is `late` until the peer starts to send, then `exposed`.
LATE, EXPOSED = "late", "exposed"
SPENT = (INDEX, ATTENTION, COLUMNS, MERGE, ARRANGE, GAP, LATE, EXPOSED)
BUSY = SPENT[:6]

_COLUMNS = (
    "case", "iteration", "micro", "layer", "direction", "step", "rank", "phase", "link", "payload",
    "peer", "start_us", "dur_us", "late_us", "blocks", "pairs",
)  # fmt: skip
_SURVEY = ("case", "iteration", "micro", "layer", "direction", "step", "rank", "phase")


@dataclass
class TensorWaits:
    """Waits for messages of tensor groups, between the passes of attention, in milliseconds.

    late: the part of a rank's waits before the last worker started the message, by that worker,
        [ranks, ranks]. exposed: the rest, which no computation hides, [ranks].
    """

    late: np.ndarray
    exposed: np.ndarray

    @staticmethod
    def none(ranks: int) -> TensorWaits:
        return TensorWaits(np.zeros((ranks, ranks)), np.zeros(ranks))

    def add(self, rows: dict[str, np.ndarray]) -> None:
        """Add the waits among the rows of one iteration."""
        chosen = rows["phase"] == KINDS.index(WAIT)
        chosen &= rows["link"] == WORDS["link"].index(TENSOR)
        rank, peer = rows["rank"][chosen], rows["peer"][chosen]
        whole = rows["dur_us"][chosen].astype(np.float64)
        late = np.clip(rows["late_us"][chosen], 0, whole) * (peer >= 0)
        np.add.at(self.late, (rank, peer), late / 1e3)
        np.add.at(self.exposed, rank, (whole - late) / 1e3)


@dataclass(frozen=True)
class RecordedShape:
    """The iterations, layers, ranks and steps that a case's rows cover.

    facts: entry of the case in the summary.
    iterations, micros, layers: numbers of the iterations, micro-batches and layers with rows.
    workers, ranks: number of ranks in a context group, and in all of them.
    present: whether a rank has rows, [groups, workers].
    steps: number of steps of the schedule, for each direction with rows.
    tensor: tensor-parallel degree. Consecutive ranks are a tensor group, so the ranks of a context
        group are ``tensor`` apart.
    pipeline: the pipeline of the case; None without a pipeline. Ranks of a stage are consecutive.
    """

    case: int
    facts: dict[str, Any]
    iterations: tuple[int, ...]
    micros: tuple[int, ...]
    layers: tuple[int, ...]
    workers: int
    ranks: int
    present: np.ndarray
    steps: dict[str, int]
    tensor: int = 1
    pipeline: Pipeline | None = None

    @property
    def directions(self) -> tuple[str, ...]:
        return tuple(self.steps)

    @property
    def groups(self) -> int:
        return self.ranks // self.workers

    @property
    def slots(self) -> int:
        """The number of slots of a pass. Slot 0 is the time before all steps, slot t + 1 step t."""
        return max(self.steps.values(), default=0) + 1

    @property
    def missing(self) -> tuple[int, ...]:
        return tuple(sorted(self.ranks_by_place[~self.present.reshape(-1)].tolist()))

    @property
    def places(self) -> np.ndarray:
        """The place of each rank if the ranks of a context group are consecutive, [ranks]."""
        return places_of(self.ranks, self.workers, self.tensor)

    @property
    def ranks_by_place(self) -> np.ndarray:
        """The rank at each place, [ranks]."""
        return np.argsort(self.places)


def places_of(ranks: int, workers: int, tensor: int) -> np.ndarray:
    """Return `RecordedShape.places` of all ranks."""
    return np.arange(ranks).reshape(-1, workers, tensor).swapaxes(1, 2).argsort(axis=None)


@dataclass(frozen=True)
class Iteration:
    """Sums over one iteration of a case. Times are in milliseconds.

    A sample is one layer of one micro-batch. Slot 0 (`RecordedShape.slots`) also holds the time and
    pairs of single columns, which belong to no step.

    spent: time by category, [SPENT, direction, sample, group, worker, slot].
    pairs, blocks: number of computed query-key pairs and block pairs, [direction, sample, ...].
    link: time of exposed communication by link class, as a sum over samples, [direction, LINKS,
        group, worker, slot].
    behind: peer and link of the wait with the longest late part, in the shape of ``pairs``, as the
        code ((peer + 1) * len(LINKS) + link) * 2 + gradients; -1 without a wait. ``gradients`` is 1
        if the message holds gradients, which a peer sends after it has computed its step; else 0.
    start, length: start and duration of the pass, [direction, sample, group, worker]; NaN if not
        recorded.
    whole: duration of the iteration, [group, worker]; NaN if not recorded.
    """

    number: int
    spent: np.ndarray
    pairs: np.ndarray
    blocks: np.ndarray
    link: np.ndarray
    behind: np.ndarray
    start: np.ndarray
    length: np.ndarray
    whole: np.ndarray
    tensor: TensorWaits | None = None
    pipeline: PipelineTimes | None = None


def survey(recorded: RecordedFolder) -> tuple[dict[int, RecordedShape], dict[tuple[int, int], int]]:
    """Return the shape of each case, and the last batch with rows of each (case, iteration).

    Raises:
        ConfigError: the rows do not match the summary.
    """
    seen: dict[int, dict[str, set[int]]] = {}
    steps: dict[int, dict[int, int]] = {}
    last: dict[tuple[int, int], int] = {}
    for number, batch in enumerate(recorded.batches(_SURVEY)):
        for case, mine in _split(batch, "case"):
            of_case = seen.setdefault(
                case, {name: set() for name in ("iteration", "micro", "layer", "rank")}
            )
            for name, numbers in of_case.items():
                numbers.update(_unique(mine[name]))
            last.update({(case, iteration): number for iteration in _unique(mine["iteration"])})
            counts = steps.setdefault(case, {})
            attends = (mine["layer"] >= 0) & (mine["phase"] != KINDS.index(EXPERTS))
            of_layers = select(mine, attends)
            for direction, of_direction in _split(of_layers, "direction"):
                most = int(of_direction["step"].max()) + 1
                counts[direction] = max(most, counts.get(direction, 0))
    cases = recorded.summary.get("cases") or []
    shapes = {}
    for case, values in sorted(seen.items()):
        if not 0 <= case < len(cases) or not isinstance(cases[case], dict):
            raise ConfigError(
                f"{recorded.folder}: has rows of case {case}, which {SUMMARY} does not list; "
                "measure again"
            )
        workers = cases[case].get("workers") or recorded.summary.get("workers")
        shapes[case] = _shape(case, cases[case], values, steps[case], workers)
    return shapes, last


def _shape(
    case: int, facts: dict[str, Any], seen: dict[str, set[int]], steps: dict[int, int], known: Any
) -> RecordedShape:
    """Return the shape of a case. known: number of ranks in the summary; None if unknown."""
    highest = max(seen["rank"]) + 1
    total = max(highest, int(known or highest))
    workers = min(int(facts.get("cp") or total), total)
    tensor = int(facts.get("tp") or 1)
    total = -(-total // (workers * tensor)) * workers * tensor
    if total > 1 << 20:  # before arrays of this length fill the memory
        raise ValueError(f"workers={known}: more than {1 << 20:,}")
    present = np.zeros(total, bool)
    present[places_of(total, workers, tensor)[sorted(seen["rank"])]] = True
    declared = facts.get("steps") or {}
    counted = {
        name: max(most, int(declared.get("backward" if name == "backward" else "forward") or 0))
        for code, most in sorted(steps.items())
        if (name := DIRECTIONS[code])
    }
    return RecordedShape(
        case,
        facts,
        iterations=tuple(sorted(seen["iteration"])),
        micros=tuple(sorted(seen["micro"])),
        layers=tuple(sorted(layer for layer in seen["layer"] if layer >= 0)),
        workers=workers,
        ranks=total,
        present=present.reshape(-1, workers),
        steps=counted,
        tensor=tensor,
        pipeline=pipeline_of(facts.get("pipeline")),
    )


def iterations(
    recorded: RecordedFolder, shapes: dict[int, RecordedShape], last: dict[tuple[int, int], int]
) -> Iterator[tuple[RecordedShape, Iteration]]:
    """Yield the iterations of all cases, each as soon as its last row has been read.

    shapes, last: results of `survey`.
    """
    under_way: dict[tuple[int, int], _RecordSums] = {}
    for number, batch in enumerate(recorded.batches(_COLUMNS)):
        for case, of_case in _split(batch, "case"):
            for iteration, rows in _split(of_case, "iteration"):
                key = (case, iteration)
                if key not in under_way:
                    under_way[key] = _RecordSums(shapes[case], iteration)
                under_way[key].add(rows)
        for key in [key for key in under_way if last[key] == number]:
            yield shapes[key[0]], under_way.pop(key).result()


class _RecordSums:
    def __init__(self, shape: RecordedShape, number: int) -> None:
        self.shape, self.number = shape, number
        self.samples = len(shape.micros) * len(shape.layers)
        self.passes = (len(shape.directions), self.samples, shape.groups, shape.workers)
        self.cells = int(np.prod(self.passes)) * shape.slots
        self.spent = np.zeros(len(SPENT) * self.cells, np.float32)
        self.pairs, self.blocks = np.zeros(self.cells, np.int64), np.zeros(self.cells, np.int64)
        self.behind = np.full(self.cells, -1, np.int32)
        self.longest = np.zeros(self.cells, np.float32)
        self.start, self.length = (np.full(int(np.prod(self.passes)), np.nan) for _ in range(2))
        self.link = np.zeros((len(shape.directions), len(LINKS), shape.ranks, shape.slots))
        self.whole = np.full(shape.ranks, np.nan)
        self.tensor = TensorWaits.none(shape.ranks) if shape.tensor > 1 else None
        self.pipeline = None if shape.pipeline is None else StepSums(shape.pipeline, shape.ranks)
        codes = [DIRECTIONS.index(name) for name in shape.directions]
        self.direction = _places(codes, len(DIRECTIONS))
        self.layer = _places(shape.layers, max(shape.layers, default=0) + 1)
        self.micro = _places(shape.micros, max(shape.micros, default=0) + 1)
        self.place = _places([KINDS.index(kind) for kind in BUSY], len(KINDS))

    def add(self, rows: dict[str, np.ndarray]) -> None:
        if self.pipeline is not None:
            self.pipeline.add(rows)
        if self.tensor is not None:
            self.tensor.add(rows)
            # Ranks of a context group are then consecutive.
            places = np.append(self.shape.places, -1)  # the peer -1 stays
            rows = {**rows, "rank": places[rows["rank"]], "peer": places[rows["peer"]]}
        phase = rows["phase"]
        whole = phase == KINDS.index(ITERATION)
        self.whole[rows["rank"][whole]] = rows["dur_us"][whole] / 1e3
        direction = self.direction[rows["direction"]]
        keep = (rows["layer"] >= 0) & (direction >= 0)
        sample = direction * len(self.shape.micros) + self.micro[rows["micro"]]
        sample = sample * len(self.shape.layers) + self.layer[rows["layer"]]
        at = sample * self.shape.ranks + rows["rank"]  # index of the pass
        passes = keep & (phase == KINDS.index(PASS))
        self.start[at[passes]] = rows["start_us"][passes] / 1e3
        self.length[at[passes]] = rows["dur_us"][passes] / 1e3
        slot = np.where(phase == KINDS.index(COLUMNS), 0, rows["step"] + 1)
        cell = at * self.shape.slots + slot
        busy = keep & (self.place[phase] >= 0)
        spent = self.place[phase[busy]] * self.cells + cell[busy]
        np.add.at(self.spent, spent, rows["dur_us"][busy] / np.float32(1e3))
        work = keep & ((phase == KINDS.index(ATTENTION)) | (phase == KINDS.index(COLUMNS)))
        np.add.at(self.pairs, cell[work], rows["pairs"][work])
        np.add.at(self.blocks, cell[work], rows["blocks"][work].astype(np.int64))
        waits = keep & (phase == KINDS.index(WAIT))
        if waits.any():
            self._add_waits(select(rows, waits), cell[waits], slot[waits])

    def _add_waits(self, rows: dict[str, np.ndarray], cell: np.ndarray, slot: np.ndarray) -> None:
        late = np.clip(rows["late_us"], 0, rows["dur_us"]) / np.float32(1e3)
        exposed = rows["dur_us"] / np.float32(1e3) - late
        np.add.at(self.spent, SPENT.index(LATE) * self.cells + cell, late)
        np.add.at(self.spent, SPENT.index(EXPOSED) * self.cells + cell, exposed)
        direction, link = self.direction[rows["direction"]], rows["link"].astype(np.int64)
        np.add.at(self.link, (direction, link, rows["rank"], slot), exposed)
        gradient = np.isin(rows["payload"], [PAYLOADS.index(name) for name in GRADIENTS])
        code = ((rows["peer"].astype(np.int32) + 1) * len(LINKS) + rows["link"]) * 2 + gradient
        order = np.argsort(late, kind="stable")
        order = order[late[order] > self.longest[cell[order]]]
        # The longest wait is written last, so it overwrites the others.
        self.behind[cell[order]] = code[order]
        self.longest[cell[order]] = late[order]

    def result(self) -> Iteration:
        shape, slots = self.passes, self.shape.slots
        return Iteration(
            self.number,
            self.spent.reshape(len(SPENT), *shape, slots),
            self.pairs.reshape(*shape, slots),
            self.blocks.reshape(*shape, slots),
            self.link.reshape(*self.link.shape[:2], *shape[2:], slots),
            self.behind.reshape(*shape, slots),
            self.start.reshape(shape),
            self.length.reshape(shape),
            self.whole.reshape(shape[2:]),
            self.tensor,
            None if self.pipeline is None else self.pipeline.result(),
        )


def _places(codes: Sequence[int], size: int) -> np.ndarray:
    """Return an array that maps a code below ``size`` to its index in ``codes``, or to -1."""
    # The code -1 (no layer) reads the last entry, which stays -1.
    table = np.full(size + 1, -1, np.int64)
    table[list(codes)] = np.arange(len(codes))
    return table


def _split(rows: dict[str, np.ndarray], column: str) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
    """Yield each number that occurs in a column, with its rows."""
    numbers = _unique(rows[column])
    for number in numbers:
        yield number, rows if len(numbers) == 1 else select(rows, rows[column] == number)


def select(batch: dict[str, np.ndarray], mask: np.ndarray) -> dict[str, np.ndarray]:
    return {name: values[mask] for name, values in batch.items()}


def _unique(values: np.ndarray) -> list[int]:
    """Return the distinct integers of an array. Integers that lie close together are fast."""
    if not len(values):
        return []
    low = int(values.min())
    if int(values.max()) - low > 1 << 22:
        return np.unique(values).tolist()
    return (np.flatnonzero(np.bincount(values.astype(np.int64) - low)) + low).tolist()
