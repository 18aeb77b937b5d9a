"""The fused operations of experts give what separate operations give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moe_models import make_module, moe_model

from mtrain_cli.model import expert_kernels, grouped_products
from mtrain_cli.model.experts import compute_experts
from mtrain_cli.model.routing import Decision, decide_alone

TOKENS, EXPERTS = 23, 6
NAMES = "out", "x", "scores", "gate_up", "down"


@pytest.fixture(autouse=True)
def rows_behind_the_last_group(monkeypatch):
    """Fill them with NaN, as a grouped product on a GPU may."""
    product = grouped_products._by_expert

    def poisoned(rows: torch.Tensor, weights: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        result = product(rows, weights, ends)
        result[int(ends[-1]) :] = torch.nan
        return result

    monkeypatch.setattr(grouped_products, "_by_expert", poisoned)


@pytest.fixture
def uncompiled(monkeypatch):
    monkeypatch.setattr(expert_kernels, "_compiled", lambda function: function)


def decision(tokens: int, beyond: int) -> Decision:
    """Return a decision with an empty expert, and with pairs beyond the capacity."""
    chosen = torch.rand(tokens, EXPERTS - 1, generator=torch.Generator().manual_seed(3)).topk(2)
    found = decide_alone(chosen.indices, EXPERTS)
    return found._replace(ends_E=found.ends_E.clamp(max=2 * tokens - beyond))


def computed(dtype: torch.dtype, beyond: int = 5, **options: Any) -> dict[str, torch.Tensor]:
    """Return output and gradients of the experts of some tokens."""
    module = make_module(moe_model()).to(dtype)
    generator = torch.Generator().manual_seed(1)
    x, grad, scores = (torch.randn(TOKENS, n, generator=generator).to(dtype) for n in (40, 40, 2))
    inputs = x, scores.to(torch.promote_types(dtype, torch.float32))
    for each in inputs:
        each.requires_grad_()
    options = {"bounds": [0, TOKENS], "recompute": False, "inputs_only": False} | options
    out = compute_experts(*inputs, module.experts, decision(TOKENS, beyond), **options)
    out.backward(grad)
    weights = module.experts.gate_up.grad, module.experts.down.grad
    found = (out.detach(), *(each.grad for each in inputs), *weights)
    return dict(zip(NAMES, found, strict=True))


@pytest.mark.parametrize("bounds", [[0, TOKENS], [0, 8, 15, TOKENS]])
@pytest.mark.parametrize("beyond", [0, 5, 2 * TOKENS])
@pytest.mark.usefixtures("uncompiled")
def test_output_and_gradients_equal_those_of_separate_operations(bounds, beyond):
    for recompute in (False, True):
        options = {"beyond": beyond, "bounds": bounds, "recompute": recompute}
        expected, found = (
            computed(torch.float64, compile=each, **options) for each in (False, True)
        )
        for name in NAMES:
            assert expected[name].isfinite().all(), name
            torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_compiled_operations_in_bfloat16_are_as_close_as_separate_ones():
    exact, apart, fused = (
        computed(dtype, compile=fused)
        for dtype, fused in (
            (torch.float64, False),
            (torch.bfloat16, False),
            (torch.bfloat16, True),
        )
    )
    for name in NAMES:
        errors = [float((each[name].double() - exact[name]).norm()) for each in (apart, fused)]
        assert errors[1] < 1.2 * errors[0], name
