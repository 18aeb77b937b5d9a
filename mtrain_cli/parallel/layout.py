"""Layouts: which worker of a context group holds which tokens of a sequence.

A layout is a bijection between positions ``0..padded_seq`` and (rank, slot). A worker's slots hold
ascending positions, so an interval of keys in the sequence is an interval of slots in any key shard
(`mtrain_cli.attention.mask`). Padding at the end makes shards equal.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.attention.partials import Pair
from mtrain_cli.parallel.wide_copy import as_wide, copy

_TILE = 128  # queries per kernel tile


@dataclass(frozen=True)
class Layout(ABC):
    """A distribution of a sequence's tokens over workers.

    block_size: number of tokens per block of a striped layout.
    unit: number of tokens that divides the length of every contiguous piece of a shard, such as the
        block size of a dynamic index.
    """

    workers: int
    seq: int
    block_size: int
    unit: int = 1
    name: ClassVar[str]

    @property
    @abstractmethod
    def _multiple(self) -> int:
        """The number of tokens that divides `padded_seq`."""

    @property
    def padded_seq(self) -> int:
        return -(-self.seq // self._multiple) * self._multiple

    @property
    def tokens_per_worker(self) -> int:
        return self.padded_seq // self.workers

    @abstractmethod
    def positions(self, rank: int) -> NDArray[np.int64]:
        """Return the global position of each slot of a rank, ascending, [tokens_per_worker]."""

    def to_sequence(self, shards: Tensor) -> Tensor:
        """Turn shards [workers, batch, tokens_per_worker, ...] into [batch, padded_seq, ...]."""
        return self._to_sequence(as_wide(shards) if shards.ndim > 3 else shards).view(shards.dtype)

    def to_shards(self, sequence: Tensor) -> Tensor:
        """Turn a sequence into shards: the inverse of `to_sequence`."""
        wide = as_wide(sequence) if sequence.ndim > 2 else sequence
        return self._to_shards(wide).view(sequence.dtype)

    def copy_to_shards(self, sequence: Tensor, shards: Tensor) -> None:
        """Write the result of `to_shards` into ``shards``, which may have another dtype."""
        copy(self.to_shards(sequence), shards)

    # These do the work of `to_sequence` and `to_shards`, on views that may have wider elements.

    @abstractmethod
    def _to_sequence(self, shards: Tensor) -> Tensor: ...

    @abstractmethod
    def _to_shards(self, sequence: Tensor) -> Tensor: ...


class Contiguous(Layout):
    """Rank r holds the r-th of ``workers`` equal parts."""

    name = "contiguous"

    @property
    def _multiple(self) -> int:
        return self.workers * self.unit

    def positions(self, rank: int) -> NDArray[np.int64]:
        n = self.tokens_per_worker
        return np.arange(rank * n, (rank + 1) * n, dtype=np.int64)

    def _to_sequence(self, shards: Tensor) -> Tensor:
        return shards.transpose(0, 1).flatten(1, 2)

    def _to_shards(self, sequence: Tensor) -> Tensor:
        return sequence.unflatten(1, (self.workers, -1)).transpose(0, 1)


class Zigzag(Layout):
    """Rank r holds, of 2 * workers parts, part r from the front and part r from the back."""

    name = "zigzag"

    @property
    def _multiple(self) -> int:
        return 2 * self.workers * self.unit

    def positions(self, rank: int) -> NDArray[np.int64]:
        part = self.tokens_per_worker // 2
        mirrored = 2 * self.workers - 1 - rank
        within = np.arange(part, dtype=np.int64)
        return np.concatenate([rank * part + within, mirrored * part + within])

    def _to_sequence(self, shards: Tensor) -> Tensor:
        halves = shards.unflatten(2, (2, -1))
        return torch.cat([halves[:, :, 0], halves[:, :, 1].flip(0)]).transpose(0, 1).flatten(1, 2)

    def _to_shards(self, sequence: Tensor) -> Tensor:
        parts = sequence.unflatten(1, (2 * self.workers, -1)).transpose(0, 1)
        return torch.stack([parts[: self.workers], parts[self.workers :].flip(0)], dim=2).flatten(
            2, 3
        )


class Striped(Layout):
    """Deal blocks to the ranks in turn: rank r holds blocks r, r + workers, r + 2 * workers, ...

    In each ring step all ranks compute the same block diagonals, those whose number has the same
    remainder modulo workers. So the layout also balances dynamic sparse attention, which keeps
    whole diagonals (MTraining, section 4.1).
    """

    name = "striped"

    @property
    def _multiple(self) -> int:
        return self.workers * math.lcm(self.block_size, self.unit)

    def positions(self, rank: int) -> NDArray[np.int64]:
        blocks = np.arange(rank, self.padded_seq // self.block_size, self.workers, dtype=np.int64)
        return (blocks[:, None] * self.block_size + np.arange(self.block_size)).reshape(-1)

    def _to_sequence(self, shards: Tensor) -> Tensor:
        blocks = shards.unflatten(2, (-1, self.block_size))
        return blocks.permute(1, 2, 0, *range(3, blocks.ndim)).flatten(1, 3)

    def _to_shards(self, sequence: Tensor) -> Tensor:
        return self._blocks(sequence).flatten(2, 3)

    def copy_to_shards(self, sequence: Tensor, shards: Tensor) -> None:
        copy(self._blocks(sequence), shards.unflatten(2, (-1, self.block_size)))

    def _blocks(self, sequence: Tensor) -> Tensor:
        """Return a view [workers, batch, blocks, block_size, ...]."""
        blocks = sequence.unflatten(1, (-1, self.workers, self.block_size))
        return blocks.permute(2, 0, 1, *range(3, blocks.ndim))


class _Permuted(Layout):
    """A layout that gathers pieces of the sequence by index."""

    @property
    @abstractmethod
    def _piece(self) -> int:
        """The number of tokens per piece."""

    @cached_property
    def _moved(self) -> dict[torch.device, Pair]:
        return {}

    def _on(self, device: torch.device) -> Pair:
        """Return the index of each piece in the concatenated shards, and the inverse."""
        if device not in self._moved:
            positions = np.concatenate([self.positions(r) for r in range(self.workers)])
            order = positions[:: self._piece] // self._piece
            self._moved[device] = to_device(np.argsort(order), device), to_device(order, device)
        return self._moved[device]

    def _to_sequence(self, shards: Tensor) -> Tensor:
        flat = shards.transpose(0, 1).flatten(1, 2)
        return self._gather(flat, self._on(shards.device)[0])

    def _to_shards(self, sequence: Tensor) -> Tensor:
        flat = self._gather(sequence, self._on(sequence.device)[1])
        return flat.unflatten(1, (self.workers, -1)).transpose(0, 1)

    def _gather(self, tokens: Tensor, pieces: Tensor) -> Tensor:
        if self._piece == 1:
            return tokens.index_select(1, pieces)
        return tokens.unflatten(1, (-1, self._piece)).index_select(1, pieces).flatten(1, 2)


@dataclass(frozen=True)
class Joined(_Permuted):
    """A layout whose shards each combine those of ``together`` neighboring ranks of ``base``."""

    base: Layout | None = None
    together: int = 1
    name = "joined"

    @staticmethod
    def of(base: Layout, together: int) -> Joined:
        sizes = base.workers // together, base.seq, base.block_size, base.unit
        return Joined(*sizes, base, together)

    @property
    def _multiple(self) -> int:
        assert self.base is not None
        return self.base._multiple

    @property
    def _piece(self) -> int:
        return 1

    def positions(self, rank: int) -> NDArray[np.int64]:
        assert self.base is not None
        members = range(rank * self.together, (rank + 1) * self.together)
        return np.sort(np.concatenate([self.base.positions(r) for r in members]))


@dataclass(frozen=True)
class Balanced(_Permuted):
    """Each rank holds the chunks that a dispatch assigns to it (`mtrain_cli.parallel.dispatch`).

    owner: the rank that holds each chunk. All ranks hold the same number of chunks.
    """

    owner: tuple[int, ...] = ()
    name = "balanced"

    @staticmethod
    def of(owner: NDArray[np.int64], workers: int, seq: int, chunk: int) -> Balanced:
        return Balanced(workers, seq, chunk, chunk, tuple(owner.tolist()))

    @property
    def _multiple(self) -> int:
        return len(self.owner) * self.block_size

    @property
    def _piece(self) -> int:
        return self.block_size

    def positions(self, rank: int) -> NDArray[np.int64]:
        chunks = np.flatnonzero(np.array(self.owner) == rank)
        return (chunks[:, None] * self.block_size + np.arange(self.block_size)).reshape(-1)


_LAYOUTS: dict[str, type[Layout]] = {cls.name: cls for cls in (Contiguous, Zigzag, Striped)}


def make_layout(name: str, workers: int, seq: int, block_size: int, unit: int = 1) -> Layout:
    if name not in _LAYOUTS:
        raise ValueError(f"topology.layout={name}: no such layout; allowed: {', '.join(_LAYOUTS)}")
    return _LAYOUTS[name](workers, seq, block_size, unit)


def early_queries(queries: int, keep: float, block: int | None) -> int:
    """Return how many of a worker's queries recomputation computes again.

    These are whole blocks of the index, or whole kernel tiles if the worker has at least 16.
    """
    unit = block or (_TILE if queries % _TILE == 0 and queries >= 16 * _TILE else 1)
    return min(queries, round((1 - keep) * queries / unit) * unit)


class Placement:
    """The layout of a batch, and the layout that remains between two Ulysses all-to-alls."""

    def __init__(self, layout: Layout, heads: int = 1) -> None:
        self.layout, self.heads = layout, heads
        self._orders: dict[tuple[int, torch.device], Pair] = {}

    @cached_property
    def inside(self) -> Layout:
        """The layout in which the ranks that share heads count as one rank."""
        return self.layout if self.heads == 1 else Joined.of(self.layout, self.heads)

    def token_order(self, shard: int, device: torch.device) -> Pair:
        """Return the permutation that sorts the tokens after an all-to-all, and its inverse.

        The all-to-all delivers the tokens of the ranks that share heads rank after rank.
        """
        key = shard, device
        if key not in self._orders:
            ranks = range(shard * self.heads, (shard + 1) * self.heads)
            positions = np.concatenate([self.layout.positions(rank) for rank in ranks])
            order = np.argsort(positions, kind="stable")
            self._orders[key] = to_device(order, device), to_device(np.argsort(order), device)
        return self._orders[key]
