"""Count the work of one causal document in closed form, for layouts of equal chunks.

The pairs of two whole chunks depend only on their distance, so no table of blocks is needed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mtrain_cli.attention.mask import IntArray


@dataclass(frozen=True, eq=False)
class Chunks:
    """A document of ``length`` tokens in chunks of ``size`` blocks.

    held: int64 [chunks of a group, groups], the chunks of each group, ascending.
    """

    length: int
    block: int
    size: int
    held: IntArray

    @staticmethod
    def of(length: int, block: int, owner: IntArray, tokens: int) -> Chunks:
        """Make chunks of ``tokens``. owner: int64 [positions], the group that holds each."""
        groups = int(owner.max()) + 1
        held = np.argsort(owner[::tokens], kind="stable").reshape(groups, -1).T
        return Chunks(length, block, tokens // block, held)


class CausalRows:
    """The rows of a table [query groups, key groups] of pairs, or of blocks with any."""

    def __init__(self, chunks: Chunks, chosen: IntArray, *, touched: bool = False) -> None:
        """Prepare the count. chosen: int64 [blocks], number of heads on each block diagonal.

        touched: whether to count blocks.
        """
        self.held, size, block = chunks.held, chunks.size, chunks.block
        rows, cut = divmod(chunks.length, block)  # whole blocks, and the tokens of the next one
        whole, diagonal = block**2, block * (block + 1) // 2
        last, corner = cut * block, cut * (cut + 1) // 2
        if touched:
            whole, diagonal, last, corner = 1, 1, int(cut > 0), int(cut > 0)
        sums = np.concatenate([[0, 0], np.cumsum(np.cumsum(chosen))])

        def area(first: IntArray, rows: int) -> IntArray:
            """Sum ``rows`` rows of a chunk of columns, whose corner is on diagonal ``first``."""
            below = (
                sums[np.maximum(first + n, 0)] for n in (rows + 1, 1, rows + 1 - size, 1 - size)
            )
            a, b, c, d = below
            return a - b - c + d

        away = np.arange(self.held.size) * size
        self.by_distance = whole * area(away, size)
        self.by_distance[0] += chosen[0] * size * (diagonal - whole)
        self.end, rows = divmod(rows, size)  # the chunk in which the document ends
        self.at_end = whole * area(away, rows) + last * area(away + rows, 1)
        self.at_end[0] += chosen[0] * (rows * (diagonal - whole) + corner - last)
        # As in a striped layout: groups get the chunks in turn.
        self.dealt = np.array_equal(self.held.ravel(), np.arange(self.held.size))
        self._dealt: dict[int, IntArray] = {}

    def row(self, group: int) -> IntArray:
        """Return the counts of a query group with each key group, int64 [groups]."""
        own, found = self.held[:, group], np.zeros(self.held.shape[1], np.int64)
        whole = own[own < self.end]
        counts = [self.at_end[: self.end + 1]] * (self.end in own)
        if self.dealt:
            before, after = self._of_dealt(len(whole)), self._of_dealt(len(whole) - 1)
            near = np.concatenate([before[: group + 1], after[group + 1 :]])
            found = np.roll(near[::-1], group + 1)
        else:
            counts += [self.by_distance[: chunk + 1] for chunk in whole]
        for count in counts:
            of_chunk = np.zeros(self.held.size, np.int64)
            of_chunk[: len(count)] = count[::-1]
            found = sum((of_chunk[chunks] for chunks in self.held), start=found)
        return found

    def _of_dealt(self, number: int) -> IntArray:
        """Return the counts of a group's first ``number`` chunks with other groups, by distance."""
        if number not in self._dealt:
            # A chunk meets those of its own turn and of all turns before it.
            times = np.maximum(number - np.arange(len(self.held)), 0)
            self._dealt[number] = times @ self.by_distance.reshape(self.held.shape)
        return self._dealt[number]

    def sums(self) -> IntArray:
        """Return the counts of each query group with all key groups, int64 [groups]."""
        of_chunk = np.cumsum(self.by_distance)
        of_chunk[self.end :] = 0
        of_chunk[self.end : self.end + 1] = self.at_end[: self.end + 1].sum()
        return of_chunk[self.held].sum(0)
