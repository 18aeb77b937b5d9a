"""The contract of a pattern: how a dynamic index is estimated from the queries and keys of one layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from mtrain_cli.attention.index import Index
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.tiles import BlockGeometry


@dataclass(frozen=True)
class Masked:
    """The masks of a batch as patterns see them: one per sequence, and the same as tensors on the device."""

    masks: Sequence[SequenceMask]
    geometry: BlockGeometry

    def visible(self, sequence: int, rows: torch.Tensor, keys: int) -> torch.Tensor:
        """bool [rows, keys]: which of the first keys the queries at positions ``rows`` (int64) of one sequence may see."""
        position = torch.arange(keys, device=rows.device)
        return (position >= self.geometry.first[sequence, rows][:, None]) & (position <= rows[:, None])


class Pattern(Protocol):
    """Deterministic: the same queries and keys give the same index."""

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

    def estimate(self, q: torch.Tensor, k: torch.Tensor, masked: Masked, layer: int) -> Index:
        """q [batch, seq, heads, head_dim], k [batch, seq, kv_heads, head_dim] in sequence order -> what is worth computing. Called without
        gradients, once per layer and step.
        """
        ...


def shown_name(pattern: Pattern) -> str:
    """The name of a pattern where people read it; in a measurement nobody is to take a synthetic one for a real one."""
    return f"{pattern.name} (SYNTHETIC)" if pattern.synthetic else pattern.name


_UNIT = 2.0**38  # masses are compared and added as integers of this resolution: exact, and the same in any order
_NUMBER_BITS = 24


def kept_lines(
    mass: torch.Tensor, share: float | torch.Tensor, forced: torch.Tensor, least: int, most: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The fewest lines that hold a share of all mass, the one that crosses it included (MTraining, algorithm 1).

    mass: float32 [..., n], not negative, each row adding up to 1 or less. share: of that sum, a number or [..., 1]. forced: bool [n] or
    like mass, lines that are kept whatever their mass and counted first. least, most: bounds on how many are kept, forced ones included.
    Of equal masses the lower number goes first.
    Returns the numbers of the lines, int64 [..., min(most, n)] by falling rank, and which of them are kept.
    """
    n = mass.shape[-1]
    assert n < 1 << _NUMBER_BITS
    units = (torch.nan_to_num(mass, nan=0.0, posinf=0.0).double() * _UNIT).long()
    # One integer orders by forced, mass and number: 1 + 38 + 24 bits.
    order = (forced.long() << 62) | (units.clamp(max=(1 << 38) - 1) << _NUMBER_BITS) | (n - 1 - torch.arange(n, device=mass.device))
    lines = n - 1 - (torch.topk(order, min(most, n), dim=-1).values & ((1 << _NUMBER_BITS) - 1))
    taken = units.gather(-1, lines)
    before = taken.cumsum(-1) - taken
    rank = torch.arange(lines.shape[-1], device=mass.device)
    keep = (before < share * units.sum(-1, keepdim=True).double()) | (rank < least) | forced.expand_as(mass).gather(-1, lines)
    return lines, keep
