"""Mask algebra: which query-key pairs are allowed, independent of the data.

A causal mask over packed documents lets the query at position p see the keys ``first[p] <= k <=
p``, one interval per row. Every layout keeps a worker's tokens in ascending order, so within any
shard of keys that interval is again one interval of slots. A mask is therefore two integers per
row, `KeySpans`, for any shard: kilobytes, exact, and computed on the CPU without a process group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class SequenceMask:
    """Causal attention over one packed sequence of ``padded`` positions.

    first: int64 [padded], first key that each query may see: the start of its document, or 0
        without documents.
    length: number of tokens. Later positions are padding: they see nothing and nothing sees them.
    """

    first: IntArray
    length: int

    @property
    def padded(self) -> int:
        return len(self.first)

    @property
    def pairs(self) -> int:
        """Number of allowed query-key pairs in the sequence."""
        return int((np.arange(self.length) - self.first[: self.length] + 1).sum())

    def last(self) -> IntArray:
        """Return int64 [padded], the last query that sees each key: the end of its document.

        Padding gets the last token.
        """
        last = np.full(self.padded, self.length - 1, np.int64)
        starts = np.flatnonzero(np.diff(self.first[: self.length])) + 1
        last[: self.length] = np.repeat(
            np.append(starts, self.length) - 1,
            np.diff(np.append(np.append(0, starts), self.length)),
        )
        return last

    @staticmethod
    def causal(length: int, padded: int) -> SequenceMask:
        """Causal attention over the whole sequence, without documents."""
        return SequenceMask(np.zeros(padded, np.int64), length)

    @staticmethod
    def from_documents(documents: NDArray[np.integer], padded: int) -> SequenceMask:
        """Causal attention within each document.

        documents: id of each token, non-decreasing. Raises ValueError if the ids decrease.
        """
        ids = np.asarray(documents)
        if len(ids) > 1 and bool((np.diff(ids) < 0).any()):
            raise ValueError("Document ids decrease along the sequence. Give non-decreasing ids.")
        first = np.zeros(padded, np.int64)
        if len(ids):
            starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 1))
            lengths = np.diff(starts, append=len(ids))
            first[: len(ids)] = np.repeat(starts, lengths)
            first[len(ids) :] = starts[-1]
        return SequenceMask(first, len(ids))

    def spans(self, query_positions: IntArray, key_positions: IntArray) -> KeySpans:
        """Return the mask between a shard of queries and a shard of keys.

        query_positions [q], key_positions [k]: global positions, ascending.
        """
        low = np.searchsorted(key_positions, self.first[query_positions], side="left")
        high = np.searchsorted(key_positions, query_positions, side="right")
        is_token = query_positions < self.length
        low = np.where(is_token, low, 0)
        high = np.where(is_token, np.maximum(high, low), 0)
        return KeySpans(low, high, len(key_positions))


@dataclass(frozen=True)
class KeySpans:
    """The key slots ``low[i] <= j < high[i]`` that each query row i sees; none if ``low == high``.

    low, high: int64 [queries]; neither decreases among rows that see a key.
    num_keys: key slots of the shard.
    """

    low: IntArray
    high: IntArray
    num_keys: int

    @property
    def pairs(self) -> int:
        """Number of query-key pairs that are computed."""
        return int((self.high - self.low).sum())

    def slices(self) -> list[KeySlice]:
        """Return the mask as the fewest rectangles, each full or causal, in O(rows).

        In a causal rectangle the last row sees the last key.
        """
        low, high = self.low, self.high
        seen = high > low
        if not seen.any():
            return []
        step = np.diff(high)
        # A run continues while low stays, both rows see keys, and high stays (full, kind 0) or
        # grows by one (causal, kind 1).
        same = (np.diff(low) == 0) & seen[1:] & seen[:-1]
        kind = np.where(same & (step == 0), 0, np.where(same & (step == 1), 1, -1))
        result: list[KeySlice] = []
        row, rows = 0, len(low)
        changes = np.flatnonzero(np.diff(kind)) + 1
        ends = np.append(changes, len(kind))
        while row < rows:
            if not seen[row]:
                following = np.flatnonzero(seen[row:])
                if not len(following):
                    break
                row += int(following[0])
                continue
            if row < len(kind) and kind[row] >= 0:
                # kind[i] joins rows i and i + 1: a run of kinds ends one row after its last kind.
                stop = int(ends[np.searchsorted(ends, row, side="right")]) + 1
                causal = bool(kind[row] == 1)
            else:
                stop, causal = row + 1, False
            result.append(KeySlice(row, stop, int(low[row]), int(high[stop - 1]), causal))
            row = stop
        return result


@dataclass(frozen=True)
class KeySlice:
    """A rectangle: query rows ``q_start:q_stop`` against key slots ``k_start:k_stop``.

    causal: row i sees only the keys below ``k_stop - (q_stop - 1 - i)``.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool
