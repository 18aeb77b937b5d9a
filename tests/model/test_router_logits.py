"""The product of a router: float32 logits, and gradients as exact as those of float32."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from mtrain_cli.model import router_logits as module
from mtrain_cli.model.router_logits import router_logits

TOKENS, HIDDEN, EXPERTS = 37, 64, 6


@pytest.fixture
def as_on_gpus(monkeypatch):
    """Take the way of GPUs. A float32 product of the same numbers is that of tensor cores."""
    monkeypatch.setattr(module, "_on_tensor_cores", lambda x, _: x.dtype == torch.bfloat16)
    monkeypatch.setattr(module, "_mixed_product", lambda a, b: a.float() @ b.float())


def tensors(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    shapes = (TOKENS, HIDDEN), (EXPERTS, HIDDEN), (TOKENS, EXPERTS)
    x, weight, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    return x.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), grad * 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_logits_and_gradients_equal_a_linear_layer_in_high_precision(dtype):
    x, weight, grad = tensors(dtype)
    high = torch.promote_types(dtype, torch.float32)
    found = router_logits(x, weight)
    again = [each.detach().clone().requires_grad_() for each in (x, weight)]
    wanted = functional.linear(*(each.to(high) for each in again))
    assert found.dtype == high
    assert torch.equal(found, wanted)
    found.backward(grad.to(high))
    wanted.backward(grad.to(high))
    for given, other in zip((x, weight), again, strict=True):
        assert torch.equal(given.grad, other.grad)


@pytest.mark.usefixtures("as_on_gpus")
def test_the_way_of_gpus_rounds_gradients_only_once():
    x, weight, grad = tensors(torch.bfloat16)
    out = router_logits(x, weight)
    torch.testing.assert_close(out, x.float() @ weight.float().t())
    out.backward(grad)
    exact = [grad.double() @ weight.double(), grad.double().t() @ x.double()]
    for given, wanted in zip((x, weight), exact, strict=True):
        assert given.grad.dtype == torch.bfloat16
        once = wanted.bfloat16()
        # One rounding: at most a neighbour where the exact value lies between two numbers.
        assert (given.grad != once).float().mean() < 0.02
        torch.testing.assert_close(given.grad, once, rtol=2**-7, atol=1e-9)


@pytest.mark.usefixtures("as_on_gpus")
def test_autograd_keeps_only_the_inputs():
    x, weight, _ = tensors(torch.bfloat16)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        router_logits(x, weight)
    assert {each.data_ptr() for each in kept} == {x.data_ptr(), weight.data_ptr()}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensor_cores_give_the_logits_of_float32():
    x, weight, grad = (each.detach().cuda() for each in tensors(torch.bfloat16))
    x.requires_grad_(), weight.requires_grad_()
    out = router_logits(x, weight)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-4)
    out.backward(grad)
    exact = grad.double() @ weight.double(), grad.double().t() @ x.double()
    for given, wanted in zip((x, weight), exact, strict=True):
        torch.testing.assert_close(given.grad, wanted.bfloat16(), rtol=2**-7, atol=1e-8)
