"""Slices that come with the documents of a corpus: cut them where a sequence cuts the document.

Slices are arrays int64 [slices, 5]: query start and stop, key start and stop, and `SliceKind`. They
count tokens from the start of their document.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from mtrain_cli.attention.mask import IntArray, SliceKind


def causal_slices(length: int) -> IntArray:
    """Return the slices of causal attention over ``length`` tokens, int64 [1, 5]."""
    return np.array([[0, length, 0, length, SliceKind.CAUSAL]], np.int64)


def cut_slices(slices: IntArray, start: int, stop: int) -> IntArray:
    """Return the slices of the part of a document from token ``start`` to ``stop`` - 1.

    The result counts tokens from ``start``. It allows the same pairs as ``slices`` between tokens
    of the part. A cut can split a slice into three: the rows before a moving bound enters the part,
    the rows where it moves inside, and the rows after it leaves.
    """
    q_start, q_stop, k_start, k_stop, kind = slices.T
    inverse, causal = kind >> 1, kind & 1
    # Rows outside the part: each takes one key from the end of the slice that it touches.
    before, after = np.maximum(start - q_start, 0), np.maximum(q_stop - stop, 0)
    rows = np.maximum(q_stop - q_start - before - after, 0)
    first = q_start + before - start
    low = k_start + inverse * before - start  # of the first row
    high = k_stop - causal * after - start  # of the last row
    length = stop - start
    # From row `enters` on, the lower bound lies in the part; up to row `leaves`, the upper bound.
    enters = np.where(inverse, np.clip(-low, 0, rows), 0)
    leaves = np.where(causal, np.clip(length - high + rows, 0, rows), rows)
    edges = (np.zeros_like(rows), np.minimum(enters, leaves), np.maximum(enters, leaves), rows)
    parts = []
    for begin, end in pairwise(edges):
        k_from = np.maximum(low + inverse * begin, 0)
        k_to = np.minimum(high - causal * (rows - end), length)
        moves = 2 * (inverse & (begin >= enters)) + (causal & (end <= leaves))
        part = np.stack([first + begin, first + end, k_from, k_to, moves], axis=1)
        parts.append(part[(end > begin) & (k_to > k_from)])
    return np.concatenate(parts)


def lie_in(slices: IntArray, length: int) -> bool:
    """Return whether all slices have a known kind and lie in a document of ``length`` tokens."""
    queries, keys, kind = slices[:, 0:2], slices[:, 2:4], slices[:, 4]
    inside = slices[:, :4].min() >= 0 and slices[:, :4].max() <= length
    ordered = (queries[:, 0] <= queries[:, 1]).all() and (keys[:, 0] <= keys[:, 1]).all()
    known = kind.min() >= 0 and kind.max() <= SliceKind.BICAUSAL
    return bool(inside and ordered and known)
