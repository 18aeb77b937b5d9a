"""Choose the experts of each token in one kernel.

`torch.topk` runs a selection of many rounds for each token and then sorts what it found, which
suits long rows. A router has a few hundred experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ELEMENTS = 2048  # scores of a program: 16 tokens with 128 experts


@triton.jit
def _choose(
    SCORES, BIAS, CHOSEN, tokens, EXPERTS: tl.constexpr, CHOICES: tl.constexpr,
    WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, WIDTH)[None, :]
    valid = (row[:, None] < tokens) & (expert < EXPERTS)
    scores = tl.load(SCORES + row[:, None] * EXPERTS + expert, mask=valid, other=float("-inf"))
    scores += tl.load(BIAS + expert, mask=expert < EXPERTS, other=0.0)
    # `torch.topk` takes NaN for the largest number, too. An index is valid whatever the scores are.
    scores = tl.where(scores != scores, float("inf"), scores)
    for number in range(CHOICES):
        best = tl.max(scores, 1)
        first = tl.min(tl.where(scores == best[:, None], expert, WIDTH), 1)
        tl.store(CHOSEN + row * CHOICES + number, first.to(tl.int64), mask=row < tokens)
        scores = tl.where(expert == first[:, None], float("-inf"), scores)


def chosen_experts(scores: torch.Tensor, bias: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the numbers of each token's experts with the highest scores + bias, the best first.

    Of equal experts, those with the lowest numbers are chosen.

    Args:
        scores: float32 [tokens, experts].
        bias: float32 [experts].

    Returns: int64 [tokens, top_k].
    """
    scores = scores.contiguous()
    tokens, experts = scores.shape
    chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=scores.device)
    width = triton.next_power_of_2(experts)
    rows = max(1, _ELEMENTS // width)
    if tokens:
        _choose[(triton.cdiv(tokens, rows),)](
            scores, bias, chosen, tokens, EXPERTS=experts, CHOICES=top_k, WIDTH=width, ROWS=rows
        )
    return chosen
