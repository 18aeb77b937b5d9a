"""Pack units of tokens, such as documents, into sequences of equal length."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from mtrain_cli.data.sampler import shuffled_order

# The tokens after the last whole sequence are padded to one more sequence. If they fill less than
# this share of it, they are left out instead.
_MIN_FILLED = 0.05


class Part(NamedTuple):
    """The tokens ``start`` to ``stop`` - 1 of a unit, which follow ``place`` others."""

    unit: int
    start: int
    stop: int
    place: int


class Stream:
    """All units end to end, cut every ``seq`` tokens. A unit may go on in the next sequence.

    offsets: as in `TokenSource`. order: the units in their order; None for the order as it is.
    """

    def __init__(self, offsets: np.ndarray, seq: int, order: np.ndarray | None) -> None:
        self.seq, self._order, self._starts = seq, order, offsets
        if order is not None:
            self._starts = np.zeros(offsets.size, np.int64)
            np.cumsum(np.diff(offsets)[order], out=self._starts[1:])
        whole, remainder = divmod(int(offsets[-1]), seq)
        self.sequences = whole + (remainder >= max(2, _MIN_FILLED * seq))

    def parts(self, index: int) -> list[Part]:
        """Return the parts of a sequence and the token after it, if there is one."""
        begin = index * self.seq
        end = min(begin + self.seq + 1, int(self._starts[-1]))
        first = int(np.searchsorted(self._starts, begin, side="right")) - 1
        parts = []
        for number in range(first, int(np.searchsorted(self._starts, end, side="left"))):
            low, high = self._starts[number : number + 2].tolist()
            unit = number if self._order is None else int(self._order[number])
            start = max(begin - low, 0)
            parts.append(Part(unit, start, min(high, end) - low, low + start - begin))
        return parts

    def describe(self) -> str:
        """Return what becomes of the tokens after the last whole sequence."""
        remainder = int(self._starts[-1]) - self.sequences * self.seq
        if remainder > 0:
            return f", {remainder:,} tokens left out"
        return f", the last one with {-remainder:,} tokens of padding" if remainder else ""


class Bins:
    """Whole units, several in a sequence if they fit, with padding at its end.

    Best-fit decreasing (Johnson et al., SIAM J. Comput. 3, 1974) chooses the units of each sequence
    if the units are shuffled, else best fit in their order.

    lengths: number of tokens of each unit, int64[units].
    too_long: of a unit with more than ``seq`` tokens, ``truncate_left`` keeps the last ``seq``, and
        ``skip`` nothing.
    """

    def __init__(self, lengths: np.ndarray, seq: int, seed: int | None, too_long: str) -> None:
        self.seq, self._lengths, self._too_long = seq, lengths, too_long
        self.long = int((lengths > seq).sum())
        order = np.arange(lengths.size) if seed is None else shuffled_order(lengths.size, seed)
        if too_long == "skip":
            order = order[lengths[order] <= seq]
        sizes = np.minimum(lengths, seq)
        if seed is not None:
            order = order[np.argsort(-sizes[order], kind="stable")]
        bins: list[list[int]] = []
        by_room = defaultdict[int, list[int]](list)
        rooms: list[int] = []  # the keys of `by_room`, sorted
        for unit, size in zip(order.tolist(), sizes[order].tolist(), strict=True):
            at = bisect_left(rooms, size)
            room = rooms[at] if at < len(rooms) else seq
            number = by_room[room].pop() if at < len(rooms) else len(bins)
            if number == len(bins):
                bins.append([])
            elif not by_room[room]:
                rooms.pop(at)
            bins[number].append(unit)
            if room > size:
                if not by_room[room - size]:
                    insort(rooms, room - size)
                by_room[room - size].append(number)
        if seed is not None:  # else the last ones, such as those held out, have the shortest units
            bins = [bins[at] for at in shuffled_order(len(bins), seed)]
        self._bins, self.sequences = bins, len(bins)
        self.filled = int(sizes[order].sum())

    def parts(self, index: int) -> list[Part]:
        """Return the parts of a sequence, each a whole unit, or its end."""
        parts, place = [], 0
        for unit in self._bins[index]:
            length = int(self._lengths[unit])
            start = max(length - self.seq, 0)
            parts.append(Part(unit, start, length, place))
            place += length - start
        return parts

    def describe(self) -> str:
        """Return the share of padding, and what becomes of units that are too long."""
        padding = 1 - self.filled / max(self.sequences * self.seq, 1)
        how = "skipped" if self._too_long == "skip" else "cut at their start"
        long = f", {self.long:,} longer {how}" if self.long else ""
        return f" with whole documents, {padding:.1%} padding{long}"
