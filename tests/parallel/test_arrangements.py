"""Some program uses every arrangement."""

from __future__ import annotations

from itertools import product

from parallel.programs import ARRANGEMENTS
from parallel.test_schedule import cases

from mtrain_cli.parallel.lowering import lower
from mtrain_cli.parallel.operations import Arrange
from mtrain_cli.parallel.program_builder import Traits
from mtrain_cli.parallel.schedule import make_schedule


def test_programs_use_every_arrangement():
    assert len(ARRANGEMENTS) > 20
    used = set()
    for (name, options), backward in product(cases(), (False, True)):
        schedule = make_schedule(name, options)
        traits = Traits(columns=not schedule.gathers)
        operations = lower(schedule, 0, backward=backward, traits=traits).operations
        used |= {type(op) for op in operations if isinstance(op, Arrange)}
    assert used == ARRANGEMENTS
