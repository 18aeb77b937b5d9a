"""Compare attention scores with what rotary embedding predicts from mean queries and keys.

MTraining, theorem A.1: with rotary embedding, the expected score of a query and a key depends only
on their distance. If fluctuations of queries and keys are independent, only their means matter.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtrain_cli.model.rope import rotate, rotation
from mtrain_extras.studies.attention.score_variance import (
    ScoreSums,
    SeenPairs,
    VarianceShares,
    score_sums,
    variance_shares,
)

_ANGLES = 1 << 24  # most cosines in memory at a time


@dataclass(frozen=True)
class RotaryFrequencies:
    """The rotary embedding of a model.

    per_position: [frequencies], radians per position.
    factor: factor of cosine and sine (`rope.attention_factor`).
    """

    per_position: torch.Tensor
    factor: float


@dataclass(frozen=True)
class RopeAnalysis:
    """The scores of the heads of one layer by distance, as measured and as predicted.

    measured: float64 [heads, distances], mean score of the pairs at each distance.
    predicted: float64 [heads, distances], score of the mean query and the mean key.
    pairs: int64 [distances], number of pairs. Distances are 0 to tokens - 1.
    r2: float64 [heads], share of the variance of ``measured`` that ``predicted`` explains. Each
        distance counts by its pairs. Below 0 if the mean of ``measured`` predicts better.
    shares: shares of the variance of single scores.
    """

    measured: torch.Tensor
    predicted: torch.Tensor
    pairs: torch.Tensor
    r2: torch.Tensor
    shares: VarianceShares


@torch.no_grad()
def analyze_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    positions: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor,
    frequencies: RotaryFrequencies,
) -> RopeAnalysis:
    """Analyze the scores q.k / sqrt(head_dim) of one sequence.

    Args:
        q, k: [tokens, heads, head_dim] and [tokens, kv_heads, head_dim], rotated.
        positions: int64 [tokens], rotary positions, which must rise by 1 per token.
        first: int [tokens], position of the first key that each query sees.
        last: int [tokens], position of the last query that sees each key.
    """
    tokens, heads, _ = q.shape
    pairs = SeenPairs(last.long())
    sums: ScoreSums = score_sums(q, k, first)
    mean_q, mean_k = (_unrotated_mean(t, positions, frequencies) for t in (q, k))
    mean_k = mean_k.repeat_interleave(heads // len(mean_k), 0)
    predicted = predict(mean_q, mean_k, tokens, frequencies)
    measured = sums.distances / pairs.by_distance
    r2 = determination(measured, predicted, pairs.by_distance)
    return RopeAnalysis(measured, predicted, pairs.by_distance, r2, variance_shares(sums, pairs))


def predict(
    mean_q: torch.Tensor, mean_k: torch.Tensor, tokens: int, frequencies: RotaryFrequencies
) -> torch.Tensor:
    """Return the scores of mean queries and keys by distance, float64 [heads, tokens].

    MTraining, equation 9, with the mean query.

    mean_q, mean_k: float64 [heads, head_dim], without rotation.
    """
    return expected_scores(mean_q[..., :, None] * mean_k[..., None, :], tokens, frequencies)


def expected_scores(
    products: torch.Tensor, tokens: int, frequencies: RotaryFrequencies
) -> torch.Tensor:
    """Return the expected scores by distance, float64 [heads, tokens]: MTraining, theorem A.1.

    With A_i = E[q_i k_i] and B_i = E[q_i k_(i + d/2 mod d)], the score at distance D is the sum of
    (A_i + A_(i + d/2)) cos(D theta_i) + (B_i - B_(i + d/2)) sin(D theta_i) over the frequencies i.
    The paper's equation 13 squares the product of the means; E[q k] has it once.

    products: float64 [heads, head_dim, head_dim], E[q_i k_j], without rotation.
    """
    own = products.diagonal(dim1=-2, dim2=-1)
    other = products.roll(-(products.shape[-1] // 2), -1).diagonal(dim1=-2, dim2=-1)
    (a, a_next), (b, b_next) = own.chunk(2, -1), other.chunk(2, -1)
    even, odd = a + a_next, b - b_next
    theta = frequencies.per_position.to(products)
    scale = frequencies.factor**2 * products.shape[-1] ** -0.5
    parts = []
    for distances in torch.arange(tokens, device=products.device).split(_ANGLES // len(theta)):
        angles = theta[:, None] * distances
        parts.append((even @ angles.cos() + odd @ angles.sin()) * scale)
    return torch.cat(parts, -1)


def determination(
    measured: torch.Tensor, predicted: torch.Tensor, pairs: torch.Tensor
) -> torch.Tensor:
    """Return R^2 of a prediction, [...]. NaN if ``measured`` does not vary.

    measured, predicted: [..., distances].
    pairs: [distances], weight of each distance. Distances without pairs do not count.
    """
    there = pairs > 0
    weights, measured, predicted = (
        pairs[there].double(),
        measured[..., there],
        predicted[..., there],
    )
    mean = (weights * measured).sum(-1, keepdim=True) / weights.sum()
    error = (weights * (measured - predicted).square()).sum(-1)
    varies = (weights * (measured - mean).square()).sum(-1)
    return torch.where(varies > 0, 1 - error / varies, float("nan"))


def _unrotated_mean(
    x: torch.Tensor, positions: torch.Tensor, frequencies: RotaryFrequencies
) -> torch.Tensor:
    """Undo the rotation of queries or keys, and return their mean, float64 [heads, head_dim]."""
    per_position = frequencies.per_position.to(x.device)
    turned = rotation(positions[None], per_position, 1 / frequencies.factor)
    back = rotate(x[None].float(), turned.cos_BN1F, -turned.sin_BN1F)
    return back[0].mean(0, dtype=torch.float64)
