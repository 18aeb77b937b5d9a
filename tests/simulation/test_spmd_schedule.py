"""A schedule for all ranks at once agrees with the schedule of every rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
from parallel.test_schedule import cases

from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule
from mtrain_cli.simulation.spmd_schedule import SpmdSchedule


def test_every_rank_of_every_schedule_agrees():
    compared = 0
    for exchange, options in cases():
        schedule = make_schedule(exchange, options)
        found = SpmdSchedule.of(schedule)
        for rank in range(schedule.workers):
            found.compare(rank)
            compared += 1
    assert compared > 4000


def test_a_different_schedule_is_detected():
    schedule = make_schedule("hierarchical_ring", ScheduleOptions(8, 4))
    found = SpmdSchedule.of(schedule)
    for other in (
        make_schedule("hierarchical_ring", ScheduleOptions(8, 2)),
        make_schedule("ring", ScheduleOptions(8, 4)),
    ):
        with pytest.raises(AssertionError):
            replace(found, schedule=other).compare(5)
