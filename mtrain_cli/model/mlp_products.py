"""The matrix products of an MLP, in the dtype of its weights or in fp8 (``train.fp8=mlp``).

In fp8, gate, up and down, forward and recomputed, and the gradients of their inputs multiply e4m3
numbers and add in float32. Gradients of weights stay in the compute dtype. An activation has one
scale per row, which the kernel that writes the tensor also computes. Gate and up share one scale,
so that their gradient is one product, and down has its own.

Shape suffixes are those of `feed_forward.py`; W are both of gate and up, K the summed elements.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mtrain_cli.model import fp8_rows
from mtrain_cli.model.fp8_rows import Fp8, Fp8Matrix

if TYPE_CHECKING:
    from mtrain_cli.model.feed_forward import FeedForwardWeights


class MlpProducts:
    """The products of an MLP in the dtype of its weights.

    Methods whose name ends with ``_back`` return gradients of inputs. What a method takes from
    another may be fp8: `rows` and `gated` return inputs of products, and `gate_backward` returns
    the one of `gate_up_back` last.

    elementwise: `feed_forward._gated` and `feed_forward._gate_backward`, possibly compiled.
    """

    def __init__(
        self, weights: FeedForwardWeights, elementwise: tuple[Callable[..., Any], ...]
    ) -> None:
        self.weights = weights
        self._gated, self._gate_backward = elementwise

    def rows(self, input_SK: Tensor) -> Any:
        """Return activations as the input of a product."""
        return input_SK

    def gate_up(self, n_SC: Any) -> tuple[Tensor, Tensor]:
        return n_SC @ self.weights.gate_IC.t(), n_SC @ self.weights.up_IC.t()

    def gated(self, gate_SI: Tensor, up_SI: Tensor) -> Any:
        """Return silu(gate) * up as the input of `down`."""
        return self._gated(gate_SI, up_SI)

    def down(self, inner_SI: Any, out: Tensor | None = None) -> Tensor:
        return torch.mm(inner_SI, self.weights.down_CI.t(), out=out)

    def down_back(self, grad_SC: Any) -> Tensor:
        return grad_SC @ self.weights.down_CI

    def gate_backward(
        self, gate_SI: Tensor, up_SI: Tensor, dinner_SI: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Return silu(gate) * up, and the gradients of gate and of up. Overwrite the inputs."""
        inner_SI, dgate_SI, dup_SI = self._gate_backward(gate_SI, up_SI, dinner_SI)
        return inner_SI, dgate_SI, dup_SI, (dgate_SI, dup_SI)

    def gate_up_back(self, gradients: Any) -> Tensor:
        dgate_SI, dup_SI = gradients
        dn_SC = dgate_SI @ self.weights.gate_IC
        dn_SC += dup_SI @ self.weights.up_IC
        return dn_SC


class Fp8Products(MlpProducts):
    """The products of an MLP in fp8, whose weights are rounded once in each pass of a layer."""

    def __init__(self, weights: FeedForwardWeights) -> None:
        on_gpu = weights.down_CI.is_cuda
        self.weights, self._kernels = weights, _kernels() if on_gpu else fp8_rows

    @cached_property
    def _scales(self) -> tuple[Tensor, Tensor]:
        gate_IC, up_IC, down_CI = self.weights[2:]
        gate_up = torch.maximum(fp8_rows.scale_of(gate_IC), fp8_rows.scale_of(up_IC))
        return gate_up, fp8_rows.scale_of(down_CI)

    def _weight(self, *matrices: Tensor, transposed: bool = False) -> Fp8Matrix:
        is_down = matrices[0] is self.weights.down_CI
        scale = self._scales[is_down]
        return self._kernels.cast_matrix([m.detach() for m in matrices], scale, transposed)

    @cached_property
    def _gate_up_WC(self) -> Fp8Matrix:
        return self._weight(self.weights.gate_IC, self.weights.up_IC)

    @cached_property
    def _gate_up_CW(self) -> Fp8Matrix:
        return self._weight(self.weights.gate_IC, self.weights.up_IC, transposed=True)

    @cached_property
    def _down_CI(self) -> Fp8Matrix:
        return self._weight(self.weights.down_CI)

    @cached_property
    def _down_IC(self) -> Fp8Matrix:
        return self._weight(self.weights.down_CI, transposed=True)

    def rows(self, input_SK: Tensor) -> Fp8:
        return self._kernels.cast_rows(input_SK)

    def gated(self, gate_SI: Tensor, up_SI: Tensor) -> Fp8:
        return self._kernels.gated_rows(gate_SI, up_SI)

    def gate_up(self, n_SC: Fp8) -> tuple[Tensor, Tensor]:
        gate_SI, up_SI = self._product(n_SC, self._gate_up_WC).chunk(2, 1)
        return gate_SI, up_SI

    def down(self, inner_SI: Fp8, out: Tensor | None = None) -> Tensor:
        return self._product(inner_SI, self._down_CI, out=out)

    def down_back(self, grad_SC: Fp8) -> Tensor:
        return self._product(grad_SC, self._down_IC, exact_sums=True)

    def gate_backward(
        self, gate_SI: Tensor, up_SI: Tensor, dinner_SI: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Fp8]:
        return self._kernels.gate_backward_rows(gate_SI, up_SI, dinner_SI)

    def gate_up_back(self, gradients: Fp8) -> Tensor:
        return self._product(gradients, self._gate_up_CW, exact_sums=True)

    def _product(
        self, left: Fp8, right: Fp8Matrix, *, out: Tensor | None = None, exact_sums: bool = False
    ) -> Tensor:
        dtype = self.weights.down_CI.dtype
        if not left.values_SK.is_cuda:
            product = left.values_SK.float() @ right.values_NK.float().t()
            product = (product * left.scales_S1 * right.scales_1N).to(dtype)
            return product if out is None else out.copy_(product)
        # Fast sums keep about 14 bits, too few for gradients (arXiv:2412.19437, section 3.3).
        options: dict[str, Any] = {"use_fast_accum": not exact_sums, "out_dtype": dtype}
        if out is not None:
            options["out"] = out
        scales = left.scales_S1, right.scales_1N
        return torch._scaled_mm(left.values_SK, right.values_NK.t(), *scales, **options)


def _kernels() -> ModuleType:
    from mtrain_cli.kernels.triton import fp8_rows

    return fp8_rows
