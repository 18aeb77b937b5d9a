"""Cast to fp8 in the kernels that write the inputs of the MLP's fp8 products.

One program has one row, whose largest magnitude it finds before it writes. A separate cast would
read and write each tensor once more. Arguments and results are those of `model.fp8_rows`.

Shape suffixes are those of `model/mlp_products.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_cli.model.fp8_rows import E4M3, Fp8, Fp8Matrix

_TILE = 64
_MOST = 65536  # elements of a row that a program holds
# Elements of a round of the gate's backward pass: 1.44 ms for 32,768 rows of 11,008 on an H200, and
# 1.74, 1.69 and 1.66 with 1,024, 2,048 and 16,384.
_ROUND = 4096


@triton.jit
def _magnitude(values):
    # A NaN counts as an infinity: with an infinite scale, the whole row becomes NaN in a product.
    return tl.where(values == values, tl.abs(values), float("inf"))


@triton.jit
def _scale(largest):
    return tl.maximum(largest, 1e-30) / 448.0


@triton.jit
def _cast(INPUT, OUT, SCALES, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    values = tl.load(INPUT + row * WIDTH + column, mask=mask, other=0.0).to(tl.float32)
    scale = _scale(tl.max(_magnitude(values), 0))
    tl.store(OUT + row * WIDTH + column, (values * (1.0 / scale)).to(tl.float8e4nv), mask=mask)
    tl.store(SCALES + row, scale)


@triton.jit
def _gate(
    GATE, UP, OUT, SCALES, stride: tl.int64, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    gate = tl.load(GATE + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(UP + row * stride + column, mask=mask, other=0.0).to(tl.float32)
    inner = gate / (1.0 + tl.exp(-gate)) * up
    scale = _scale(tl.max(_magnitude(inner), 0))
    tl.store(OUT + row * WIDTH + column, (inner * (1.0 / scale)).to(tl.float8e4nv), mask=mask)
    tl.store(SCALES + row, scale)


@triton.jit
def _gradients(GATES, UPS, DINNERS, mask):
    """Return silu(gate) * up, and the gradients of gate and of up."""
    gate = tl.load(GATES, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(UPS, mask=mask, other=0.0).to(tl.float32)
    dinner = tl.load(DINNERS, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    return silu * up, dinner * up * (sigmoid + silu * (1.0 - sigmoid)), dinner * silu


@triton.jit
def _gate_back(
    GATE, UP, DINNER, OUT, SCALES, stride: tl.int64, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    # Two rounds over the row, of which the second one reads from the cache: in one round, the
    # gradients of a whole row would take the registers of a multiprocessor.
    row = tl.program_id(0).to(tl.int64)
    gates, ups, inners = GATE + row * stride, UP + row * stride, DINNER + row * WIDTH
    low = GATE.dtype.element_ty
    largest = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, WIDTH, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        mask = column < WIDTH
        _, dgate, dup = _gradients(gates + column, ups + column, inners + column, mask)
        largest = tl.maximum(largest, tl.maximum(_magnitude(dgate), _magnitude(dup)))
    scale = _scale(tl.max(largest, 0))
    larger = 1.0 / scale
    out = OUT + row * 2 * WIDTH
    for begin in range(0, WIDTH, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        mask = column < WIDTH
        inner, dgate, dup = _gradients(gates + column, ups + column, inners + column, mask)
        tl.store(inners + column, inner.to(low), mask=mask)
        tl.store(gates + column, dgate.to(low), mask=mask)
        tl.store(ups + column, dup.to(low), mask=mask)
        tl.store(out + column, (dgate * larger).to(tl.float8e4nv), mask=mask)
        tl.store(out + WIDTH + column, (dup * larger).to(tl.float8e4nv), mask=mask)
    tl.store(SCALES + row, scale)


@triton.jit
def _cast_tile(
    MATRIX, SCALE, OUT, rows, columns, ROW_STRIDE: tl.constexpr, COLUMN_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * TILE + tl.arange(0, TILE)).to(tl.int64)[:, None]
    column = (tl.program_id(1) * TILE + tl.arange(0, TILE)).to(tl.int64)[None, :]
    mask = (row < rows) & (column < columns)
    larger = 1.0 / tl.load(SCALE)
    values = tl.load(MATRIX + row * columns + column, mask=mask).to(tl.float32) * larger
    out = OUT + row * ROW_STRIDE + column * COLUMN_STRIDE
    tl.store(out, values.to(tl.float8e4nv), mask=mask)


def cast_rows(input_SK: Tensor) -> Fp8:
    """Round rows to e4m3."""
    rows, width = input_SK.shape
    result = _empty(rows, width, input_SK)
    _cast[(rows,)](input_SK.contiguous(), *result, width, **_whole(width))
    return result


def gated_rows(gate_SI: Tensor, up_SI: Tensor) -> Fp8:
    """Round silu(gate) * up to e4m3."""
    rows, width = gate_SI.shape
    result = _empty(rows, width, gate_SI)
    _gate[(rows,)](gate_SI, up_SI, *result, _stride(gate_SI, up_SI), width, **_whole(width))
    return result


def gate_backward_rows(
    gate_SI: Tensor, up_SI: Tensor, dinner_SI: Tensor
) -> tuple[Tensor, Tensor, Tensor, Fp8]:
    """Return silu(gate) * up, and the gradients of gate and of up, which e4m3 rows repeat.

    The results overwrite dinner, gate and up, in this order.
    """
    rows, width = gate_SI.shape
    both = _empty(rows, 2 * width, gate_SI)
    assert dinner_SI.is_contiguous()
    stride, block = _stride(gate_SI, up_SI), min(_ROUND, triton.next_power_of_2(width))
    _gate_back[(rows,)](gate_SI, up_SI, dinner_SI, *both, stride, width, **_size(block))
    return dinner_SI, gate_SI, up_SI, both


def cast_matrix(matrices: Sequence[Tensor], scale: Tensor, transposed: bool) -> Fp8Matrix:
    """Round matrices below each other to e4m3 with one scale. transposed: return the transpose."""
    rows, columns = sum(map(len, matrices)), matrices[0].shape[1]
    sizes = (columns, rows) if transposed else (rows, columns)
    values = torch.empty(sizes, dtype=E4M3, device=scale.device)
    strides = (1, rows) if transposed else (columns, 1)
    begin = 0
    for matrix in matrices:
        out = values[:, begin:] if transposed else values[begin:]
        grid = triton.cdiv(len(matrix), _TILE), triton.cdiv(columns, _TILE)
        _cast_tile[grid](matrix.contiguous(), scale, out, len(matrix), columns, *strides, _TILE)
        begin += len(matrix)
    return Fp8Matrix(values, scale.expand(1, len(values)).contiguous())


def _empty(rows: int, width: int, like: Tensor) -> Fp8:
    return Fp8(
        torch.empty(rows, width, dtype=E4M3, device=like.device),
        torch.empty(rows, 1, dtype=torch.float32, device=like.device),
    )


def _stride(gate_SI: Tensor, up_SI: Tensor) -> int:
    assert gate_SI.stride() == up_SI.stride()
    assert gate_SI.stride(1) == 1
    return gate_SI.stride(0)


def _whole(width: int) -> dict[str, int]:
    assert width <= _MOST, width
    return _size(triton.next_power_of_2(width))


def _size(block: int) -> dict[str, int]:
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}
