"""Every arrangement has a name of its own, and some program uses it."""

from __future__ import annotations

from itertools import product

from parallel.test_schedule import cases

from mtrain_cli.parallel import arrangements
from mtrain_cli.parallel.lowering import lower
from mtrain_cli.parallel.program import Arrange
from mtrain_cli.parallel.program_builder import Traits
from mtrain_cli.parallel.schedule_registry import make_schedule


def test_programs_use_every_arrangement():
    names = [value for name, value in vars(arrangements).items() if name.isupper()]
    assert len(set(names)) == len(names) > 0
    used = set()
    for (name, options), backward in product(cases(), (False, True)):
        schedule = make_schedule(name, options)
        traits = Traits(columns=not schedule.gathers)
        operations = lower(schedule, 0, backward=backward, traits=traits).operations
        used |= {op.what for op in operations if isinstance(op, Arrange)}
    assert used == set(names)
