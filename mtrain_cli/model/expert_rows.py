"""`kernels.triton.expert_rows` in PyTorch: functions of the same arguments and results."""

from __future__ import annotations

import torch
from torch import Tensor

from mtrain_cli.model.expert_products import gated

__all__ = ["gated", "leaving", "merged", "pair_order", "parted", "row_order", "summed"]

gate_backward = None  # `expert_products.inner_gradients` computes it in steps


def leaving(
    rows_TC: Tensor, pairs_A: Tensor, top_k: int, out_AD: Tensor, scores: Tensor | None = None
) -> None:
    out_AD[:, : rows_TC.shape[1]] = rows_TC.index_select(0, pairs_A // top_k)
    if scores is not None:
        out_AD.view(scores.dtype)[:, -1] = scores.flatten()[pairs_A]


def merged(
    arrived_AD: Tensor, rows_TC: Tensor, pairs_B: Tensor, order_R: Tensor, top_k: int,
    scores: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    staying_BC = rows_TC.index_select(0, pairs_B // top_k)
    rows_RC = torch.cat([arrived_AD[:, : rows_TC.shape[1]], staying_BC])[order_R]
    if scores is None:
        return rows_RC, None
    arrived_A = arrived_AD.view(scores.dtype)[:, -1]
    return rows_RC, torch.cat([arrived_A, scores.flatten()[pairs_B]])[order_R][:, None]


def parted(
    rows_RC: Tensor, place_R: Tensor, leaving_AD: Tensor, staying_BD: Tensor,
    scores: Tensor | None = None,
) -> None:  # fmt: skip
    places = place_R.split([len(leaving_AD), len(staying_BD)])
    for place, into in zip(places, (leaving_AD, staying_BD), strict=True):
        into[:, : rows_RC.shape[1]] = rows_RC[place]
        if scores is not None:
            into.view(scores.dtype)[:, -1] = scores[place]


def summed(
    rows_SD: Tensor, place_S: Tensor, out_TC: Tensor, high: torch.dtype,
    scores_TK: Tensor | None = None,
) -> None:  # fmt: skip
    places, tokens = len(rows_SD), len(out_TC)
    if not tokens:
        return
    place_TK = place_S.view(tokens, -1)
    absent_TK, place_TK = place_TK >= places, place_TK.clamp(max=places - 1)
    if scores_TK is not None:
        scores_TK.zero_()
        if places:
            scores = rows_SD.view(scores_TK.dtype)[:, -1]
            scores_TK.copy_(scores[place_TK].masked_fill(absent_TK, 0))
    total_TC = torch.zeros_like(out_TC, dtype=high)
    for place_T, absent_T in zip(place_TK.T, absent_TK.T, strict=True) if places else ():
        rows_TC = rows_SD[place_T][:, : out_TC.shape[1]]
        total_TC += rows_TC.masked_fill(absent_T[:, None], 0)
    out_TC.copy_(total_TC)


def pair_order(
    pairs_S: Tensor, counts_E: Tensor, rank: int, workers: int, parts: int
) -> tuple[Tensor, Tensor]:
    turns = [*(worker for worker in range(workers) if worker != rank), rank]
    ends_PJ = counts_E.cumsum(0).view(workers, parts, -1)[:, :, -1].flatten().tolist()
    pieces = pairs_S.tensor_split(ends_PJ)
    computed_S = torch.cat([pieces[p * parts + n] for n in range(parts) for p in turns])
    place_S = torch.full_like(pairs_S, len(pairs_S))
    place_S[computed_S] = torch.arange(len(computed_S), device=pairs_S.device)
    return torch.cat([computed_S, pieces[-1]]), place_S


def row_order(counts_PE: Tensor, rank: int, parts: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    own = counts_PE.shape[1] // len(counts_PE)
    from_PL = counts_PE[:, rank * own : (rank + 1) * own]
    counts_PL = torch.cat([from_PL[:rank], from_PL[rank + 1 :], from_PL[rank : rank + 1]])
    counts_JPL = counts_PL.unflatten(1, (parts, -1)).transpose(0, 1)
    # Both orders have one part after the other.
    sizes = counts_JPL.sum((1, 2)).tolist()
    number_R = torch.cat([torch.arange(size, device=counts_PE.device) for size in sizes])
    behind_JPL = counts_JPL.flatten(1).cumsum(1).view_as(counts_JPL)
    begin_JLP = (behind_JPL - counts_JPL).transpose(1, 2).flatten(1)
    counts_JLP = counts_JPL.transpose(1, 2).flatten(1)
    shift_JLP = begin_JLP - (counts_JLP.cumsum(1) - counts_JLP)
    # Number of a row in its part, by worker. Then the place in the order of all parts.
    order_R = number_R + shift_JLP.flatten().repeat_interleave(
        counts_JLP.flatten(), output_size=rows
    )
    place_R = torch.empty_like(order_R)
    for order, number, place in zip(
        *(t.split(sizes) for t in (order_R, number_R, place_R)), strict=True
    ):
        place[order] = number
    return order_R, place_R, counts_JPL.sum(1).cumsum(1).to(torch.int32)
