"""Given numbers of block diagonals and columns, drawn from a seed: synthetic, for benchmarks and tests of speed only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch

from mtrain_cli.attention.index import VerticalSlash
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.sparsity.pattern import NO_ROWS, MaskedPositions


@dataclass(frozen=True)
class FixedPattern:
    """The same lines for every step and sequence, of another seed in every layer.

    slashes, columns: lines a head. density: instead of slashes, unless 0.
    """

    block: int
    slashes: int
    columns: int
    density: float
    seed: int
    name: ClassVar[str] = "fixed"
    synthetic: ClassVar[bool] = True

    def request(self) -> IndexRequest:
        return IndexRequest(self.block, bitmap=False)

    def describe(self) -> str:
        lines = (
            f"diagonals of {self.density:.1%} of the causal blocks"
            if self.density
            else f"{self.slashes} block diagonals"
        )
        return f"{lines} and {self.columns} columns a head from a seed, whatever the data"

    def covers(self, seq: int) -> str | None:
        blocks = -(-seq // self.block)
        if self.columns >= seq:
            return f"{self.columns} columns cover"
        if (self.density >= 1) if self.density else self.slashes >= blocks:
            return (
                f"diagonals of {self.density:.0%} of the blocks cover"
                if self.density
                else f"{self.slashes} block diagonals cover"
            )
        return f"one block of {self.block} tokens covers" if blocks == 1 else None

    def probed_rows(self, length: int) -> torch.Tensor:  # noqa: ARG002
        return NO_ROWS

    def estimate(
        self, q: torch.Tensor, k: torch.Tensor, masked: MaskedPositions, layer: int
    ) -> VerticalSlash:
        # The same in every step: a layer keeps what it drew once.
        lengths = tuple(mask.length for mask in masked.masks)
        return _drawn(self, layer, lengths, q.shape[2], masked.geometry.blocks, q.device)


@lru_cache(maxsize=256)
def _drawn(
    pattern: FixedPattern,
    layer: int,
    lengths: tuple[int, ...],
    heads: int,
    blocks: int,
    device: torch.device,
) -> VerticalSlash:
    """From the tokens of each sequence. How far it is padded, to ``blocks`` here, depends on workers and layout."""
    of_length = {length: _of_length(pattern, layer, length, heads) for length in set(lengths)}
    slashes = torch.cat([_wide(of_length[n].slashes, blocks) for n in lengths])
    unused = [of_length[n].blocks * pattern.block for n in lengths]
    columns = [
        of_length[n].columns.masked_fill(of_length[n].columns == end, blocks * pattern.block)
        for n, end in zip(lengths, unused, strict=True)
    ]
    most = max(index.most for index in of_length.values())
    return VerticalSlash(
        pattern.block, blocks, slashes.to(device), torch.cat(columns).to(device), most
    )


def _of_length(pattern: FixedPattern, layer: int, length: int, heads: int) -> VerticalSlash:
    return fixed_index(
        seed=pattern.seed + 1000 * layer,
        batch=1,
        heads=heads,
        seq=max(1, length),
        block=pattern.block,
        slashes=pattern.slashes,
        columns=pattern.columns,
        density=pattern.density or None,
    )


def _wide(slashes: torch.Tensor, blocks: int) -> torch.Tensor:
    return torch.nn.functional.pad(slashes, (0, blocks - slashes.shape[-1]))


def fixed_index(
    *,
    seed: int,
    batch: int,
    heads: int,
    seq: int,
    block: int,
    slashes: int | None,
    columns: int,
    density: float | None = None,
) -> VerticalSlash:
    """Diagonals 0 and 1 and others that crowd towards the recent past, as many as ``slashes`` or as fill ``density`` of the causal blocks;
    columns anywhere with equal chance. Every head draws its own, all sequences of a batch the same.
    """
    rng = np.random.default_rng(seed)
    blocks = -(-seq // block)
    on = np.zeros((heads, blocks), bool)
    positions = np.full((heads, columns), blocks * block, np.int32)
    area = blocks - np.arange(blocks)
    # Diagonal d has chance ((d + 1) / blocks)^(1/3) - (d / blocks)^(1/3) of being drawn next. Who comes next without replacement is whose
    # exponential clock of that rate rings next.
    chance = np.diff(np.cbrt(np.arange(blocks + 1) / blocks))
    for h in range(heads):
        order = np.argsort(rng.standard_exponential(blocks) / chance)
        drawn = np.concatenate([[0, 1], order[order > 1]])[:blocks]
        if density is not None:
            wanted = int(np.searchsorted(np.cumsum(area[drawn]), density * area.sum())) + 1
        else:
            assert slashes is not None
            wanted = slashes
        on[h, drawn[: max(1, wanted)]] = True
        count = min(columns, seq)
        positions[h, :count] = np.sort(rng.choice(seq, count, replace=False, shuffle=False))
    slash, column = (torch.from_numpy(t).repeat(batch, 1, 1) for t in (on, positions))
    return VerticalSlash(block, blocks, slash, column, int(on.sum(-1).max()))
