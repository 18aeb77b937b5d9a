"""The order of the sequences in a run, its random permutations, and shuffled documents.

All use `mix64` instead of a library's random generator, so a run has the same order on every
machine and with every version of numpy.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

_MASK = (1 << 64) - 1
# Increment and multipliers of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number
# generators, OOPSLA 2014).
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ROUNDS = 8
Words = TypeVar("Words", int, np.ndarray)  # one word, or an array of uint64


def _mix(state: Words) -> Words:
    state = (state ^ state >> 30) * _FIRST & _MASK
    state = (state ^ state >> 27) * _SECOND & _MASK
    return state ^ state >> 31


def mix64(*words: int) -> int:
    """Return a 64-bit hash that depends on every bit and on the order of ``words``."""
    state = 0
    for word in words:
        state = _mix((state ^ (word & _MASK)) + _GOLDEN & _MASK)
    return state


def shuffled_order(count: int, seed: int) -> np.ndarray:
    """Return the numbers 0 to ``count`` - 1, sorted by their hashes with ``seed``, int64[count]."""
    return np.argsort(_mix(np.arange(count, dtype=np.uint64) + mix64(seed)), kind="stable")


class Permutation:
    """A bijection of [0, size), chosen by integer ``keys``, that stores no table of its values.

    A balanced Feistel network (Luby and Rackoff, SIAM J. Comput. 17, 1988) permutes [0, n), where n
    is the smallest power of four not below ``size``. While a result is outside [0, size), it is
    permuted again (cycle walking: Black and Rogaway, CT-RSA 2002). This takes at most four
    permutations on average.
    """

    def __init__(self, size: int, *keys: int) -> None:
        if size < 1:
            raise ValueError(f"A permutation needs at least one element, not {size}.")
        self.size = size
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        self._keys = [mix64(mix64(*keys, number)) for number in range(_ROUNDS)]

    def __call__(self, index: int) -> int:
        """Return the image of ``index``, 0 <= index < size."""
        assert 0 <= index < self.size
        while True:
            index = self._permute(index)
            if index < self.size:
                return index

    def images(self) -> np.ndarray:
        """Return the images of 0 to size - 1, int64[size]."""
        images = np.arange(self.size, dtype=np.uint64)
        outside = np.arange(self.size)
        while len(outside):
            images[outside] = self._permute(images[outside])
            outside = outside[images[outside] >= self.size]
        return images.astype(np.int64)

    def _permute(self, index: Words) -> Words:
        mask = (1 << self._half) - 1
        left, right = index >> self._half, index & mask
        for key in self._keys:
            left, right = right, left ^ (_mix((right ^ key) + _GOLDEN & _MASK) & mask)
        return left << self._half | right


cached_permutation = functools.lru_cache(256)(Permutation)


class Sampler:
    """The order of the sequences in a run: in each epoch a new permutation of the dataset.

    A sequence number counts through all epochs, so it has no upper limit. Number n belongs to epoch
    n // num_sequences.

    num_sequences: number of sequences in the dataset.
    seed: determines the permutations.
    consumed: number of sequences that the run has trained on, over all workers and epochs.
    skipped: ranges (first, end) of sequences left out: disjoint, in order, and counting all.
    """

    skipped: Sequence[tuple[int, int]] = ()

    def __init__(self, num_sequences: int, seed: int) -> None:
        if num_sequences < 1:
            raise ValueError(f"A sampler needs at least one sequence, not {num_sequences}.")
        self.num_sequences, self.seed, self.consumed = num_sequences, seed, 0

    def sequence(self, number: int) -> int:
        """Return the dataset index of the run's sequence ``number``."""
        if number < 0:
            raise ValueError(f"Sequence numbers start at 0, not {number}.")
        epoch, position = divmod(number, self.num_sequences)
        return cached_permutation(self.num_sequences, self.seed, epoch)(position)

    def position(self, number: int) -> int:
        """Return sequence ``number``, counted without those left out, as one that counts all."""
        for first, end in self.skipped:
            number += (end - first) * (number >= first)
        return number

    def leave_out(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Leave out ranges (first, end) of sequences, which count all and may overlap."""
        merged: list[tuple[int, int]] = []
        for first, end in sorted(ranges):
            if merged and first <= merged[-1][1]:
                first, end = merged[-1][0], max(end, merged.pop()[1])
            merged.append((first, end))
        self.skipped = merged

    def advance(self, count: int) -> None:
        """Add ``count`` to ``consumed``."""
        assert count >= 0
        self.consumed += count

    def state(self) -> dict[str, int]:
        """Return the state for a checkpoint: ``seed`` and ``consumed``."""
        return {"seed": self.seed, "consumed": self.consumed}

    def load_state(self, state: Mapping[str, int]) -> None:
        """Continue from ``state``, which a sampler over the same dataset saved."""
        seed, consumed = int(state["seed"]), int(state["consumed"])
        if consumed < 0:
            raise ValueError(f"The number of consumed sequences cannot be negative: {consumed}.")
        self.seed, self.consumed = seed, consumed
