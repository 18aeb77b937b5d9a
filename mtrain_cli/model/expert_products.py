"""The experts of one worker: rows in order of experts, grouped products, and chunks of tokens.

Shape suffixes are those of `experts.py`; S are the pairs of one chunk. Rows behind the last group
of a grouped product are not initialized: nothing here lets them reach a result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mtrain_cli.attention.partials import accumulation_dtype
from mtrain_cli.config.schema import MoeConfig
from mtrain_cli.launch.temporary_folders import compiled
from mtrain_cli.model.routing import Decision, part_of
from mtrain_cli.model.tiling import ONE_ADDITION, LayerExecution, expert_chunks

_ALIGNMENT = 16  # bytes of a row that CUDA's grouped product requires


# --- grouped products: consecutive rows, each group with the matrix of its expert -----


def grouped_rows(rows_SA: Tensor, weights_EBA: Tensor, ends_E: Tensor) -> Tensor:
    """Return ``rows @ weights[e].T`` for the rows of each expert e, ``[S, B]``.

    ends_E: int32, number of rows of this and all earlier experts.
    """
    return grouped_rows_back(rows_SA, weights_EBA.transpose(1, 2), ends_E)


def grouped_rows_back(rows_SB: Tensor, weights_EBA: Tensor, ends_E: Tensor) -> Tensor:
    """Return ``rows @ weights[e]`` for the rows of each expert e, as `grouped_rows` does."""
    if len(rows_SB) == 0:  # a worker of an expert group may receive nothing
        return rows_SB.new_zeros(0, weights_EBA.shape[2])
    if _runs_grouped(rows_SB, weights_EBA):
        return torch._grouped_mm(rows_SB, weights_EBA, offs=ends_E)
    result_SA = rows_SB.new_empty(len(rows_SB), weights_EBA.shape[2])
    for expert, begin, end in _groups(ends_E):
        torch.mm(rows_SB[begin:end], weights_EBA[expert], out=result_SA[begin:end])
    return result_SA


def grouped_sums(left_SB: Tensor, right_SA: Tensor, ends_E: Tensor) -> Tensor:
    """Return ``left.T @ right`` over the rows of each expert, ``[E, B, A]``."""
    if len(left_SB) and _runs_grouped(left_SB, right_SA):
        return torch._grouped_mm(left_SB.t(), right_SA, offs=ends_E)
    sums_EBA = left_SB.new_zeros(len(ends_E), left_SB.shape[1], right_SA.shape[1])
    for expert, begin, end in _groups(ends_E) if len(left_SB) else ():
        torch.mm(left_SB[begin:end].t(), right_SA[begin:end], out=sums_EBA[expert])
    return sums_EBA


def _runs_grouped(left: Tensor, right: Tensor) -> bool:
    # On a CPU, PyTorch's grouped product is a loop, too, and admits fewer dtypes and widths.
    if left.device.type != "cuda" or left.dtype != torch.bfloat16:
        return False
    widths = left.shape[-1], *right.shape[-2:]
    if left.ndim == right.ndim:  # a product over the rows
        widths = left.shape[-1], right.shape[-1]
    return all(width * left.element_size() % _ALIGNMENT == 0 for width in widths)


def _groups(ends_E: Tensor) -> Iterator[tuple[int, int, int]]:
    """Yield expert, first row and end of each group that has rows. Wait for the device."""
    for expert, (begin, end) in enumerate(pairwise([0, *ends_E.tolist()])):
        if end > begin:
            yield expert, begin, end


# --- what happens between the products -----


def dispatch(rows: Tensor, decision: Decision, *, compile: bool = False) -> Tensor:
    """Return the row of each pair's token, ordered by expert, ``[S, C]``."""
    top_k = decision.chosen_TK.shape[1]
    if not compile:
        return rows.index_select(0, decision.order_S // top_k)
    # A top_k of 1 would compile anew, with a division by a variable.
    return _run(_ordered, rows, decision.order_S, *([top_k] * (top_k > 1)))


def combine(rows_SC: Tensor, decision: Decision, *, compile: bool = False) -> Tensor:
    """Sum the expert outputs of each token, ``[T, C]``. Pairs that no expert computes are 0."""
    ends_E, (tokens, top_k) = decision.ends_E, decision.chosen_TK.shape
    if compile and len(rows_SC) == 0:
        return rows_SC.new_zeros(tokens, rows_SC.shape[1])
    if compile:
        return _run(_summed, rows_SC, decision.place_S, ends_E, top_k)
    rows = rows_SC.index_select(0, decision.place_S)
    rows.masked_fill_((decision.place_S >= ends_E[-1])[:, None], 0)
    rows_TKC = rows.unflatten(0, decision.chosen_TK.shape)
    return rows_TKC.sum(1, dtype=accumulation_dtype(rows_SC.dtype)).to(rows_SC.dtype)


def by_place(scores_TK: Tensor, decision: Decision) -> Tensor:
    """Return the score of each pair, ordered by expert, ``[S, 1]``."""
    return scores_TK.flatten()[decision.order_S][:, None]


def inner_gradients(
    rows: list[Tensor],
    gate_up_SW: Tensor,
    scores_S1: Tensor,
    down_ECI: Tensor,
    ends_E: Tensor,
    take: Callable[[Tensor, Tensor], None],
    *,
    fused: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up and of the scores.

    rows: a list that holds only the gradient of the experts' outputs ``[S, C]``; it is popped so
        that it can be freed.
    take: receives this gradient and the input of the down projection ``[S, I]``. If it does not
        keep them, they are free before the gradients of gate and up exist.
    fused: computes what `gate_backward` returns in one kernel.
    """
    grad_SC, dtype = rows.pop(), gate_up_SW.dtype
    dinner_SI = grouped_rows_back(grad_SC, down_ECI, ends_E)
    if fused is not None:
        inner_SI, dgate_up_SW, dscores_S = fused(gate_up_SW, dinner_SI, scores_S1)
        take(grad_SC, inner_SI)
        return dgate_up_SW, dscores_S
    gate_SI, up_SI = gate_up_SW.chunk(2, -1)
    silu_SI = functional.silu(gate_SI)
    outer_SI = silu_SI * up_SI
    row_S = torch.arange(len(outer_SI), device=outer_SI.device)
    dscores_S = (dinner_SI.to(scores_S1.dtype) * outer_SI).sum(-1)
    dscores_S.masked_fill_(row_S >= ends_E[-1], 0)
    take(grad_SC, (outer_SI * scores_S1).to(dtype))
    del grad_SC, outer_SI
    douter_SI = (dinner_SI * scores_S1).to(dtype)
    del dinner_SI
    dgate_SI = torch.ops.aten.silu_backward(douter_SI * up_SI, gate_SI)
    return torch.cat([dgate_SI, douter_SI * silu_SI], -1), dscores_S


# Compiled, each is one kernel that reads and writes each row once. As separate operations, they
# would take longer on a GPU than the matrix products.
def _ordered(rows: Tensor, order_S: Tensor, top_k: int = 1) -> Tensor:
    return rows[order_S if top_k == 1 else order_S // top_k]


def _summed(rows_SC: Tensor, place_S: Tensor, ends_E: Tensor, top_k: int) -> Tensor:
    high, total_TC = accumulation_dtype(rows_SC.dtype), None
    # Not a reduction: as a sum of terms, each element of the result reads consecutive memory.
    for place_T in place_S.view(-1, top_k).unbind(1):
        rows_TC = rows_SC[place_T.clamp(max=rows_SC.shape[0] - 1)].to(high)
        rows_TC = torch.where((place_T < ends_E[-1])[:, None], rows_TC, 0)
        total_TC = rows_TC if total_TC is None else total_TC + rows_TC
    assert total_TC is not None
    return total_TC.to(rows_SC.dtype)


def gated(gate_up_SW: Tensor, scores_S1: Tensor) -> Tensor:
    """Return silu(gate) * up * score, the input of the down projection, ``[S, I]``."""
    gate_SI, up_SI = gate_up_SW.chunk(2, -1)
    return (functional.silu(gate_SI) * up_SI * scores_S1).to(gate_up_SW.dtype)


def gate_backward(
    gate_up_SW: Tensor, dinner_SI: Tensor, scores_S1: Tensor, ends_E: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `gated`, and the gradients of gate and up and of the scores."""
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


def _run(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    # Compiled code depends on whether a tensor requires a gradient, and compiles anew for no rows.
    given = [each.detach() if isinstance(each, Tensor) else each for each in arguments]
    return (_compiled(function) if len(given[0]) > 1 else function)(*given, **options)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, compiled. It is compiled again once if the number of rows changes."""
    return compiled(function)


# --- the experts of one worker, one chunk of tokens after another -----


def token_bounds(
    x_TC: Tensor, moe: MoeConfig, execution: LayerExecution, *, degree: int
) -> list[int]:
    """Return the first token of each chunk, and the number of tokens."""
    tokens, hidden = x_TC.shape
    count = expert_chunks(
        tokens, hidden, moe, x_TC.element_size(), execution.tile_bytes, degree=degree,
        chunks=execution.expert_chunks,
    )  # fmt: skip
    return [tokens * n // count for n in range(count + 1)]


class WeightGradients:
    """Gradients of the experts' weights, summed over chunks.

    The sum of more than two chunks is float32. That of two has the compute dtype: one addition
    computes in float32 and rounds once, as a float32 sum would, with a quarter of the bytes.
    """

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, left_SB: Tensor, right_SA: Tensor, ends_E: Tensor) -> None:
        """Add ``left.T @ right`` of each expert's rows to the gradient ``name``."""
        sums_EBA = grouped_sums(left_SB, right_SA, ends_E)
        if name in self._sums:
            self._sums[name] += sums_EBA
            return
        high = accumulation_dtype(sums_EBA.dtype)
        self._sums[name] = sums_EBA.to(high if self._chunks > ONE_ADDITION else sums_EBA.dtype)

    def take(self, name: str, weight: Tensor) -> Tensor:
        """Remove the gradient ``name`` and return it in the dtype of its weight."""
        return self._sums.pop(name).to(weight.dtype)


class ChunkedExperts(torch.autograd.Function):
    """Backward of several chunks may compute gate and up again; that of one chunk has them."""

    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, scores_TK: Tensor, gate_up_EWC: Tensor, down_ECI: Tensor,
        decision: Decision, bounds: list[int], recompute: bool, compile: bool, inputs_only: bool,
    ) -> Tensor:  # fmt: skip
        ctx.decision, ctx.bounds, ctx.compile = decision, bounds, compile
        kept: list[Tensor] = []
        several = len(bounds) > 2
        again = recompute and several
        activate = partial(_run, gated) if compile else gated
        out_TC = torch.empty_like(x_TC) if several and not inputs_only else None
        for own, part in () if inputs_only and again else _chunks(decision, bounds):
            rows_SC = dispatch(x_TC[own], part, compile=compile)
            gate_up_SW = grouped_rows(rows_SC, gate_up_EWC, part.ends_E)
            del rows_SC
            if not again:
                kept.append(gate_up_SW)
            if not inputs_only:
                scores_S1 = by_place(scores_TK[own], part)
                out_SC = grouped_rows(activate(gate_up_SW, scores_S1), down_ECI, part.ends_E)
                summed_TC = combine(out_SC, part, compile=compile)
                if out_TC is None:
                    out_TC = summed_TC
                else:
                    out_TC[own] = summed_TC
        ctx.save_for_backward(x_TC, scores_TK, gate_up_EWC, down_ECI, *kept)
        return x_TC.new_empty(()).expand_as(x_TC) if out_TC is None else out_TC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TC: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, scores_TK, gate_up_EWC, down_ECI, *kept = ctx.saved_tensors
        grad_TC, several = grad_TC.contiguous(), len(ctx.bounds) > 2
        dx_TC = torch.empty_like(x_TC if several else x_TC[:0])
        dscores_TK = torch.empty_like(scores_TK)
        sums = WeightGradients(len(ctx.bounds) - 1)
        for own, part in _chunks(ctx.decision, ctx.bounds):
            # The memory of a single chunk is the largest: it takes x and dx last.
            x_SC = dispatch(x_TC[own], part, compile=ctx.compile) if several else None
            rows = [dispatch(grad_TC[own], part, compile=ctx.compile)]
            if kept:
                gate_up_SW = kept.pop(0)
            else:
                assert x_SC is not None
                gate_up_SW = grouped_rows(x_SC, gate_up_EWC, part.ends_E)
            dgate_up_SW, dscores_S = inner_gradients(
                rows, gate_up_SW, by_place(scores_TK[own], part), down_ECI, part.ends_E,
                partial(sums.add, "down", ends_E=part.ends_E),
                fused=partial(_run, gate_backward, ends_E=part.ends_E) if ctx.compile else None,
            )  # fmt: skip
            del gate_up_SW
            if x_SC is None:
                x_SC = dispatch(x_TC[own], part, compile=ctx.compile)
            sums.add("gate_up", dgate_up_SW, x_SC, part.ends_E)
            del x_SC
            dx_SC = grouped_rows_back(dgate_up_SW, gate_up_EWC, part.ends_E)
            del dgate_up_SW
            dscores_TK[own] = dscores_S[part.place_S].view_as(dscores_TK[own])
            if several:
                dx_TC[own] = combine(dx_SC, part, compile=ctx.compile)
            else:
                dx_TC = combine(dx_SC, part, compile=ctx.compile)
        of_weights = sums.take("gate_up", gate_up_EWC), sums.take("down", down_ECI)
        return dx_TC, dscores_TK, *of_weights, None, None, None, None, None


def _chunks(decision: Decision, bounds: list[int]) -> Iterator[tuple[slice, Decision]]:
    for begin, end in pairwise(bounds):
        whole = len(bounds) == 2
        yield slice(begin, end), decision if whole else part_of(decision, begin, end)
