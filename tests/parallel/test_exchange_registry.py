"""The options of an exchange reach its schedule."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtrain_cli.parallel.exchange import make_chosen_exchange, make_exchange
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule

GROUP = ContextGroup(2, tuple(range(8)), per_node=4, heads=2)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ring", {"prefetch": 2}),
        ("ring", {"circulates": "queries"}),
        ("all_gather", {"chunks": 2}),
        ("hierarchical_ring", {}),
    ],
)
def test_the_schedule_has_the_options_and_the_sizes_of_the_group(name, options):
    made = make_exchange(name, make_layout("striped", 8, 256, 16), GROUP, **options)
    assert made.schedule == make_schedule(name, ScheduleOptions(8, 4, heads=2, **options))
    assert made.name == name


@pytest.mark.parametrize(
    ("name", "heads", "shared", "gathers"),
    [
        ("ring", 2, True, True),
        ("ring", 2, False, False),
        ("ring", 8, True, False),  # no shard circulates
        ("all_gather", 2, True, False),
    ],
)
def test_only_a_ring_gathers_columns_once_if_it_may(name, heads, shared, gathers):
    layout, group = make_layout("striped", 8, 256, 16), replace(GROUP, heads=heads)
    assert make_exchange(name, layout, group, shared_columns=shared).gathers_columns is gathers


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("ring", {"prefetch": 3}),
        ("ring", {"circulates": "queries", "shared_columns": False}),
        ("hierarchical_all_gather", {"chunks": 2}),
    ],
)
def test_a_chosen_exchange_has_every_option_of_the_choice(name, options):
    choice = ExchangeChoice(name, "a reason", per_node=4, heads=2, **options)
    made = make_chosen_exchange(choice, make_layout("striped", 8, 256, 16), GROUP)
    assert made.schedule == make_schedule(name, choice.options(8))
    assert made.name == name
    assert made.gathers_columns is (name == "ring" and choice.shared_columns)
