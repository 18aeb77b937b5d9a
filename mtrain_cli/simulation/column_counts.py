"""Count the pairs of single key columns that lie on no slash, between groups of workers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mtrain_cli.attention.mask import IntArray, SequenceMask

AT_ONCE = 1 << 21  # most entries of a temporary table


@dataclass(frozen=True)
class ColumnCounter:
    """Counts the pairs that single columns add to the slashes, by query group and key group.

    All queries from a column to the end of its document see the column; pairs in blocks on a slash
    do not count again. The columns of one block and document form a segment: they differ only in
    which rows of their own block see them. The blocks of a group are cut into pieces, runs of
    adjacent blocks (stride 1) or, in a striped layout, ``start, start + stride, ...``. A difference
    of prefix sums over every stride-th diagonal counts a piece's blocks that lie on no slash.

    owner: int64 [blocks], the group that holds each block.
    segment: [length], the segment of each position.
    key_block, last: [segments], the block of the segment, and the last query that sees it.
    start: [pieces], first block of each piece.
    """

    length: int
    block: int
    groups: int
    owner: IntArray
    segment: IntArray
    key_block: IntArray
    last: IntArray
    stride: int
    start: IntArray

    @staticmethod
    def make(mask: SequenceMask, block: int, owner: IntArray, groups: int) -> ColumnCounter:
        own, last = np.arange(mask.length) // block, mask.last()[: mask.length]
        begins = (np.diff(own, prepend=-1) != 0) | (np.diff(last, prepend=-1) != 0)
        segments = np.cumsum(begins) - 1, own[begins], last[begins]
        return ColumnCounter(mask.length, block, groups, owner, *segments, *_pieces(owner))

    def count(self, slashes: NDArray[np.bool_], columns: NDArray[np.int32]) -> tuple[int, IntArray]:
        """Return the number of columns without padding, and of their pairs [groups, groups].

        slashes: [rows, blocks], with one row per head and sequence.
        columns: [rows, width], positions.
        """
        pairs = np.zeros((self.groups, self.groups), np.int64)
        real = columns < self.length
        row, x = np.nonzero(real)[0], columns[real].astype(np.int64)
        if not len(x):
            return 0, pairs
        segments = len(self.last)
        where = row * segments + self.segment[x]
        number = np.bincount(where)
        some = np.flatnonzero(number)
        positions = np.bincount(where, x)[some].astype(np.int64)  # sum over a segment's columns
        number = number[some]
        row, of = np.divmod(some, segments)
        own, last = self.key_block[of], self.last[of]
        end = last // self.block
        key_group = self.owner[own]
        off = ~slashes
        # First the rows of the column's own block that see the column. Then the rows of the last
        # block of the document, if that is another block.
        in_own = off[row, 0] * (
            number * (np.minimum(last, (own + 1) * self.block - 1) + 1) - positions
        )
        np.add.at(pairs, (key_group, key_group), in_own)
        in_last = off[row, end - own] * (end > own) * (last - end * self.block + 1) * number
        np.add.at(pairs, (self.owner[end], key_group), in_last)
        # In the blocks between these two, all rows see the column.
        below = self._sums(off)
        at_once = max(1, AT_ONCE // len(self.start))
        order = np.argsort(key_group, kind="stable")
        for begin in range(0, len(order), at_once):
            chosen = order[begin : begin + at_once]
            uncovered = self._between(below, row[chosen], own[chosen], end[chosen])
            uncovered = uncovered * (number[chosen] * self.block)[:, None]
            groups = key_group[chosen]
            first = np.flatnonzero(np.diff(groups, prepend=-1))
            by_piece = np.add.reduceat(uncovered, first, axis=0)
            np.add.at(pairs, (self.owner[self.start][None], groups[first][:, None]), by_piece)
        return int(real.sum()), pairs

    def _sums(self, off: NDArray[np.bool_]) -> IntArray:
        """Return [rows, blocks]: how many of the diagonals d, d - stride, ... are no slash."""
        rows, blocks = off.shape
        table = np.zeros((rows, -(-blocks // self.stride) * self.stride), np.int32)
        table[:, 1:blocks] = off[:, 1:]
        return table.reshape(rows, -1, self.stride).cumsum(1, dtype=np.int32).reshape(rows, -1)

    def _between(self, below: IntArray, row: IntArray, own: IntArray, end: IntArray) -> IntArray:
        """Count each piece's blocks between ``own`` and ``end`` on no slash, [segments, pieces]."""
        base = (row * below.shape[1])[:, None]
        before_end, own = end[:, None] - 1, own[:, None]
        if self.stride > 1:
            # The sum starts at the first block of a piece, so there is nothing to subtract.
            distance = before_end - (before_end - self.start) % self.stride - own
            return below.ravel()[base + np.maximum(distance, 0)].astype(np.int64)
        # A run ends where the next one begins.
        distance = np.minimum(np.append(self.start, len(self.owner)) - 1, before_end) - own
        return np.diff(below.ravel()[base + np.maximum(distance, 0)].astype(np.int64), axis=1)


def _pieces(owner: IntArray) -> tuple[int, IntArray]:
    """Return the stride with the fewest pieces, and the first block of each piece."""
    start = np.flatnonzero(np.diff(owner, prepend=-1))
    repeats = [int(p) for p in start[1:] if owner[p] == owner[0]]
    for period in repeats[:4]:
        if period < len(start) and np.array_equal(owner[period:], owner[:-period]):
            return period, np.arange(period)
    return 1, start
