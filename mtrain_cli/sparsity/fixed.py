"""Draw block diagonals and columns from a seed, for benchmarks and speed tests only."""

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
    """The same index for every step and sequence; every layer draws its own.

    slashes, columns: number per head.
    density: share of the causal blocks that the diagonals fill, replaces slashes unless 0.
    seed: of layer 0; layer n adds 1000 n.
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
        diagonals = (
            f"diagonals of {self.density:.1%} of the causal blocks"
            if self.density
            else f"{self.slashes} block diagonals"
        )
        return (
            f"{diagonals} and {self.columns} columns per head, drawn from a seed, not from the data"
        )

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
        self,
        q: torch.Tensor,
        k: torch.Tensor,  # noqa: ARG002
        masked: MaskedPositions,
        layer: int,
    ) -> VerticalSlash:
        # Every step has the same index: a layer draws it once and caches it.
        lengths = tuple(mask.length for mask in masked.masks)
        return _draw(self, layer, lengths, q.shape[2], masked.geometry.blocks, q.device)


@lru_cache(maxsize=256)
def _draw(
    pattern: FixedPattern,
    layer: int,
    lengths: tuple[int, ...],
    heads: int,
    blocks: int,
    device: torch.device,
) -> VerticalSlash:
    """Draw the index from the token count of each sequence.

    The padded length, ``blocks`` here, depends on workers and layout, so the draw must not use it.
    """
    index_by_length = {
        length: _index_of_length(pattern, layer, length, heads) for length in set(lengths)
    }
    slashes = torch.cat([_pad_blocks(index_by_length[n].slashes, blocks) for n in lengths])
    unused = [index_by_length[n].blocks * pattern.block for n in lengths]
    columns = [
        index_by_length[n].columns.masked_fill(
            index_by_length[n].columns == end, blocks * pattern.block
        )
        for n, end in zip(lengths, unused, strict=True)
    ]
    max_slashes = max(index.max_slashes for index in index_by_length.values())
    return VerticalSlash(
        pattern.block, blocks, slashes.to(device), torch.cat(columns).to(device), max_slashes
    )


def _index_of_length(pattern: FixedPattern, layer: int, length: int, heads: int) -> VerticalSlash:
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


def _pad_blocks(slashes: torch.Tensor, blocks: int) -> torch.Tensor:
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
    """Draw diagonals 0 and 1, further diagonals that favour the recent past, and uniform columns.

    Every head draws its own; all sequences of a batch share them.

    Args:
        slashes: diagonals per head, at least 1.
        density: instead of slashes, draw diagonals until they fill this share of the causal blocks.
    """
    rng = np.random.default_rng(seed)
    blocks = -(-seq // block)
    chosen = np.zeros((heads, blocks), bool)
    positions = np.full((heads, columns), blocks * block, np.int32)
    area = blocks - np.arange(blocks)
    # Draw diagonal d with probability ((d + 1) / blocks)^(1/3) - (d / blocks)^(1/3), without
    # replacement: sort exponential arrival times with these rates.
    probabilities = np.diff(np.cbrt(np.arange(blocks + 1) / blocks))
    for h in range(heads):
        order = np.argsort(rng.standard_exponential(blocks) / probabilities)
        drawn = np.concatenate([[0, 1], order[order > 1]])[:blocks]
        if density is not None:
            num_slashes = int(np.searchsorted(np.cumsum(area[drawn]), density * area.sum())) + 1
        else:
            assert slashes is not None
            num_slashes = slashes
        chosen[h, drawn[: max(1, num_slashes)]] = True
        num_columns = min(columns, seq)
        positions[h, :num_columns] = np.sort(
            rng.choice(seq, num_columns, replace=False, shuffle=False)
        )
    slash, column = (torch.from_numpy(t).repeat(batch, 1, 1) for t in (chosen, positions))
    return VerticalSlash(block, blocks, slash, column, int(chosen.sum(-1).max()))
