"""Masks: which query-key pairs are allowed before any dynamic index.

Each query sees a few disjoint intervals of keys. A slot is the index of a token in its shard. Every
layout keeps a worker's tokens in ascending order, so intervals of keys are intervals of slots, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntFlag
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mtrain_cli.config.mask_settings import MOST_INTERVALS

IntArray = NDArray[np.int64]
# Most slices of a query on average. Slices may overlap, but more than this is a mistake in the data
# and would exhaust memory.
MOST_SLICES = 4 * MOST_INTERVALS


class SliceKind(IntFlag):
    """Which keys of a rectangle a row sees. The two bits are independent of each other.

    CAUSAL: each row sees one key fewer than the next row at the upper end; the last row sees all.
    INVERSE: each row sees one key fewer than the row before at the lower end; the first sees all.
    """

    FULL = 0
    CAUSAL = 1
    INVERSE = 2
    BICAUSAL = 3


class KeySlice(NamedTuple):
    """A rectangle: query rows ``q_start:q_stop`` against key slots ``k_start:k_stop``.

    Row i sees the keys from ``k_start + (i - q_start)`` on if the kind has the bit INVERSE, and the
    keys below ``k_stop - (q_stop - 1 - i)`` if it has CAUSAL.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    kind: int = SliceKind.FULL

    @property
    def causal(self) -> bool:
        return bool(self.kind & SliceKind.CAUSAL)

    @property
    def inverse(self) -> bool:
        return bool(self.kind & SliceKind.INVERSE)


@dataclass(frozen=True)
class SequenceMask:
    """The keys that each query of one packed sequence of ``padded`` positions sees.

    low, high: int64 [intervals, padded]. The query at position q sees the keys ``low[i, q] <= k <
        high[i, q]`` of each interval i: disjoint and ascending, those with low == high last.
    """

    low: IntArray
    high: IntArray
    length: int

    @property
    def intervals(self) -> int:
        """The number of intervals that the mask has room for in each query."""
        return len(self.low)

    @property
    def padded(self) -> int:
        return self.low.shape[1]

    @cached_property
    def is_causal_interval(self) -> bool:
        """Whether each query sees itself and the keys from some key on, which never decreases."""
        low, high = self.low[:, : self.length], self.high[:, : self.length]
        return (
            self.intervals == 1
            and bool((high[0] == np.arange(1, self.length + 1)).all())
            and bool((np.diff(low[0]) >= 0).all())
        )

    @property
    def first(self) -> IntArray:
        """The position of the first key that the query at each position sees, int64 [padded]."""
        if not self.is_causal_interval:
            raise ValueError(
                "A dynamic index needs a mask in which each query sees one interval of keys that "
                "ends at the query and whose start never decreases."
            )
        return self.low[0]

    @cached_property
    def plain(self) -> bool:
        """Whether the mask is causal only, without documents or padding."""
        whole = self.length == self.padded and self.is_causal_interval
        return whole and not self.low.any()

    @cached_property
    def pairs(self) -> int:
        return int((self.high - self.low).sum())

    def last(self) -> IntArray:
        """Return the position of the last query that sees each key, int64 [padded]."""
        opened = np.bincount(self.first[: self.length], minlength=self.padded)
        return np.cumsum(opened) - 1

    def shows_later_keys(self) -> NDArray[np.bool_]:
        """Return whether a query up to each position sees a key after the position, bool [padded].

        If so, the model may know the next token from its input: the query may see an earlier one,
        which sees the next token in a layer below.
        """
        reach = np.maximum.accumulate(self.high.max(0))
        return reach > np.arange(1, self.padded + 1)

    @staticmethod
    def causal(length: int, padded: int) -> SequenceMask:
        return SequenceMask.from_first(np.zeros(padded, np.int64), length)

    @staticmethod
    def from_first(first: IntArray, length: int) -> SequenceMask:
        """Return the mask in which each query sees the keys from ``first`` to itself."""
        positions = np.arange(len(first))
        high = np.where(positions < length, positions + 1, first)
        return SequenceMask(first[None], high[None], length)

    @staticmethod
    def from_documents(
        documents: NDArray[np.integer], padded: int, *, causal: bool = True
    ) -> SequenceMask:
        """Return the mask of attention within each document."""
        starts = document_starts(documents, padded)
        if causal:
            return SequenceMask.from_first(starts, len(documents))
        begins = np.flatnonzero(np.diff(starts[: len(documents)], prepend=-1) != 0)
        lengths = np.diff(begins, append=len(documents))
        stops = starts.copy()
        stops[: len(documents)] = np.repeat(begins + lengths, lengths)
        return SequenceMask(starts[None], stops[None], len(documents))

    @staticmethod
    def from_slices(
        slices: Sequence[KeySlice] | IntArray,
        length: int,
        padded: int,
        most: int = MOST_INTERVALS,
    ) -> SequenceMask:
        """Return the mask that allows each pair that at least one slice allows.

        slices: also as an array int64 [slices, 5] of their fields.
        most: intervals that a query may see.

        Raises ValueError for a slice outside the sequence or of an unknown kind, and for a query
        that sees more intervals.
        """
        table = np.asarray(slices, np.int64).reshape(-1, 5)
        if not (valid := valid_slices(table, length)).all():
            raise ValueError(
                f"The slice {table[np.argmin(valid)].tolist()} of (query start, query stop, key "
                f"start, key stop, kind) does not lie in a sequence of {length} tokens or has an "
                f"unknown kind. Give starts from 0 on, stops from the start to {length}, and kinds "
                "0 (full), 1 (causal), 2 (inverse) and 3 (bicausal)."
            )
        table = table[table[:, 3] > table[:, 2]]  # the others have no keys
        table = table[np.argsort(table[:, 0], kind="stable")]
        if (table[1:, 0] >= table[:-1, 1]).all():
            return SequenceMask(*_one_interval(table, padded), length)
        row, low, high = _rows(table)
        # Sort by row, then by start. The reach of a row is above all reaches of earlier rows.
        base = row * (padded + 1)
        order = np.argsort(base + low, kind="stable")
        row, base, low, high = row[order], base[order], low[order], high[order]
        reach = np.maximum.accumulate(base + high)
        opens = np.append(True, (base + low)[1:] > reach[:-1])[: len(row)]
        starts = np.flatnonzero(opens)
        ends = np.append(starts[1:], len(row))[: len(starts)] - 1
        of_row = row[starts]
        rank = np.arange(len(starts)) - np.searchsorted(of_row, of_row)
        intervals = int(rank.max(initial=0)) + 1
        _check_intervals(intervals, of_row, rank, most)
        bounds = np.zeros((2, intervals, padded), np.int64)
        bounds[0, rank, of_row] = low[starts]
        bounds[1, rank, of_row] = reach[ends] - base[ends]
        return SequenceMask(bounds[0], bounds[1], length)

    def intersect(self, other: SequenceMask) -> SequenceMask:
        low = np.maximum(self.low[:, None], other.low[None]).reshape(-1, self.padded)
        high = np.minimum(self.high[:, None], other.high[None]).reshape(-1, self.padded)
        high = np.maximum(low, high)
        if len(low) > 1:
            most = max(MOST_INTERVALS, self.intervals, other.intervals)
            low, high = _packed(low, high, most)
        return SequenceMask(low, high, min(self.length, other.length))

    def repadded(self, padded: int) -> SequenceMask:
        if padded == self.padded:
            return self
        bounds = np.zeros((2, self.intervals, padded), np.int64)
        bounds[:, :, : self.length] = (self.low[:, : self.length], self.high[:, : self.length])
        return SequenceMask(bounds[0], bounds[1], self.length)

    def same_as(self, other: SequenceMask) -> bool:
        tokens = slice(self.length)
        return self is other or (
            self.length == other.length
            and np.array_equal(self.low[:, tokens], other.low[:, tokens])
            and np.array_equal(self.high[:, tokens], other.high[:, tokens])
        )

    def spans(self, query_positions: IntArray, key_positions: IntArray) -> KeySpans:
        return KeySpans(*self.bounds(query_positions), self.padded).restrict(key_positions)

    def bounds(self, query_positions: IntArray) -> tuple[IntArray, IntArray]:
        """Return low and high: a query sees the positions ``low <= p < high`` of each interval."""
        is_token = query_positions < self.length
        low, high = (
            np.where(is_token, bound[:, query_positions], 0) for bound in (self.low, self.high)
        )
        return low, high


def document_starts(documents: NDArray[np.integer], padded: int) -> IntArray:
    """Return the position at which the document of each position starts, int64 [padded]."""
    steps = np.diff(np.asarray(documents))
    if bool((steps < 0).any()):
        raise ValueError("Document ids decrease along the sequence. Give non-decreasing ids.")
    starts = np.append(0, np.flatnonzero(steps != 0) + 1)  # 10 times faster for bool
    return np.repeat(starts, np.diff(starts, append=padded))


def valid_slices(table: IntArray, length: int) -> NDArray[np.bool_]:
    """Return which slices lie in a sequence of ``length`` tokens and have a known kind."""
    q_start, q_stop, k_start, k_stop, kind = table.T
    inside = (q_start >= 0) & (q_stop <= length) & (k_start >= 0) & (k_stop <= length)
    ordered = (q_start <= q_stop) & (k_start <= k_stop)
    return inside & ordered & (kind >= 0) & (kind <= SliceKind.BICAUSAL)


def _check_intervals(intervals: int, rows: IntArray, rank: IntArray, most: int) -> None:
    if intervals > most:
        raise ValueError(
            f"The query at position {rows[np.argmax(rank)]} sees {intervals} separate intervals of "
            f"keys; allowed: at most {most}. Merge slices into wider ones, "
            "or split the document (docs/masks.md)."
        )


def _rows(table: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Return (row, low, high) of each interval that the slices give a row, without empty ones."""
    rows = table[:, 1] - table[:, 0]
    of = np.repeat(np.arange(len(table)), rows)
    within = np.arange(len(of)) - np.repeat(np.cumsum(rows) - rows, rows)
    q_start, _, k_start, k_stop, kind = table[of].T
    low = k_start + within * (kind >> 1)
    high = k_stop - (rows[of] - 1 - within) * (kind & 1)
    seen = high > low
    return (q_start + within)[seen], low[seen], high[seen]


def _one_interval(table: IntArray, padded: int) -> tuple[IntArray, IntArray]:
    """Return low and high, [1, padded] each, of slices that share no row."""
    # Much faster than `_rows`, which matters for sequences of millions of tokens.
    bounds = np.zeros((2, 1, padded), np.int64)
    for q_start, q_stop, k_start, k_stop, kind in table.tolist():
        rows = q_stop - q_start
        low, high = bounds[:, 0, q_start:q_stop]
        low[:] = np.arange(k_start, k_start + rows) if kind >> 1 else k_start
        high[:] = np.arange(k_stop - rows + 1, k_stop + 1) if kind & 1 else k_stop
        empty = high <= low
        if empty.any():
            low[empty] = high[empty] = 0
    return bounds[0], bounds[1]


def _packed(low: IntArray, high: IntArray, allowed: int) -> tuple[IntArray, IntArray]:
    """Move empty intervals, as 0 to 0, behind the others, and drop rows of only empty ones."""
    used = high > low
    most = int(used.sum(0).max(initial=0))
    if (used[1:] & ~used[:-1]).any():
        order = np.argsort(~used, axis=0, kind="stable")
        low, high = (np.take_along_axis(bound, order, 0) for bound in (low, high))
        used = high > low
    _check_intervals(most, np.arange(low.shape[1]), used.sum(0), allowed)
    keep = slice(max(most, 1))
    return np.where(used[keep], low[keep], 0), np.where(used[keep], high[keep], 0)


@dataclass(frozen=True)
class KeySpans:
    """The key slots that each query of a shard sees.

    low, high: int64 [intervals, queries], as in `SequenceMask`; empty intervals may stand anywhere.
    """

    low: IntArray
    high: IntArray
    num_keys: int

    @property
    def intervals(self) -> int:
        return len(self.low)

    @cached_property
    def pairs(self) -> int:
        return int((self.high - self.low).sum())

    def seen(self) -> NDArray[np.bool_]:
        """Return which query sees which slot, bool [queries, keys]. For tests and small masks."""
        slots = np.arange(self.num_keys)
        seen = (slots >= self.low[..., None]) & (slots < self.high[..., None])
        return np.logical_or.reduce(seen, 0)

    def restrict(self, keys: IntArray) -> KeySpans:
        """Return the spans over some of the keys, whose ascending slots are given."""
        if len(keys) == self.num_keys:  # all slots
            return self
        low, high = (np.searchsorted(keys, bound) for bound in (self.low, self.high))
        return KeySpans(low, high, len(keys))

    @cached_property
    def slices(self) -> tuple[KeySlice, ...]:
        """The mask as few slices. Those of one interval come in ascending order of queries."""
        found: list[KeySlice] = []
        for low, high in zip(self.low, self.high, strict=True):
            found += _slices(low, high)
        return tuple(found)


def _slices(low: IntArray, high: IntArray) -> list[KeySlice]:
    seen = high > low
    # Rows i and i + 1 belong to one slice if each bound either stays or grows by one. The kind says
    # which bounds grow. Otherwise a slice ends at row i (kind -1).
    lower, upper = np.diff(low), np.diff(high)
    joined = seen[1:] & seen[:-1] & (lower >> 1 == 0) & (upper >> 1 == 0)
    kind = np.append(np.where(joined, 2 * lower + upper, -1), -1)
    # A row between a band and a full or causal slice belongs to the latter.
    kind[:-1][(kind[:-1] > 1) & (kind[1:] >= 0) & (kind[1:] <= 1)] = -1
    begins = np.append(0, np.flatnonzero(np.diff(kind) != 0) + 1)
    stops = np.append(begins[1:], len(kind)).tolist()
    bounds: list[tuple[int, int, int]] = []
    row = 0
    for stop, k in zip(stops, kind[begins].tolist(), strict=True):
        if k < 0:
            alone = row + np.flatnonzero(seen[row:stop])
            bounds += [(r, r + 1, 0) for r in alone.tolist()]
            row = max(row, stop)
        elif row < stop:  # the run includes row `stop`, so no other slice begins there
            bounds.append((row, stop + 1, k))
            row = stop + 1
    return [
        KeySlice(start, stop, int(low[start]), int(high[stop - 1]), kind)
        for start, stop, kind in bounds
    ]


# --- slices that come with the documents of a corpus, [slices, 5], in tokens of the document -----


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
