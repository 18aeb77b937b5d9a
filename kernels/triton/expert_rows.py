"""Rows that travel between the workers that share experts: one kernel for each way.

Each function launches one kernel. A part of a layer's experts takes so few microseconds on a GPU
that several operations, or a compiled function, would keep it waiting for the host.

A row of a message can carry a score behind its elements (`model.tiling.scored_row`).

Shape suffixes are those of `model/expert_parallel.py`. D are the elements of a row of a message.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_PAIRS = 1024  # pairs of a step in the loops of `_order_pairs` and `_order_rows`


@triton.jit(do_not_specialize_on_alignment=["PAIRS", "SCORES"])
def _leave(
    ROWS, SCORES, PAIRS, OUT, OUT_SCORES, STRIDE: tl.constexpr, SCORE_STRIDE: tl.constexpr,
    CHOICES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    pair = tl.load(PAIRS + row)
    values = tl.load(ROWS + (pair // CHOICES) * WIDTH + column, mask=column < WIDTH)
    tl.store(OUT + row * STRIDE + column, values, mask=column < WIDTH)
    if SCORED:
        tl.store(OUT_SCORES + (row + 1) * SCORE_STRIDE - 1, tl.load(SCORES + pair))


@triton.jit(
    do_not_specialize=["arriving"],
    do_not_specialize_on_alignment=["ORDER", "PAIRS", "SCORES", "ARRIVED_SCORES"],
)
def _arrive(
    ARRIVED, ARRIVED_SCORES, ROWS, SCORES, PAIRS, ORDER, OUT, OUT_SCORES, arriving,
    STRIDE: tl.constexpr, SCORE_STRIDE: tl.constexpr, CHOICES: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, SCORED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    source = tl.load(ORDER + row)
    if source < arriving:
        values = tl.load(ARRIVED + source * STRIDE + column, mask=column < WIDTH)
        tl.store(OUT + row * WIDTH + column, values, mask=column < WIDTH)
        if SCORED:
            score = tl.load(ARRIVED_SCORES + (source + 1) * SCORE_STRIDE - 1)
            tl.store(OUT_SCORES + row, score)
    else:
        pair = tl.load(PAIRS + source - arriving)
        values = tl.load(ROWS + (pair // CHOICES) * WIDTH + column, mask=column < WIDTH)
        tl.store(OUT + row * WIDTH + column, values, mask=column < WIDTH)
        if SCORED:
            tl.store(OUT_SCORES + row, tl.load(SCORES + pair))


@triton.jit(do_not_specialize=["arriving"], do_not_specialize_on_alignment=["PLACE"])
def _depart(
    ROWS, SCORES, PLACE, LEAVING, LEAVING_SCORES, STAYING, STAYING_SCORES, arriving,
    STRIDE: tl.constexpr, SCORE_STRIDE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SCORED: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    source = tl.load(PLACE + row)
    values = tl.load(ROWS + source * WIDTH + column, mask=column < WIDTH)
    if row < arriving:
        tl.store(LEAVING + row * STRIDE + column, values, mask=column < WIDTH)
        if SCORED:
            tl.store(LEAVING_SCORES + (row + 1) * SCORE_STRIDE - 1, tl.load(SCORES + source))
    else:
        own = row - arriving
        tl.store(STAYING + own * STRIDE + column, values, mask=column < WIDTH)
        if SCORED:
            tl.store(STAYING_SCORES + (own + 1) * SCORE_STRIDE - 1, tl.load(SCORES + source))


@triton.jit(do_not_specialize=["places"], do_not_specialize_on_alignment=["OUT_SCORES"])
def _sum_rows(
    ROWS, SCORES, PLACE, OUT, OUT_SCORES, places, STRIDE: tl.constexpr,
    SCORE_STRIDE: tl.constexpr, CHOICES: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    SCORED: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=HIGH)
    for choice in tl.static_range(CHOICES):
        place = tl.load(PLACE + token * CHOICES + choice)
        there = place < places
        mask = column < tl.where(there, WIDTH, 0)
        total += tl.load(ROWS + place * STRIDE + column, mask=mask, other=0.0).to(HIGH)
        if SCORED:
            score = tl.load(SCORES + (place + 1) * SCORE_STRIDE - 1, mask=there, other=0.0)
            tl.store(OUT_SCORES + token * CHOICES + choice, score)
    values = total.to(OUT.dtype.element_ty)
    tl.store(OUT + token * WIDTH + column, values, mask=column < WIDTH)


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


@triton.jit
def _turn(worker, rank, WORKERS: tl.constexpr):
    # Other workers come first, in the order of their ranks.
    return tl.where(worker == rank, WORKERS - 1, worker - (worker > rank).to(worker.dtype))


@triton.jit
def _key_of_pairs(expert, rank, WORKERS: tl.constexpr, PARTS: tl.constexpr, EACH: tl.constexpr):
    # By part, then by worker, then by expert.
    turn, own = _turn(expert // (PARTS * EACH), rank, WORKERS), expert % (PARTS * EACH)
    return (own // EACH * WORKERS + turn) * EACH + own % EACH


@triton.jit(do_not_specialize=["rank"], do_not_specialize_on_alignment=["COUNTS", "PAIRS"])
def _order_pairs(
    COUNTS, PAIRS, ORDER, PLACE, rank, WORKERS: tl.constexpr, PARTS: tl.constexpr,
    EACH: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    own, expert = tl.program_id(0), tl.arange(0, BLOCK)
    counts = tl.load(COUNTS + expert, mask=expert < WORKERS * PARTS * EACH, other=0)
    key = _key_of_pairs(own, rank, WORKERS, PARTS, EACH)
    keys = _key_of_pairs(expert, rank, WORKERS, PARTS, EACH)
    count = tl.sum(tl.where(expert == own, counts, 0), 0)
    before = tl.sum(tl.where(expert < own, counts, 0), 0)
    begin = tl.sum(tl.where(keys < key, counts, 0), 0)
    for first in range(0, count, STEP):
        number = first + tl.arange(0, STEP)
        pair = tl.load(PAIRS + before + number, mask=number < count, other=0)
        tl.store(ORDER + begin + number, pair, mask=number < count)
        tl.store(PLACE + pair, begin + number, mask=number < count)


@triton.jit(do_not_specialize=["rank"], do_not_specialize_on_alignment=["COUNTS"])
def _order_rows(
    COUNTS, ORDER, PLACE, ENDS, rank, stride, WORKERS: tl.constexpr, PARTS: tl.constexpr,
    EACH: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    # Rows arrive by part, then by worker, then by expert. Products take them by part, then by
    # expert, then by worker. Each program moves the rows of an expert from a worker.
    cell = tl.arange(0, BLOCK)
    workers, experts = cell // (PARTS * EACH), cell % (PARTS * EACH)
    source = workers * stride + rank * PARTS * EACH + experts
    counts = tl.load(COUNTS + source, mask=cell < WORKERS * PARTS * EACH, other=0)
    own = tl.program_id(0)
    worker, expert = own // (PARTS * EACH), own % (PARTS * EACH)
    turn, turns = _turn(worker, rank, WORKERS), _turn(workers, rank, WORKERS)
    part, parts = expert // EACH, experts // EACH
    arrival = (part * WORKERS + turn) * EACH + expert % EACH
    arrivals = (parts * WORKERS + turns) * EACH + experts % EACH
    place, places = expert * WORKERS + turn, experts * WORKERS + turns
    count = tl.sum(tl.where(cell == own, counts, 0), 0)
    behind = tl.sum(tl.where(parts < part, counts, 0), 0)
    arrived = tl.sum(tl.where(arrivals < arrival, counts, 0), 0)
    begin = tl.sum(tl.where(places < place, counts, 0), 0)
    if turn == WORKERS - 1:
        tl.store(ENDS + expert, (begin + count - behind).to(tl.int32))
    for first in range(0, count, STEP):
        number = first + tl.arange(0, STEP)
        tl.store(ORDER + begin + number, arrived - behind + number, mask=number < count)
        tl.store(PLACE + arrived + number, begin - behind + number, mask=number < count)


def leaving(
    rows_TC: Tensor, pairs_A: Tensor, top_k: int, out_AD: Tensor, scores: Tensor | None = None
) -> None:
    """Copy the row of each pair's token, and its score, to a message.

    Args:
        pairs_A: pairs of a token and an expert, numbered token * K + k.
        scores: the score of each pair ``[T, K]``; None if no scores travel.
    """
    if len(pairs_A) == 0:
        return
    width = rows_TC.shape[1]
    scored, out_scores, strides = _scored(out_AD, scores)
    _leave[(len(pairs_A),)](
        rows_TC, scored, pairs_A, out_AD, out_scores, *strides, top_k, width,
        _block(width), scores is not None,
    )  # fmt: skip


def merged(
    arrived_AD: Tensor,
    rows_TC: Tensor,
    pairs_B: Tensor,
    order_R: Tensor,
    top_k: int,
    scores: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the rows of a message and those of own tokens in one order, and their scores.

    Args:
        pairs_B: pairs of a token and an expert, numbered token * K + k.
        order_R: for each result, the number of a row: first those of the message, then the rows of
            the tokens of ``pairs_B``.
        scores: the score of each pair ``[T, K]``; None if no scores travelled.

    Returns: rows ``[R, C]`` and scores ``[R, 1]``.
    """
    width, rows = rows_TC.shape[1], len(order_R)
    out_RC = rows_TC.new_empty(rows, width)
    out_R1 = None if scores is None else scores.new_empty(rows, 1)
    if rows:
        own, arrived, strides = _scored(arrived_AD, scores)
        _arrive[(rows,)](
            arrived_AD, arrived, rows_TC, own, pairs_B, order_R,
            out_RC, out_RC if out_R1 is None else out_R1, len(arrived_AD),
            *strides, top_k, width, _block(width), scores is not None,
        )  # fmt: skip
    return out_RC, out_R1


def parted(
    rows_RC: Tensor,
    place_R: Tensor,
    leaving_AD: Tensor,
    staying_BD: Tensor,
    scores: Tensor | None = None,
) -> None:
    """Copy the rows at the first places to a message, and the others to those of own tokens.

    Args:
        place_R: the place of each row.
        scores: numbers ``[R]`` that go with the rows; None if none do.
    """
    if len(place_R) == 0:
        return
    width = rows_RC.shape[1]
    given, leaving, strides = _scored(leaving_AD, scores)
    staying = staying_BD if scores is None else staying_BD.view(scores.dtype)
    _depart[(len(place_R),)](
        rows_RC, given, place_R, leaving_AD, leaving, staying_BD, staying, len(leaving_AD),
        *strides, width, _block(width), scores is not None,
    )  # fmt: skip


def summed(
    rows_SD: Tensor,
    place_S: Tensor,
    out_TC: Tensor,
    high: torch.dtype,
    scores_TK: Tensor | None = None,
) -> None:
    """Add up the rows at each K consecutive places. A place behind the last row counts as 0.

    Args:
        high: dtype in which to add up.
        scores_TK: receives the number that is with each row; None if none is.
    """
    tokens, width = out_TC.shape
    if tokens == 0:
        return
    into, scores, strides = _scored(rows_SD, scores_TK)
    _sum_rows[(tokens,)](
        rows_SD, scores, place_S, out_TC, into, len(rows_SD), *strides,
        len(place_S) // tokens, width, _block(width), scores_TK is not None,
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


def pair_order(
    pairs_S: Tensor, counts_E: Tensor, rank: int, workers: int, parts: int
) -> tuple[Tensor, Tensor]:
    """Order pairs by part, then by the worker of their expert, own experts last.

    Args:
        pairs_S: all pairs, ordered by expert. Those that no expert computes come last.
        counts_E: int64, number of pairs of each expert, contiguous.

    Returns: the pairs. Behind those that an expert computes, they are not initialized. And the
        place of each pair; that of a pair that no expert computes is the number of all pairs.
    """
    order_S, place_S = torch.empty_like(pairs_S), torch.full_like(pairs_S, len(pairs_S))
    experts = len(counts_E)
    if len(pairs_S):
        _order_pairs[(experts,)](
            counts_E, pairs_S, order_S, place_S, rank, workers, parts,
            experts // (workers * parts), _block(experts), _PAIRS,
        )  # fmt: skip
    return order_S, place_S


def row_order(counts_PE: Tensor, rank: int, parts: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order the rows of own experts by part, then by expert, then by worker.

    Args:
        counts_PE: int64, number of rows of each worker for each expert. Elements of a worker are
            contiguous.
        rows: number of rows of own experts.

    Returns: for each place, the number of its row among those of the part, as they arrive: by
        worker, own rows last; the place of each of these rows; and int32 the end of each expert's
        rows in its part, ``[J, L / J]``.
    """
    workers, experts = counts_PE.shape
    own = experts // workers
    order_R, place_R = counts_PE.new_empty(2, rows).unbind()
    ends_L = torch.empty(own, dtype=torch.int32, device=counts_PE.device)
    _order_rows[(experts,)](
        counts_PE, order_R, place_R, ends_L, rank, counts_PE.stride(0), workers, parts,
        own // parts, _block(experts), _PAIRS,
    )  # fmt: skip
    return order_R, place_R, ends_L.view(parts, -1)


def _scored(message_SD: Tensor, scores: Tensor | None) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Return the scores, the message as scores, and the elements of a row of both."""
    width = message_SD.shape[1]
    if scores is None:
        return message_SD, message_SD, (width, width)
    as_scores = message_SD.view(scores.dtype)
    return scores, as_scores, (width, as_scores.shape[1])


def _block(width: int) -> int:
    return triton.next_power_of_2(width)
