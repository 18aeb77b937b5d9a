"""The simulator's own constants state a source, an explanation and a range."""

from __future__ import annotations

from mtrain_cli.config.cluster import SOURCES
from mtrain_cli.simulation.constants import CONSTANTS
from mtrain_cli.simulation.costs import LAUNCHES


def test_every_constant_has_a_source_a_note_and_a_range_around_its_value():
    for name, constant in CONSTANTS.items():
        assert constant.source in SOURCES, name
        assert constant.note, name
        assert 0 < constant.low <= constant.value <= constant.high, name


def test_constants_that_are_not_varied_say_so():
    fixed = {name for name, c in CONSTANTS.items() if c.low == c.value == c.high}
    assert fixed == {name for name, c in CONSTANTS.items() if c.note.endswith("; not varied")}
    assert {f"costs.launches.{name}" for name in LAUNCHES} < fixed
