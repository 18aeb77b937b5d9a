"""`kernels.triton.fp8_rows` in PyTorch: functions of the same arguments and results.

A number is its e4m3 value times its float32 scale. The largest magnitude that shares a scale
becomes 448, the largest of e4m3. A row with an infinity or NaN has only NaNs in its product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3


class Fp8(NamedTuple):
    """Rows in e4m3, each with a scale."""

    values_SK: Tensor
    scales_S1: Tensor


class Fp8Matrix(NamedTuple):
    """The right side of a product in e4m3, transposed, with a scale for each column."""

    values_NK: Tensor
    scales_1N: Tensor


def largest_of(matrices: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude in up to three matrices, float32 [1]."""
    of_each = [torch.linalg.vector_norm(matrix, torch.inf).float() for matrix in matrices]
    return torch.stack(of_each).amax(0, keepdim=True)


def cast_rows(input_SK: Tensor) -> Fp8:
    """Round rows to e4m3."""
    high_SK = input_SK.float()
    scales_S1 = _scale(high_SK.abs().amax(1, keepdim=True))
    return Fp8((high_SK * (1.0 / scales_S1)).to(E4M3), scales_S1)


def _scale(largest: Tensor) -> Tensor:
    return largest.clamp(min=1e-30) / LARGEST


def normed_rows(
    x_SC: Tensor, norm_C: Tensor, eps: float, added_SC: Tensor | None, needs_norm: bool
) -> tuple[Tensor, Tensor | None, Fp8]:
    """Return h = x + added, its norm n if needed, and n in e4m3."""
    h_SC = x_SC if added_SC is None else x_SC + added_SC
    n_SC = functional.rms_norm(h_SC, norm_C.shape, norm_C, eps)
    return h_SC, n_SC if needs_norm else None, cast_rows(n_SC)


def gated_rows(gate_SI: Tensor, up_SI: Tensor, keep: bool) -> tuple[Fp8, Fp8 | None]:
    """Round silu(gate) * up to e4m3. keep: also gate and up side by side, which share scales."""
    inner = cast_rows(functional.silu(gate_SI.float()) * up_SI.float())
    return inner, cast_rows(torch.cat([gate_SI, up_SI], 1)) if keep else None


def gate_backward_rows(
    gate_up: Fp8 | tuple[Tensor, Tensor], dinner_SI: Tensor
) -> tuple[Tensor, Tensor, Tensor, Fp8]:
    """Return silu(gate) * up, and the gradients of gate and of up, which e4m3 rows repeat.

    dinner: the gradient of silu(gate) * up. On a GPU, the results overwrite dinner, and gate and up
    unless they are e4m3.
    """
    if isinstance(gate_up, Fp8):
        gate, up = (gate_up.values_SK.float() * gate_up.scales_S1).chunk(2, 1)
    else:
        gate, up = gate_up[0].float(), gate_up[1].float()
    dinner = dinner_SI.float()
    silu = functional.silu(gate)
    sigmoid = torch.sigmoid(gate)
    dgate = dinner * up * (sigmoid + silu * (1.0 - sigmoid))
    dup = dinner * silu
    low = dinner_SI.dtype
    both = cast_rows(torch.cat([dgate, dup], 1))
    return (silu * up).to(low), dgate.to(low), dup.to(low), both


def cast_matrix(matrices: Sequence[Tensor], largest: Tensor, transposed: bool) -> Fp8Matrix:
    """Round up to three matrices below each other to e4m3 with one scale.

    transposed: return the transpose.
    """
    scale = _scale(largest)
    values = torch.cat([(matrix.float() * (1.0 / scale)).to(E4M3) for matrix in matrices])
    values = values.t().contiguous() if transposed else values
    return Fp8Matrix(values, scale.expand(1, len(values)).contiguous())
