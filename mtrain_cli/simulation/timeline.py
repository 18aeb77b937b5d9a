"""Simulate the timeline of a pass for all ranks at once.

All ranks run the same program, and an operation on one rank depends only on earlier ones of the
others. So each is played for all ranks together, in program order, without an event queue:

- A message is ready at a rank when the rank has posted it, the previous message on the same
  communicator has ended at this rank, and the message that it forwards has arrived.
- A hop (a p2p message) begins when both ranks are ready and the link into the receiver, one inside
  a node and one from others, is free. In a ring, a rank's outgoing links are free whenever the
  neighbor's incoming links are. A hop ends when its shard has left and the incoming has arrived.
- A collective begins when all its ranks are ready.
- A wait stops the compute stream until the message ends at this rank. `late` is its part until the
  peer posts the message, as in profiles.
- Messages in flight at a rank slow its attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from mtrain_cli.attention.mask import IntArray
from mtrain_cli.parallel import recording
from mtrain_cli.parallel.operations import AddColumns, Arrange, Merge
from mtrain_cli.parallel.program import Begin, Compute, ComputeColumns, Copy, Post, Program, Wait
from mtrain_cli.parallel.schedule import GRADIENTS
from mtrain_cli.records.record_files import LINKS, PAYLOADS, ROW
from mtrain_cli.simulation.costs import FloatArray, LayerPrices, PricedMessage
from mtrain_cli.simulation.spmd_schedule import RankGrid, SpmdSchedule

LEAST_POWER = 0.05  # messages leave at least this share of a GPU to computation
NOT_SLOW: Mapping[int, float] = MappingProxyType({})
Counts = Mapping[str, IntArray]  # number of pairs, blocks or columns of each rank, for records
NO_WORK: Counts = MappingProxyType({})
_KIND, _LINK, _PAYLOAD, _DIRECTION = (
    {word: code for code, word in enumerate(words)}
    for words in (recording.KINDS, LINKS, PAYLOADS, recording.DIRECTIONS)
)


@dataclass(frozen=True, eq=False)
class PassTimes:
    """The times of one pass, in microseconds.

    start, end: [workers].
    spent: time by kind (`recording.COMPUTING` without waits), [workers, 1 + steps]. Entry 0 holds
        the time before the first step and that of gathered single columns.
    late, exposed: waits for slower workers, and exposed communication by link, [workers, 1 +
        steps].
    carried: [2, workers], time for which messages occupy a rank's inner and outer link.
    """

    direction: str
    start: FloatArray
    end: FloatArray
    spent: dict[str, FloatArray]
    late: FloatArray
    exposed: dict[str, FloatArray]
    carried: FloatArray
    rows: tuple[np.ndarray, ...] = ()

    @property
    def duration(self) -> float:
        return float(self.end.max() - self.start.min())

    def moved(self, by: float) -> PassTimes:
        rows = tuple(table.copy() for table in self.rows)
        for table in rows:
            table["start_us"] += by
        return replace(self, start=self.start + by, end=self.end + by, rows=rows)

    @property
    def attention(self) -> FloatArray:
        """Return the time of attention, [workers, steps]."""
        return self.spent["attention"][:, 1:]


def play(
    program: Program,
    spmd: SpmdSchedule,
    prices: LayerPrices,
    *,
    start: FloatArray | None = None,
    slow: Mapping[int, float] = NOT_SLOW,
    rows: bool = False,
    overlap: str = "all",
) -> PassTimes:
    """Simulate a pass, and return its times.

    Args:
        program: rank 0's program.
        start: [workers], microseconds at which each rank starts; None for 0.
        slow: factor by which the computation of a rank takes longer.
        overlap: see `exchanges.RingVariant`. A rank waits for the other messages as soon as it has
            posted them.
    """
    direction, workers = prices.direction, spmd.grid.workers
    everyone, transfers = np.ones(workers), spmd.transfers(direction)
    player = _Player(direction, spmd, everyone * 0 if start is None else start, slow, rows)
    player.launch(-1, prices.costs.host("begin"))
    if direction == recording.FORWARD:
        player.compute(recording.INDEX, -1, everyone * prices.costs.index_us())
    computing: dict[int, NDArray[np.bool_]] = {}
    waited: set[int] = set()
    for op in program.operations:
        match op:
            case Begin():
                player.launch(op.step, prices.costs.host("step" if op.computes else "moves"))
            case Post():
                transfer = transfers.get(op.transfer.number) or spmd.column_sum(op.transfer)
                player.post(op.step, prices.message(transfer, op))
                gradient = op.transfer.payload in GRADIENTS
                if overlap == "none" or (overlap == "keys" and gradient):
                    player.wait(op.step, op.transfer.number)
                    waited.add(op.transfer.number)
            case Wait():
                if op.number not in waited:
                    player.wait(op.step, op.number)
            case Compute():
                us = prices.attention(op.step)
                computing[op.step] = us > 0
                work = prices.work(op.step)
                player.compute(recording.ATTENTION, op.step, us, slowed=True, work=work)
            case ComputeColumns():
                us, work = prices.column_times()
                player.compute(recording.COLUMNS, op.step, us, slowed=True, work=work)
            case Merge():
                us = np.where(computing[op.step], prices.copy(op), 0.0)
                player.compute(recording.MERGE, op.step, us)
            case Copy():
                arranges = isinstance(op, Arrange) and op.timed
                kind = recording.ARRANGE if arranges else recording.GAP
                kind = recording.COLUMNS if isinstance(op, AddColumns) else kind
                player.compute(kind, op.step, everyone * prices.copy(op))
            case _:
                raise AssertionError(op)
    return player.result()


class _Player:
    def __init__(
        self,
        direction: str,
        spmd: SpmdSchedule,
        start: FloatArray,
        slow: Mapping[int, float],
        rows: bool,
    ) -> None:
        workers, steps = len(start), len(spmd.steps(direction))
        self.direction, self.start = direction, np.asarray(start, np.float64)
        self.rows = _Rows(direction, workers, spmd.grid) if rows else None
        self.now, self.host = self.start.copy(), self.start.copy()
        self.factor = np.ones(workers)
        for rank, factor in slow.items():
            self.factor[rank] *= factor
        self.ranks = np.arange(workers)
        # The times at which communicators ([workers]) and incoming links ([inner or outer,
        # workers]) become free.
        self.queues: dict[tuple[str, bool], FloatArray] = {}
        self.arriving = np.full((2, workers), -np.inf)
        self.messages: dict[int, PricedMessage] = {}
        self.posted: dict[int, FloatArray] = {}
        self.ended: dict[int, FloatArray] = {}
        self.active: list[tuple[FloatArray, FloatArray, FloatArray]] = []  # ready, end, share
        self.groups: dict[int, _Groups] = {}
        kinds = [kind for kind in recording.COMPUTING if kind != recording.WAIT]
        self.spent = {kind: np.zeros((steps + 1, workers)) for kind in kinds}
        self.late = np.zeros((steps + 1, workers))
        self.exposed: dict[str, FloatArray] = {}
        self.carried = np.zeros((2, workers))

    def result(self) -> PassTimes:
        if self.rows is not None:
            self.rows.add(recording.PASS, -1, self.start, self.now - self.start)
        return PassTimes(
            direction=self.direction,
            start=self.start,
            end=self.now,
            spent={kind: table.T for kind, table in self.spent.items()},
            late=self.late.T,
            exposed={link: table.T for link, table in self.exposed.items()},
            carried=self.carried,
            rows=tuple(self.rows.tables) if self.rows is not None else (),
        )

    def launch(self, step: int, us: float) -> None:
        """Keep the host busy. It never waits for the GPU, but the GPU waits for its launches."""
        self.host = self.host + us
        gap = np.maximum(self.host - self.now, 0.0)
        if gap.any():
            self._busy(recording.GAP, step, gap, {})

    def compute(
        self, kind: str, step: int, us: FloatArray, *, slowed: bool = False, work: Counts = NO_WORK
    ) -> None:
        """Keep the compute stream busy. slowed: whether messages in flight slow this work down."""
        us = us * self.factor
        if us.any():
            self._busy(kind, step, self._slowed(us) if slowed else us, work)

    def _busy(self, kind: str, step: int, us: FloatArray, work: Counts) -> None:
        self.spent[kind][0 if kind == recording.COLUMNS else step + 1] += us
        if self.rows is not None:
            self.rows.add(kind, step, self.now, us, work=work)
        self.now = self.now + us

    def _slowed(self, us: FloatArray) -> FloatArray:
        """Return how long work takes that starts now, while messages slow it down."""
        self.active = [entry for entry in self.active if (entry[1] > self.now).any()]
        if not self.active:
            return us
        begins, ends, shares = (np.stack(parts) for parts in zip(*self.active, strict=True))
        edges = np.sort(np.maximum(np.concatenate([begins, ends]), self.now), axis=0)
        left, at = us.copy(), self.now.copy()
        for edge in edges:
            power = self._power(begins, ends, shares, at)
            done = np.minimum((edge - at) * power, left)
            at = at + done / power
            left = left - done
            # Ranks with work left continue exactly at the edge, without rounding errors.
            at = np.where(left > 0, edge, at)
        return at + left - self.now

    @staticmethod
    def _power(
        begins: FloatArray, ends: FloatArray, shares: FloatArray, at: FloatArray
    ) -> FloatArray:
        taken = np.where((begins <= at) & (at < ends), shares, 0.0).sum(0)
        return np.maximum(1.0 - taken, LEAST_POWER)

    def post(self, step: int, message: PricedMessage) -> None:
        ready = np.maximum(self.now, self.queues.get(message.transfer.queue, self.now))
        if message.transfer.first.after is not None:
            ready = np.maximum(ready, self.ended[message.transfer.first.after])
        self.carried[message.outer.astype(np.intp), self.ranks] += message.busy
        play = self._between_two if message.transfer.peers is None else self._among
        ended = play(message, ready)
        self.queues[message.transfer.queue] = ended
        number = message.transfer.number
        self.messages[number], self.posted[number], self.ended[number] = message, self.now, ended
        if message.share.any():
            self.active.append((ready, ended, message.share))
        if self.rows is not None:
            for kind in (recording.SEND, recording.RECEIVE):
                self.rows.add(kind, step, self.now, ended - self.now, message=message)

    def _between_two(self, message: PricedMessage, ready: FloatArray) -> FloatArray:
        to, source = message.transfer.to, message.transfer.source
        assert to is not None
        assert source is not None
        outer = message.outer.astype(np.intp)
        begin = np.maximum(np.maximum(ready, ready[source]), self.arriving[outer, self.ranks])
        through = begin + message.busy
        self.arriving[outer, self.ranks] = through
        arrived = through + message.latency
        return np.maximum(arrived, arrived[to])

    def _among(self, message: PricedMessage, ready: FloatArray) -> FloatArray:
        link = int(message.outer.any())
        groups = self._groups(message.transfer.peers)
        begin = groups.most(np.maximum(ready, self.arriving[link]))
        through = begin + message.busy
        self.arriving[link] = through
        return through + message.latency

    def _groups(self, peers: IntArray | None) -> _Groups:
        assert peers is not None
        if id(peers) not in self.groups:
            self.groups[id(peers)] = _Groups(peers)
        return self.groups[id(peers)]

    def wait(self, step: int, number: int) -> None:
        message, posted = self.messages.pop(number), self.posted.pop(number)
        us = np.maximum(self.ended[number] - self.now, 0.0)
        transfer, channel = message.transfer, message.transfer.first.channel
        if transfer.to is not None and transfer.source is not None:
            by_source, by_to = posted[transfer.source], posted[transfer.to]
            peer = np.where(by_to > by_source, transfer.to, transfer.source)
            last = np.maximum(by_source, by_to)
        else:
            groups = self._groups(transfer.peers)
            last, peer = groups.most(posted), groups.latest(posted)
            peer = np.where(peer == self.ranks, -1, peer)
        late = np.clip(last - self.now, 0.0, us)
        self.late[step + 1] += late
        self.exposed.setdefault(channel, np.zeros_like(self.late))[step + 1] += us - late
        if self.rows is not None:
            kind = recording.WAIT
            self.rows.add(kind, step, self.now, us, message=message, late=late, peer=peer)
        self.now = self.now + us


class _Groups:
    def __init__(self, peers: IntArray) -> None:
        self.peers = peers  # keeps the array alive, so that no other array can get the same id
        self.alone = bool((peers == peers[0]).all())
        self.order = np.argsort(peers, kind="stable")
        ordered = peers[self.order]
        self.begin = np.flatnonzero(np.diff(ordered, prepend=-1))
        self.of = np.searchsorted(ordered[self.begin], peers)

    def most(self, values: FloatArray) -> FloatArray:
        """Return the largest value in each rank's group, [workers]."""
        if self.alone:
            return np.full(len(values), values.max())
        return np.maximum.reduceat(values[self.order], self.begin)[self.of]

    def latest(self, values: FloatArray) -> IntArray:
        """Return the lowest rank with the largest value in each rank's group, [workers]."""
        largest = values == self.most(values)
        candidates = np.where(largest, np.arange(len(values)), len(values))
        if self.alone:
            return np.full(len(values), candidates.min())
        return np.minimum.reduceat(candidates[self.order], self.begin)[self.of]


class _Rows:
    def __init__(self, direction: str, workers: int, grid: RankGrid) -> None:
        self.direction, self.workers, self.grid = _DIRECTION[direction], workers, grid
        self.tables: list[np.ndarray] = []

    def add(
        self,
        kind: str,
        step: int,
        start: FloatArray,
        us: FloatArray,
        *,
        work: Counts = NO_WORK,
        message: PricedMessage | None = None,
        late: FloatArray | None = None,
        peer: IntArray | None = None,
    ) -> None:
        rows = np.zeros(self.workers, ROW)
        rows["direction"], rows["phase"], rows["step"] = self.direction, _KIND[kind], step
        rows["rank"], rows["start_us"], rows["dur_us"] = np.arange(self.workers), start, us
        rows["shard"] = rows["peer"] = -1
        for name, counts in work.items():
            rows[name] = counts
        if message is not None:
            transfer, rows["bytes"] = message.transfer, message.size
            t = transfer.first
            rows["link"], rows["payload"] = _LINK[t.channel], _PAYLOAD[t.payload]
            ranks = transfer.to if kind == recording.SEND else transfer.source
            if ranks is not None:
                rows["peer"] = ranks
            place = transfer.leaving if kind == recording.SEND else transfer.arriving
            if place is not None:
                rows["shard"] = self.grid.groups_of(place)
        if late is not None and peer is not None:
            rows["late_us"], rows["peer"] = late, peer
        # A rank without work gets no row, but a wait of zero time does.
        self.tables.append(
            rows
            if kind in (recording.WAIT, recording.SEND, recording.RECEIVE, recording.PASS)
            else rows[us > 0]
        )


def together(
    passes: Sequence[tuple[int, PassTimes]],
    *,
    case: int = 0,
    iteration: int = 0,
    flop: tuple[float, float] = (0.0, 0.0),
) -> np.ndarray:
    """Join the records of (layer, times) passes into those of one iteration, of dtype `ROW`.

    flop: FLOP per query-key pair in (forward, backward).
    """
    parts = []
    for layer, times in passes:
        assert times.rows, "rows were not asked for"
        parts.append(np.concatenate(times.rows))
        parts[-1]["layer"] = layer
    start, end = np.stack([(times.start, times.end) for _, times in passes], 1)
    whole = np.zeros(start.shape[1], ROW)
    whole["layer"] = whole["step"] = whole["shard"] = whole["peer"] = -1
    whole["phase"], whole["rank"] = _KIND[recording.ITERATION], np.arange(start.shape[1])
    whole["start_us"], whole["dur_us"] = start.min(0), end.max(0) - start.min(0)
    found = np.concatenate([*parts, whole])
    found["case"], found["iteration"] = case, iteration
    backward = found["direction"] == _DIRECTION["backward"]
    found["flop"] = found["pairs"] * np.where(backward, flop[1], flop[0])
    found["start_us"] -= found["start_us"].min()
    return found
