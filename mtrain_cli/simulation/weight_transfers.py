"""The collectives that move weights and gradients, and how much of them computation hides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtrain_cli.simulation.calibration import LOW


@dataclass(frozen=True)
class WeightTransfer:
    """A collective that moves weights or gradients.

    us: duration in microseconds without other messages.
    busy: time in microseconds for which the collective occupies the link.
    outer: whether the collective crosses nodes.
    size: number of bytes that each rank receives.
    """

    us: float
    busy: float
    outer: bool
    size: float = 0.0


def overlapped_us(
    transfers: Sequence[WeightTransfer], computing: float, carried: tuple[float, float], bound: str
) -> float:
    """Return the total time of successive collectives that start with a computation.

    All times are in microseconds. Attention's messages use the same links. During the computation,
    the collectives get the bandwidth that these messages leave; afterwards they get the whole link.
    The low bound assumes that the collectives never meet attention's messages.

    Args:
        computing: time of the computation.
        carried: times for which attention's messages occupy the (inner, outer) link.
    """
    alone, busy = sum(t.us for t in transfers), sum(t.busy for t in transfers)
    if not alone or not computing or bound == LOW:
        return alone
    left = max(0.0, 1.0 - carried[transfers[0].outer] / computing)
    speed = min(1.0, left * alone / busy) if busy else 1.0
    return alone / speed if alone <= speed * computing else computing + alone - speed * computing
