"""Matrix products of consecutive groups of rows, each with the matrix of its expert.

Shape suffixes: S rows ordered by expert, E experts, A and B widths.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes of a row that CUDA's grouped product requires


def grouped_rows(rows_SA: Tensor, weights_EBA: Tensor, ends_E: Tensor) -> Tensor:
    """Return ``rows @ weights[e].T`` for the rows of each expert e, ``[S, B]``.

    Rows behind the last group are not initialized.

    Args:
        ends_E: int32, number of rows of this and all earlier experts.
    """
    return _by_expert(rows_SA, weights_EBA.transpose(1, 2), ends_E)


def grouped_rows_back(rows_SB: Tensor, weights_EBA: Tensor, ends_E: Tensor) -> Tensor:
    """Return ``rows @ weights[e]`` for the rows of each expert e, as `grouped_rows` does."""
    return _by_expert(rows_SB, weights_EBA, ends_E)


def grouped_sums(left_SB: Tensor, right_SA: Tensor, ends_E: Tensor) -> Tensor:
    """Return ``left.T @ right`` over the rows of each expert, ``[E, B, A]``."""
    if len(left_SB) and _runs_grouped(left_SB, right_SA):
        return torch._grouped_mm(left_SB.t(), right_SA, offs=ends_E)
    shape = len(ends_E), left_SB.shape[1], right_SA.shape[1]
    sums_EBA = left_SB.new_zeros(shape)
    if len(left_SB) == 0:
        return sums_EBA
    for expert, begin, end in _groups(ends_E):
        torch.mm(left_SB[begin:end].t(), right_SA[begin:end], out=sums_EBA[expert])
    return sums_EBA


def _by_expert(rows_SA: Tensor, weights_EAB: Tensor, ends_E: Tensor) -> Tensor:
    if len(rows_SA) == 0:  # a worker of an expert group may receive nothing
        return rows_SA.new_zeros(0, weights_EAB.shape[2])
    if _runs_grouped(rows_SA, weights_EAB):
        return torch._grouped_mm(rows_SA, weights_EAB, offs=ends_E)
    result_SB = rows_SA.new_empty(len(rows_SA), weights_EAB.shape[2])
    for expert, begin, end in _groups(ends_E):
        torch.mm(rows_SA[begin:end], weights_EAB[expert], out=result_SB[begin:end])
    return result_SB


def _runs_grouped(left: Tensor, right: Tensor) -> bool:
    """Return whether PyTorch's grouped product takes these tensors."""
    if left.device.type != "cuda" or left.dtype != torch.bfloat16:
        return False
    widths = left.shape[-1], *right.shape[-2:]
    if left.ndim == right.ndim:  # a product over the rows
        widths = left.shape[-1], right.shape[-1]
    return all(width * left.element_size() % _ALIGNMENT == 0 for width in widths)


def _groups(ends_E: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield expert, first row and end of each group that has rows. Wait for the device."""
    begin = 0
    for expert, end in enumerate(ends_E.tolist()):
        if end > begin:
            yield expert, begin, end
        begin = end
