"""The player proves that a schedule ends, and times it."""

from __future__ import annotations

import pytest

from mtrain_cli.parallel.pipeline_schedule import (
    BACKWARD,
    FORWARD,
    RECEIVE,
    SEND,
    Pipeline,
    ScheduleError,
    play,
)


def schedules(most_stages: int) -> list[Pipeline]:
    return [
        Pipeline(schedule, stages, parts, count)
        for stages in range(2, most_stages + 1)
        for schedule, parts in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3))
        for count in range(1, 25)
        if parts == 1 or count % stages == 0
    ]


def test_every_schedule_ends_and_idles_as_the_formula_says():
    for each in schedules(16):
        behind = each.stages - 1
        expected = behind / (each.virtual_stages * each.micro_batches + behind)
        assert play(each).bubble == pytest.approx(expected, abs=1e-9), each


def test_the_makespan_counts_forward_and_backward():
    """(m + (p - 1) / v) (F + B), for a forward pass F and a backward pass B of all of a stage."""
    for parts, schedule in ((1, "1f1b"), (2, "interleaved")):
        pipeline = Pipeline(schedule, 4, parts, 8)
        seconds = {FORWARD: 1.0 / parts, BACKWARD: 2.0 / parts}
        played = play(pipeline, lambda action, seconds=seconds: seconds[action.kind])
        assert played.makespan == pytest.approx((8 + 3 / parts) * 3)
        assert played.busy(2) == pytest.approx(24)


def test_a_slow_hop_delays_the_stages_behind_it():
    free, slow = (play(Pipeline("gpipe", 2, 1, 1), hop=hop).makespan for hop in (0.0, 0.5))
    assert (free, slow) == (4.0, 5.0)


def test_evaluation_of_any_number_of_micro_batches_ends():
    for stages in (2, 3):
        for count in range(1, 8):
            pipeline = Pipeline("interleaved", stages, 2, count)
            actions = [pipeline.forward_actions(stage) for stage in range(stages)]
            assert len(play(pipeline, actions=actions).spans) == 2 * stages * count


def test_a_lost_message_is_found():
    pipeline = Pipeline("1f1b", 2, 1, 2)
    actions = [pipeline.actions(stage) for stage in (0, 1)]
    actions[0] = [a for a in actions[0] if (a.kind, a.micro_batch) != (SEND, 1)]
    with pytest.raises(ScheduleError, match=r"waits for ever: stage 0 .*; stage 1"):
        play(pipeline, actions=actions)


def test_messages_in_another_order_are_found():
    pipeline = Pipeline("gpipe", 2, 1, 2)
    actions = [pipeline.actions(stage) for stage in (0, 1)]
    first, second = (n for n, a in enumerate(actions[1]) if a.kind == RECEIVE)
    actions[1][first], actions[1][second] = actions[1][second], actions[1][first]
    with pytest.raises((ScheduleError, AssertionError)):
        play(pipeline, actions=actions)
    last = [pipeline.actions(stage) for stage in (0, 1)]
    sends = [n for n, a in enumerate(last[1]) if a.kind == SEND]
    last[1][sends[0]], last[1][sends[1]] = last[1][sends[1]], last[1][sends[0]]
    with pytest.raises(ScheduleError, match="would get"):
        play(pipeline, actions=last)


def test_a_stage_that_only_sends_would_wait_for_room():
    """The third send of a channel waits for the first to be received."""
    pipeline = Pipeline("gpipe", 2, 1, 3)
    actions = [pipeline.actions(stage) for stage in (0, 1)]
    # Stage 1 posts no receive before stage 0 has sent everything: a circle.
    actions[1] = [a for a in actions[1] if a.kind != RECEIVE and a.kind != FORWARD]
    with pytest.raises((ScheduleError, AssertionError)):
        play(pipeline, actions=actions)
