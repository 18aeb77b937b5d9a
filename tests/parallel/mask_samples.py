"""Masks for tests of traffic and dispatch, and their dense definition."""

from __future__ import annotations

import numpy as np

from mtrain_cli.attention.mask import IntArray, SequenceMask


def mask_of(low: IntArray, high: IntArray) -> SequenceMask:
    """Return the mask of these intervals of keys per query, without padding."""
    return SequenceMask(low, high, low.shape[1])


def random_mask(rng: np.random.Generator, padded: int, n: int) -> SequenceMask:
    """Draw n disjoint ascending intervals per query. About a third of them are empty."""
    bounds = np.sort(rng.integers(0, padded + 1, (2 * n, padded)), axis=0)
    low, high = bounds[::2], bounds[1::2].copy()
    empty = rng.random(low.shape) < 0.3
    high[empty] = low[empty]
    return mask_of(low, high)


def local_mask(rng: np.random.Generator, padded: int) -> SequenceMask:
    """Draw documents in which each query sees the document's start and a window of keys."""
    position = np.arange(padded)
    first = np.sort(rng.integers(0, padded, 5))[:, None]
    start = np.where(first <= position, first, 0).max(0)
    window = np.maximum(start, position - int(rng.integers(1, padded // 4 + 2)))
    sink = np.minimum(window, start + 3)
    return mask_of(np.stack([start, window]), np.stack([sink, position + 1]))


def documents(seq: int, mean: int, seed: int) -> SequenceMask:
    """Draw lengths of documents from a log-normal distribution (sigma 1.5); attention is causal."""
    draws = np.random.default_rng(seed).lognormal(np.log(mean) - 1.5**2 / 2, 1.5, seq // 16)
    ends = np.cumsum(np.maximum(16, draws.astype(np.int64)))
    position = np.arange(seq)
    starts = np.append(0, ends)[np.searchsorted(ends, position, side="right")]
    return mask_of(starts[None], position[None] + 1)


def sliding_window(seq: int, window: int) -> SequenceMask:
    position = np.arange(seq)
    return mask_of(np.maximum(0, position - window + 1)[None], position[None] + 1)


def dense(mask: SequenceMask) -> np.ndarray:
    """Return whether each query sees each key, bool [padded, padded]."""
    key = np.arange(mask.low.shape[1])
    return np.logical_or.reduce(
        [
            (low[:, None] <= key) & (key < high[:, None])
            for low, high in zip(mask.low, mask.high, strict=True)
        ]
    )
