"""The operations of experts between their matrix products, each compiled to one kernel.

They read and write each row once. As separate operations, they would take longer on a GPU than the
matrix products. Rows behind the last group of a grouped product are not initialized: nothing here
lets them reach a result.

Shape suffixes are those of `experts.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mtrain_cli.attention.partials import accumulation_dtype
from mtrain_cli.model.compilation import compiled


def taken(rows: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    """Return row ``order_S // top_k`` for each element of ``order_S``, ``[S, C]``."""
    # A number of its own would compile both anew, with a division by a variable.
    return _run(_ordered, rows, order_S) if top_k == 1 else _run(_taken, rows, order_S, top_k)


def summed(rows_SC: Tensor, place_S: Tensor, ends_E: Tensor, top_k: int) -> Tensor:
    """Return the sum of the rows at each ``top_k`` consecutive places, ``[T, C]``.

    The sum is computed in float32.

    Args:
        ends_E: the end of each expert's rows. Rows behind the last end do not count.
    """
    if len(rows_SC) == 0:
        return rows_SC.new_zeros(len(place_S) // top_k, rows_SC.shape[1])
    return _run(_summed, rows_SC, place_S, ends_E, top_k)


def gated(gate_up_SW: Tensor, scores_S1: Tensor) -> Tensor:
    """Return silu(gate) * up * score, ``[S, I]``."""
    return _run(_gated, gate_up_SW, scores_S1)


def gate_backward(
    gate_up_SW: Tensor, dinner_SI: Tensor, scores_S1: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `gated`, and the gradients of gate and up and of the scores.

    Args:
        dinner_SI: gradient of the result of `gated`.
        ends_E: the end of each expert's rows. Rows behind the last end get a gradient of 0 for
            their score.
    """
    return _run(_gate_backward, gate_up_SW, dinner_SI, scores_S1, ends_E)


def _ordered(rows: Tensor, order_S: Tensor) -> Tensor:
    return rows[order_S]


def _taken(rows: Tensor, order_S: Tensor, top_k: int) -> Tensor:
    return rows[order_S // top_k]


def _summed(rows_SC: Tensor, place_S: Tensor, ends_E: Tensor, top_k: int) -> Tensor:
    end = ends_E[-1]
    high = accumulation_dtype(rows_SC.dtype)
    total_TC: Tensor | None = None
    # Not a reduction: as a sum of terms, each element of the result reads consecutive memory.
    for place_T in place_S.view(-1, top_k).unbind(1):
        rows_TC = rows_SC[place_T.clamp(max=rows_SC.shape[0] - 1)].to(high)
        rows_TC = torch.where((place_T < end)[:, None], rows_TC, 0)
        total_TC = rows_TC if total_TC is None else total_TC + rows_TC
    assert total_TC is not None
    return total_TC.to(rows_SC.dtype)


def _gated(gate_up_SW: Tensor, scores_S1: Tensor) -> Tensor:
    gate_SI, up_SI = gate_up_SW.chunk(2, -1)
    return (functional.silu(gate_SI) * up_SI * scores_S1).to(gate_up_SW.dtype)


def _gate_backward(
    gate_up_SW: Tensor, dinner_SI: Tensor, scores_S1: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    dtype, high = gate_up_SW.dtype, scores_S1.dtype
    gate_SI, up_SI = gate_up_SW.chunk(2, -1)
    gate_SI, up_SI, dinner_SI = gate_SI.to(high), up_SI.to(high), dinner_SI.to(high)
    sigmoid_SI = gate_SI.sigmoid()
    silu_SI = gate_SI * sigmoid_SI
    outer_SI = silu_SI * up_SI
    row_S = torch.arange(gate_up_SW.shape[0], device=gate_up_SW.device)
    dscores_S = torch.where(row_S < ends_E[-1], (dinner_SI * outer_SI).sum(-1), 0)
    douter_SI = dinner_SI * scores_S1
    dgate_SI = douter_SI * up_SI * (sigmoid_SI + silu_SI * (1 - sigmoid_SI))
    dgate_up_SW = torch.cat([dgate_SI.to(dtype), (douter_SI * silu_SI).to(dtype)], -1)
    return (outer_SI * scores_S1).to(dtype), dgate_up_SW, dscores_S


def _run(function: Callable[..., Any], *arguments: Any) -> Any:
    # Compiled code depends on whether a tensor requires a gradient, and compiles anew for no rows.
    given = [each.detach() if isinstance(each, Tensor) else each for each in arguments]
    return (_compiled(function) if len(given[0]) > 1 else function)(*given)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, compiled. It is compiled again once if the number of rows changes."""
    return compiled(function)
