"""Schedules of all-gathers and group casts: the order of parts of the heads and of stages."""

from __future__ import annotations

import pytest

from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule


@pytest.mark.parametrize(
    ("name", "per_node", "each"), [("all_gather", 4, 1), ("hierarchical_all_gather", 2, 2)]
)
def test_a_part_sends_its_gradients_before_the_next_part_does(name, per_node, each):
    for steps in make_schedule(name, ScheduleOptions(4, per_node, chunks=3)).backward:
        assert [len(step.send) for step in steps] == [each] * 3
        assert [step.collect for step in steps] == [
            (),
            *(tuple(t.number for t in step.send) for step in steps[:-1]),
        ]


@pytest.mark.parametrize("name", ["all_gather", "hierarchical_all_gather"])
def test_a_part_of_the_heads_is_gathered_while_the_one_before_is_computed(name):
    for steps in make_schedule(name, ScheduleOptions(4, 2, chunks=3)).forward:
        coming = [{t.part for t in step.post} for step in steps]
        assert coming == [{(0, 3), (1, 3)}, {(2, 3)}, set()]


@pytest.mark.parametrize(("stages", "per_node", "found"), [(2, 4, 2), (3, 2, 3), (3, 4, 2)])
def test_stages_divide_the_keys_of_a_part(stages, per_node, found):
    """Forward begins with a rank's own keys, backward ends with them."""
    options = ScheduleOptions(4, per_node, chunks=2, stages=stages)
    schedule = make_schedule("hierarchical_group_cast", options)
    assert schedule.stages == found
    for rank in range(4):
        for steps, order in ((schedule.forward[rank], 1), (schedule.backward[rank], -1)):
            for part in range(2):
                of_part = [step for step in steps if step.part == (part, 2)]
                assert [step.stage for step in of_part] == list(range(found))[::order]
                assert sorted(key for step in of_part for key in step.keys) == list(range(4))
                (own,) = (step for step in of_part if step.stage == 0)
                assert (own.keys, own.wait, own.send) == ((rank,), (), ())


@pytest.mark.parametrize("workers", [1, 4])
def test_one_worker_has_one_stage(workers):
    schedule = make_schedule("group_cast", ScheduleOptions(workers, 4, stages=2))
    assert schedule.stages == min(workers, 2)
