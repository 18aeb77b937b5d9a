"""Masks by their definitions, as dense tables."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import starmap

import numpy as np

from mtrain_cli.attention.mask import KeySlice


def cells(slices: Iterable[KeySlice], queries: int, keys: int) -> np.ndarray:
    """How many slices allow each pair, by the definition of the four kinds, [queries, keys]."""
    count = np.zeros((queries, keys), int)
    for s in slices:
        for row in range(s.q_start, s.q_stop):
            low = s.k_start + (row - s.q_start if s.kind & 2 else 0)
            high = s.k_stop - (s.q_stop - 1 - row if s.kind & 1 else 0)
            count[row, low : max(low, high)] += 1
    return count


def window_start(place: np.ndarray, size: int, window: int) -> np.ndarray:
    return np.clip(place - window // 2, 0, size - window)


def predicate(kind: str, seq: int, ids: np.ndarray | None = None, **keys) -> np.ndarray:
    """Which query sees which key under a named mask, bool [seq, seq].

    ids: ids of the documents in which the mask counts, if it counts in documents.
    """
    q, k = np.indices((seq, seq))
    if kind == "causal":
        return k <= q
    if kind == "full":
        return k >= 0
    if kind == "sliding_window":
        return (k <= q) & ((q - k < keys["window"]) | (k < keys["global_tokens"]))
    if kind == "prefix_lm":
        return (k <= q) | (k < keys["prefix"])
    if kind == "block_causal":
        return k // keys["block"] <= q // keys["block"]
    if kind == "chunked":
        start = np.zeros(seq, int) if ids is None else np.searchsorted(ids, ids)
        chunk = (np.arange(seq) - start) // keys["chunk"]
        return (k <= q) & (chunk[q] == chunk[k])
    if kind == "block_window":
        apart = q // keys["block"] - k // keys["block"]
        return (apart >= 0) & (apart <= keys["back"])
    if kind == "dilated":
        apart = q // keys["block"] - k // keys["block"]
        near = apart // keys["stride"] < keys["count"]
        return (k <= q) & (apart % keys["stride"] == 0) & near
    assert kind == "video"
    sizes = keys["frames"], keys["height"], keys["width"]
    seen = k <= q if keys.get("causal") else np.ones((seq, seq), bool)
    axes = zip(
        np.unravel_index(q, sizes), np.unravel_index(k, sizes), sizes, keys["window"], strict=True
    )
    for axis, (of_q, of_k, size, window) in enumerate(axes):
        start = window_start(of_q, size, window)
        if axis == 0 and keys.get("causal"):
            start = of_q - window + 1
        seen &= (of_k >= start) & (of_k < start + window)
    return seen


def by_slices(slices: np.ndarray, length: int) -> np.ndarray:
    """Whether each query sees each key, bool [length, length]."""
    return cells(starmap(KeySlice, slices.tolist()), length, length) > 0


def question(first: int, answers: int, length: int) -> np.ndarray:
    """The slices of a question of `first` tokens whose answers see the question and themselves."""
    rows = [[0, first, 0, first, 1]]
    for start in range(first, first + answers * length, length):
        stop = start + length
        rows += [[start, stop, 0, first, 0], [start, stop, start, stop, 1]]
    return np.array(rows)
