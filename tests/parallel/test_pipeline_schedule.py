"""Schedules of a pipeline: their orders, their messages, and what they keep in flight."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.parallel.pipeline_schedule import (
    ACTIVATIONS,
    BACKWARD,
    FORWARD,
    GRADIENTS,
    RECEIVE,
    SEND,
    Action,
    Pipeline,
    ScheduleError,
    in_flight,
    play,
)


def stage_of_torch(number: int, stages: int, total: int) -> Any:
    return SimpleNamespace(
        stage_index=number,
        num_stages=total,
        group_size=stages,
        group_rank=0,
        is_first=False,
        is_last=False,
        has_backward=True,
    )


def passes_of_torch(actions: list[Any]) -> list[tuple[bool, int, int]]:
    """Return whether each pass is forward, its virtual stage and its micro-batch."""
    return [
        (str(action.computation_type.name) == "FORWARD", *action[::2])
        for action in actions
        if action and "REDUCE" not in action.computation_type.name
    ]


def passes(pipeline: Pipeline, stage: int) -> list[tuple[bool, int, int]]:
    return [
        (action.kind == FORWARD, action.virtual_stage, action.micro_batch)
        for action in pipeline.computations(stage)
    ]


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("parts", [2, 3])
def test_interleaved_orders_equal_those_of_torch(stages, parts):
    from torch.distributed.pipelining import ScheduleInterleaved1F1B

    for count in range(stages, 25, stages):
        own: Any = [stage_of_torch(n * stages, stages, stages * parts) for n in range(parts)]
        torchs = ScheduleInterleaved1F1B(own, count).pipeline_order
        pipeline = Pipeline("interleaved", stages, parts, count)
        for stage in range(stages):
            assert passes(pipeline, stage) == passes_of_torch(torchs[stage]), (
                stages, parts, count, stage,
            )  # fmt: skip


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_gpipe_and_1f1b_orders_equal_those_of_torch(stages):
    from torch.distributed import pipelining

    for count in range(stages, 25):
        own: Any = stage_of_torch(0, stages, stages)
        torchs = pipelining.ScheduleGPipe(own, count).pipeline_order or {}
        for stage in range(stages):
            found = passes(Pipeline("gpipe", stages, 1, count), stage)
            assert found == passes_of_torch(torchs[stage]), (count, stage)
        torchs = pipelining.Schedule1F1B(own, count).pipeline_order or {}
        # torch 2.13 numbers the forward passes of the last stage from 1.
        for stage in range(stages - 1):
            found = passes(Pipeline("1f1b", stages, 1, count), stage)
            assert found == passes_of_torch(torchs[stage]), (count, stage)


def test_a_receive_is_posted_one_computation_ahead_and_a_send_at_once():
    assert Pipeline("1f1b", 2, 1, 2).actions(1) == [
        Action(RECEIVE, 1, 0, ACTIVATIONS),
        Action(FORWARD, 1, 0),
        Action(RECEIVE, 1, 1, ACTIVATIONS),
        Action(BACKWARD, 1, 0),
        Action(SEND, 1, 0, GRADIENTS),
        Action(FORWARD, 1, 1),
        Action(BACKWARD, 1, 1),
        Action(SEND, 1, 1, GRADIENTS),
    ]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved"])
def test_every_message_has_a_channel(schedule):
    pipeline = Pipeline(schedule, 3, 2 if schedule == "interleaved" else 1, 6)
    used = {
        pipeline.channel(action)
        for stage in range(3)
        for action in pipeline.actions(stage)
        if action.payload
    }
    assert used == set(pipeline.channels())
    assert len(pipeline.channels()) == len(used)


@pytest.mark.parametrize("count", [1, 2, 4, 9])
def test_1f1b_keeps_as_many_micro_batches_as_stages_follow(count):
    for stage in range(4):
        found = in_flight(Pipeline("1f1b", 4, 1, count).actions(stage), lambda _: 1)
        assert found == {stage: min(count, 4 - stage)}
        gpipe = in_flight(Pipeline("gpipe", 4, 1, count).actions(stage), lambda _: 1)
        assert gpipe == {stage: count}


def test_in_flight_finds_the_heaviest_moment():
    pipeline = Pipeline("interleaved", 2, 2, 4)
    assert sum(in_flight(pipeline.actions(0), lambda _: 1).values()) == 5
    heavy_end = in_flight(pipeline.actions(0), lambda stage: 100 if stage == 2 else 1)
    assert heavy_end[2] == 2


def test_evaluation_only_passes_forward():
    pipeline = Pipeline("interleaved", 2, 2, 3)  # any number of micro-batches
    actions = pipeline.forward_actions(0)
    assert {action.kind for action in actions} == {FORWARD, SEND, RECEIVE}
    assert sum(action.kind == FORWARD for action in actions) == 6


@pytest.mark.parametrize(
    ("words", "schedule"),
    [
        ((), "1f1b"),
        (("topology.schedule=gpipe",), "gpipe"),
        (("topology.virtual_stages=2",), "interleaved"),
    ],
)
def test_auto_interleaves_virtual_stages(words, schedule):
    config = compose(["model.num_layers=8", "topology.pipeline_parallel=2", *words])
    assert Pipeline.of(config.topology, 4).schedule == schedule


def schedules(most_stages: int) -> list[Pipeline]:
    return [
        Pipeline(schedule, stages, parts, count)
        for stages in range(2, most_stages + 1)
        for schedule, parts in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3))
        for count in range(1, 25)
        if parts == 1 or count % stages == 0
    ]


def test_every_schedule_ends_and_idles_as_the_formula_says():
    for each in schedules(8):
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
