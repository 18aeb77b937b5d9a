"""The contract of a pattern, which estimates a dynamic index from a layer's queries and keys.

The tokens may be spread over several workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.attention.index import Index
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.attention.tiles import BlockGeometry
from mtrain_cli.config.schema import MOST_LINES


class IndexGroup(Protocol):
    """The workers that estimate an index together.

    All must call the same operations in the same order.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, mine: torch.Tensor) -> torch.Tensor:
        """Replace contiguous ``mine`` by its sum over all workers, and return it."""
        ...

    def max(self, mine: torch.Tensor) -> torch.Tensor:
        """Replace contiguous ``mine``, without NaN, by its maximum over workers, and return it."""
        ...

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """Return [size, ...], the equally shaped ``mine`` [...] of all workers in rank order."""
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
    geometry: block positions of this worker, the same for queries and keys.
    shards: block numbers of each worker, ascending; equally many per worker.
    group: the workers that hold the shards.
    cache: what patterns derive from this, shared by all layers.
    """

    masks: Sequence[SequenceMask]
    geometry: BlockGeometry
    shards: tuple[IntArray, ...]
    group: IndexGroup
    cache: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def make(
        masks: Sequence[SequenceMask],
        block: int,
        device: torch.device | str = "cpu",
        shards: Sequence[IntArray] | None = None,
        group: IndexGroup | None = None,
    ) -> MaskedPositions:
        """Build the positions of one worker.

        Args:
            shards: positions [tokens] that each worker holds, ascending, equally many; None if one
                worker holds all.

        Raises:
            ValueError: a worker's positions are not whole blocks, or workers hold different numbers
                of blocks.
        """
        group = group or SingleWorkerGroup()
        shards = shards or [np.arange(masks[0].padded, dtype=np.int64)]
        assert len(shards) == group.size
        mine = shards[group.rank]
        numbers = tuple(np.unique(positions // block) for positions in shards)
        blocks_per_worker = [len(blocks) for blocks in numbers]
        if len(set(blocks_per_worker)) > 1 or sum(blocks_per_worker) != -(
            -masks[0].padded // block
        ):
            raise ValueError(
                f"The workers hold {blocks_per_worker} blocks of {block}. An index needs whole "
                "blocks, equally many on each worker."
            )
        return MaskedPositions(
            masks, BlockGeometry.make(masks, mine, mine, block, device), numbers, group
        )

    @property
    def numbers(self) -> IntArray:
        """int64 [local blocks], block numbers of this worker, ascending."""
        return self.shards[self.group.rank]

    @cached_property
    def host_positions(self) -> IntArray:
        """int64 [local blocks * block], positions of this worker's slots.

        They include those beyond the end of a short last block.
        """
        return (
            self.numbers[:, None] * self.geometry.block + np.arange(self.geometry.block)
        ).reshape(-1)

    @cached_property
    def positions(self) -> torch.Tensor:
        """`host_positions` on the device."""
        return to_device(self.host_positions, self.geometry.first.device)

    @cached_property
    def lengths(self) -> torch.Tensor:
        """int64 [batch] on the device, tokens of each sequence without padding."""
        return to_device(
            torch.tensor([mask.length for mask in self.masks]), self.geometry.first.device
        )

    @cached_property
    def padded(self) -> bool:
        """Whether some sequence does not fill its blocks."""
        return any(mask.length < self.geometry.blocks * self.geometry.block for mask in self.masks)

    def num_tokens(self, sequence: int) -> int:
        """Return the number of local slots of a sequence that hold a token; padding comes last."""
        return int(np.searchsorted(self.host_positions, self.masks[sequence].length))

    def visible(self, sequence: int, rows: torch.Tensor, keys: int) -> torch.Tensor:
        """Return which of the first ``keys`` local keys each row sees, bool [rows, keys].

        rows: int64, query positions of one sequence.
        """
        position = self.positions[:keys]
        return (position >= self.geometry.first[sequence, rows][:, None]) & (
            position <= rows[:, None]
        )


class Pattern(Protocol):
    """Estimates an index from queries and keys.

    Deterministic: the same queries and keys give the same index, up to rounding of ties, however
        many workers hold them.

    name: as in ``sparsity=NAME``.
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
        """Return which setting makes the index allow every pair of ``seq`` tokens, or None.

        The words go before "all of seq=...". The data must not matter.
        """
        ...

    def probed_rows(self, length: int) -> torch.Tensor:
        """Return int64 [rows], positions of the queries that decide for all others.

        Recall must be measured on other queries. Empty if every query, or the seed, decides.
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
    """Return the pattern's name for readers; a synthetic pattern is marked as such."""
    return f"{pattern.name} (SYNTHETIC)" if pattern.synthetic else pattern.name


# Masses are compared and added as integers of this resolution: exact in any order, on any worker.
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
    """Return a distinct int64 key per candidate: sort by forced, then mass, then lower number.

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
        share: of each row's sum, a number or [..., 1].
        forced: bool, [n] or like mass; candidates to keep whatever their mass, counted first.
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
