"""`kernels.triton.expert_rows` in PyTorch: functions of the same arguments and results."""

from __future__ import annotations

import torch
from torch import Tensor

from mtrain_cli.model.expert_products import gated

__all__ = ["ABSENT", "gated", "leaving", "numbers_of", "spread", "summed"]

ABSENT = torch.iinfo(torch.int32).max  # place of a row that is not there
gate_backward = None  # `expert_products.inner_gradients` computes it in steps


def numbers_of(message_AD: Tensor, high: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a message as numbers of the dtype of scores, and as integers of the same size."""
    as_high = message_AD.view(high)
    return as_high, as_high.view(torch.int64 if high == torch.float64 else torch.int32)


def leaving(
    rows_TC: Tensor, slot_TP: Tensor, out_AD: Tensor,
    pairs: tuple[Tensor, Tensor, Tensor] | None = None, each: int = 1,
) -> None:  # fmt: skip
    worker_A, token_A = ((slot_TP >= len(rows_TC)) & (slot_TP < ABSENT)).T.nonzero(as_tuple=True)
    out_AD[:, : rows_TC.shape[1]] = rows_TC[token_A]
    if pairs is not None:
        scores_TK, chosen_TK, place_TK = pairs
        scores, places = numbers_of(out_AD, scores_TK.dtype)
        elsewhere = chosen_TK[token_A] // each != worker_A[:, None]
        top_k = chosen_TK.shape[1]
        scores[:, -2 * top_k : -top_k] = scores_TK[token_A]
        places[:, -top_k:] = place_TK[token_A].masked_fill(elsewhere, ABSENT)


def spread(
    own_TC: Tensor, arrived_AD: Tensor, place_NK: Tensor, rows: int,
    scores_NK: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    there = place_NK < rows
    # Each place once: number of its pair.
    pair_R = place_NK.new_empty(rows, dtype=torch.int64)
    pair_R[place_NK[there].long()] = there.flatten().nonzero().flatten()
    rows_NC = torch.cat([own_TC, arrived_AD[:, : own_TC.shape[1]]])
    rows_RC = rows_NC[pair_R // place_NK.shape[1]]
    return rows_RC, None if scores_NK is None else scores_NK.flatten()[pair_R][:, None]


def summed(
    rows_RD: Tensor, place_NK: Tensor, out_ND: Tensor, width: int, high: torch.dtype
) -> None:
    total_NC = torch.zeros(len(out_ND), width, dtype=high, device=out_ND.device)
    for place_N in place_NK.T if len(rows_RD) else ():
        absent_N1 = (place_N >= len(rows_RD))[:, None]
        rows_NC = rows_RD[place_N.clamp(max=len(rows_RD) - 1).long(), :width]
        total_NC += rows_NC.masked_fill(absent_N1, 0)
    out_ND[:, :width] = total_NC
