"""The actions of a pass are the operations of the program, in its order."""

from __future__ import annotations

import numpy as np
import pytest

from mtrain_cli.config.exchanges import EXCHANGE_TRAITS
from mtrain_cli.parallel.lowering import Traits, lower
from mtrain_cli.parallel.program import Begin, Compute, ComputeColumns, Post, Wait
from mtrain_cli.parallel.recording import ATTENTION, COLUMNS
from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule
from mtrain_cli.simulation.actions import (
    AwaitMessage,
    Dispatch,
    PostMessage,
    PricedMessage,
    Prices,
    Spend,
    actions,
)
from mtrain_cli.simulation.spmd_schedule import SpmdSchedule

WORKERS = 8


class Free(Prices):
    """Attention takes 1 us on every rank, everything else no time."""

    def __init__(self, direction: str) -> None:
        self.direction = direction

    def attention(self, step):  # noqa: ARG002
        return np.ones(WORKERS)

    def column_times(self):
        return np.ones(WORKERS), None, None

    def message(self, move, post):  # noqa: ARG002
        zero = np.zeros(WORKERS)
        return PricedMessage(move, zero, zero, zero > 0, zero, 1)


def named(action) -> tuple | None:
    """Return what an action says about the program's order; None for copies."""
    match action:
        case PostMessage():
            return "post", action.step, action.message.move.number
        case AwaitMessage():
            return "wait", action.step, action.number
        case Spend(kind=kind) if kind in (ATTENTION, COLUMNS):
            return kind, action.step
        case Dispatch() if action.step >= 0:
            return "begin", action.step
    return None


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("exchange", EXCHANGE_TRAITS)
def test_actions_follow_the_program(exchange, heads, direction):
    schedule = make_schedule(exchange, ScheduleOptions(WORKERS, 4, heads=heads))
    traits = Traits(columns=not schedule.gathers)
    program = lower(schedule, 0, backward=direction == "backward", traits=traits)
    expected = []
    for op in program.operations:
        match op:
            case Post():
                expected.append(("post", op.step, op.transfer.number))
            case Wait():
                expected.append(("wait", op.step, op.number))
            case Compute():
                expected.append((ATTENTION, op.step))
            case ComputeColumns():
                expected.append((COLUMNS, op.step))
            case Begin():
                expected.append(("begin", op.step))
    found = [named(a) for a in actions(program, SpmdSchedule.of(schedule), Free(direction))]
    relevant = [entry for entry in found if entry is not None]
    # `AddColumns` is recorded as COLUMNS, too, after all attention of a backward pass.
    if traits.columns and direction == "backward":
        relevant.pop(max(i for i, entry in enumerate(relevant) if entry[0] == COLUMNS))
    assert relevant == expected
