"""The simulator's own constants state a source, an explanation and a range."""

from __future__ import annotations

import pytest

from mtrain_cli.config.cluster import SOURCES, Constant
from mtrain_cli.simulation import (
    calibration,
    costs,
    expert_cost,
    host_time,
    non_attention_cost,
    timeline,
)
from mtrain_cli.simulation.costs import LAUNCHES
from mtrain_cli.simulation.prediction import CONSTANTS


def test_every_constant_has_a_source_a_note_and_a_range_around_its_value():
    for name, constant in CONSTANTS.items():
        assert constant.source in SOURCES, name
        assert constant.note, name
        assert 0 < constant.low <= constant.value <= constant.high, name


def test_constants_that_are_not_varied_say_so():
    fixed = {name for name, c in CONSTANTS.items() if c.low == c.value == c.high}
    assert fixed == {name for name, c in CONSTANTS.items() if c.note.endswith("; not varied")}
    assert {f"costs.launches.{name}" for name in LAUNCHES} < fixed


@pytest.mark.parametrize("name", CONSTANTS)
def test_a_constant_shows_the_number_that_the_module_of_its_name_uses(name):
    modules = {
        "calibration": calibration,
        "costs": costs,
        "expert_cost": expert_cost,
        "host_time": host_time,
        "non_attention": non_attention_cost,
        "timeline": timeline,
    }
    module, key, *entry = name.split(".")
    used, shown = getattr(modules[module], key.upper()), CONSTANTS[name]
    if entry:
        assert shown.value == used[entry[0]]
    elif isinstance(used, Constant):
        assert shown is used
    elif isinstance(used, tuple):
        assert (shown.low, shown.value, shown.high) == (used[0], 1.0, used[1])
    elif isinstance(used, dict):
        assert (shown.low, shown.value, shown.high) == tuple(
            used[bound] for bound in (calibration.LOW, calibration.VALUE, calibration.HIGH)
        )
    else:
        assert shown.value == used


def test_every_time_of_the_costs_is_shown():
    times = {f"costs.{name.lower()}" for name in vars(costs) if name.endswith("_US")}
    assert times == {name for name in CONSTANTS if name.startswith("costs.") and name[-3:] == "_us"}
