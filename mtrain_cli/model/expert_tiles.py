"""Experts in chunks of tokens: less memory for temporary tensors, with the results of one chunk.

Shape suffixes are those of `experts.py`; S are the pairs of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from mtrain_cli.attention.partials import accumulation_dtype
from mtrain_cli.config.schema import MoeConfig
from mtrain_cli.model import expert_kernels
from mtrain_cli.model.grouped_products import grouped_rows, grouped_rows_back, grouped_sums
from mtrain_cli.model.routing import Decision, part_of
from mtrain_cli.model.tiling import ONE_ADDITION, expert_chunks


@dataclass(frozen=True)
class ExpertExecution:
    """How the experts of a layer run.

    tile_bytes: maximum bytes of temporary tensors, which sets the number of chunks. 0 means no
        limit.
    chunks: value of ``topology.expert_chunks``.
    recompute: whether the layer is checkpointed. Its second forward pass then leaves the products
        to the backward pass, if there are several chunks or if workers share the experts.
    compile: compile the operations between the matrix products.
    """

    tile_bytes: int = 0
    chunks: int | str = "auto"
    recompute: bool = False
    compile: bool = False

    def bounds(self, x_TC: Tensor, moe: MoeConfig, *, degree: int) -> list[int]:
        """Return the first token of each chunk, and the number of tokens.

        Args:
            x_TC: the own tokens.
            degree: number of workers that share the experts; 1 without expert parallelism.
        """
        tokens, hidden = x_TC.shape
        count = expert_chunks(
            tokens, hidden, moe, x_TC.element_size(), self.tile_bytes,
            degree=degree, chunks=self.chunks,
        )  # fmt: skip
        return [tokens * n // count for n in range(count + 1)]


def dispatch(rows: Tensor, decision: Decision, *, compile: bool = False) -> Tensor:
    """Return the row of each pair's token, ordered by expert, ``[S, C]``."""
    top_k = decision.chosen_TK.shape[1]
    if compile:
        return expert_kernels.taken(rows, decision.order_S, top_k)
    return rows.index_select(0, decision.order_S // top_k)


def combine(rows_SC: Tensor, decision: Decision, *, compile: bool = False) -> Tensor:
    """Return the sum of each token's rows, ``[T, C]``. The inverse way of `dispatch`.

    The sum is computed in float32. Rows of pairs that no expert computes do not count.
    """
    ends_E, top_k = decision.ends_E, decision.chosen_TK.shape[1]
    if compile:
        return expert_kernels.summed(rows_SC, decision.place_S, ends_E, top_k)
    rows = rows_SC.index_select(0, decision.place_S)
    rows.masked_fill_((decision.place_S >= ends_E[-1])[:, None], 0)
    rows_TKC = rows.unflatten(0, decision.chosen_TK.shape)
    return rows_TKC.sum(1, dtype=accumulation_dtype(rows_SC.dtype)).to(rows_SC.dtype)


def by_place(scores_TK: Tensor, decision: Decision) -> Tensor:
    """Return the score of each pair, ordered by expert, ``[S, 1]``."""
    return scores_TK.flatten()[decision.order_S][:, None]


def outputs(
    gate_up_SW: Tensor,
    scores_S1: Tensor,
    down_ECI: Tensor,
    ends_E: Tensor,
    *,
    compile: bool = False,
) -> Tensor:
    """Return the experts' outputs times the scores, ``[S, C]``."""
    if compile:
        return grouped_rows(expert_kernels.gated(gate_up_SW, scores_S1), down_ECI, ends_E)
    gate_SI, up_SI = gate_up_SW.chunk(2, -1)
    inner_SI = functional.silu(gate_SI) * up_SI * scores_S1
    return grouped_rows(inner_SI.to(gate_up_SW.dtype), down_ECI, ends_E)


def inner_gradients(
    rows: list[Tensor],
    gate_up_SW: Tensor,
    scores_S1: Tensor,
    down_ECI: Tensor,
    ends_E: Tensor,
    take: Callable[[Tensor, Tensor], None],
    *,
    compile: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up and of the scores.

    Args:
        rows: the gradient of the experts' outputs ``[S, C]``, which leaves the list to be freed.
        take: receives this gradient and the input of the down projection ``[S, I]``, from which the
            gradient of the down projection follows. If it does not keep them, they are free before
            the gradients of gate and up exist.
    """
    grad_SC, dtype = rows.pop(), gate_up_SW.dtype
    dinner_SI = grouped_rows_back(grad_SC, down_ECI, ends_E)
    if compile:
        inner_SI, dgate_up_SW, dscores_S = expert_kernels.gate_backward(
            gate_up_SW, dinner_SI, scores_S1, ends_E
        )
        take(grad_SC, inner_SI)
        return dgate_up_SW, dscores_S
    gate_SI, up_SI = gate_up_SW.chunk(2, -1)
    silu_SI = functional.silu(gate_SI)
    outer_SI = silu_SI * up_SI
    dscores_S = score_gradients(dinner_SI, outer_SI, scores_S1.dtype, ends_E)
    take(grad_SC, (outer_SI * scores_S1).to(dtype))
    del grad_SC, outer_SI
    douter_SI = (dinner_SI * scores_S1).to(dtype)
    del dinner_SI
    dgate_SI = torch.ops.aten.silu_backward(douter_SI * up_SI, gate_SI)
    return torch.cat([dgate_SI, douter_SI * silu_SI], -1), dscores_S


def score_gradients(
    dinner_SI: Tensor, outer_SI: Tensor, dtype: torch.dtype, ends_E: Tensor
) -> Tensor:
    """Return the gradient of each row's score, ``[S]``; 0 behind the last group."""
    row_S = torch.arange(len(outer_SI), device=outer_SI.device)
    return (dinner_SI.to(dtype) * outer_SI).sum(-1).masked_fill_(row_S >= ends_E[-1], 0)


class WeightGradients:
    """Gradients of the experts' weights, summed over chunks.

    The sum of more than two chunks is float32. For one or two chunks, it has the compute dtype, as
    the gradient of autograd does: a single addition computes in float32 and rounds once, as a
    float32 sum that is rounded at the end does. It moves a quarter of the bytes.
    """

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks
        self._sums: dict[str, Tensor] = {}

    def add(self, name: str, left_SB: Tensor, right_SA: Tensor, ends_E: Tensor) -> None:
        """Add ``left.T @ right`` of each expert's rows to the gradient ``name``."""
        sums_EBA = grouped_sums(left_SB, right_SA, ends_E)
        if name in self._sums:
            self._sums[name] += sums_EBA
        else:
            high = accumulation_dtype(sums_EBA.dtype)
            self._sums[name] = sums_EBA.to(high) if self._chunks > ONE_ADDITION else sums_EBA

    def take(self, name: str, weight: Tensor) -> Tensor:
        """Remove the gradient ``name`` and return it in the dtype of its weight."""
        return self._sums.pop(name).to(weight.dtype)


class ChunkedExperts(torch.autograd.Function):
    """The experts of one worker, one chunk of tokens after another (`experts.compute_experts`)."""

    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, scores_TK: Tensor, gate_up_EWC: Tensor, down_ECI: Tensor,
        decision: Decision, bounds: list[int], recompute: bool, compile: bool, inputs_only: bool,
    ) -> Tensor:  # fmt: skip
        ctx.decision, ctx.bounds, ctx.compile = decision, bounds, compile
        kept: list[Tensor] = []
        if not inputs_only:
            out_TC = torch.empty_like(x_TC)
            for own, part in _chunks(decision, bounds):
                rows_SC = dispatch(x_TC[own], part, compile=compile)
                gate_up_SW = grouped_rows(rows_SC, gate_up_EWC, part.ends_E)
                del rows_SC
                if not recompute:
                    kept.append(gate_up_SW)
                scores_S1 = by_place(scores_TK[own], part)
                out_SC = outputs(gate_up_SW, scores_S1, down_ECI, part.ends_E, compile=compile)
                out_TC[own] = combine(out_SC, part, compile=compile)
        ctx.save_for_backward(x_TC, scores_TK, gate_up_EWC, down_ECI, *kept)
        return x_TC.new_empty(()).expand_as(x_TC) if inputs_only else out_TC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_TC: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, scores_TK, gate_up_EWC, down_ECI, *kept = ctx.saved_tensors
        grad_TC = grad_TC.contiguous()
        dx_TC, dscores_TK = torch.empty_like(x_TC), torch.empty_like(scores_TK)
        sums = WeightGradients(len(ctx.bounds) - 1)
        for own, part in _chunks(ctx.decision, ctx.bounds):
            x_SC = dispatch(x_TC[own], part, compile=ctx.compile)
            rows = [dispatch(grad_TC[own], part, compile=ctx.compile)]
            gate_up_SW = kept.pop(0) if kept else grouped_rows(x_SC, gate_up_EWC, part.ends_E)
            dgate_up_SW, dscores_S = inner_gradients(
                rows, gate_up_SW, by_place(scores_TK[own], part), down_ECI, part.ends_E,
                partial(sums.add, "down", ends_E=part.ends_E), compile=ctx.compile,
            )  # fmt: skip
            del gate_up_SW
            sums.add("gate_up", dgate_up_SW, x_SC, part.ends_E)
            del x_SC
            dx_SC = grouped_rows_back(dgate_up_SW, gate_up_EWC, part.ends_E)
            del dgate_up_SW
            dx_TC[own] = combine(dx_SC, part, compile=ctx.compile)
            dscores_TK[own] = dscores_S[part.place_S].view_as(dscores_TK[own])
        of_weights = sums.take("gate_up", gate_up_EWC), sums.take("down", down_ECI)
        return dx_TC, dscores_TK, *of_weights, None, None, None, None, None


def _chunks(decision: Decision, bounds: list[int]) -> Iterator[tuple[slice, Decision]]:
    for begin, end in pairwise(bounds):
        yield slice(begin, end), part_of(decision, begin, end)
