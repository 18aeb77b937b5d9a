"""Rotary embedding predicts the mean score at each distance from planted means."""

from __future__ import annotations

import math

import pytest
import torch

from mtrain_cli.model.rope import rotate, rotation
from mtrain_extras.studies.attention.rope_analysis import (
    RotaryFrequencies,
    analyze_rope,
    determination,
    expected_scores,
    predict,
)

TOKENS, HEADS, DIM = 400, 4, 16
THETA = 1.0 / 1000 ** (torch.arange(0, DIM, 2) / DIM)


def rotated(mean: torch.Tensor, spread: float, seed: int, factor: float) -> torch.Tensor:
    """Vectors around a mean [heads, head_dim], turned by their positions."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(TOKENS, *mean.shape, generator=generator)
    turned = rotation(torch.arange(TOKENS)[None], THETA, factor)
    return rotate((mean + spread * noise)[None], turned.cos_BN1F, turned.sin_BN1F)[0]


def planted(spread: float, factor: float = 1.0):
    generator = torch.Generator().manual_seed(9)
    mean_q, mean_k = torch.randn(2, HEADS, DIM, generator=generator)
    q = rotated(mean_q, spread, 1, factor)
    k = rotated(mean_k[:2], spread, 2, factor)
    return mean_q.double(), mean_k[:2].repeat_interleave(2, 0).double(), q, k


def analyze(q, k, frequencies):
    first, last = torch.zeros(TOKENS).int(), torch.full((TOKENS,), TOKENS - 1).int()
    return analyze_rope(q, k, torch.arange(TOKENS), first, last, frequencies)


@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_the_prediction_equals_the_scores_of_rotated_means(factor):
    mean_q, mean_k, q, k = planted(0.0, factor)
    found = predict(mean_q, mean_k, TOKENS, RotaryFrequencies(THETA, factor))
    keys = k.repeat_interleave(2, 1)
    scores = torch.einsum("nhd,mhd->hnm", q, keys) / math.sqrt(DIM)
    for distance in (0, 1, 17, TOKENS - 1):
        diagonal = scores.diagonal(-distance, 1, 2).double()
        expected = found[:, distance, None].expand_as(diagonal)
        torch.testing.assert_close(diagonal, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("factor", [1.0, 1.25])
def test_planted_means_are_predicted_and_make_slashes(factor):
    *_, q, k = planted(0.1, factor)
    found = analyze(q, k, RotaryFrequencies(THETA, factor))
    assert found.r2.min() > 0.999
    assert found.pairs.tolist() == list(range(TOKENS, 0, -1))
    assert found.shares.slash.min() > 0.9
    diagonals = torch.einsum("nhd,mhd->hnm", q, k.repeat_interleave(2, 1)) / math.sqrt(DIM)
    expected = torch.stack([diagonals.diagonal(-d, 1, 2).mean(-1) for d in range(TOKENS)], -1)
    torch.testing.assert_close(found.measured, expected.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("factor", [1.0, 1.25])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_expected_score_of_correlated_queries_and_keys_depends_on_their_distance(seed, factor):
    """MTraining, theorem A.1, by 100,000 draws: three distances, each at two places."""
    generator = torch.Generator().manual_seed(seed)
    draws, frequencies = 100_000, RotaryFrequencies(THETA, factor)
    mean_q, mean_k = torch.randn(2, DIM, generator=generator, dtype=torch.float64)
    mix_q, mix_k = torch.randn(2, DIM, DIM, generator=generator, dtype=torch.float64)
    # A query and a key share their noise, so E[q_i k_j] has a covariance beside the means.
    products = mean_q[:, None] * mean_k + mix_q.T @ mix_k
    expected = expected_scores(products[None], TOKENS, frequencies)[0]
    for distance in (1, 37, TOKENS - 1):
        for place in (0, 1000):
            noise = torch.randn(draws, DIM, generator=generator, dtype=torch.float64)
            positions = torch.tensor([[place + distance, place]])
            turned = rotation(positions, THETA, factor)
            pair = torch.stack([mean_q + noise @ mix_q, mean_k + noise @ mix_k], 1)[:, :, None]
            q, k = rotate(pair, turned.cos_BN1F, turned.sin_BN1F)[:, :, 0].unbind(1)
            scores = (q * k).sum(-1) / math.sqrt(DIM)
            error = float(scores.std()) / math.sqrt(draws)
            assert abs(float(scores.mean() - expected[distance])) < 3 * error


def test_other_frequencies_do_not_predict():
    *_, q, k = planted(0.1)
    assert analyze(q, k, RotaryFrequencies(THETA * 1.3, 1.0)).r2.max() < 0.9


def test_a_key_that_stands_out_makes_a_vertical_head():
    """Keys differ along an unrotated direction, the slowest pair of dimensions; queries agree."""
    slow = torch.full((DIM // 2,), 1e-9)
    generator = torch.Generator().manual_seed(3)
    q, k = torch.zeros(TOKENS, 1, DIM), torch.zeros(TOKENS, 1, DIM)
    q[:, 0, 0] = 1
    k[:, 0, 0] = torch.randn(TOKENS, generator=generator)
    found = analyze(q, k, RotaryFrequencies(slow, 1.0))
    assert float(found.shares.vertical[0]) == pytest.approx(1, abs=1e-5)
    assert found.shares.slash[0] < 0.2


def test_determination_weights_distances_by_pairs_and_skips_those_without():
    measured = torch.tensor([[1.0, 2.0, 4.0, float("nan")]]).double()
    predicted = torch.tensor([[1.0, 2.0, 3.0, 0.0]]).double()
    pairs = torch.tensor([3, 2, 1, 0])
    mean = (3 + 4 + 4) / 6
    varies = 3 * (1 - mean) ** 2 + 2 * (2 - mean) ** 2 + (4 - mean) ** 2
    assert float(determination(measured, predicted, pairs)[0]) == pytest.approx(1 - 1 / varies)
    constant = torch.ones(1, 3).double()
    assert determination(constant, constant, torch.ones(3)).isnan().all()
