"""The products of q, k and v in fp8 (``train.fp8=all``), as those of `mlp_products.py`.

The weights share one scale, so that forward and the gradient of their input are one product.

Shape suffixes: B batch, N tokens, S tokens of all sequences, C hidden size, A width of q, k or v, W
of all three.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from mtrain_cli.model import mlp_products
from mtrain_cli.model.mlp_products import Fp8Weight


def qkv_products(
    x_BNC: Tensor,
    norm_C: Tensor | None,
    eps: float,
    weights_AC: tuple[Tensor, ...],
    normalized: Callable[[Tensor, Tensor, float], Tensor],
) -> Tensor:
    """Return products of norm(x), or of x without a norm, with the weights side by side.

    normalized: `feed_forward.normalized`, possibly compiled.
    """
    return _QkvProducts.apply(x_BNC, norm_C, eps, normalized, *weights_AC)


class _QkvProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BNC: Tensor, norm_C: Tensor | None, eps: float,
        normalized: Callable[..., Tensor], *weights_AC: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x_BNC, norm_C, *weights_AC)
        ctx.normalized = partial(normalized, eps=eps)
        kernels, x_SC = mlp_products.kernels_of(x_BNC), x_BNC.flatten(0, 1)
        if norm_C is None:
            rows = kernels.cast_rows(x_SC)
        else:
            rows = kernels.normed_rows(x_SC, norm_C.detach(), eps, None, False)[2]
        return Fp8Weight(*weights_AC).product(rows).unflatten(0, x_BNC.shape[:2])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BNW: Tensor) -> tuple[Tensor | None, ...]:
        x_BNC, norm_C, *weights_AC = ctx.saved_tensors
        leaves = x_BNC.detach(), norm_C
        if norm_C is not None:  # the kernel of forward wrote no n in the compute dtype
            leaves = x_BNC.detach().requires_grad_(), norm_C.detach().requires_grad_()
            with torch.enable_grad():
                x_BNC = ctx.normalized(*leaves)
            edge = get_gradient_edge(x_BNC)
        grad_SW = grad_BNW.flatten(0, 1)
        gradients = grad_SW.t() @ x_BNC.detach().flatten(0, 1)
        del x_BNC
        rows = mlp_products.kernels_of(grad_SW).cast_rows(grad_SW)
        dx_BNC, dnorm_C = Fp8Weight(*weights_AC).product_back(rows).view_as(leaves[0]), None
        del rows
        if norm_C is not None:
            dx_BNC, dnorm_C = torch.autograd.grad(edge, leaves, dx_BNC)
        return dx_BNC, dnorm_C, None, None, *gradients.split([len(w) for w in weights_AC])
