"""An MLP in fp8: its errors stay those of the format, and what is not finite stays so."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mtrain_cli.model import fp8_rows
from mtrain_cli.model.feed_forward import FeedForwardOptions, FeedForwardWeights, feed_forward
from mtrain_cli.model.fp8_rows import Fp8
from mtrain_cli.model.mlp_products import Fp8Products
from mtrain_cli.model.tiling import LayerExecution

TOKENS, HIDDEN, WIDE, EPS = 256, 512, 1376, 1e-6
# Relative errors of one MLP in percent, largest of Gaussian data and of data with outliers, 1.3
# times: e4m3 has 3 bits of mantissa. Those of bfloat16 are 0.35.
LIMITS = {"result": 8.6, "x": 8.8, "gate": 7.6, "up": 7.6, "down": 7.1}


def inputs(outliers: bool) -> tuple[dict[str, Tensor], Tensor]:
    """Return the arguments of `feed_forward` in float32, and a gradient of its result."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    x, grad = normal(1, TOKENS, HIDDEN), normal(1, TOKENS, HIDDEN) * 1e-4
    if outliers:
        wide = torch.randperm(HIDDEN, generator=generator)[:4]
        x[..., wide] *= 40
        grad *= torch.exp(1.5 * normal(1, TOKENS, 1))
        grad[..., wide] *= 20
    tensors = {
        "x": x,
        "out": torch.zeros(1, TOKENS, 1, 16),
        "o": torch.zeros(HIDDEN, 16),
        "norm": torch.ones(HIDDEN),
        "gate": normal(WIDE, HIDDEN) * HIDDEN**-0.5,
        "up": 3 * normal(WIDE, HIDDEN) * HIDDEN**-0.5,
        "down": normal(HIDDEN, WIDE) * WIDE**-0.5,
    }
    return tensors, grad


def mlp(
    tensors: dict[str, Tensor], grad: Tensor, dtype: torch.dtype, *, rows: int = TOKENS, **how: bool
) -> dict[str, Tensor]:
    """Return the MLP's part of the result, without x, and the gradients, in float32."""
    keep = how.pop("keep_products", False)
    given = {name: t.to(dtype).requires_grad_() for name, t in tensors.items()}
    x, out, *weights = given.values()
    options = FeedForwardOptions(LayerExecution(**how), EPS, rows, keep_products=keep)
    result = feed_forward(x, out, FeedForwardWeights(*weights), options)
    found = torch.autograd.grad(result, list(given.values()), grad.to(dtype))
    gradients = dict(zip(given, (g.float() for g in found), strict=True))
    gradients["x"] -= grad.to(dtype).float()
    return {"result": (result - x).detach().float(), **gradients}


def error(found: Tensor, expected: Tensor) -> float:
    return 100 * float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("keep_products", [False, True])
@pytest.mark.parametrize("outliers", [False, True])
def test_errors_are_those_of_e4m3(outliers, keep_products):
    tensors, grad = inputs(outliers)
    exact = mlp(tensors, grad, torch.float32)
    found = mlp(tensors, grad, torch.bfloat16, fp8=True, keep_products=keep_products)
    errors = {name: error(found[name], exact[name]) for name in LIMITS}
    assert all(1.5 < errors[name] < limit for name, limit in LIMITS.items()), errors


def test_tiles_and_kept_products_change_only_the_order_of_sums():
    tensors, grad = inputs(outliers=False)
    whole = mlp(tensors, grad, torch.bfloat16, fp8=True)
    for changes in ({"rows": 96}, {"rows": 100, "keep_products": True}):
        found = mlp(tensors, grad, torch.bfloat16, fp8=True, **changes)
        assert torch.equal(found["result"], whole["result"])
        assert all(error(found[name], whole[name]) < 0.5 for name in LIMITS)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["x", "gate", "down"])
def test_what_is_not_finite_is_not_rounded_to_a_finite_number(where, value):
    tensors, grad = inputs(outliers=False)
    tensors[where].view(-1, tensors[where].shape[-1])[7, 3] = value
    result = mlp(tensors, grad, torch.bfloat16, fp8=True)["result"]
    assert not result[0, 7 if where == "x" else 0].isfinite().all()


def test_a_gradient_that_is_not_finite_reaches_the_weights():
    tensors, grad = inputs(outliers=False)
    grad[0, 7, 3] = float("inf")
    found = mlp(tensors, grad, torch.bfloat16, fp8=True)
    assert not any(found[name].isfinite().all() for name in ("x", "gate", "up", "down"))


def test_rows_of_zeros_stay_zeros():
    rows = torch.zeros(3, 16, dtype=torch.bfloat16)
    rows[1] = 2.0
    values, scales = fp8_rows.cast_rows(rows)
    torch.testing.assert_close(values.float() * scales, rows.float())


def test_a_scale_spans_e4m3():
    tensors, _ = inputs(outliers=True)
    for rows in (tensors["x"][0], tensors["gate"]):
        values, scales = fp8_rows.cast_rows(rows)
        assert (values.float().abs().amax(1) == torch.finfo(fp8_rows.E4M3).max).all()
        # Half of a step of three bits of mantissa, or of the smallest step of the scale.
        off = (values.float() * scales - rows).abs()
        assert (off <= torch.maximum(rows.abs() / 16, scales * 2**-10) * 1.001).all()


def test_gate_and_up_share_a_scale():
    gate, up = torch.randn(6, 4), 5 * torch.randn(3, 4)
    scale = torch.maximum(fp8_rows.scale_of(gate), fp8_rows.scale_of(up))
    below = fp8_rows.cast_matrix([gate, up], scale, transposed=False)
    beside = fp8_rows.cast_matrix([gate, up], scale, transposed=True)
    assert torch.equal(below.values_NK.t().float(), beside.values_NK.float())
    assert below.scales_1N.shape == (1, 9)
    assert beside.scales_1N.shape == (1, 4)
    rounded = below.values_NK.float() * scale
    assert error(rounded, torch.cat([gate, up])) < 5


def test_the_gradients_of_the_gate_are_those_of_autograd():
    gate, up, dinner = (torch.randn(5, 32, dtype=torch.float64) for _ in range(3))
    leaves = gate.clone().requires_grad_(), up.clone().requires_grad_()
    inner = functional.silu(leaves[0]) * leaves[1]
    expected = [inner.detach(), *torch.autograd.grad(inner, leaves, dinner)]
    *found, both = fp8_rows.gate_backward_rows(gate.float(), up.float(), dinner.float())
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
    assert error(both.values_SK.float() * both.scales_S1, torch.cat(found[1:], 1)) < 5


def test_products_that_give_gradients_have_exact_sums(monkeypatch):
    tensors, _ = inputs(outliers=False)
    weights = (tensors[name].bfloat16() for name in ("o", "norm", "gate", "up", "down"))
    mlp, fast = Fp8Products(FeedForwardWeights(*weights)), []

    def product(left, right, *_, use_fast_accum, out_dtype):
        fast.append(use_fast_accum)
        return torch.zeros(left.shape[0], right.shape[1], dtype=out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    rows = Fp8(SimpleNamespace(is_cuda=True, shape=(4, 0)), torch.ones(4, 1))
    mlp.gate_up(rows)
    mlp.down(rows)
    assert fast == [True, True]
    mlp.down_back(rows)
    mlp.gate_up_back(rows)
    assert fast[2:] == [False, False]
