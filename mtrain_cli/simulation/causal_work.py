"""Count the pairs of one causal document in closed form, for layouts of equal chunks.

Contiguous, zigzag and striped layouts cut a sequence into equal chunks. The pairs of two whole
chunks depend only on their distance, so a count takes no table of blocks or positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mtrain_cli.attention.mask import IntArray


@dataclass(frozen=True, eq=False)
class Chunks:
    """The chunks of a layout, and the document that they hold.

    length: number of tokens of the document; the rest of the chunks is padding.
    block: tokens per block, and ``size`` the blocks per chunk.
    of_group: int64 [chunks of a group, groups], the chunks of each group, ascending.
    """

    length: int
    block: int
    size: int
    of_group: IntArray

    @staticmethod
    def of(length: int, block: int, tokens: int, owner: IntArray) -> Chunks:
        """Make the chunks of ``tokens`` each. owner: int64 [chunks], the group of each."""
        groups = int(owner.max()) + 1
        of_group = np.argsort(owner, kind="stable").reshape(groups, -1).T
        return Chunks(length, block, tokens // block, of_group)

    @cached_property
    def dealt(self) -> bool:
        """Whether groups get the chunks in turn, as in a striped layout."""
        return bool((np.diff(self.of_group, axis=0) == self.of_group.shape[1]).all())


class CausalRows:
    """The counts of one row at a time of a table [query groups, key groups]."""

    def __init__(self, chunks: Chunks, chosen: IntArray, *, touched: bool = False) -> None:
        """Prepare a count of pairs, or of the blocks with any if ``touched``.

        chosen: int64 [blocks], number of heads that choose each block diagonal.
        """
        self.chunks, size, block = chunks, chunks.size, chunks.block
        rows, cut = divmod(chunks.length, block)  # whole blocks, and the tokens of the next one
        whole, diagonal = (1, 1) if touched else (block**2, block * (block + 1) // 2)
        last, corner = (cut > 0,) * 2 if touched else (cut * block, cut * (cut + 1) // 2)
        # Sums over diagonals below d, and their sums, with zeros for negative d.
        self._sums = np.concatenate([[0, 0], np.cumsum(np.cumsum(chosen))])
        away = np.arange(chunks.of_group.size) * size
        self.by_distance = whole * self._area(away, size)
        self.by_distance[0] += chosen[0] * size * (diagonal - whole)
        # The chunk in which the document ends, if it is not at the end of a chunk.
        self.end, rows = divmod(rows, size)
        self.at_end = whole * self._area(away, rows) + last * self._area(away + rows, 1)
        self.at_end[0] += chosen[0] * (rows * (diagonal - whole) + corner - last)
        self._dealt: dict[int, IntArray] = {}

    def _area(self, first: IntArray, rows: int) -> IntArray:
        """Sum the heads over ``rows`` rows and a chunk of columns, from diagonal ``first`` on."""
        size, sums = self.chunks.size, self._sums
        ends = (first + rows + 1, 1), (first + 1, -1), (first + rows + 1 - size, -1)
        of = (sums[np.maximum(at, 0)] * sign for at, sign in (*ends, (first + 1 - size, 1)))
        return np.sum(list(of), axis=0)

    def row(self, group: int) -> IntArray:
        """Return the counts of a query group with each key group, int64 [groups]."""
        held, own = self.chunks.of_group, self.chunks.of_group[:, group]
        whole = own[own < self.end]
        counts = [self.at_end[: self.end + 1]] * (self.end in own)
        found = np.zeros(held.shape[1], np.int64)
        if self.chunks.dealt:
            before, after = self._of_dealt(len(whole)), self._of_dealt(len(whole) - 1)
            near = np.concatenate([before[: group + 1], after[group + 1 :]])
            found = np.roll(near[::-1], group + 1)
        else:
            counts += [self.by_distance[: chunk + 1] for chunk in whole]
        for count in counts:
            of_chunk = np.zeros(held.size, np.int64)
            of_chunk[: len(count)] = count[::-1]
            found = sum((of_chunk[chunks] for chunks in held), start=found)
        return found

    def _of_dealt(self, number: int) -> IntArray:
        """Return the counts of ``number`` chunks with another group's, by distance, [groups].

        A group's chunk meets the chunks of its own turn and of all turns before it.
        """
        if number not in self._dealt:
            turns, groups = self.chunks.of_group.shape
            times = np.maximum(number - np.arange(turns), 0)
            self._dealt[number] = times @ self.by_distance.reshape(turns, groups)
        return self._dealt[number]

    def sums(self) -> IntArray:
        """Return the counts of each query group with all key groups, int64 [groups]."""
        of_chunk = np.cumsum(self.by_distance)
        of_chunk[self.end :] = 0
        of_chunk[self.end : self.end + 1] = self.at_end[: self.end + 1].sum()
        return of_chunk[self.chunks.of_group].sum(0)


def column_sums(
    chunks: Chunks, slashes: NDArray[np.bool_], columns: NDArray[np.int32]
) -> tuple[int, IntArray]:
    """Return the number of columns without padding, and their pairs by query group, [groups].

    slashes: [rows, blocks], with one row per head and sequence; their pairs do not count.
    columns: [rows, width], positions.
    """
    (rows, blocks), block = slashes.shape, chunks.block
    row, at = np.nonzero(columns < chunks.length)
    x = columns[row, at].astype(np.int64)
    own, off = x // block, ~slashes
    # All rows of a block see a column in an earlier block, unless a slash covers it.
    held = np.bincount(row * blocks + own, minlength=rows * blocks).reshape(rows, blocks)
    later = np.where(np.arange(blocks) > 0, off, False)
    of_rows = (np.fft.rfft(numbers, 2 * blocks) for numbers in (held, later))
    seen = np.fft.irfft(np.prod(list(of_rows), axis=0).sum(0), 2 * blocks)[:blocks]
    pairs = np.rint(seen).astype(np.int64)
    pairs *= np.clip(chunks.length - np.arange(blocks) * block, 0, block)
    ends = np.minimum((own + 1) * block, chunks.length)
    np.add.at(pairs, own, off[row, 0] * (ends - x))
    of_chunk = pairs.reshape(-1, chunks.size).sum(1)
    return len(x), of_chunk[chunks.of_group].sum(0)
