"""Rows that travel between the workers that share experts: one kernel for each way.

A token is sent once to each worker that has some of its experts, with the score and the place of
each of its pairs behind its row; the worker adds up what its experts return for the token.

Shape suffixes are those of `model/expert_parallel.py`. D are the elements of a row of a message.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtrain_cli.model.expert_rows import ABSENT, numbers_of


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["ROWS", "SCORES"])
def _leave(
    ROWS, SLOTS, OUT, SCORES, EXPERTS, PLACES, OUT_SCORES, OUT_PLACES, tokens,
    STRIDE: tl.constexpr, SCORE_STRIDE: tl.constexpr, CHOICES: tl.constexpr,
    WORKERS: tl.constexpr, EACH: tl.constexpr, ABSENT: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    values = tl.load(ROWS + token * WIDTH + column, mask=column < WIDTH)
    for worker in range(WORKERS):
        slot = tl.load(SLOTS + token * WORKERS + worker).to(tl.int64)
        if (slot >= tokens) & (slot < ABSENT):
            row = slot - tokens
            tl.store(OUT + row * STRIDE + column, values, mask=column < WIDTH)
            if SCORED:
                behind = (row + 1) * SCORE_STRIDE - 2 * CHOICES
                for choice in range(CHOICES):
                    pair = token * CHOICES + choice
                    there = tl.load(EXPERTS + pair) // EACH == worker
                    place = tl.where(there, tl.load(PLACES + pair), ABSENT)
                    tl.store(OUT_SCORES + behind + choice, tl.load(SCORES + pair))
                    tl.store(OUT_PLACES + behind + CHOICES + choice, place)


@triton.jit(do_not_specialize=["tokens", "rows"], do_not_specialize_on_alignment=["OWN", "ARRIVED"])
def _spread(
    OWN, ARRIVED, PLACES, OUT, SCORES, OUT_SCORES, tokens, rows, STRIDE: tl.constexpr,
    CHOICES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    is_own = row < tokens
    mask = column < tl.where(is_own, WIDTH, 0)
    own = tl.load(OWN + row * WIDTH + column, mask=mask, other=0.0)
    mask = column < tl.where(is_own, 0, WIDTH)
    arrived = tl.load(ARRIVED + (row - tokens) * STRIDE + column, mask=mask, other=0.0)
    values = tl.where(is_own, own, arrived)
    for choice in tl.static_range(CHOICES):
        place = tl.load(PLACES + row * CHOICES + choice).to(tl.int64)
        mask = column < tl.where(place < rows, WIDTH, 0)
        tl.store(OUT + place * WIDTH + column, values, mask=mask)
        if SCORED:
            score = tl.load(SCORES + row * CHOICES + choice)
            tl.store(OUT_SCORES + place, score, mask=place < rows)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["PLACES", "OUT"])
def _sum_rows(
    ROWS, PLACES, OUT, rows, STRIDE: tl.constexpr, OUT_STRIDE: tl.constexpr,
    CHOICES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=HIGH)
    for choice in tl.static_range(CHOICES):
        place = tl.load(PLACES + token * CHOICES + choice).to(tl.int64)
        mask = column < tl.where(place < rows, WIDTH, 0)
        total += tl.load(ROWS + place * STRIDE + column, mask=mask, other=0.0).to(HIGH)
    result = total.to(OUT.dtype.element_ty)
    tl.store(OUT + token * OUT_STRIDE + column, result, mask=column < WIDTH)


@triton.jit
def _gate(GATE_UP, SCORES, OUT, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    score = tl.load(SCORES + row)
    gate = tl.load(GATE_UP + row * 2 * WIDTH + column, mask=mask, other=0.0).to(score.dtype)
    up = tl.load(GATE_UP + row * 2 * WIDTH + WIDTH + column, mask=mask, other=0.0)
    inner = gate / (1.0 + tl.exp(-gate)) * up.to(score.dtype) * score
    tl.store(OUT + row * WIDTH + column, inner.to(OUT.dtype.element_ty), mask=mask)


@triton.jit
def _gate_back(
    GATE_UP, DINNER, SCORES, INNER, DGATE_UP, DSCORES, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    mask = column < WIDTH
    score = tl.load(SCORES + row)
    gate = tl.load(GATE_UP + row * 2 * WIDTH + column, mask=mask, other=0.0).to(score.dtype)
    up = tl.load(GATE_UP + row * 2 * WIDTH + WIDTH + column, mask=mask, other=0.0).to(score.dtype)
    dinner = tl.load(DINNER + row * WIDTH + column, mask=mask, other=0.0).to(score.dtype)
    sigmoid = 1.0 / (1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    outer = silu * up
    tl.store(DSCORES + row, tl.sum(dinner * outer, 0))
    tl.store(INNER + row * WIDTH + column, (outer * score).to(INNER.dtype.element_ty), mask=mask)
    douter = dinner * score
    dgate = douter * up * (sigmoid + silu * (1.0 - sigmoid))
    tl.store(DGATE_UP + row * 2 * WIDTH + column, dgate.to(INNER.dtype.element_ty), mask=mask)
    dup = (douter * silu).to(INNER.dtype.element_ty)
    tl.store(DGATE_UP + row * 2 * WIDTH + WIDTH + column, dup, mask=mask)


def leaving(
    rows_TC: Tensor,
    slot_TP: Tensor,
    out_AD: Tensor,
    pairs: tuple[Tensor, Tensor, Tensor] | None = None,
    each: int = 1,
) -> None:
    """Copy the row of each token to a message, once for each worker that it is for.

    Args:
        slot_TP: int32, place of the row for each worker, behind ``T`` places of own tokens; others
            are at most ``T``, or `expert_rows.ABSENT`.
        pairs: the scores, experts and int32 places of all pairs ``[T, K]``, of which a row for a
            worker takes scores and places: those of other workers' experts are absent. None if
            only rows travel.
        each: number of experts of a worker.
    """
    tokens, width = rows_TC.shape
    if tokens == 0 or len(out_AD) == 0:
        return
    stride = out_AD.shape[1]
    scores = experts = places = scored = placed = out_AD
    score_stride = choices = 0
    if pairs is not None:
        scores, experts, places = pairs
        scored, placed = numbers_of(out_AD, scores.dtype)
        score_stride, choices = scored.shape[1], scores.shape[1]
    _leave[(tokens,)](
        rows_TC, slot_TP, out_AD, scores, experts, places, scored, placed, tokens, stride,
        score_stride, choices, slot_TP.shape[1], each, ABSENT, width, _block(width),
        pairs is not None,
    )  # fmt: skip


def spread(
    own_TC: Tensor,
    arrived_AD: Tensor,
    place_NK: Tensor,
    rows: int,
    scores_NK: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Copy each row to the places of its pairs. Own tokens come first, then the rows that arrived.

    Args:
        place_NK: int32; at most ``rows`` if no expert here computes the pair. Each place below
            ``rows`` occurs once.
        scores_NK: the score of each pair, if it is to be copied.

    Returns: rows ``[R, C]`` and scores ``[R, 1]``.
    """
    tokens, width = own_TC.shape
    out_RC = own_TC.new_empty(rows, width)
    out_R1 = None if scores_NK is None else scores_NK.new_empty(rows, 1)
    if rows:
        _spread[(len(place_NK),)](
            own_TC, arrived_AD, place_NK, out_RC, out_RC if scores_NK is None else scores_NK,
            out_RC if out_R1 is None else out_R1, tokens, rows, arrived_AD.shape[1],
            place_NK.shape[1], width, _block(width), scores_NK is not None,
        )  # fmt: skip
    return out_RC, out_R1


def summed(
    rows_RD: Tensor, place_NK: Tensor, out_ND: Tensor, width: int, high: torch.dtype
) -> None:
    """Add up the rows at each K places, one after another. A place behind the last counts as 0.

    Args:
        width: elements of a row that are added up; those behind them stay.
        high: dtype in which to add up.
    """
    if len(out_ND):
        _sum_rows[(len(out_ND),)](
            rows_RD, place_NK, out_ND, len(rows_RD), rows_RD.shape[1], out_ND.shape[1],
            place_NK.shape[1], width, _block(width),
            tl.float64 if high == torch.float64 else tl.float32,
        )  # fmt: skip


def gated(gate_up_RW: Tensor, scores_R1: Tensor) -> Tensor:
    """Return silu(gate) * up * score, ``[R, I]``, computed in the dtype of the scores."""
    rows, width = len(gate_up_RW), gate_up_RW.shape[1] // 2
    out_RI = gate_up_RW.new_empty(rows, width)
    if rows:
        _gate[(rows,)](gate_up_RW, scores_R1, out_RI, width, _block(width))
    return out_RI


def gate_backward(
    gate_up_RW: Tensor, dinner_RI: Tensor, scores_R1: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `gated`, and the gradients of gate and up and of the scores ``[R]``.

    Args:
        dinner_RI: gradient of the result of `gated`.
    """
    rows, width = dinner_RI.shape
    inner_RI, dgate_up_RW = torch.empty_like(dinner_RI), torch.empty_like(gate_up_RW)
    dscores_R = scores_R1.new_empty(rows)
    if rows:
        _gate_back[(rows,)](
            gate_up_RW, dinner_RI, scores_R1, inner_RI, dgate_up_RW, dscores_R,
            width, _block(width),
        )  # fmt: skip
    return inner_RI, dgate_up_RW, dscores_R


def _block(width: int) -> int:
    return triton.next_power_of_2(width)
