"""The compute timer measures a layer after its attention, once per step, in the forward pass."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mtrain_cli.training.callback import LAYERS, ComputeTimer


class Clock:
    """A clock that stands still while the test computes."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(
        "mtrain_cli.training.callback.time", SimpleNamespace(perf_counter=clock.perf_counter)
    )
    return clock


class Layer(nn.Module):
    """A layer whose attention takes 100 s, and whose other work takes `seconds`."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, attend, clock: Clock, seconds: float) -> None:
        attend(clock, None, None, self.index)
        clock.now += seconds


def attention(clock: Clock, *_: object) -> None:
    clock.now += 100


def made(layers: int) -> tuple[list[Layer], ComputeTimer]:
    model = [Layer(index) for index in range(layers)]
    return model, ComputeTimer(dict(enumerate(model)), torch.device("cpu"))


def forward(model: list[Layer], timer: ComputeTimer, clock: Clock, seconds: float = 2) -> None:
    attend = timer.wrap_attention(None, attention)
    for layer in model:
        layer(attend, clock, seconds)


def test_a_step_counts_what_layers_do_after_attention(clock):
    model, timer = made(3)
    timer.before_step()
    assert timer.seconds == 0, "no step has been measured"
    forward(model, timer, clock)
    timer.before_step()
    assert timer.seconds == 6
    timer.before_step()
    assert timer.seconds == 0, "the last step ran no layer"


def test_later_micro_batches_and_recomputation_do_not_count(clock):
    model, timer = made(2)
    timer.before_step()
    forward(model, timer, clock)
    forward(model, timer, clock, seconds=50)
    timer.before_step()
    assert timer.seconds == 4


def test_a_step_that_stops_early_is_not_measured(clock):
    model, timer = made(2)
    timer.before_step()
    forward(model[:1], timer, clock)
    timer.before_step()
    assert timer.seconds == 0


@pytest.mark.parametrize("layers", [1, LAYERS, 3 * LAYERS])
def test_at_most_eight_layers_are_timed_evenly_spread(layers):
    timed = [layer.index for layer in made(layers)[0] if layer._forward_hooks]
    assert len(timed) == min(layers, LAYERS)
    assert len({after - before for before, after in pairwise(timed)}) <= 1


def test_all_stages_of_a_pipeline_time_as_many_layers(clock):
    """A stage with layers 4 to 9, where another stage has three layers."""
    layers = {number: Layer(number) for number in range(4, 10)}
    timer = ComputeTimer(layers, torch.device("cpu"), most=3)
    timer.before_step()
    forward(list(layers.values()), timer, clock)
    timer.before_step()
    assert timer.seconds == 3 * 2
    assert [number for number, layer in layers.items() if layer._forward_hooks] == [4, 6, 8]


def test_waits_for_other_workers_do_not_count(clock):
    """Each layer waits 5 s of its 2 + 5 s. Waits outside a timed part change nothing."""
    model, timer = made(2)
    attend = timer.wrap_attention(None, attention)

    def wait() -> None:
        with timer.waiting():
            clock.now += 5

    class Sharing(Layer):
        def forward(self, attend, clock, seconds):
            wait()
            attend(clock, None, None, self.index)
            clock.now += seconds
            wait()

    for layer in model:
        layer.__class__ = Sharing
    timer.before_step()
    for layer in model:
        layer(attend, clock, 2)
        wait()
    timer.before_step()
    assert timer.seconds == 4
    for layer in model:
        layer(attend, clock, 3)
    timer.before_step()
    assert timer.seconds == 6
