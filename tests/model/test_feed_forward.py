"""Output projection, norm and MLP in tiles equal the same formula under autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from mtrain_cli.model.feed_forward import FeedForwardOptions, FeedForwardWeights, feed_forward
from mtrain_cli.model.tiling import LayerExecution

BATCH, TOKENS, HIDDEN, HEADS, HEAD_DIM, WIDE, EPS = 2, 9, 6, 3, 4, 10, 1e-6


def inputs() -> list[Tensor]:
    """Return x, attention output, and the five weights, float64."""
    generator = torch.Generator().manual_seed(3)
    shapes = (
        (BATCH, TOKENS, HIDDEN),
        (BATCH, TOKENS, HEADS, HEAD_DIM),
        (HIDDEN, HEADS * HEAD_DIM),
        (HIDDEN,),
        (WIDE, HIDDEN),
        (WIDE, HIDDEN),
        (HIDDEN, WIDE),
    )
    return [
        torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes
    ]


def plain(x: Tensor, out: Tensor, o: Tensor, norm: Tensor, gate: Tensor, up: Tensor, down: Tensor):
    h = x + out.flatten(-2) @ o.t()
    n = functional.rms_norm(h, norm.shape, norm, EPS)
    return h + (functional.silu(n @ gate.t()) * (n @ up.t())) @ down.t()


def options(rows: int, **changes: bool) -> FeedForwardOptions:
    return FeedForwardOptions(LayerExecution(), EPS, rows, **changes)


@pytest.mark.parametrize("keep_products", [False, True])
@pytest.mark.parametrize("rows", [1, 4, 6, BATCH * TOKENS])
def test_result_and_all_gradients_equal_those_of_autograd(rows, keep_products):
    tensors, expected_tensors = inputs(), inputs()
    x, out, *weights = tensors
    result = feed_forward(
        x, out, FeedForwardWeights(*weights), options(rows, keep_products=keep_products)
    )
    expected = plain(*expected_tensors)
    torch.testing.assert_close(result, expected)
    upstream = torch.randn(expected.shape, dtype=torch.float64)
    for got, wanted in zip(
        torch.autograd.grad(result, tensors, upstream),
        torch.autograd.grad(expected, expected_tensors, upstream),
        strict=True,
    ):
        torch.testing.assert_close(got, wanted)


def test_inputs_alone_are_enough_for_backward():
    tensors, expected_tensors = inputs(), inputs()
    x, out, *weights = tensors
    placeholder = feed_forward(x, out, FeedForwardWeights(*weights), options(5, inputs_only=True))
    upstream = torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.float64)
    got = torch.autograd.grad(placeholder, tensors, upstream)
    wanted = torch.autograd.grad(plain(*expected_tensors), expected_tensors, upstream)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)
