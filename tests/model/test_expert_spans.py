"""The spans of the experts begin and end around their own work, in both directions."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from mtrain_cli.model.expert_spans import record_experts
from mtrain_cli.parallel.profiler_labels import layer_of
from mtrain_cli.parallel.recording import Recorder


class _Slow(torch.autograd.Function):
    """Doubles its argument, and notes when each pass begins and ends."""

    passes: ClassVar[list[tuple[float, float]]] = []

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * _Slow.work(x)

    @staticmethod
    def backward(ctx, grad):
        _ = ctx.saved_tensors
        return 2 * _Slow.work(grad)

    @staticmethod
    def work(x):
        begin = time.perf_counter()
        time.sleep(0.01)
        _Slow.passes.append((begin, time.perf_counter()))
        return x


@pytest.mark.parametrize("again", [False, True])
def test_spans_cover_each_pass_and_not_the_second_forward_pass(again):
    recorder = Recorder(torch.device("cpu"))
    _Slow.passes.clear()

    def layer(x):
        second = bool(_Slow.passes)
        return record_experts(_Slow.apply, x, recorder, 3, again=second)

    x = torch.ones(4, requires_grad=True)
    recorder.start()
    out = checkpoint(layer, x, use_reentrant=False) if again else layer(x)
    assert out.tolist() == [2.0] * 4
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 4
    spans = {span.direction: span for span in recorder.read()}
    assert list(spans) == ["forward", *(["recompute"] if again else []), "backward"]
    assert {(span.kind, span.layer, span.step) for span in spans.values()} == {("experts", 3, -1)}
    for direction, (begin, end) in zip(spans, _Slow.passes, strict=True):
        span = spans[direction]
        assert span.start <= begin
        assert end <= span.start + span.seconds
    ordered = list(spans.values())
    for span, following in pairwise(ordered):
        assert span.start + span.seconds <= following.start, "spans of passes are apart"


def test_nothing_is_recorded_without_a_recorder_or_while_it_is_stopped():
    x = torch.ones(2, requires_grad=True)
    assert record_experts(lambda x: 2 * x, x, None, 0, again=False).tolist() == [2, 2]
    recorder = Recorder(torch.device("cpu"))
    record_experts(lambda x: 2 * x, x, recorder, 0, again=False).sum().backward()
    recorder.start()
    assert recorder.read() == []


def test_a_profiler_sees_the_passes_without_a_recorder():
    x = torch.ones(4, requires_grad=True)
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        record_experts(_Slow.apply, x, None, 5, again=False).sum().backward()
    spans = {layer_of(e.name): e.time_range for e in recorded.events() if layer_of(e.name)}
    assert set(spans) == {("experts", 5, "forward"), ("experts", 5, "backward")}
    assert all(span.elapsed_us() >= 10_000 for span in spans.values())
