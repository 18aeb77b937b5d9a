"""Turn the program of an attention pass into actions and price them, in program order.

All ranks run the same program, so one action stands for the same operation on every rank. The times
of an action are arrays with one entry per rank.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mtrain_cli.attention.mask import IntArray
from mtrain_cli.parallel.operations import AddColumns, Arrange, Merge
from mtrain_cli.parallel.program import (
    Begin,
    Compute,
    ComputeColumns,
    Copy,
    Post,
    Program,
    Wait,
)
from mtrain_cli.parallel.recording import ARRANGE, ATTENTION, COLUMNS, FORWARD, GAP, INDEX, MERGE
from mtrain_cli.simulation.spmd_schedule import SpmdSchedule, SpmdTransfer

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Spend:
    """Work that keeps the compute stream busy.

    kind: kind of the work, as in profiles (`recording.COMPUTING`).
    us: [workers], duration in microseconds; 0 for an idle rank.
    slowed: whether messages in flight slow this work down.
    pairs, blocks, columns: [workers], numbers of computed pairs, blocks and columns, for records.
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
    """Kernel launches, which keep the host busy for ``us`` microseconds before later actions."""

    step: int
    us: float


@dataclass(frozen=True, eq=False)
class PricedMessage:
    """One transfer as every rank performs it, with its price. Arrays are [workers].

    busy: time for which the message occupies the link into the receiving rank, in microseconds.
    latency: time between the end of ``busy`` and the arrival of the message, in microseconds.
    outer: bool, whether the message that a rank receives crosses nodes.
    share: share of a rank's computing power, 0 to 1, that is lost while the message is in flight.
    size: number of bytes that a rank sends, and also the number that it receives.
    """

    transfer: SpmdTransfer
    latency: FloatArray
    busy: FloatArray
    outer: NDArray[np.bool_]
    share: FloatArray
    size: int


@dataclass(frozen=True, eq=False)
class PostMessage:
    step: int
    message: PricedMessage


@dataclass(frozen=True)
class AwaitMessage:
    """The compute stream waits for a message."""

    step: int
    number: int


Action = Spend | Dispatch | PostMessage | AwaitMessage


class Prices(ABC):
    """Prices of one pass of one layer.

    Times are in microseconds: an array [workers], or one number for all ranks.
    """

    direction: str  # forward, recompute or backward

    @abstractmethod
    def attention(self, step: int) -> FloatArray: ...

    @abstractmethod
    def message(self, transfer: SpmdTransfer, post: Post) -> PricedMessage:
        """Price a transfer. post: rank 0's operation; all ranks send the same number of bytes."""

    def work(self, step: int) -> tuple[IntArray | None, IntArray | None]:  # noqa: ARG002
        """Return each rank's numbers of pairs and blocks in a step; None if unknown."""
        return None, None

    def copy(self, op: Copy) -> float:  # noqa: ARG002
        """Return the time of a copy or an addition on one rank, in microseconds."""
        return 0.0

    def index(self) -> float:
        return 0.0

    def dispatch(self, what: str) -> float:  # noqa: ARG002
        """Return the time that the host spends on launches, in microseconds.

        what: what the host launches: ``begin`` (the start of a pass), ``step`` (a step with a
            kernel call), or ``moves`` (a step that only sends messages).
        """
        return 0.0

    def column_times(self) -> tuple[FloatArray, IntArray | None, IntArray | None]:
        """Return the kernel time of gathered columns, their number, and their number of pairs.

        Each is [workers]. A number is None if it is unknown.
        """
        raise NotImplementedError


def actions(program: Program, spmd: SpmdSchedule, prices: Prices) -> Iterator[Action]:
    """Yield the actions of one pass, in order, with prices for all ranks.

    program: rank 0's program.
    """
    everyone = np.ones(spmd.grid.workers)
    transfers = spmd.transfers(prices.direction)
    yield Dispatch(-1, prices.dispatch("begin"))
    if prices.direction == FORWARD:
        yield Spend(INDEX, -1, everyone * prices.index())
    computing: dict[int, NDArray[np.bool_]] = {}
    for op in program.operations:
        match op:
            case Begin():
                yield Dispatch(op.step, prices.dispatch("step" if op.computes else "moves"))
            case Post():
                transfer = transfers.get(op.transfer.number) or spmd.column_sum(op.transfer)
                yield PostMessage(op.step, prices.message(transfer, op))
            case Wait():
                yield AwaitMessage(op.step, op.number)
            case Compute():
                us = prices.attention(op.step)
                computing[op.step] = us > 0
                yield Spend(ATTENTION, op.step, us, True, *prices.work(op.step))
            case ComputeColumns():
                us, columns, pairs = prices.column_times()
                yield Spend(COLUMNS, op.step, us, True, pairs, None, columns)
            case Merge():
                us = np.where(computing[op.step], prices.copy(op), 0.0)
                yield Spend(MERGE, op.step, us)
            case Copy():
                yield Spend(_kind(op), op.step, everyone * prices.copy(op))
            case _:
                raise AssertionError(op)


def _kind(op: Copy) -> str:
    if isinstance(op, AddColumns):
        return COLUMNS
    return ARRANGE if isinstance(op, Arrange) and op.timed else GAP
