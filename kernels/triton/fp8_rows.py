"""Cast to fp8 in the kernels that write the inputs of fp8 products.

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
_ELEMENTS = 8192  # of matrices, whose largest magnitude a program finds
_MOST = 65536  # elements of a row that a program holds
# Elements of a round of kernels with two rounds. The gate's backward pass takes 1.44 ms for 32,768
# rows of 11,008 on an H200, and 1.74, 1.69 and 1.66 with 1,024, 2,048 and 16,384.
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
def _norm(
    X, ADDED, NORM, H, N, OUT, SCALES, eps, WIDTH: tl.constexpr, ADDS: tl.constexpr,
    NEEDS_NORM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    at = row * WIDTH + column
    low = X.dtype.element_ty
    h = tl.load(X + at, mask=mask, other=0.0).to(tl.float32)
    if ADDS:
        joined = (h + tl.load(ADDED + at, mask=mask, other=0.0).to(tl.float32)).to(low)
        tl.store(H + at, joined, mask=mask)
        h = joined.to(tl.float32)
    norm = tl.load(NORM + column, mask=mask, other=0.0).to(tl.float32)
    n = (h * tl.rsqrt(tl.sum(h * h, 0) / WIDTH + eps) * norm).to(low)
    if NEEDS_NORM:
        tl.store(N + at, n, mask=mask)
    values = n.to(tl.float32)
    scale = _scale(tl.max(_magnitude(values), 0))
    tl.store(OUT + at, (values * (1.0 / scale)).to(tl.float8e4nv), mask=mask)
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
def _gate_kept(
    GATE, UP, OUT, SCALES, KEPT, KEPT_SCALES, stride: tl.int64, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    # In one round, this takes three times the registers of `_gate`.
    row = tl.program_id(0).to(tl.int64)
    gates, ups = GATE + row * stride, UP + row * stride
    largest, largest_kept = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for begin in range(0, WIDTH, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        mask = column < WIDTH
        gate = tl.load(gates + column, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(ups + column, mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, _magnitude(gate / (1.0 + tl.exp(-gate)) * up))
        largest_kept = tl.maximum(largest_kept, tl.maximum(_magnitude(gate), _magnitude(up)))
    scale, kept_scale = _scale(tl.max(largest, 0)), _scale(tl.max(largest_kept, 0))
    larger, kept_larger = 1.0 / scale, 1.0 / kept_scale
    for begin in range(0, WIDTH, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        mask = column < WIDTH
        gate = tl.load(gates + column, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(ups + column, mask=mask, other=0.0).to(tl.float32)
        inner = gate / (1.0 + tl.exp(-gate)) * up * larger
        tl.store(OUT + row * WIDTH + column, inner.to(tl.float8e4nv), mask=mask)
        kept = KEPT + row * 2 * WIDTH + column
        tl.store(kept, (gate * kept_larger).to(tl.float8e4nv), mask=mask)
        tl.store(kept + WIDTH, (up * kept_larger).to(tl.float8e4nv), mask=mask)
    tl.store(SCALES + row, scale)
    tl.store(KEPT_SCALES + row, kept_scale)


@triton.jit
def _gradients(GATES, UPS, DINNERS, unit, mask):
    """Return silu(gate) * up, and the gradients of gate and of up. unit: scale of gate and up."""
    gate = tl.load(GATES, mask=mask, other=0.0).to(tl.float32) * unit
    up = tl.load(UPS, mask=mask, other=0.0).to(tl.float32) * unit
    dinner = tl.load(DINNERS, mask=mask, other=0.0).to(tl.float32)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    return silu * up, dinner * up * (sigmoid + silu * (1.0 - sigmoid)), dinner * silu


@triton.jit
def _gate_back(
    GATE, UP, KEPT_SCALES, DINNER, DGATE, DUP, OUT, SCALES, stride: tl.int64,
    stride_of_gradients: tl.int64, WIDTH: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # Two rounds over the row, of which the second one reads from the cache: in one round, the
    # gradients of a whole row would take the registers of a multiprocessor.
    row = tl.program_id(0).to(tl.int64)
    gates, ups, inners = GATE + row * stride, UP + row * stride, DINNER + row * WIDTH
    low = DINNER.dtype.element_ty
    unit = 1.0
    dgates, dups = DGATE + row * stride_of_gradients, DUP + row * stride_of_gradients
    if KEPT:
        unit = tl.load(KEPT_SCALES + row)
    largest = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, WIDTH, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        mask = column < WIDTH
        _, dgate, dup = _gradients(gates + column, ups + column, inners + column, unit, mask)
        largest = tl.maximum(largest, tl.maximum(_magnitude(dgate), _magnitude(dup)))
    scale = _scale(tl.max(largest, 0))
    larger = 1.0 / scale
    out = OUT + row * 2 * WIDTH
    for begin in range(0, WIDTH, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        mask = column < WIDTH
        inner, dgate, dup = _gradients(gates + column, ups + column, inners + column, unit, mask)
        tl.store(inners + column, inner.to(low), mask=mask)
        tl.store(dgates + column, dgate.to(low), mask=mask)
        tl.store(dups + column, dup.to(low), mask=mask)
        tl.store(out + column, (dgate * larger).to(tl.float8e4nv), mask=mask)
        tl.store(out + WIDTH + column, (dup * larger).to(tl.float8e4nv), mask=mask)
    tl.store(SCALES + row, scale)


@triton.jit
def _one_of(FIRST, SECOND, THIRD, first, second, third, number, UNIT: tl.constexpr):
    """Return (matrix, its size, size of those before it, number within it) of a program.

    Programs take ``UNIT`` of the sizes each, and begin again with each matrix.
    """
    matrix, size, before = FIRST, first, first * 0
    if number >= tl.cdiv(first, UNIT):
        number -= tl.cdiv(first, UNIT)
        matrix, size, before = SECOND, second, first
        if number >= tl.cdiv(second, UNIT):
            number -= tl.cdiv(second, UNIT)
            matrix, size, before = THIRD, third, first + second
    return matrix, size, before, number


@triton.jit
def _largest(FIRST, SECOND, THIRD, OUT, first, second, third, BLOCK: tl.constexpr):
    matrix, size, _, number = _one_of(
        FIRST, SECOND, THIRD, first, second, third, tl.program_id(0), BLOCK
    )
    at = number.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(matrix + at, mask=at < size, other=0.0).to(tl.float32)
    # The bits of floats that are not negative are ordered as they are.
    tl.atomic_max(OUT, tl.max(_magnitude(values), 0).to(tl.int32, bitcast=True))


@triton.jit
def _cast_tile(
    FIRST, SECOND, THIRD, LARGEST, OUT, SCALES, first, second, third, columns,
    TRANSPOSED: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    matrix, rows, before, number = _one_of(
        FIRST, SECOND, THIRD, first, second, third, tl.program_id(0), TILE
    )
    row = number * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    scale = _scale(tl.load(LARGEST))
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(matrix + at, mask=mask).to(tl.float32) * (1.0 / scale)
    row += before
    if TRANSPOSED:
        out = column.to(tl.int64)[None, :] * (first + second + third) + row[:, None]
        if tl.program_id(0) == 0:
            tl.store(SCALES + column, tl.full([TILE], 0.0, tl.float32) + scale, column < columns)
    else:
        out = row.to(tl.int64)[:, None] * columns + column[None, :]
        if tl.program_id(1) == 0:
            tl.store(SCALES + row, tl.full([TILE], 0.0, tl.float32) + scale, row < before + rows)
    tl.store(OUT + out, values.to(tl.float8e4nv), mask=mask)


def cast_rows(input_SK: Tensor) -> Fp8:
    """Round rows to e4m3."""
    rows, width = input_SK.shape
    result = _empty(rows, width, input_SK)
    _cast[(rows,)](input_SK.contiguous(), *result, width, **_whole(width))
    return result


def normed_rows(
    x_SC: Tensor, norm_C: Tensor, eps: float, added_SC: Tensor | None, needs_norm: bool
) -> tuple[Tensor, Tensor | None, Fp8]:
    """Return h = x + added, its norm n if needed, and n in e4m3."""
    x_SC = x_SC.contiguous()
    rows, width = x_SC.shape
    adds, added_SC = added_SC is not None, x_SC if added_SC is None else added_SC.contiguous()
    h_SC = torch.empty_like(x_SC) if adds else x_SC
    n_SC = torch.empty_like(x_SC) if needs_norm else h_SC
    result = _empty(rows, width, x_SC)
    tensors = x_SC, added_SC, norm_C, h_SC, n_SC, *result
    _norm[(rows,)](*tensors, eps, width, adds, needs_norm, **_whole(width))
    return h_SC, n_SC if needs_norm else None, result


def gated_rows(gate_SI: Tensor, up_SI: Tensor, keep: bool) -> tuple[Fp8, Fp8 | None]:
    """Round silu(gate) * up to e4m3. keep: also gate and up side by side, which share scales."""
    rows, width = gate_SI.shape
    result = _empty(rows, width, gate_SI)
    stride = _stride(gate_SI, up_SI)
    if not keep:
        _gate[(rows,)](gate_SI, up_SI, *result, stride, width, **_whole(width))
        return result, None
    kept = _empty(rows, 2 * width, gate_SI)
    _gate_kept[(rows,)](gate_SI, up_SI, *result, *kept, stride, width, **_round(width))
    return result, kept


def gate_backward_rows(
    gate_up: Fp8 | tuple[Tensor, Tensor], dinner_SI: Tensor
) -> tuple[Tensor, Tensor, Tensor, Fp8]:
    """Return silu(gate) * up, and the gradients of gate and of up, which e4m3 rows repeat.

    The results overwrite dinner and, unless they are e4m3, gate and up, in this order.
    """
    rows, width = dinner_SI.shape
    both = _empty(rows, 2 * width, dinner_SI)
    assert dinner_SI.is_contiguous()
    kept = isinstance(gate_up, Fp8)
    if isinstance(gate_up, Fp8):
        gate, up = gate_up.values_SK.chunk(2, 1)
        dgate, dup = dinner_SI.new_empty(rows, 2 * width).chunk(2, 1)
        scales = gate_up.scales_S1
    else:
        (gate, up), scales = gate_up, both.scales_S1  # the kernel reads no scales
        dgate, dup = gate, up
    tensors = gate, up, scales, dinner_SI, dgate, dup, *both
    strides = _stride(gate, up), _stride(dgate, dup)
    _gate_back[(rows,)](*tensors, *strides, width, kept, **_round(width))
    return dinner_SI, dgate, dup, both


def largest_of(matrices: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude in up to three matrices of less than 2^31 elements each."""
    bits = torch.zeros(1, dtype=torch.int32, device=matrices[0].device)
    flat = [matrix.contiguous().flatten() for matrix in matrices]
    programs = sum(triton.cdiv(len(values), _ELEMENTS) for values in flat)
    tensors, sizes = _three(flat)
    _largest[(programs,)](*tensors, bits, *sizes, _ELEMENTS)
    return bits.view(torch.float32)


def cast_matrix(matrices: Sequence[Tensor], largest: Tensor, transposed: bool) -> Fp8Matrix:
    """Round up to three matrices below each other to e4m3 with one scale.

    transposed: return the transpose.
    """
    rows, columns = sum(map(len, matrices)), matrices[0].shape[1]
    sizes = (columns, rows) if transposed else (rows, columns)
    values = torch.empty(sizes, dtype=E4M3, device=largest.device)
    scales = torch.empty(1, sizes[0], dtype=torch.float32, device=largest.device)
    grid = sum(triton.cdiv(len(m), _TILE) for m in matrices), triton.cdiv(columns, _TILE)
    tensors, lengths = _three([matrix.contiguous() for matrix in matrices])
    _cast_tile[grid](*tensors, largest, values, scales, *lengths, columns, transposed, _TILE)
    return Fp8Matrix(values, scales)


def _three(matrices: list[Tensor]) -> tuple[list[Tensor], list[int]]:
    """Return matrices and their lengths, with more of length 0 until there are three."""
    missing = 3 - len(matrices)
    return matrices + matrices[:1] * missing, [*map(len, matrices), *[0] * missing]


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


def _round(width: int) -> dict[str, int]:
    return _size(min(_ROUND, triton.next_power_of_2(width)))


def _size(block: int) -> dict[str, int]:
    return {"BLOCK": block, "num_warps": min(16, max(1, block // 512))}
