"""Schedules by name: refused options, channels, and the all-to-alls of Ulysses."""

from __future__ import annotations

import pytest

from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule


@pytest.mark.parametrize(
    ("exchange", "options", "message"),
    [
        ("star", ScheduleOptions(2, 2), "topology.exchange=star"),
        ("ring", ScheduleOptions(6, 4), "6 workers: not a multiple of 4 ranks per node"),
        ("ring", ScheduleOptions(6, 6, heads=4), "6 workers: not a multiple of the 4 ranks"),
        ("ring", ScheduleOptions(12, 4, heads=3), "do not fit nodes of 4 ranks"),
        ("ring", ScheduleOptions(2, 2, prefetch=0), "at least 1"),
    ],
)
def test_invalid_options_are_refused(exchange, options, message):
    with pytest.raises(ValueError, match=message):
        make_schedule(exchange, options)


def test_inner_transfers_wait_for_the_head_trade():
    for steps in make_schedule("ring", ScheduleOptions(4, 4, heads=2)).forward:
        trade, *others = steps[0].post
        assert trade.kind == "all_to_all"
        assert others
        assert all(t.after is not None for t in others)


@pytest.mark.parametrize(
    ("name", "options", "channels"),
    [
        ("ring", ScheduleOptions(4, 2), ("context",)),
        ("hierarchical_ring", ScheduleOptions(4, 2), ("inner", "outer")),
        ("hierarchical_ring", ScheduleOptions(4, 4), ("inner",)),
        ("hierarchical_ring", ScheduleOptions(4, 1), ("outer",)),
        ("hierarchical_all_gather", ScheduleOptions(4, 2), ("inner", "outer")),
        ("hierarchical_all_gather", ScheduleOptions(4, 4), ("context",)),
        ("hierarchical_all_gather", ScheduleOptions(4, 1), ("context",)),
        ("hierarchical_all_gather", ScheduleOptions(4, 2, heads=2), ("context",)),
        ("all_gather", ScheduleOptions(4, 4, heads=4), ()),
        ("ring", ScheduleOptions(1, 1), ()),
    ],
)
def test_channels_of_a_schedule(name, options, channels):
    assert make_schedule(name, options).channels == channels


def test_a_schedule_is_made_once():
    """Planning asks for the same schedule of up to 16,384 ranks many times."""
    first, second = (make_schedule("ring", ScheduleOptions(6, 6)) for _ in range(2))
    assert first is second
