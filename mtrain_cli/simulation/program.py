"""The priced actions of one attention pass, in order: one list for all, with arrays over ranks.

The order is that of `parallel.all_gather_exchange` and `parallel.ring_exchange`, with their copies
and additions: post, wait, compute, collect, send.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mtrain_cli.attention.mask import IntArray
from mtrain_cli.parallel.recording import (
    ARRANGE,
    ATTENTION,
    BACKWARD,
    COLUMNS,
    FORWARD,
    GAP,
    INDEX,
    MERGE,
)
from mtrain_cli.parallel.schedule import CONTEXT, HEADS
from mtrain_cli.parallel.transport import UNSCHEDULED
from mtrain_cli.simulation.spmd_schedule import SpmdSchedule, SpmdStep, SpmdTransfer

FloatArray = NDArray[np.float64]

# Copies and additions other than attention. PACK: stack k and v; PICK: select single columns;
# TRADE: prepare or reorder tokens traded for heads; ORDER: bring gathered keys into sequence order;
# CUT: copy a part of the heads of out and dout, if the kernel needs that; SHARDS: cut key gradients
# into shards; ADD: add a gradient that arrived; SCATTER: add column gradients; RESULT: cast the
# results.
PACK, PICK, TRADE, ORDER, CUT = "pack", "pick", "trade", "order", "cut"
SHARDS, ADD, SCATTER, RESULT = "shards", "add", "scatter", "result"


@dataclass(frozen=True, eq=False)
class Spend:
    """The compute stream is busy.

    us: [workers], 0 for a rank that has nothing to do.
    slowed: whether messages under way take computing power from it.
    pairs, blocks, columns: [workers], its work, for records.
    """

    kind: str
    step: int
    us: FloatArray
    slowed: bool = False
    pairs: IntArray | None = None
    blocks: IntArray | None = None
    columns: IntArray | None = None


@dataclass(frozen=True)
class Dispatch:
    """The host launches what follows: nothing that follows begins until ``us`` later."""

    step: int
    us: float


@dataclass(frozen=True, eq=False)
class PricedMessage:
    """A transfer of all ranks, priced. Arrays are [workers].

    queue: the communicator; it carries one message after the other.
    after: number of the message that this one forwards.
    to, source, peers: see `spmd_schedule.SpmdTransfer`.
    busy: us in which what arrives at a rank occupies its link.
    latency: further us until it is there; the link is free for the next message.
    outer: bool, whether what arrives crosses nodes.
    share: of a rank's computing power that the message takes while it is under way.
    sent, received: bytes.
    """

    number: int
    link: str
    payload: str
    queue: tuple[str, bool]
    after: int | None
    to: IntArray | None
    source: IntArray | None
    peers: IntArray | None
    latency: FloatArray
    busy: FloatArray
    outer: NDArray[np.bool_]
    share: FloatArray
    sent: int
    received: int
    move: SpmdTransfer | None = None


@dataclass(frozen=True, eq=False)
class Post:
    step: int
    message: PricedMessage


@dataclass(frozen=True)
class Wait:
    """The compute stream waits for a message."""

    step: int
    number: int


Action = Spend | Dispatch | Post | Wait


class Prices(ABC):
    """Prices of one pass of one layer. Times in us: [workers], or one number for all."""

    direction: str  # forward, recompute or backward
    columns: bool = False  # whether single columns are gathered once, outside the steps

    @abstractmethod
    def attention(self, step: int) -> FloatArray: ...

    @abstractmethod
    def message(self, move: SpmdTransfer, *, first: bool) -> PricedMessage:
        """Price a transfer. first: whether it is the first of the two head trades of a pass."""

    def work(self, step: int) -> tuple[IntArray | None, IntArray | None]:  # noqa: ARG002
        """Return the pairs and blocks of a step, for records; None if unknown."""
        return None, None

    def merge(self, step: int) -> float:  # noqa: ARG002
        """Return the us of merging, for a rank that computes in this step."""
        return 0.0

    def other(self, what: str) -> float:  # noqa: ARG002
        """Return the us of a copy or addition, such as `PACK`."""
        return 0.0

    def index(self) -> float:
        return 0.0

    def dispatch(self, what: str) -> float:  # noqa: ARG002
        """Return the host's us to launch ``begin`` (of a pass), ``step`` or ``moves``."""
        return 0.0

    def column_times(self) -> tuple[FloatArray, IntArray | None, IntArray | None]:
        """Return the us of gathered columns, their number and their pairs."""
        raise NotImplementedError

    def column_sum(self) -> PricedMessage:
        """Return the all-reduce of gathered columns, or of their gradients."""
        raise NotImplementedError


def program(lockstep: SpmdSchedule, prices: Prices) -> Iterator[Action]:
    """Yield all actions of one pass, in order."""
    return _Program(lockstep, prices).actions()


class _Program:
    def __init__(self, lockstep: SpmdSchedule, prices: Prices) -> None:
        self.schedule, self.prices = lockstep.schedule, prices
        self.backward = prices.direction == BACKWARD
        self.beats = lockstep.beats(prices.direction)
        self.rings = self.schedule.exchange in ("ring", "hierarchical_ring")
        self.workers = self.schedule.workers
        self.trades = 0
        self.under_way: list[int] = []

    def actions(self) -> Iterator[Action]:
        prices = self.prices
        yield Dispatch(-1, prices.dispatch("begin"))
        if prices.direction == FORWARD:
            yield self._spend(INDEX, -1, prices.index())
        last = len(self.beats) - 1
        inner_last = last - (self.schedule.heads > 1)
        for at, beat in enumerate(self.beats):
            yield Dispatch(at, prices.dispatch("step" if beat.computes else "moves"))
            traded = [m for m in beat.post if m.first.payload == HEADS]
            for move in traded:
                yield from self._trade(at, move)
            if at == 0:
                yield from self._begin()
            if not traded or beat.computes:
                yield from self._step(at, beat)
            if at == inner_last:
                yield from self._end(at)
        # The last reduce-scatters: no step waits for them.
        for number in list(self.under_way):
            yield self._wait(last, number)
        if self.backward:
            yield self._spend(GAP, last, 0.0 if self.rings else prices.other(RESULT))

    def _step(self, at: int, beat: SpmdStep) -> Iterator[Action]:
        prices = self.prices
        for move in beat.post:
            if move.first.payload != HEADS:
                yield self._post(at, move)
        for number in beat.wait:
            if number in self.under_way:
                yield self._wait(at, number)
        if beat.computes:
            if not self.rings and self.workers > self.schedule.heads:
                yield self._spend(ARRANGE, at, prices.other(ORDER))
                if self.backward:
                    yield self._spend(ARRANGE, at, prices.other(CUT))
            us = prices.attention(at)
            yield Spend(ATTENTION, at, us, True, *prices.work(at))
            if self.rings:
                yield Spend(MERGE, at, np.where(us > 0, prices.merge(at), 0.0))
        if at == 0 and prices.columns and not self.backward:
            yield self._wait(at, UNSCHEDULED)
            yield self._columns(at)
        for number in beat.collect:
            yield self._wait(at, number)
            if self.rings:
                yield self._spend(GAP, at, prices.other(ADD))
        if beat.computes and self.backward and not self.rings:
            yield self._spend(ARRANGE, at, prices.other(SHARDS))
        for move in beat.send:
            yield self._post(at, move)

    def _begin(self) -> Iterator[Action]:
        prices = self.prices
        yield self._spend(ARRANGE, 0, prices.other(PACK))
        if prices.columns and self.backward:
            yield self._columns(0)
        elif prices.columns:
            yield self._spend(ARRANGE, 0, prices.other(PICK))
        if prices.columns:
            self.under_way.append(UNSCHEDULED)
            yield Post(0, prices.column_sum())

    def _end(self, at: int) -> Iterator[Action]:
        prices = self.prices
        if prices.columns and self.backward:
            yield self._wait(at, UNSCHEDULED)
            yield self._spend(COLUMNS, at, prices.other(SCATTER))
        if self.rings or not self.backward:
            yield self._spend(ARRANGE, at, prices.other(RESULT))

    def _trade(self, at: int, move: SpmdTransfer) -> Iterator[Action]:
        yield self._spend(ARRANGE, at, self.prices.other(TRADE))
        yield self._post(at, move)
        yield self._wait(at, move.number)
        yield self._spend(ARRANGE, at, self.prices.other(TRADE))

    def _columns(self, at: int) -> Spend:
        us, columns, pairs = self.prices.column_times()
        return Spend(COLUMNS, at, us, True, pairs, None, columns)

    def _spend(self, kind: str, at: int, us: float) -> Spend:
        return Spend(kind, at, np.full(self.workers, us))

    def _post(self, at: int, move: SpmdTransfer) -> Post:
        message = self.prices.message(move, first=self.trades == 0)
        self.trades += move.first.payload == HEADS
        self.under_way.append(move.number)
        return Post(at, message)

    def _wait(self, at: int, number: int) -> Wait:
        self.under_way.remove(number)
        return Wait(at, number)


def collective_of_all(
    payload: str,
    workers: int,
    heads: int,
    us: tuple[float, float],
    share: float,
    *,
    crosses: bool,
    size: int,
) -> PricedMessage:
    """Make an all-reduce over all ranks with the same heads. us: latency and busy time."""
    latency, busy = (np.full(workers, t) for t in us)
    peers = np.arange(workers) % heads
    return PricedMessage(
        UNSCHEDULED,
        CONTEXT,
        payload,
        ("whole", False),
        None,
        None,
        None,
        peers,
        latency,
        busy,
        np.full(workers, crosses),
        np.full(workers, share),
        size,
        size,
    )
