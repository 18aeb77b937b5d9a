"""The product of a router: float32 logits of bfloat16 tokens, on tensor cores.

Shape suffixes: T tokens, C hidden size, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mtrain_cli.attention.partials import accumulation_dtype


def router_logits(x_TC: Tensor, weight_EC: Tensor) -> Tensor:
    """Return ``x @ weight.T`` in float32, or in float64 for float64 inputs, ``[T, E]``.

    A product of two bfloat16 numbers is exact in float32, and the sum is float32, so the result is
    that of a float32 product up to the order of the sum. On a GPU, tensor cores compute it without
    a float32 copy of the tokens. Autograd keeps only the inputs, in their own dtype.
    """
    return _RouterLogits.apply(x_TC, weight_EC)


class _RouterLogits(torch.autograd.Function):
    """PyTorch has no derivative of a product whose result has another dtype."""

    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, weight_EC: Tensor) -> Tensor:
        ctx.save_for_backward(x_TC, weight_EC)
        if _on_tensor_cores(x_TC, weight_EC):
            return _mixed_product(x_TC, weight_EC.t())
        high = accumulation_dtype(x_TC.dtype)
        return functional.linear(x_TC.to(high), weight_EC.to(high))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TE: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x_TC, weight_EC = ctx.saved_tensors
        compute = _split_gradients if _on_tensor_cores(x_TC, weight_EC) else _gradients
        return compute(grad_TE, x_TC, weight_EC)


def _gradients(grad_TE: Tensor, x_TC: Tensor, weight_EC: Tensor) -> tuple[Tensor, Tensor]:
    high = grad_TE.dtype
    dx_TC = (grad_TE @ weight_EC.to(high)).to(x_TC.dtype)
    return dx_TC, (grad_TE.t() @ x_TC.to(high)).to(weight_EC.dtype)


def _split_gradients(grad_TE: Tensor, x_TC: Tensor, weight_EC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of tokens and weight with products of bfloat16 numbers."""
    # A float32 number is the sum of two bfloat16 numbers with a relative error of at most 2^-16, far
    # below the rounding of the results to bfloat16. So each product has two terms.
    low = x_TC.dtype
    first_TE = grad_TE.to(low)
    terms = torch.cat([first_TE, (grad_TE - first_TE).to(low)], 1)  # [T, 2 E]
    dx_TC = terms @ torch.cat([weight_EC, weight_EC])
    of_terms = _mixed_product(terms.t(), x_TC).unflatten(0, (2, -1))
    return dx_TC, of_terms.sum(0).to(weight_EC.dtype)


def _on_tensor_cores(x_TC: Tensor, weight_EC: Tensor) -> bool:
    return x_TC.is_cuda and x_TC.dtype == weight_EC.dtype == torch.bfloat16


def _mixed_product(left: Tensor, right: Tensor) -> Tensor:
    """Return the float32 product of bfloat16 matrices. Only GPUs support it."""
    return torch.mm(left, right, out_dtype=torch.float32)
