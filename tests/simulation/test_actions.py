"""The actions of a pass are the operations of the program, in its order."""

from __future__ import annotations

import numpy as np
import pytest
from simulation.free_prices import Prices

from mtrain_cli.config.exchanges import EXCHANGE_TRAITS
from mtrain_cli.parallel.lowering import Traits, lower
from mtrain_cli.parallel.operations import AddColumns, Arrange, Reduce
from mtrain_cli.parallel.program import Begin, Compute, ComputeColumns, Post, Wait
from mtrain_cli.parallel.recording import ARRANGE, ATTENTION, COLUMNS, GAP, INDEX, MERGE
from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule
from mtrain_cli.simulation.costs import (
    AwaitMessage,
    Dispatch,
    PostMessage,
    PricedMessage,
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

    def message(self, transfer, post):  # noqa: ARG002
        zero = np.zeros(WORKERS)
        return PricedMessage(transfer, zero, zero, zero > 0, zero, 1)


def named(action) -> tuple | None:
    """Return what an action says about the program's order; None for copies."""
    match action:
        case PostMessage():
            return "post", action.step, action.message.transfer.number
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


class Priced(Free):
    """An index takes 9 us, each copy 5 us. The launches of steps and of moves differ."""

    idle = frozenset((2, 5))  # ranks without pairs

    def attention(self, step):
        return np.where(np.isin(np.arange(WORKERS), list(self.idle)), 0.0, 1.0 + step)

    def copy(self, op):  # noqa: ARG002
        return 5.0

    def index(self):
        return 9.0

    def dispatch(self, what):
        return {"begin": 10.0, "step": 6.0, "moves": 3.0}[what]


def priced(direction: str, **options) -> list:
    schedule = make_schedule("ring", ScheduleOptions(WORKERS, WORKERS, **options))
    program = lower(schedule, 0, backward=direction == "backward")
    return list(actions(program, SpmdSchedule.of(schedule), Priced(direction)))


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_rank_without_pairs_has_nothing_to_merge(direction):
    merges = [a for a in priced(direction) if isinstance(a, Spend) and a.kind == MERGE]
    assert len(merges) == WORKERS
    for action in merges:
        assert action.us.tolist() == [0 if rank in Priced.idle else 5 for rank in range(WORKERS)]


def test_a_step_that_only_moves_gradients_launches_less():
    """If queries circulate, the last gradients come home after the last kernel call."""
    launches = [a.us for a in priced("backward", circulates="queries") if isinstance(a, Dispatch)]
    assert launches == [10, *[6] * WORKERS, 3]
    assert [a.us for a in priced("forward") if isinstance(a, Dispatch)] == [10, *[6] * WORKERS]


def test_an_index_is_estimated_once_in_forward():
    for direction, times in (("forward", [9.0]), ("recompute", []), ("backward", [])):
        found = [a for a in priced(direction) if isinstance(a, Spend) and a.kind == INDEX]
        assert [float(a.us.max()) for a in found] == times, direction


@pytest.mark.parametrize(("exchange", "heads"), [("ring", 1), ("all_gather", 2)])
def test_only_timed_copies_appear_as_copies(exchange, heads):
    """A profile shows other copies as gaps, and adds the gradients of columns to the columns."""
    schedule = make_schedule(exchange, ScheduleOptions(WORKERS, WORKERS, heads=heads))
    traits = Traits(columns=not schedule.gathers)
    program = lower(schedule, 0, backward=True, traits=traits)
    expected = []
    for op in program.operations:
        match op:
            case AddColumns():
                expected.append(COLUMNS)
            case Arrange():
                expected.append(ARRANGE if op.timed else GAP)
            case Reduce():
                expected.append(GAP)
    assert len(set(expected)) > 1
    found = actions(program, SpmdSchedule.of(schedule), Priced("backward"))
    copies = [a.kind for a in found if isinstance(a, Spend) and set(a.us) == {5.0}]
    assert copies == expected
