"""Stages of a pipeline exchange messages in the order of a schedule."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import gloo
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mtrain_cli.launch.environment import ParallelDims
from mtrain_cli.parallel.pipeline_group import PipelineExecutor, make_pipeline_group
from mtrain_cli.parallel.pipeline_schedule import Pipeline
from mtrain_cli.parallel.recording import Recorder, Span
from mtrain_cli.parallel.transport import ExchangeError

CPU = torch.device("cpu")


class Arithmetic:
    """Stand-in for a stage: forward appends its number as a digit, backward doubles.

    Each micro-batch starts with its own number. sent_back: gradients that reach the first stage.
    """

    def __init__(self, last: int) -> None:
        self.last = last
        self.ends: dict[int, float] = {}
        self.sent_back: dict[int, float] = {}

    def received_like(self, micro_batch: int) -> Tensor:  # noqa: ARG002
        return torch.empty(3)

    def forward(self, virtual_stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        start = torch.full((3,), float(micro_batch)) if received is None else received
        result = 10 * start + virtual_stage
        if virtual_stage == self.last:
            self.ends[micro_batch] = result[0].item()
        return result

    def backward(
        self, virtual_stage: int, micro_batch: int, gradient: Tensor | None
    ) -> Tensor | None:
        own = 2 * (torch.full((3,), micro_batch + 1.0) if gradient is None else gradient)
        if virtual_stage == 0:
            self.sent_back[micro_batch] = own[0].item()
            return None
        return own


def run(rank: int, world: int, schedule: str, parts: int, count: int) -> dict[str, Any]:
    """Run a step and an evaluation on pipelines of ``world / 2`` stages."""
    dims = ParallelDims.of(world, pp=world // 2, cp=1)
    pipeline = Pipeline(schedule, world // 2, parts, count)
    group = make_pipeline_group(rank, dims, pipeline, CPU, tied=True)
    executor, passes = PipelineExecutor(group, pipeline), Arithmetic(pipeline.last)
    for _ in range(2):
        executor.run(pipeline.actions(group.stage), passes)
    evaluated = Arithmetic(pipeline.last)
    executor.run(pipeline.forward_actions(group.stage), evaluated)
    shared = torch.tensor([float(rank + 1)])
    group.sum_over_ends(shared)
    return {
        "ranks": group.ranks,
        "ends": passes.ends,
        "evaluated": evaluated.ends,
        "sent_back": passes.sent_back,
        "shared": shared.item(),
    }


@pytest.mark.parametrize(
    ("world", "schedule", "parts", "count"),
    [(4, "1f1b", 1, 5), (4, "gpipe", 1, 4), (4, "interleaved", 2, 4), (6, "1f1b", 1, 2)],
)
def test_results_pass_through_all_stages_and_gradients_back(world, schedule, parts, count):
    stages = world // 2
    digits = "".join(str(n) for n in range(stages * parts))
    ends = {n: float(f"{n}{digits}") for n in range(count)}
    for rank, found in enumerate(gloo.run(world, run, schedule, parts, count)):
        stage, place = divmod(rank, 2)
        assert found["ranks"] == tuple(place + 2 * n for n in range(stages))
        assert found["ends"] == found["evaluated"] == (ends if stage == stages - 1 else {})
        back = {n: (n + 1.0) * 2 ** (stages * parts) for n in range(count)}
        assert found["sent_back"] == (back if stage == 0 else {})
        both = (place + 1) + (place + 2 * (stages - 1) + 1)
        assert found["shared"] == (both if stage in (0, stages - 1) else rank + 1)


def first_messages(rank: int, world: int) -> list[tuple[str, int]]:
    """Return the operation and the peer of each message that making the channels sends."""
    messages = []
    send_all = dist.batch_isend_irecv

    def watched(operations: list[dist.P2POp]) -> list[dist.Work]:
        (only,) = operations
        messages.append((only.op.__name__, only.peer))
        return send_all(operations)

    dist.batch_isend_irecv = watched
    dims, pipeline = ParallelDims.of(world, pp=world, cp=1), Pipeline("interleaved", 3, 2, 3)
    make_pipeline_group(rank, dims, pipeline, CPU)
    dist.batch_isend_irecv = send_all
    return messages


def test_each_channel_connects_before_the_first_step_and_in_one_order():
    messages = gloo.run(3, first_messages)
    hops = [(0, 1), (1, 2), (2, 0), (1, 0), (2, 1), (0, 2)]
    for rank, found in enumerate(messages):
        own = [("isend", b) if a == rank else ("irecv", a) for a, b in hops if rank in (a, b)]
        assert found == own


class Slow(Arithmetic):
    def forward(self, virtual_stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        if virtual_stage == 0 and micro_batch == 1:
            time.sleep(6)
        return super().forward(virtual_stage, micro_batch, received)


def lost(rank: int, world: int, dies: bool) -> str:
    """Return the error of a stage whose peer ends, or hangs longer than the timeout."""
    dims, pipeline = ParallelDims.of(world, pp=world, cp=1), Pipeline("1f1b", 2, 1, 3)
    group = make_pipeline_group(rank, dims, pipeline, CPU, timedelta(seconds=2))
    passes = Slow(1)
    if rank == 0 and dies:
        Slow.forward = lambda *_: os._exit(0)  # type: ignore[method-assign]
    try:
        PipelineExecutor(group, pipeline).run(pipeline.actions(rank), passes)
    except ExchangeError as error:
        text = str(error)
    else:
        text = "no error"
    if rank == 1:
        print(text)
        time.sleep(6)
    return text


@pytest.mark.slow
def test_a_stage_that_hangs_is_named_with_stage_and_micro_batch():
    began = time.monotonic()
    text = gloo.run(2, lost, False)[1]
    assert text.startswith(
        "pipeline, stage 1, micro-batch 1: activations did not arrive from rank 0 ("
    ), text
    assert time.monotonic() - began < 20


class Wide(Arithmetic):
    """Like `Arithmetic`, but every pass of the last stage takes at least 20 ms."""

    def forward(self, virtual_stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        time.sleep(0.02 * (virtual_stage == self.last))
        return super().forward(virtual_stage, micro_batch, received)


def recorded(rank: int, world: int) -> list[Span]:
    dims, pipeline = ParallelDims.of(world, pp=world, cp=1), Pipeline("interleaved", 2, 2, 2)
    group = make_pipeline_group(rank, dims, pipeline, CPU)
    recorder = Recorder(CPU)
    executor = PipelineExecutor(group, pipeline, recorder)
    executor.run(pipeline.actions(rank), Wide(pipeline.last))  # nothing has started: no spans
    recorder.start()
    executor.run(pipeline.actions(rank), Wide(pipeline.last))
    return recorder.read()


def test_a_recorder_gets_every_pass_and_every_wait():
    pipeline = Pipeline("interleaved", 2, 2, 2)
    for rank, spans in enumerate(gloo.run(2, recorded)):
        assert {(span.kind, span.layer) for span in spans} == {("stage", -1), ("wait", -1)}
        passes = [span for span in spans if span.kind == "stage"]
        assert [(s.direction, s.step, s.micro) for s in passes] == [
            (action.kind, action.virtual_stage, action.micro_batch)
            for action in pipeline.computations(rank)
        ]
        waits = [span for span in spans if span.kind == "wait"]
        messages = [a for a in pipeline.actions(rank) if a.payload]
        assert sorted((s.direction, s.message.payload, s.step, s.micro) for s in waits) == sorted(
            (
                "forward" if a.payload == "activations" else "backward",
                a.payload,
                a.virtual_stage,
                a.micro_batch,
            )
            for a in messages
        )
        for span in waits:
            assert (span.message.link, span.message.size) == ("stage", 3 * 4)
            assert {span.message.to, span.message.source} == {1 - rank, -1}
        if rank == 0:  # it waits for the gradients of the last virtual stage, on rank 1
            (first,) = (
                span
                for span in waits
                if (span.message.source, span.direction, span.step, span.micro)
                == (1, "backward", 2, 0)
            )
            assert first.seconds > 0.005
