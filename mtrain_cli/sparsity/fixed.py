"""Draw block diagonals and columns from a seed, independent of the data; for benchmarks only."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from mtrain_cli.attention.index import VerticalSlash
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.config.pattern_settings import FixedSettings
from mtrain_cli.sparsity.pattern import NO_ROWS, MaskedPositions


@dataclass(frozen=True)
class FixedPattern(FixedSettings):
    """Draw each layer's index from a seed, so a layer has the same index in every step.

    Sequences with an equal number of blocks have the same index, apart from columns past their end.

    seed: seed of layer 0. Layer n uses seed + 1000 n.
    part: which of several equal parts of the heads this worker has, and the number of parts. Every
        worker draws all heads, so that a head's index does not depend on the parts.
    """

    seed: int = 0
    part: tuple[int, int] = (0, 1)

    def request(self) -> IndexRequest:
        return IndexRequest(self.block, bitmap=False)

    def describe(self) -> str:
        diagonals = f"{self.slashes} block diagonals"
        if self.density:
            diagonals = f"diagonals of {self.density:.1%} of the causal blocks"
        columns = f"{self.columns} columns per head"
        return f"{diagonals} and {columns}, drawn from a seed, not from the data"

    def probed_rows(self, length: int) -> Tensor:
        return NO_ROWS

    def estimate(self, q: Tensor, k: Tensor, masked: MaskedPositions, layer: int) -> VerticalSlash:
        lengths = tuple(mask.length for mask in masked.masks)
        return _draw(self, layer, lengths, q.shape[2], masked.geometry.blocks, q.device)

    def draw(self, layer: int, batch: int, heads: int, seq: int) -> VerticalSlash:
        return fixed_index(
            seed=self.seed + 1000 * layer,
            batch=batch,
            heads=heads,
            seq=seq,
            block=self.block,
            slashes=self.slashes,
            columns=self.columns,
            density=self.density or None,
        )


def make_pattern(settings: FixedSettings, seed: int) -> FixedPattern:
    return FixedPattern(**vars(settings), seed=seed)


@lru_cache(maxsize=256)
def _draw(
    pattern: FixedPattern,
    layer: int,
    lengths: tuple[int, ...],
    heads: int,
    blocks: int,
    device: torch.device,
) -> VerticalSlash:
    """Draw the index of a batch from the length of each sequence."""
    # Padding depends on the number of workers and on the layout, so nothing drawn depends on
    # ``blocks``: the index is drawn for the whole blocks of a sequence.
    place, parts = pattern.part
    own = slice(heads * place, heads * (place + 1))
    every = heads * parts
    drawn = {}
    for length in set(lengths):
        whole = max(1, -(-length // pattern.block)) * pattern.block
        all_columns = pattern.columns >= length > 0
        drawn[length] = pattern.draw(layer, 1, every, length if all_columns else whole)
    unused = blocks * pattern.block
    slashes, columns = [], []
    for length in lengths:
        index = drawn[length]
        drawn_slashes, drawn_columns = index.slashes[:, own], index.columns[:, own]
        slashes.append(torch.nn.functional.pad(drawn_slashes, (0, blocks - index.blocks)))
        columns.append(drawn_columns.masked_fill(drawn_columns >= length, unused))
    max_slashes = max(index.max_slashes for index in drawn.values())
    tensors = (torch.cat(slashes).to(device), torch.cat(columns).to(device))
    return VerticalSlash(pattern.block, blocks, *tensors, max_slashes, has_own_blocks=True)


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
    """Draw an index: diagonals 0 and 1, further diagonals, and columns.

    Diagonals near the recent past are more probable; all columns have equal probability. Every head
    draws its own index, which all sequences of the batch share. A density replaces ``slashes``.
    """
    rng = np.random.default_rng(seed)
    blocks = -(-seq // block)
    chosen = np.zeros((heads, blocks), bool)
    positions = np.full((heads, columns), blocks * block, np.int32)
    area = blocks - np.arange(blocks)
    # Draw diagonal d with probability ((d + 1) / blocks)^(1/3) - (d / blocks)^(1/3), without
    # replacement: give each diagonal an exponential arrival time with this rate, and sort.
    probabilities = np.diff(np.cbrt(np.arange(blocks + 1) / blocks))
    for h in range(heads):
        order = np.argsort(rng.standard_exponential(blocks) / probabilities)
        drawn = np.concatenate([[0, 1], order[order > 1]])[:blocks]
        num_slashes = slashes
        if density is not None:
            num_slashes = int(np.searchsorted(np.cumsum(area[drawn]), density * area.sum())) + 1
        assert num_slashes is not None
        chosen[h, drawn[: max(1, num_slashes)]] = True
        some = rng.choice(seq, min(columns, seq), replace=False, shuffle=False)
        positions[h, : len(some)] = np.sort(some)
    slash, column = (torch.from_numpy(t).repeat(batch, 1, 1) for t in (chosen, positions))
    return VerticalSlash(
        block, blocks, slash, column, int(chosen.sum(-1).max()), has_own_blocks=True
    )
