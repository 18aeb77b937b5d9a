"""Interpreters of programs: bytes, FLOP and time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from mtrain_cli.step.program import Compute, Link, Message, Post, Program, Repeat, Wait


def traffic(program: Program, sizes: Mapping[Message, Any]) -> Any:
    """Return the bytes that a worker receives.

    sizes: bytes per row of each message, numbers or arrays [ranks]; other messages are not counted.
    """
    received: Any = 0
    for op in program:
        match op:
            case Post():
                received += op.rows * sizes.get(op.message, 0)
            case Repeat():
                received += op.times * traffic(op.body, sizes)
    return received


def work(program: Program, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the work of matrix products by direction.

    parts: work of one row with each weight, numbers or arrays, such as its elements (half of the
        FLOP) or a time; other products are not counted.
    """
    amounts: defaultdict[str, Any] = defaultdict(int)
    for op in program:
        match op:
            case Compute():
                amounts[op.direction] += op.rows * parts.get(op.part, 0)
            case Repeat():
                for direction, amount in work(op.body, parts).items():
                    amounts[direction] += op.times * amount
    return amounts


class MessageCost(NamedTuple):
    """Microseconds of a message, those for which it occupies the link, and mean bytes received.

    outer: whether it crosses nodes.
    """

    us: float
    busy: float
    size: float = 0.0
    outer: bool = False


class PassTime(NamedTuple):
    """The time of a program. Times are in microseconds.

    span: time of the slowest worker.
    exposed: time for which the worker with the most work waits for messages.
    late: time for which a worker waits, in the mean, for the worker with the most work.
    hidden: time of messages that overlaps with computation.
    busy: time for which messages occupy their links.
    size: number of bytes that a worker receives, in the mean.
    """

    span: float
    exposed: float
    late: float
    hidden: float
    busy: float
    size: float

    @staticmethod
    def mean(times: Sequence[PassTime], shares: Sequence[float] | None = None) -> PassTime:
        """Return the mean of programs, such as those of a model's layers."""
        return PassTime(*np.average(times, axis=0, weights=shares).tolist())


def time(
    program: Program,
    parts: Mapping[str, float],
    cost: Callable[[Post], MessageCost | None],
    computing: Any = None,
) -> PassTime:
    """Run a program on the clocks of its workers, and on one of each link.

    A message begins when the last worker starts it and its link is free. It arrives everywhere at
    the same time.

    Args:
        parts: time of one row with each weight, as in `work`, or its share in ``computing``.
        cost: returns the cost of a message; None if it is not sent.
        computing: time of all products, a number or an array [ranks]. Default: that of ``parts``.
    """
    total = sum(work(program, parts).values())
    computing = total if computing is None else computing
    share = computing / total
    now, free, arrived = computing * 0.0, dict.fromkeys(Link, 0.0), dict[int, float]()
    sending = busy = size = 0.0
    for op in program:
        match op:
            case Compute():
                now = now + share * (op.rows * parts.get(op.part, 0))
            case Post():
                if (sent := cost(op)) is not None:
                    link = op.message.link
                    free[link] = max(float(np.max(now)), free[link]) + sent.us
                    arrived[op.number] = free[link]
                    sending, busy, size = sending + sent.us, busy + sent.busy, size + sent.size
            case Wait():
                now = np.maximum(now, arrived.get(op.number, 0.0))
    span, most = float(np.max(now)), float(np.max(computing))
    exposed, late = max(0.0, span - most), most - float(np.mean(computing))
    return PassTime(span, exposed, late, max(0.0, sending - exposed), busy, size)
