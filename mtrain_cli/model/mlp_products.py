"""The matrix products after attention, in the dtype of their weights or in fp8 (``train.fp8``).

In fp8, products forward, recomputed and for the gradients of inputs multiply e4m3 numbers and add
in float32. Gradients of weights stay in the compute dtype. An activation has one scale per row,
which the kernel that writes the tensor also computes. Gate and up share one scale, so that their
gradient is one product, and down and the output projection have their own.

Shape suffixes are those of `feed_forward.py`; K are the summed elements of a product, N the others.
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
    """The products after attention in the dtype of their weights.

    Methods whose name ends with ``_back`` return gradients of inputs. What a method takes from
    another may be fp8: inputs of products come from `rows`, `normed` and `gated`, and the one of
    `gate_up_back` is the last result of `gate_backward`.

    elementwise: `feed_forward._join`, `feed_forward._gated` and `feed_forward._gate_backward`,
        possibly compiled.
    """

    def __init__(
        self, weights: FeedForwardWeights, elementwise: tuple[Callable[..., Any], ...]
    ) -> None:
        self.weights = weights
        self._join, self._gated, self._gate_backward = elementwise

    def output(self, out_SA: Tensor) -> Tensor:
        return out_SA @ self.weights.o_CA.t()

    def output_back(self, grad_SC: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.mm(grad_SC, self.weights.o_CA, out=out)

    def normed(
        self, x_RC: Tensor, projected_RC: Tensor, eps: float, needs_norm: bool
    ) -> tuple[Tensor, Tensor | None, Any]:
        """Return h = x + projected, its norm n if needed, and n as the input of `gate_up`."""
        del needs_norm
        # In forward the weight is a Parameter, in backward a Tensor. Compiled code would treat them
        # as two types and compile twice, so detach the weight.
        h_RC, n_RC = self._join(x_RC, projected_RC, self.weights.norm_C.detach(), eps)
        return h_RC, n_RC, n_RC

    def rows(self, input_SK: Tensor) -> Any:
        """Return activations as the input of a product."""
        return input_SK

    def gate_up(self, n_SC: Any) -> tuple[Tensor, Tensor]:
        return n_SC @ self.weights.gate_IC.t(), n_SC @ self.weights.up_IC.t()

    def gated(self, gate_up: tuple[Tensor, Tensor], keep: bool) -> tuple[Any, Any]:
        """Return silu(gate) * up as the input of `down`, and what to keep for `gate_backward`."""
        return self._gated(*gate_up), gate_up if keep else None

    def down(self, inner_SI: Any, out: Tensor | None = None) -> Tensor:
        return torch.mm(inner_SI, self.weights.down_CI.t(), out=out)

    def down_back(self, grad_SC: Any) -> Tensor:
        return grad_SC @ self.weights.down_CI

    def gate_backward(self, gate_up: Any, dinner_SI: Tensor) -> tuple[Tensor, Tensor, Tensor, Any]:
        """Return silu(gate) * up, and the gradients of gate and of up. Overwrite the inputs."""
        inner_SI, dgate_SI, dup_SI = self._gate_backward(*gate_up, dinner_SI)
        return inner_SI, dgate_SI, dup_SI, (dgate_SI, dup_SI)

    def gate_up_back(self, gradients: Any) -> Tensor:
        dgate_SI, dup_SI = gradients
        dn_SC = dgate_SI @ self.weights.gate_IC
        dn_SC += dup_SI @ self.weights.up_IC
        return dn_SC


class Fp8Products(MlpProducts):
    """The products after attention in fp8. Kept gate and up are e4m3, too.

    of_output: whether the output projection is in fp8.
    """

    def __init__(self, weights: FeedForwardWeights, *, of_output: bool = False) -> None:
        self.weights, self._kernels = weights, kernels_of(weights.down_CI)
        self._output = Fp8Weight(weights.o_CA) if of_output else None
        self._gate_up, self._down = Fp8Weight(*weights[2:4]), Fp8Weight(weights.down_CI)

    def output(self, out_SA: Tensor) -> Tensor:
        if self._output is None:
            return super().output(out_SA)
        return self._output.product(self.rows(out_SA))

    def output_back(self, grad_SC: Tensor, out: Tensor | None = None) -> Tensor:
        if self._output is None:
            return super().output_back(grad_SC, out)
        return self._output.product_back(self.rows(grad_SC), out)

    def normed(
        self, x_RC: Tensor, projected_RC: Tensor, eps: float, needs_norm: bool
    ) -> tuple[Tensor, Tensor | None, Fp8]:
        norm_C = self.weights.norm_C.detach()
        return self._kernels.normed_rows(x_RC, norm_C, eps, projected_RC, needs_norm)

    def rows(self, input_SK: Tensor) -> Fp8:
        return self._kernels.cast_rows(input_SK)

    def gated(self, gate_up: tuple[Tensor, Tensor], keep: bool) -> tuple[Fp8, Fp8 | None]:
        return self._kernels.gated_rows(*gate_up, keep)

    def gate_up(self, n_SC: Fp8) -> tuple[Tensor, Tensor]:
        gate_SI, up_SI = self._gate_up.product(n_SC).chunk(2, 1)
        return gate_SI, up_SI

    def down(self, inner_SI: Fp8, out: Tensor | None = None) -> Tensor:
        return self._down.product(inner_SI, out)

    def down_back(self, grad_SC: Fp8) -> Tensor:
        return self._down.product_back(grad_SC)

    def gate_backward(self, gate_up: Any, dinner_SI: Tensor) -> tuple[Tensor, Tensor, Tensor, Fp8]:
        return self._kernels.gate_backward_rows(gate_up, dinner_SI)

    def gate_up_back(self, gradients: Fp8) -> Tensor:
        return self._gate_up.product_back(gradients)


class Fp8Weight:
    """Matrices below each other in e4m3 with one scale, rounded once in each pass of a layer."""

    def __init__(self, *matrices_NK: Tensor) -> None:
        self._matrices = [matrix.detach() for matrix in matrices_NK]
        self._kernels = kernels_of(matrices_NK[0])

    @cached_property
    def _largest(self) -> Tensor:
        return self._kernels.largest_of(self._matrices)

    @cached_property
    def _below(self) -> Fp8Matrix:
        return self._kernels.cast_matrix(self._matrices, self._largest, transposed=False)

    @cached_property
    def _beside(self) -> Fp8Matrix:
        return self._kernels.cast_matrix(self._matrices, self._largest, transposed=True)

    def product(self, left_SK: Fp8, out: Tensor | None = None) -> Tensor:
        return product(left_SK, self._below, self._matrices[0].dtype, out)

    def product_back(self, grad_SN: Fp8, out: Tensor | None = None) -> Tensor:
        """Return the gradient of the input of `product`."""
        return product(grad_SN, self._beside, self._matrices[0].dtype, out, exact_sums=True)


def product(
    left: Fp8, right: Fp8Matrix, dtype: torch.dtype, out: Tensor | None, exact_sums: bool = False
) -> Tensor:
    """Multiply e4m3 numbers. exact_sums: add in float32 with all of its bits on a GPU, too."""
    if not left.values_SK.is_cuda:
        result = left.values_SK.float() @ right.values_NK.float().t()
        result = (result * left.scales_S1 * right.scales_1N).to(dtype)
        return result if out is None else out.copy_(result)
    # Fast sums keep about 14 bits, too few for gradients (arXiv:2412.19437, section 3.3).
    options: dict[str, Any] = {"use_fast_accum": not exact_sums, "out_dtype": dtype}
    if out is not None:
        options["out"] = out
    scales = left.scales_S1, right.scales_1N
    return torch._scaled_mm(left.values_SK, right.values_NK.t(), *scales, **options)


def kernels_of(tensor: Tensor) -> ModuleType:
    """Return the module whose functions run where a tensor is."""
    if not tensor.is_cuda:
        return fp8_rows
    from mtrain_cli.kernels.triton import fp8_rows as kernels

    return kernels
