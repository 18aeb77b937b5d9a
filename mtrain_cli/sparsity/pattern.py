"""The contract of a pattern, which estimates a dynamic index from a layer's queries and keys.

The tokens may be spread over several workers.
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
        """Stack ``mine`` of all workers, equally shaped, in rank order: [size, *mine.shape]."""
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
    """The masks of a batch and one worker's shard, on the host and on the device.

    masks: one per sequence.
    geometry: this worker's blocks, the same for queries and keys.
    shards: ascending block numbers of each worker, the same count on every worker.
    rank: this worker.
    group: the workers that hold the shards.
    cache: values that patterns derive from these fields, shared by all layers.
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
            shards: ascending positions [tokens] of each worker, the same count on every worker;
                None if one worker holds all.
            bitmap: the index is a bitmap.

        Raises:
            ValueError: a worker's positions are not whole blocks, or workers hold different numbers
                of blocks.
        """
        padded = masks[0].padded
        shards = shards or [np.arange(padded, dtype=np.int64)]
        numbers = tuple(_numbers(positions // block) for positions in shards)
        blocks_per_worker = [len(blocks) for blocks in numbers]
        if len(set(blocks_per_worker)) > 1 or sum(blocks_per_worker) != -(-padded // block):
            raise ValueError(
                f"The workers hold {blocks_per_worker} blocks of {block}. An index needs whole "
                "blocks, equally many on each worker."
            )
        tables = MaskTables.make(masks, block, bitmap=bitmap, rows=numbers[rank])
        return MaskedPositions(masks, tables.between(shards[rank], shards[rank]), numbers, rank)

    def to(self, device: torch.device | str) -> MaskedPositions:
        """Return the positions with their tables on a device."""
        return map_tensors(self, lambda tensor: to_device(tensor, device))

    def with_group(self, group: IndexGroup) -> MaskedPositions:
        """Return the positions for estimates with the workers of ``group``."""
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
        """int64 [local blocks], block numbers of this worker, ascending."""
        return self.shards[self.rank]

    @cached_property
    def host_positions(self) -> IntArray:
        """int64 [local blocks * block], positions of this worker's slots, padding included."""
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
        """Whether some sequence does not fill its blocks."""
        return any(mask.length < self.tables.blocks * self.tables.block for mask in self.masks)

    def num_tokens(self, sequence: int) -> int:
        """Return the number of local slots of a sequence that hold a token; padding comes last."""
        return int(np.searchsorted(self.host_positions, self.masks[sequence].length))

    def visible(self, sequence: int, rows: torch.Tensor, keys: int) -> torch.Tensor:
        """Return which of the first ``keys`` local keys each row sees, bool [rows, keys].

        rows: int64, query positions of one sequence.
        """
        position = self.positions[:keys]
        first = self.tables.first[sequence, rows][:, None]
        return (position >= first) & (position <= rows[:, None])


def _numbers(blocks: IntArray) -> IntArray:
    """Return the distinct values of an ascending array."""
    return blocks[np.diff(blocks, prepend=-1) > 0]


class Pattern(Protocol):
    """Estimates an index from queries and keys.

    The same queries and keys give the same index on any number of workers, up to rounding of ties.

    name: NAME of ``sparsity=NAME``.
    synthetic: the index does not come from the data. Such a pattern is for benchmarks only, and
        reports label it.
    """

    name: ClassVar[str]
    synthetic: ClassVar[bool]

    def request(self) -> IndexRequest:
        """Return what the index requires of a kernel."""
        ...

    def describe(self) -> str:
        """Return one line for banners."""
        ...

    def covers(self, seq: int) -> str | None:
        """Return which setting allows every pair of ``seq`` tokens for any data, or None.

        A message adds "all of seq=..." to the text.
        """
        ...

    def probed_rows(self, length: int) -> torch.Tensor:
        """Return int64 [rows], positions of the queries that choose the index for all others.

        Measure recall on other queries. Empty if every query chooses, or if a seed does.
        """
        ...

    def estimate(
        self, q: torch.Tensor, k: torch.Tensor, masked: MaskedPositions, layer: int
    ) -> Index:
        """Return the pairs worth computing.

        Called without gradients, once per layer and step, by all workers of ``masked.group``
        together.

        Args:
            q, k: this worker's [batch, tokens, heads, head_dim] and [batch, tokens, kv_heads,
                head_dim], in the order of ``masked.positions``.

        Returns:
            The whole index on every worker; for a bitmap, the rows of this worker's blocks.
        """
        ...


NO_ROWS = torch.empty(0, dtype=torch.int64)


def display_name(pattern: Pattern) -> str:
    """Return the name to show in reports, which marks a synthetic pattern."""
    return f"{pattern.name} (SYNTHETIC)" if pattern.synthetic else pattern.name


# Integer units per 1.0 of mass: integer sums are exact in any order, on any worker.
MASS_UNITS = 2.0**38
MOST_UNITS = (1 << 38) - 1
_NUMBER_BITS = MOST_LINES.bit_length() - 1
_NUMBER_MASK = (1 << _NUMBER_BITS) - 1


def to_mass_units(mass: torch.Tensor) -> torch.Tensor:
    """Convert non-negative floats to int64 in units of 1 / `MASS_UNITS`; NaN and inf become 0."""
    return torch.nan_to_num(mass, nan=0.0, posinf=0.0).mul_(MASS_UNITS).round_().long()


def base_rank_keys(forced: torch.Tensor, numbers: torch.Tensor, n: int) -> torch.Tensor:
    """Return the part of `rank_keys` that does not depend on the mass, the same for all layers.

    forced: bool; numbers: int64 [candidates], below n. Returns int64 like forced.
    """
    assert n <= MOST_LINES
    return (forced.long() << 62) | (n - 1 - numbers)


def rank_keys(units: torch.Tensor, without_mass: torch.Tensor) -> torch.Tensor:
    """Return a distinct int64 key per candidate that ranks by forced, mass, and lower number.

    Keys of several workers may be merged and sorted together.

    units: int64 [..., candidates], at most `MOST_UNITS`.
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
    """Select as `select_by_mass` does, from keys of `rank_keys`.

    Args:
        order: keys [..., candidates] that include the ``at_most`` largest of all candidates.
        total: mass of all candidates in units, int64 [..., 1].
        at_least: not below the number of forced candidates, which rank first.
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

    The candidate that crosses the share is included. Of equal masses the lower number goes first.

    Args:
        mass: non-negative float [..., n] whose rows sum to at most 1, or the same in units, int64.
        share: share of each row's sum to hold, a number or [..., 1].
        forced: bool, [n] or like mass; candidates to keep whatever their mass, ranked first.
        at_least, at_most: bounds on the number kept, forced ones included.

    Returns:
        numbers: int64 [..., min(at_most, n)], candidates by falling rank.
        kept: bool like numbers.
    """
    n = mass.shape[-1]
    units = (to_mass_units(mass) if mass.is_floating_point() else mass).clamp(max=MOST_UNITS)
    order = rank_keys(units, base_rank_keys(forced, torch.arange(n, device=mass.device), n))
    candidates, kept = select_ranked(
        order, units.sum(-1, keepdim=True), share, at_least, at_most, n
    )
    return candidates, kept | forced.expand_as(mass).gather(-1, candidates)
