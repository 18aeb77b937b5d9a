"""Mask algebra: which query-key pairs are allowed, whatever the data.

A causal mask with packed documents lets the query at position p see the keys ``first[p] <= k <= p``: one interval a row. Every layout of
mtrain keeps the tokens of a worker in ascending order, so in *any* shard of keys that interval is again one interval of slots. A mask is
therefore two integers a row, `KeySpans`, whichever worker holds what: kilobytes, exact, and made on the CPU without a process group.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class SequenceMask:
    """Causal attention over one packed sequence of ``padded`` positions.

    first: int64 [padded], the first key that the query at each position may see (start of its document; 0 without documents).
    length: positions at and beyond it are padding: they see nothing and nothing sees them.
    """

    first: IntArray
    length: int

    @property
    def padded(self) -> int:
        return len(self.first)

    @property
    def pairs(self) -> int:
        """Query-key pairs that are allowed in the whole sequence."""
        return int((np.arange(self.length) - self.first[: self.length] + 1).sum())

    def last(self) -> IntArray:
        """int64 [padded], the last query that sees the key at each position (end of its document); for padding, that of the last token."""
        last = np.full(self.padded, self.length - 1, np.int64)
        starts = np.flatnonzero(np.diff(self.first[: self.length])) + 1
        last[: self.length] = np.repeat(
            np.append(starts, self.length) - 1,
            np.diff(np.append(np.append(0, starts), self.length)),
        )
        return last

    @staticmethod
    def causal(length: int, padded: int) -> SequenceMask:
        """Plain causal attention over the whole sequence."""
        return SequenceMask(np.zeros(padded, np.int64), length)

    @staticmethod
    def from_documents(documents: NDArray[np.integer], padded: int) -> SequenceMask:
        """Attention inside each document. documents: ids per token, non-decreasing along the sequence."""
        ids = np.asarray(documents)
        if len(ids) > 1 and bool((np.diff(ids) < 0).any()):
            raise ValueError(
                "Document ids decrease along the sequence; packed documents need non-decreasing ids."
            )
        first = np.zeros(padded, np.int64)
        if len(ids):
            starts = np.flatnonzero(np.diff(ids, prepend=ids[0] - 1))
            lengths = np.diff(starts, append=len(ids))
            first[: len(ids)] = np.repeat(starts, lengths)
            first[len(ids) :] = starts[-1]
        return SequenceMask(first, len(ids))

    def spans(self, query_positions: IntArray, key_positions: IntArray) -> KeySpans:
        """The mask as one kernel call sees it.

        query_positions [q], key_positions [k]: global positions in ascending order (a worker's shard, or the whole sequence).
        """
        low = np.searchsorted(key_positions, self.first[query_positions], side="left")
        high = np.searchsorted(key_positions, query_positions, side="right")
        real = query_positions < self.length
        low = np.where(real, low, 0)
        high = np.where(real, np.maximum(high, low), 0)
        return KeySpans(low, high, len(key_positions))


@dataclass(frozen=True)
class KeySpans:
    """Row i of the queries sees the key slots ``low[i] <= j < high[i]``; a row with ``low == high`` sees nothing.

    low, high: int64 [queries]; num_keys: key slots of the shard. Among rows that see something, both never decrease.
    """

    low: IntArray
    high: IntArray
    num_keys: int

    @property
    def pairs(self) -> int:
        """Query-key pairs that are computed."""
        return int((self.high - self.low).sum())

    def slices(self) -> list[KeySlice]:
        """The same mask as the fewest rectangles, each full or causal (its last row sees its last key). Cost: O(rows)."""
        low, high = self.low, self.high
        seen = high > low
        if not seen.any():
            return []
        step = np.diff(high)
        # A run goes on while low stays, both rows see something, and high either stays (full) or grows by one (causal).
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
                # kind[i] joins rows i and i+1: the run of equal kinds starting at `row` ends after the row it last joins.
                stop = int(ends[np.searchsorted(ends, row, side="right")]) + 1
                causal = bool(kind[row] == 1)
            else:
                stop, causal = row + 1, False
            result.append(KeySlice(row, stop, int(low[row]), int(high[stop - 1]), causal))
            row = stop
        return result


@dataclass(frozen=True)
class KeySlice:
    """Query rows ``q_start:q_stop`` against key slots ``k_start:k_stop``; if causal, row i sees the keys below ``k_stop - (q_stop - 1 -
    i)``.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool
