"""Masks: which query-key pairs are allowed before any dynamic index.

Each query sees one interval of keys. A slot is the index of a token in its shard. Every layout
keeps a worker's tokens in ascending order, so a query also sees one interval of slots in any key
shard. `KeySpans` holds these intervals as two integers per query. Spans are exact, and are computed
on the CPU without a process group. This module derives rectangles and counts from the spans, and
`mask_tables` derives tables by block.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mtrain_cli.config.schema import DataConfig

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class SequenceMask:
    """Causal attention over one packed sequence of ``padded`` positions.

    first: int64 [padded], position of the first key that the query at each position may see: the
        start of the query's document, or 0 without documents. Non-decreasing.
    length: number of tokens. Later positions are padding: a query in the padding sees no key, and
        no query sees a key in the padding.
    """

    first: IntArray
    length: int

    @property
    def padded(self) -> int:
        return len(self.first)

    @cached_property
    def plain(self) -> bool:
        """Whether the mask is causal only, without documents or padding."""
        return self.length == self.padded and not self.first.any()

    @property
    def pairs(self) -> int:
        """Number of allowed query-key pairs in the sequence."""
        return int((np.arange(self.length) - self.first[: self.length] + 1).sum())

    def last(self) -> IntArray:
        """Return the position of the last query that sees each key, int64 [padded].

        For a key in the padding, the result holds the position of the last token.
        """
        opened = np.bincount(self.first[: self.length], minlength=self.padded)
        return np.cumsum(opened) - 1

    @staticmethod
    def causal(length: int, padded: int) -> SequenceMask:
        """Return the mask of causal attention over the whole sequence, without documents."""
        return SequenceMask(np.zeros(padded, np.int64), length)

    @staticmethod
    def from_documents(documents: NDArray[np.integer], padded: int) -> SequenceMask:
        """Return the mask of causal attention within each document.

        documents: document id of each token, non-decreasing.

        Raises:
            ValueError: an id is smaller than the id before it.
        """
        ids = np.asarray(documents)
        steps = np.diff(ids)
        if bool((steps < 0).any()):
            raise ValueError("Document ids decrease along the sequence. Give non-decreasing ids.")
        starts = np.append(0, np.flatnonzero(steps) + 1)
        lengths = np.diff(starts, append=padded)
        return SequenceMask(np.repeat(starts, lengths), len(ids))

    def intersect(self, other: SequenceMask) -> SequenceMask:
        """Return the mask that allows a pair if both this mask and ``other`` allow it."""
        return SequenceMask(np.maximum(self.first, other.first), min(self.length, other.length))

    def repadded(self, padded: int) -> SequenceMask:
        """Return this mask with the sequence padded to ``padded`` positions instead."""
        first = np.zeros(padded, np.int64)
        first[: self.length] = self.first[: self.length]
        return SequenceMask(first, self.length)

    def spans(self, query_positions: IntArray, key_positions: IntArray) -> KeySpans:
        """Return the mask between a shard of queries and a shard of keys.

        query_positions, key_positions: int64 [queries] and [keys], global positions, ascending.
        """
        return KeySpans(*self.bounds(query_positions), self.padded).restrict(key_positions)

    def bounds(self, query_positions: IntArray) -> tuple[IntArray, IntArray]:
        """Return the positions low and high: each query sees the keys ``low <= position < high``.

        query_positions: int64 [queries]. A query in the padding has equal bounds.
        """
        is_token = query_positions < self.length
        low = np.where(is_token, self.first[query_positions], 0)
        return low, np.where(is_token, query_positions + 1, 0)


@dataclass(frozen=True)
class KeySpans:
    """The key slots that each query of a shard sees: query i sees slots ``low[i] <= j < high[i]``.

    low, high: int64 [queries], equal if the query sees no key. Over the queries that see a key,
        both are non-decreasing.
    num_keys: number of key slots.
    """

    low: IntArray
    high: IntArray
    num_keys: int

    @cached_property
    def pairs(self) -> int:
        """Number of allowed query-key pairs."""
        return int((self.high - self.low).sum())

    def restrict(self, keys: IntArray) -> KeySpans:
        """Return the spans over a subset of the keys.

        keys: slots of the keys in the subset, ascending. In the result, slot j is ``keys[j]``.
        """
        low, high = (np.searchsorted(keys, bound) for bound in (self.low, self.high))
        return KeySpans(low, high, len(keys))

    @cached_property
    def slices(self) -> tuple[KeySlice, ...]:
        """The mask as the fewest full or causal rectangles, in ascending order of queries."""
        low, high = self.low, self.high
        seen = high > low
        # Rows i and i + 1 with equal low belong to one rectangle if high stays (full, kind 0) or
        # grows by one (causal, kind 1). Otherwise a rectangle ends at row i (kind -1).
        step = np.diff(high)
        joined = (np.diff(low) == 0) & seen[1:] & seen[:-1] & ((step == 0) | (step == 1))
        kind = np.append(np.where(joined, step, -1), -1)
        begins = np.append(0, np.flatnonzero(np.diff(kind)) + 1)
        stops = np.append(begins[1:], len(kind)).tolist()
        bounds: list[tuple[int, int, bool]] = []
        row = 0
        for stop, k in zip(stops, kind[begins].tolist(), strict=True):
            if k < 0:
                alone = row + np.flatnonzero(seen[row:stop])
                bounds += [(r, r + 1, False) for r in alone.tolist()]
                row = stop
            elif row < stop:  # the run includes row `stop`, so no other rectangle begins there
                bounds.append((row, stop + 1, k == 1))
                row = stop + 1
        return tuple(
            KeySlice(start, stop, int(low[start]), int(high[stop - 1]), causal)
            for start, stop, causal in bounds
        )


@dataclass(frozen=True)
class KeySlice:
    """A rectangle: query rows ``q_start:q_stop`` against key slots ``k_start:k_stop``.

    causal: whether row i sees only the keys below ``k_stop - (q_stop - 1 - i)``: the last row sees
        all keys, and every other row sees one key fewer than the next row.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool


@dataclass(frozen=True)
class MaskRule:
    """The rule by which a run masks its sequences. The fields are keys of `DataConfig`.

    `docs/extending.md`, "A mask", lists the steps to add a mask.
    """

    document_mask: bool

    @staticmethod
    def of(data: DataConfig) -> MaskRule:
        return MaskRule(**{f.name: getattr(data, f.name) for f in fields(MaskRule)})

    def __call__(
        self, documents: NDArray[np.integer] | None, length: int, padded: int
    ) -> SequenceMask:
        """Return the mask of a sequence.

        documents: document id of each token; None if the sequence is one document.
        """
        mask = SequenceMask.causal(length, padded)
        if self.document_mask and documents is not None:
            mask = mask.intersect(SequenceMask.from_documents(documents, padded))
        return mask
