"""A mixture of experts against its definition, and recomputation that never routes again."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import ClassVar

import pytest
import torch
from moe_models import choices, layer_by_definition, make_module, moe_model
from tiny_models import loss_and_gradients, make_decoder
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from mtrain_cli.model import experts
from mtrain_cli.model.decoder import SwiGLU
from mtrain_cli.model.experts import record_experts, reset_biases
from mtrain_cli.parallel.recording import Recorder

SETTINGS = [
    {},
    {"normalize": False},
    {"score": "sigmoid", "scale": 2.5},
    {"score": "sigmoid", "normalize": False, "top_k": 3},
    {"shared_size": 20},
    {"top_k": 1},
    {"top_k": 6},
]


def inputs(seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 11, 40, dtype=torch.float64, generator=generator)


def module_of(settings: dict, seed: int = 0):
    model = moe_model(moe=settings)
    width = model.moe.shared_size
    return make_module(model, SwiGLU(model.hidden_size, width) if width else None, seed)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("bias", [0.0, 0.2])
def test_output_and_all_gradients_equal_a_loop_over_tokens(settings, bias):
    module = module_of(settings)
    module.selection_bias = torch.linspace(-bias, bias, 6).roll(2)
    x, again = (inputs().requires_grad_() for _ in range(2))
    grad = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(2))
    out = module(x)
    out.backward(grad)
    found = {"x": x.grad, **{n: p.grad.clone() for n, p in module.named_parameters()}}
    module.zero_grad()
    expected = layer_by_definition(module, again, choices(module, x.detach()))
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    expected.backward(grad)
    wanted = {"x": again.grad, **{n: p.grad for n, p in module.named_parameters()}}
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12, msg=name)


def test_a_bias_changes_the_choice_but_not_the_scores():
    module, x = module_of({"normalize": False, "top_k": 1}), inputs()
    module.selection_bias = torch.tensor([0.0, 0, 0, 9, 0, 0])
    assert (choices(module, x) == 3).all()
    scores = (x @ module.gate.weight.T).softmax(-1)[..., 3:4]
    gate, up = (x @ module.experts.gate_up[3].T).chunk(2, -1)
    wanted = (torch.nn.functional.silu(gate) * up) @ module.experts.down[3].T * scores
    torch.testing.assert_close(module(x), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_second_pass_of_a_checkpoint_keeps_the_choice_bitwise(dtype, monkeypatch):
    model = moe_model(moe={"shared_size": 8, "dense_layers": 1})
    calls = []
    choose = experts.choose
    monkeypatch.setattr(experts, "choose", lambda *args: calls.append(1) or choose(*args))
    found = {}
    for mode in ("none", "selective", "full"):
        calls.clear()
        decoder = make_decoder(model, checkpoint=mode).to(dtype)
        reset_biases(decoder)
        found[mode] = loss_and_gradients(decoder)
        assert len(calls) == 2, "one choice for each of two layers with experts"
    loss, gradients = found["none"]
    for mode in ("selective", "full"):
        assert torch.equal(found[mode][0], loss)
        for name, gradient in gradients.items():
            # Layers with one MLP have a backward pass of their own with checkpoints.
            if name.startswith(("layers.1.mlp", "layers.2.mlp")):
                assert torch.equal(found[mode][1][name], gradient), (mode, name)


def test_the_bias_follows_the_loads():
    module = module_of({})
    module.change_bias(torch.tensor([10.0, 0, 4, 4, 3, 3]), 0.01)
    torch.testing.assert_close(module.selection_bias, torch.tensor([-0.01, 0.01, 0, 0, 0.01, 0.01]))


# Clocks of the cores of a virtual machine differ by microseconds; a pass takes ten milliseconds.
CLOCK = 1e-3


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
        assert span.start <= begin + CLOCK
        assert end <= span.start + span.seconds + CLOCK
    ordered = list(spans.values())
    for span, following in pairwise(ordered):
        assert span.start + span.seconds <= following.start + CLOCK, "spans of passes are apart"


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
    spans = {
        (name.removeprefix("mtrain."), int(layer), way): e.time_range
        for e in recorded.events()
        for name, layer, way in [e.name.split("/")] * (e.name.count("/") == 2)
    }
    assert set(spans) == {("experts", 5, "forward"), ("experts", 5, "backward")}
    assert all(span.elapsed_us() >= 10_000 for span in spans.values())
