"""Sums of scores equal the whole float64 matrix; shares equal least squares; lines are found."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtrain_cli.attention.mask import SequenceMask
from mtrain_extras.studies.attention import score_variance as subject
from mtrain_extras.studies.attention.score_variance import (
    ScoreSums,
    SeenPairs,
    score_sums,
    variance_shares,
)

TOKENS, HEADS, DIM = 60, 4, 8


def mask_of(lengths: list[int], window: int | None = None) -> SequenceMask:
    documents = np.repeat(np.arange(len(lengths)), lengths)
    mask = SequenceMask.from_documents(documents, sum(lengths))
    if window is None:
        return mask
    nearest = np.arange(mask.length) - window + 1
    return SequenceMask(np.maximum(mask.low, nearest), mask.high, mask.length)


def bounds(mask: SequenceMask) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(mask.first), torch.from_numpy(mask.last().astype(np.int64))


def whole(q, k, first):
    """All scores [heads, tokens, tokens], and which pairs count."""
    keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    at = torch.arange(len(q))
    seen = (at <= at[:, None]) & (at >= first[:, None])
    return torch.einsum("nhd,mhd->hnm", q, keys) * q.shape[-1] ** -0.5, seen


def least_squares(scores: np.ndarray, *labels: np.ndarray) -> float:
    """The share of the variance that a sum of one value per label of each kind explains."""
    columns = [np.eye(label.max() + 1)[label] for label in labels]
    fit = np.concatenate(columns, 1)
    left = scores - fit @ (np.linalg.pinv(fit.T @ fit, hermitian=True) @ (fit.T @ scores))
    return 1 - left @ left / ((scores - scores.mean()) ** 2).sum()


@pytest.mark.parametrize("lengths", [[60], [20, 1, 39]])
@pytest.mark.parametrize("window", [None, 1, 13])
@pytest.mark.parametrize("chunk", [7, 60])
def test_sums_and_shares_equal_the_whole_matrix(lengths, window, chunk, monkeypatch):
    monkeypatch.setattr(subject, "_CHUNK", chunk)
    monkeypatch.setattr(subject, "_KEYS", chunk + 1)
    monkeypatch.setattr(subject, "_SPECTRUM_BYTES", 3 * 16 * 3 * (TOKENS + 5))
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(TOKENS, HEADS, DIM, dtype=torch.float64, generator=generator)
    k = torch.randn(TOKENS, 2, DIM, dtype=torch.float64, generator=generator)
    first, last = bounds(mask_of(lengths, window))
    sums, pairs = score_sums(q, k, first), SeenPairs(last)
    scores, seen = whole(q, k, first)
    kept = scores * seen
    distances = torch.stack([kept.diagonal(-d, 1, 2).sum(-1) for d in range(TOKENS)], -1)
    torch.testing.assert_close(sums.distances, distances, rtol=0, atol=1e-12)
    torch.testing.assert_close(sums.keys, kept.sum(1), rtol=0, atol=1e-12)
    torch.testing.assert_close(sums.squares, kept.square().sum((1, 2)), rtol=1e-12, atol=0)
    assert pairs.by_key.tolist() == seen.sum(0).tolist()
    assert pairs.by_distance.tolist() == [int(seen.diagonal(-d).sum()) for d in range(TOKENS)]
    shares = variance_shares(sums, pairs)
    query, key = (t.numpy() for t in seen.nonzero(as_tuple=True))
    for head in (0, HEADS - 1) if chunk == 7 and window != 1 else ():
        values = scores[head][seen].numpy()
        expected = [
            least_squares(values, query - key),
            least_squares(values, key),
            least_squares(values, query - key, key),
        ]
        found = [float(t[head]) for t in (shares.slash, shares.vertical, shares.both)]
        assert found == pytest.approx(expected, abs=1e-7)
        assert float(shares.rest[head]) == pytest.approx(1 - expected[2], abs=1e-7)


def test_a_planted_slash_head_and_a_planted_vertical_head_are_found():
    """Scores that depend on the distance, on the key, on both, and on neither."""
    first, last = bounds(mask_of([TOKENS]))
    at = torch.arange(TOKENS, dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    angle = at[:, None] * 0.7
    slash = torch.cat([angle.cos(), angle.sin()], 1)
    of_key = torch.randn(TOKENS, 1, dtype=torch.float64, generator=generator)
    noise = torch.randn(2, TOKENS, 4, dtype=torch.float64, generator=generator)
    zero, one = torch.zeros(TOKENS, 1).double(), torch.ones(TOKENS, 1).double()
    q = torch.stack([
        torch.cat([slash, zero, zero], 1), torch.cat([one, zero, zero, zero], 1),
        torch.cat([slash, one, zero], 1), noise[0],
    ], 1)  # fmt: skip
    k = torch.stack([
        torch.cat([slash, zero, zero], 1), torch.cat([of_key, zero, zero, zero], 1),
        torch.cat([slash, of_key, zero], 1), noise[1],
    ], 1)  # fmt: skip
    shares = variance_shares(score_sums(q, k, first), SeenPairs(last))
    assert shares.slash[0] == pytest.approx(1, abs=1e-9)
    assert shares.vertical[0] < 0.5
    assert shares.vertical[1] == pytest.approx(1, abs=1e-9)
    assert shares.slash[1] < 0.5
    assert shares.both[2] == pytest.approx(1, abs=1e-6)
    assert max(shares.slash[2], shares.vertical[2]) < 0.9
    assert shares.rest[3] > 0.6


def test_scores_that_do_not_vary_have_no_shares():
    last = torch.full((5,), 4)
    ones = torch.ones(5, 1, 2)
    shares = variance_shares(score_sums(ones, ones, torch.zeros(5)), SeenPairs(last))
    assert shares.both.isnan().all()
    assert shares.slash.isnan().all()


def test_half_precision_scores_are_summed_in_float64():
    generator = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, TOKENS, 1, DIM, generator=generator).bfloat16()
    first, _ = bounds(mask_of([TOKENS]))
    found, exact = (score_sums(a, b, first) for a, b in ((q, k), (q.double(), k.double())))
    assert isinstance(found, ScoreSums)
    for name in ("distances", "keys", "squares"):
        assert torch.equal(getattr(found, name), getattr(exact, name))


def test_a_mask_of_another_form_is_refused():
    """Its distances are no correlation of whole documents."""
    q, k = torch.randn(2, 4, 1, 2)
    with pytest.raises(AssertionError):
        score_sums(q, k, torch.tensor([0, 0, 1, 1]))


def test_long_sequences_take_time_in_proportion():
    """The matrix of scores of this sequence would have 4 billion entries."""
    q, k = torch.randn(2, 1 << 16, 1, 2)
    sums = score_sums(q, k, torch.zeros(1 << 16))
    assert float(sums.distances.sum()) == pytest.approx(float(sums.keys.sum()), rel=1e-9)
