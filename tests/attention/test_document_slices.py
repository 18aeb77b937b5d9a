"""Slices of documents that are cut allow the same pairs as the definition."""

from __future__ import annotations

import numpy as np
import pytest
from attention.mask_definitions import by_slices

from mtrain_cli.attention.mask import (
    SequenceMask,
    causal_slices,
    continues,
    cut_slices,
    intervals_at_most,
    slices_per_query,
)


def by_mask(slices: np.ndarray, length: int) -> np.ndarray:
    at = np.arange(length)
    return SequenceMask.from_slices(slices, length, length).spans(at, at).seen()


def drawn(rng: np.random.Generator, length: int, most: int = 4) -> np.ndarray:
    q = np.sort(rng.integers(0, length + 1, (rng.integers(1, most + 1), 2)))
    k = np.sort(rng.integers(0, length + 1, q.shape))
    return np.concatenate([q, k, rng.integers(0, 4, (len(q), 1))], axis=1)


@pytest.mark.parametrize("seed", range(40))
def test_a_part_of_a_document_keeps_the_pairs_between_its_tokens(seed):
    rng = np.random.default_rng(seed)
    for _ in range(25):
        length = int(rng.integers(1, 40))
        slices = drawn(rng, length)
        start, stop = sorted(rng.choice(length + 1, 2, replace=False).tolist())
        cut = cut_slices(slices, start, stop)
        expected = by_slices(slices, length)[start:stop, start:stop]
        assert np.array_equal(by_mask(cut, stop - start), expected), (slices, start, stop)


def test_a_whole_document_keeps_its_slices():
    slices = np.array([[0, 9, 0, 9, 1], [4, 9, 0, 6, 2], [2, 5, 1, 9, 3]])
    assert np.array_equal(by_mask(cut_slices(slices, 0, 9), 9), by_slices(slices, 9))
    assert cut_slices(slices[:1], 0, 9).tolist() == slices[:1].tolist()


def test_parts_without_pairs_have_no_slices():
    """The answers of a question that was cut off still see themselves."""
    slices = np.array([[0, 4, 0, 4, 1], [4, 8, 0, 4, 0], [4, 8, 4, 8, 1]])
    assert cut_slices(slices, 5, 8).tolist() == [[0, 3, 0, 3, 1]]
    assert cut_slices(slices[1:2], 4, 8).size == 0


def test_causal_slices_are_causal_attention():
    assert np.array_equal(by_mask(causal_slices(7), 7), np.tri(7, dtype=bool))


@pytest.mark.parametrize(
    ("wrong", "lies"),
    [
        ([0, 9, 0, 9, 3], True),
        ([9, 9, 9, 9, 0], True),
        ([0, 10, 0, 9, 0], False),
        ([0, 9, 0, 10, 0], False),
        ([-1, 9, 0, 9, 0], False),
        ([0, 9, -1, 9, 0], False),
        ([5, 4, 0, 9, 0], False),
        ([0, 9, 5, 4, 0], False),
        ([0, 9, 0, 9, 4], False),
        ([0, 9, 0, 9, -1], False),
    ],
)
def test_slices_lie_in_a_document(wrong, lies):
    assert intervals_at_most(np.array([[0, 9, 0, 9, 1], wrong]), 9, 16) == lies


@pytest.mark.parametrize("seed", range(20))
def test_the_number_of_intervals_is_that_of_the_definition(seed):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        length = int(rng.integers(1, 40))
        slices = drawn(rng, length, most=6)
        seen = np.pad(by_slices(slices, length), ((0, 0), (1, 0))).astype(np.int8)
        intervals = int((np.diff(seen, axis=1) == 1).sum(1).max())
        for most in range(1, 7):
            assert intervals_at_most(slices, length, most) == (intervals <= most), (slices, most)


def test_slices_that_would_exhaust_memory_are_too_many():
    same = np.tile([0, 9, 0, 9, 0], (65, 1))
    assert slices_per_query(same, 9) == 65
    assert intervals_at_most(same[:64], 9, 1)
    assert not intervals_at_most(same, 9, 1)


@pytest.mark.parametrize("seed", range(20))
def test_which_tokens_see_the_token_before_them(seed):
    rng = np.random.default_rng(seed)
    for _ in range(20):
        length = int(rng.integers(1, 40))
        slices = drawn(rng, length)
        start, stop = sorted(rng.choice(length + 1, 2, replace=False).tolist())
        expected = np.append(False, np.diag(by_slices(slices, length), -1))
        assert np.array_equal(continues(slices, start, stop), expected[start:stop]), slices
