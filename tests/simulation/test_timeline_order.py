"""A timeline plays the operations of the program, in its order."""

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
from mtrain_cli.simulation import timeline
from mtrain_cli.simulation.costs import PricedMessage
from mtrain_cli.simulation.spmd_schedule import SpmdSchedule

WORKERS = 8


class Priced(Prices):
    """An index takes 9 us, each copy 5 us. The launches of steps and of moves differ."""

    idle = frozenset((2, 5))  # ranks without pairs

    def __init__(self, direction: str) -> None:
        self.direction = direction

    def attention(self, step):
        return np.where(np.isin(np.arange(WORKERS), list(self.idle)), 0.0, 1.0 + step)

    def column_times(self):
        return np.ones(WORKERS), {}

    def message(self, transfer, post):  # noqa: ARG002
        zero = np.zeros(WORKERS)
        return PricedMessage(transfer, zero, zero, zero > 0, zero, 1)

    def copy(self, op):  # noqa: ARG002
        return 5.0

    def index_us(self):
        return 9.0

    def host(self, what):
        return {"begin": 10.0, "step": 6.0, "moves": 3.0}[what]


class Player:
    """Stands in for the timeline's player and records each operation."""

    def __init__(self, *_) -> None:
        self.played = []

    def launch(self, step, us):
        self.played.append(("begin", step, us))

    def compute(self, kind, step, us, **_):
        self.played.append((kind, step, us))

    def post(self, step, message):
        self.played.append(("post", step, message.transfer.number))

    def wait(self, step, number):
        self.played.append(("wait", step, number))

    def result(self):
        return self.played


@pytest.fixture
def played(monkeypatch):
    """Return a function that returns what a player plays."""
    monkeypatch.setattr(timeline, "_Player", Player)

    def play(schedule, direction, *, columns=False):
        program = lower(
            schedule, 0, backward=direction == "backward", traits=Traits(columns=columns)
        )
        return program, timeline.play(program, SpmdSchedule.of(schedule), Priced(direction))

    return play


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("exchange", EXCHANGE_TRAITS)
def test_the_order_is_that_of_the_program(played, exchange, heads, direction):
    schedule = make_schedule(exchange, ScheduleOptions(WORKERS, 4, heads=heads))
    columns = not schedule.gathers
    program, found = played(schedule, direction, columns=columns)
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
    timed = [
        (kind, step, *([what] if kind in ("post", "wait") else []))
        for kind, step, what in found
        if kind in ("post", "wait", ATTENTION, COLUMNS) or (kind == "begin" and step >= 0)
    ]
    # `AddColumns` is recorded as COLUMNS, too, after all attention of a backward pass.
    if columns and direction == "backward":
        timed.pop(max(i for i, entry in enumerate(timed) if entry[0] == COLUMNS))
    assert timed == expected


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_rank_without_pairs_has_nothing_to_merge(played, direction):
    _, found = played(make_schedule("ring", ScheduleOptions(WORKERS, WORKERS)), direction)
    merges = [us.tolist() for kind, _, us in found if kind == MERGE]
    assert merges == [[0 if rank in Priced.idle else 5 for rank in range(WORKERS)]] * WORKERS


def test_a_step_that_only_moves_gradients_launches_less(played):
    """If queries circulate, the last gradients come home after the last kernel call."""
    ring = make_schedule("ring", ScheduleOptions(WORKERS, WORKERS, circulates="queries"))
    for direction, last in (("backward", [3]), ("forward", [])):
        launches = [us for kind, _, us in played(ring, direction)[1] if kind == "begin"]
        assert launches == [10, *[6] * WORKERS, *last]


def test_an_index_is_estimated_once_in_forward(played):
    ring = make_schedule("ring", ScheduleOptions(WORKERS, WORKERS))
    for direction, times in (("forward", [9.0]), ("recompute", []), ("backward", [])):
        found = [us.max() for kind, _, us in played(ring, direction)[1] if kind == INDEX]
        assert found == times, direction


@pytest.mark.parametrize(("exchange", "heads"), [("ring", 1), ("all_gather", 2)])
def test_only_timed_copies_appear_as_copies(played, exchange, heads):
    """A profile shows other copies as gaps, and adds the gradients of columns to the columns."""
    schedule = make_schedule(exchange, ScheduleOptions(WORKERS, WORKERS, heads=heads))
    program, found = played(schedule, "backward", columns=not schedule.gathers)
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
    numbers = ("begin", "post", "wait")
    assert [k for k, _, us in found if k not in numbers and set(us) == {5.0}] == expected
