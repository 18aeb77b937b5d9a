"""The contract of a pattern: how a dynamic index is estimated from the queries and keys of one layer, wherever their tokens are held."""

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
    """The workers that estimate one index together. Every worker calls the same operations in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def sum(self, mine: torch.Tensor) -> torch.Tensor:
        """mine [...], contiguous: becomes the sum over all workers, and is returned."""
        ...

    def max(self, mine: torch.Tensor) -> torch.Tensor:
        """mine [...], contiguous, no NaN in it: becomes the largest over all workers, and is returned."""
        ...

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        """mine [...], of one shape everywhere -> [size, ...] in the order of ranks."""
        ...


@dataclass(frozen=True)
class SingleWorkerGroup:
    """One worker that holds the whole sequence: its own values are those of all."""

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
    """The masks of a batch and the shard of one worker, as patterns see them: on the host, and as tensors on the device.

    masks: one per sequence. geometry: where the blocks of this worker stand, the same for queries and keys. shards: per worker the numbers
    of its blocks, ascending, as many for each. cache: what patterns derive from all this, kept for the other layers.
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
        """shards: the positions [tokens] that each worker of the group holds, ascending, as many for each; None: one worker holds all.

        Raises:
            ValueError: the positions of a worker are not whole blocks, or some workers hold more blocks than others.
        """
        group = group or SingleWorkerGroup()
        shards = shards or [np.arange(masks[0].padded, dtype=np.int64)]
        assert len(shards) == group.size
        mine = shards[group.rank]
        numbers = tuple(np.unique(positions // block) for positions in shards)
        held = [len(blocks) for blocks in numbers]
        if len(set(held)) > 1 or sum(held) != -(-masks[0].padded // block):
            raise ValueError(
                f"The workers hold {held} blocks of {block}; an index needs whole blocks, as many on each worker."
            )
        return MaskedPositions(
            masks, BlockGeometry.make(masks, mine, mine, block, device), numbers, group
        )

    @property
    def numbers(self) -> IntArray:
        """int64 [local blocks], the blocks of this worker, ascending."""
        return self.shards[self.group.rank]

    @cached_property
    def host_positions(self) -> IntArray:
        """int64 [local blocks * block], the positions of this worker's slots, those beyond the end of a short last block included."""
        return (
            self.numbers[:, None] * self.geometry.block + np.arange(self.geometry.block)
        ).reshape(-1)

    @cached_property
    def positions(self) -> torch.Tensor:
        """`host_positions` on the device."""
        return to_device(self.host_positions, self.geometry.first.device)

    @cached_property
    def lengths(self) -> torch.Tensor:
        """int64 [batch], the tokens of each sequence that are no padding, on the device."""
        return to_device(
            torch.tensor([mask.length for mask in self.masks]), self.geometry.first.device
        )

    @cached_property
    def padded(self) -> bool:
        """Some sequence does not fill its blocks."""
        return any(mask.length < self.geometry.blocks * self.geometry.block for mask in self.masks)

    def real(self, sequence: int) -> int:
        """Local slots of one sequence that hold a token; padding comes after them."""
        return int(np.searchsorted(self.host_positions, self.masks[sequence].length))

    def visible(self, sequence: int, rows: torch.Tensor, keys: int) -> torch.Tensor:
        """bool [rows, keys]: which of the first local keys the queries at positions ``rows`` (int64) of one sequence may see."""
        position = self.positions[:keys]
        return (position >= self.geometry.first[sequence, rows][:, None]) & (
            position <= rows[:, None]
        )


class Pattern(Protocol):
    """Deterministic: the same queries and keys give the same index, however many workers hold them, up to ties in rounding."""

    name: ClassVar[str]
    synthetic: ClassVar[bool]
    """The index does not come from the data: fit for benchmarks only, and labelled wherever it shows."""

    def request(self) -> IndexRequest:
        """What the index asks of a kernel."""
        ...

    def describe(self) -> str:
        """One line for banners."""
        ...

    def covers(self, seq: int) -> str | None:
        """Which setting leaves every pair of ``seq`` tokens, whatever the data, in words before "all of seq=..."; None if none does."""
        ...

    def probed_rows(self, length: int) -> torch.Tensor:
        """int64 [rows], the positions of the queries that decide for all others; recall has to be measured outside them. None where every
        query, or the seed, decides for itself.
        """
        ...

    def estimate(
        self, q: torch.Tensor, k: torch.Tensor, masked: MaskedPositions, layer: int
    ) -> Index:
        """q [batch, tokens, heads, head_dim], k [batch, tokens, kv_heads, head_dim] of this worker, in the order of ``masked.positions`` ->
        what is worth computing: the whole index on every worker, or of a bitmap the rows of its own blocks. Called without gradients, once
        per layer and step, by all workers of ``masked.group`` together.
        """
        ...


NO_ROWS = torch.empty(0, dtype=torch.int64)


def shown_name(pattern: Pattern) -> str:
    """The name of a pattern where people read it; in a measurement nobody is to take a synthetic one for a real one."""
    return f"{pattern.name} (SYNTHETIC)" if pattern.synthetic else pattern.name


MASS_UNITS = (
    2.0**38
)  # masses are compared and added as integers of this resolution: exact, and the same in any order and on any worker
MOST_UNITS = (1 << 38) - 1
_NUMBER_BITS = MOST_LINES.bit_length() - 1
_NUMBERS = (1 << _NUMBER_BITS) - 1


def in_units(mass: torch.Tensor) -> torch.Tensor:
    """float [...], not negative -> int64 [...] in units of 1 / `MASS_UNITS`; what is not finite has no mass."""
    return torch.nan_to_num(mass, nan=0.0, posinf=0.0).mul_(MASS_UNITS).round_().long()


def rank_without_mass(forced: torch.Tensor, numbers: torch.Tensor, n: int) -> torch.Tensor:
    """forced bool, numbers int64 [lines], below n -> int64 like forced: `ranking` but for the mass, the same for all layers."""
    assert n <= MOST_LINES
    return (forced.long() << 62) | (n - 1 - numbers)


def ranking(units: torch.Tensor, without_mass: torch.Tensor) -> torch.Tensor:
    """units int64 [..., lines], at most `MOST_UNITS` -> int64 like units, all different: a larger one goes before, by forced, mass and
    lower number. Keys of several workers may be merged and sorted together.
    """
    # 1 + 38 + 24 bits.
    return torch.add(without_mass, units, alpha=1 << _NUMBER_BITS)


def fewest_lines(
    order: torch.Tensor,
    total: torch.Tensor,
    share: float | torch.Tensor,
    least: int,
    most: int,
    n: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The choice of `kept_lines` from keys of `ranking` [..., candidates], among them the ``most`` largest of all lines, and the mass of
    all lines in units, int64 [..., 1]. least: no fewer than are forced, which come first.
    """
    order = torch.topk(order, min(most, order.shape[-1]), dim=-1).values
    lines = n - 1 - (order & _NUMBERS)
    taken = (order >> _NUMBER_BITS) & MOST_UNITS
    # A scalar on the host of another dtype costs no kernel of its own, unlike a conversion.
    limit = (
        share * total.double()
        if isinstance(share, torch.Tensor)
        else total * torch.tensor(share, dtype=torch.float64)
    )
    keep = taken.cumsum(-1).sub_(taken) < limit
    keep[..., :least].fill_(True)
    return lines, keep


def kept_lines(
    mass: torch.Tensor, share: float | torch.Tensor, forced: torch.Tensor, least: int, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The fewest lines that hold a share of all mass, the one that crosses it included (MTraining, algorithm 1).

    mass: float [..., n], not negative, each row adding up to 1 or less, or the same in units, int64. share: of that sum, a number or
    [..., 1]. forced: bool [n] or like mass, lines that are kept whatever their mass and counted first. least, most: bounds on how many are
    kept, forced ones included. Of equal masses the lower number goes first.
    Returns the numbers of the lines, int64 [..., min(most, n)] by falling rank, and which of them are kept.
    """
    n = mass.shape[-1]
    units = (in_units(mass) if mass.is_floating_point() else mass).clamp(max=MOST_UNITS)
    order = ranking(units, rank_without_mass(forced, torch.arange(n, device=mass.device), n))
    lines, keep = fewest_lines(order, units.sum(-1, keepdim=True), share, least, most, n)
    return lines, keep | forced.expand_as(mass).gather(-1, lines)
