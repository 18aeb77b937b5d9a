"""Slices that come with the documents of a corpus: cut them where a sequence cuts the document.

Slices are arrays int64 [slices, 5]: query start and stop, key start and stop, and `SliceKind`. They
count tokens from the start of their document.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mtrain_cli.attention.mask import IntArray, SequenceMask, SliceKind, valid_slices
from mtrain_cli.config.mask_settings import MOST_INTERVALS

# Most slices of a query on average. Slices may overlap, but more than this is a mistake in the data
# and would exhaust memory.
MOST_SLICES = 4 * MOST_INTERVALS


def causal_slices(length: int) -> IntArray:
    return np.array([[0, length, 0, length, SliceKind.CAUSAL]], np.int64)


def cut_slices(slices: IntArray, start: int, stop: int) -> IntArray:
    """Return the slices of the part of a document from token ``start`` to ``stop`` - 1."""
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


def continues(slices: IntArray, start: int, stop: int) -> NDArray[np.bool_]:
    """Return whether tokens ``start`` to ``stop`` - 1 of a document see the token before them."""
    q_start, q_stop, k_start, k_stop, kind = slices.T
    # A bound that moves with the query is at the token before it for all queries or for none.
    low_moves, high_moves = kind >> 1 == 1, kind & 1 == 1
    first = np.where(low_moves, q_start, np.maximum(q_start, k_start + 1))
    end = np.where(high_moves, q_stop, np.minimum(q_stop, k_stop + 1))
    never = (low_moves & (k_start >= q_start)) | (high_moves & (k_stop < q_stop - 1))
    first, end = (np.clip(bound, start, stop) - start for bound in (first, end))
    some = ~never & (end > first)
    change = np.bincount(first[some], minlength=stop - start + 1)
    change = change - np.bincount(end[some], minlength=stop - start + 1)
    return np.cumsum(change)[: stop - start] > 0


def slices_per_query(slices: IntArray, length: int) -> float:
    return float(np.clip(slices[:, 1].astype(float) - slices[:, 0], 0, None).sum()) / max(1, length)


def intervals_at_most(slices: IntArray, length: int, most: int) -> bool:
    """Return whether slices lie in a document, where no query sees over ``most`` intervals."""
    if not valid_slices(slices, length).all():
        return False
    starts, stops = np.sort(slices[:, 0]), np.sort(slices[:, 1])
    shared = np.arange(1, len(starts) + 1) - np.searchsorted(stops, starts, side="right")
    if shared.max(initial=0) <= most:
        return True  # no query is in more slices
    if slices_per_query(slices, length) > MOST_SLICES:
        return False
    try:
        return SequenceMask.from_slices(slices, length, length).intervals <= most
    except ValueError:
        return False
