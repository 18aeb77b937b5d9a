"""The contract of a pattern, which estimates a dynamic index from a layer's queries and keys.

The tokens of a sequence may be sharded over several workers. This module also selects the fewest
candidates that hold a share of attention, in a way that gives every worker the same result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from mtrain_cli.attention.device_copy import map_tensors, to_device
from mtrain_cli.attention.index import Index
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.attention.mask_tables import BlockGeometry, MaskTables
from mtrain_cli.config.pattern_settings import MOST_LINES


class IndexGroup(Protocol):
    """The workers that estimate an index together.

    All workers must call the same operations in the same order.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, mine: torch.Tensor) -> torch.Tensor:
        """Replace ``mine`` (contiguous) with its sum over all workers, and return it."""
        ...

    def max(self, mine: torch.Tensor) -> torch.Tensor:
        """Replace ``mine`` (contiguous, no NaN) with its maximum over workers, and return it."""
        ...

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Return ``mine`` of all workers in rank order, [size, *mine.shape].

        ``mine`` has the same shape on every worker.
        """
        ...


@dataclass(frozen=True)
class SingleWorkerGroup:
    """A group of one worker, which holds the whole sequence."""

    rank: int = 0
    size: int = 1

    def sum(self, mine: torch.Tensor) -> torch.Tensor:
        return mine

    def max(self, mine: torch.Tensor) -> torch.Tensor:
        return mine

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        return mine[None]


@dataclass(frozen=True)
class MaskedPositions:
    """The masks of a batch and this worker's shard of it, on the host and on the device.

    masks: one per sequence.
    geometry: the blocks of this worker's shard, as queries and as keys.
    shards: block numbers of every worker, ascending. All workers have the same number of blocks.
    rank: this worker.
    group: communicates with the other workers.
    cache: what patterns derive from these fields. All layers share it.
    """

    masks: Sequence[SequenceMask]
    geometry: BlockGeometry
    shards: tuple[IntArray, ...]
    rank: int = 0
    group: IndexGroup = field(default_factory=SingleWorkerGroup)
    cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def make(
        masks: Sequence[SequenceMask],
        block: int,
        shards: Sequence[IntArray] | None = None,
        rank: int = 0,
        *,
        bitmap: bool = False,
    ) -> MaskedPositions:
        """Build the positions of one worker on the host, with `SingleWorkerGroup`.

        Args:
            shards: int64 positions [tokens] of every worker, ascending; None if one worker has the
                whole sequence.
            bitmap: whether the index is a bitmap.

        Raises:
            ValueError: a shard does not consist of whole blocks, or workers have different numbers
                of blocks.
        """
        padded = masks[0].padded
        shards = shards or [np.arange(padded, dtype=np.int64)]
        numbers = tuple(_numbers(positions // block) for positions in shards)
        blocks_per_worker = [len(blocks) for blocks in numbers]
        if len(set(blocks_per_worker)) > 1 or sum(blocks_per_worker) != -(-padded // block):
            raise ValueError(
                f"The workers hold {blocks_per_worker} blocks of {block}. An index needs whole "
                "blocks, and the same number of them on each worker."
            )
        tables = MaskTables.make(masks, block, bitmap=bitmap, rows=numbers[rank])
        return MaskedPositions(masks, tables.between(shards[rank], shards[rank]), numbers, rank)

    def to(self, device: torch.device | str) -> MaskedPositions:
        """Return the positions with their tables on a device."""
        return map_tensors(self, lambda tensor: to_device(tensor, device))

    def with_group(self, group: IndexGroup) -> MaskedPositions:
        """Return the same positions with another group for the patterns to communicate through."""
        assert (group.rank, group.size) == (self.rank, len(self.shards))
        return replace(self, group=group)

    @property
    def tables(self) -> MaskTables:
        return self.geometry.tables

    @property
    def device(self) -> torch.device:
        return self.tables.device

    @property
    def numbers(self) -> IntArray:
        """Block numbers of this worker, int64 [local blocks], ascending."""
        return self.shards[self.rank]

    @cached_property
    def host_positions(self) -> IntArray:
        """Positions of this worker's slots, padding included, int64 [local blocks * block]."""
        block = self.tables.block
        return (self.numbers[:, None] * block + np.arange(block)).reshape(-1)

    @cached_property
    def positions(self) -> torch.Tensor:
        """`host_positions` on the device."""
        block = self.tables.block
        within = torch.arange(block, device=self.device)
        return (self.geometry.query_blocks.long()[:, None] * block + within).flatten()

    @property
    def padded(self) -> bool:
        """Whether some sequence has fewer tokens than its blocks have room for."""
        return any(mask.length < self.tables.blocks * self.tables.block for mask in self.masks)

    def num_tokens(self, sequence: int) -> int:
        """Return how many of this worker's slots hold a token of a sequence, not padding.

        These slots come first.
        """
        return int(np.searchsorted(self.host_positions, self.masks[sequence].length))

    def visible(self, sequence: int, rows: torch.Tensor, keys: int) -> torch.Tensor:
        """Return which of the first ``keys`` local keys each query sees, bool [rows, keys].

        rows: int64 [rows], positions of queries of one sequence.
        """
        position = self.positions[:keys]
        first = self.tables.first[sequence, rows][:, None]
        return (position >= first) & (position <= rows[:, None])


def _numbers(blocks: IntArray) -> IntArray:
    """Return the distinct values of an ascending array."""
    return blocks[np.diff(blocks, prepend=-1) > 0]


class Pattern(Protocol):
    """Estimates an index from queries and keys.

    The same queries and keys give the same index on any number of workers, except for near ties,
    which rounding can decide either way.

    name: the value of the setting ``sparsity``, such as ``moba``.
    synthetic: whether the index does not depend on the data. Such a pattern is for benchmarks only,
        and reports mark it.
    """

    name: ClassVar[str]
    synthetic: ClassVar[bool]

    def request(self) -> IndexRequest:
        """Return what the index requires of a kernel."""
        ...

    def describe(self) -> str:
        """Return one line for banners that says what the pattern chooses."""
        ...

    def covers(self, seq: int) -> str | None:
        """Return why these settings allow every pair of ``seq`` tokens whatever the data, or None.

        The text ends with a verb, such as "3 chunks of 4096 keys cover". Messages continue it with
        "all of seq=...".
        """
        ...

    def probed_rows(self, length: int) -> torch.Tensor:
        """Return the positions of the queries that decide for all others, int64 [rows].

        Recall is measured on the other queries. Return no positions if every query decides for
        itself, or if a seed decides.
        """
        ...

    def estimate(
        self, q: torch.Tensor, k: torch.Tensor, masked: MaskedPositions, layer: int
    ) -> Index:
        """Return the index: the pairs worth computing.

        All workers of ``masked.group`` call this together, once per layer and step, without
        gradients.

        Args:
            q, k: this worker's [batch, tokens, heads, head_dim] and [batch, tokens, kv_heads,
                head_dim], in the order of ``masked.positions``.

        Returns:
            The whole index, the same on every worker. A bitmap has only the query blocks of this
            worker.
        """
        ...


NO_ROWS = torch.empty(0, dtype=torch.int64)


def display_name(pattern: Pattern) -> str:
    """Return the pattern's name for reports, marked if the pattern is synthetic."""
    return f"{pattern.name} (SYNTHETIC)" if pattern.synthetic else pattern.name


# Mass is a share of attention, between 0 and 1. Sums of integer units are exact in any order.
MASS_UNITS = 2.0**38
MOST_UNITS = (1 << 38) - 1
_NUMBER_BITS = MOST_LINES.bit_length() - 1
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1


def to_mass_units(mass: torch.Tensor) -> torch.Tensor:
    """Convert non-negative floats to int64 in units of 1 / `MASS_UNITS`; NaN and inf become 0."""
    return torch.nan_to_num(mass, nan=0.0, posinf=0.0).mul_(MASS_UNITS).round_().long()


def base_rank_keys(forced: torch.Tensor, numbers: torch.Tensor, n: int) -> torch.Tensor:
    """Return the part of `rank_keys` that does not depend on the mass, int64 [..., candidates].

    forced: bool [..., candidates], whether a candidate ranks first whatever its mass.
    numbers: int64 [candidates], the candidates' numbers, from 0 to n - 1.
    n: at most `MOST_LINES`.
    """
    assert n <= MOST_LINES
    return (forced.long() << 62) | (n - 1 - numbers)


def rank_keys(units: torch.Tensor, without_mass: torch.Tensor) -> torch.Tensor:
    """Return an int64 key per candidate: the larger the key, the better the rank.

    Forced candidates rank first, then those with more mass, then those with a lower number. No two
    keys are equal, so keys of several workers can be sorted together.

    units: int64 [..., candidates], mass in units, at most `MOST_UNITS`.
    without_mass: from `base_rank_keys`.
    """
    # Bits of a key: 1 for forced, 38 for the mass, 24 for the number.
    return torch.add(without_mass, units, alpha=1 << _NUMBER_BITS)


def select_ranked(
    order: torch.Tensor,
    total: torch.Tensor,
    share: float | torch.Tensor,
    at_least: int,
    at_most: int,
    n: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select candidates as `select_by_mass` does, from their `rank_keys`.

    Args:
        order: rank keys [..., candidates]. They must include the ``at_most`` largest of all.
        total: mass of all candidates in units, int64 [..., 1].
        share, at_most: as in `select_by_mass`.
        at_least: as in `select_by_mass`; not below the number of forced candidates.
        n: as in `base_rank_keys`.
    """
    order = torch.topk(order, min(at_most, order.shape[-1]), dim=-1).values
    candidates = n - 1 - (order & _NUMBER_MASK)
    masses = (order >> _NUMBER_BITS) & MOST_UNITS
    # Multiplying by a host scalar of another dtype needs no kernel for the conversion.
    limit = (
        share * total.double()
        if isinstance(share, torch.Tensor)
        else total * torch.tensor(share, dtype=torch.float64)
    )
    kept = masses.cumsum(-1).sub_(masses) < limit
    kept[..., :at_least].fill_(True)
    return candidates, kept


def select_by_mass(
    mass: torch.Tensor,
    share: float | torch.Tensor,
    forced: torch.Tensor,
    at_least: int,
    at_most: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Select the fewest candidates that hold a share of the mass (MTraining, algorithm 1).

    The candidate that crosses the share is included. Of two candidates with equal mass, the one
    with the lower number ranks higher.

    Args:
        mass: float [..., n], not negative, with sums of at most 1 over the last dimension; or the
            same as int64 in units.
        share: share of the sum that the selection must hold, a number or [..., 1].
        forced: bool [n] or like mass, candidates to select whatever their mass. They rank first.
        at_least, at_most: bounds on the number of selected candidates, forced ones included.

    Returns:
        numbers: int64 [..., min(at_most, n)], the candidates with the best ranks, best first.
        kept: bool like numbers, whether the candidate is selected.
    """
    n = mass.shape[-1]
    units = (to_mass_units(mass) if mass.is_floating_point() else mass).clamp(max=MOST_UNITS)
    order = rank_keys(units, base_rank_keys(forced, torch.arange(n, device=mass.device), n))
    candidates, kept = select_ranked(
        order, units.sum(-1, keepdim=True), share, at_least, at_most, n
    )
    return candidates, kept | forced.expand_as(mass).gather(-1, candidates)
