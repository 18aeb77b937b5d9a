"""Mask and index as one kernel call sees them.

The mask is made once per batch and shared by all layers; the index is made per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.attention.index import Index
from mtrain_cli.attention.mask import IntArray, KeySlice, KeySpans, SequenceMask

# `first` of a query that sees nothing: above every position, yet kernels can add a block in int32.
NOTHING = 1 << 30


@dataclass(frozen=True)
class BlockGeometry:
    """The positions of a query shard's and a key shard's blocks, and what the masks leave of them.

    Tensors are int32 on the device unless noted.

    block: tokens per block.
    blocks: blocks in the whole sequence.
    first: [batch, blocks * block], first position that the query at each position sees; `NOTHING`
        for padding.
    last: [batch, blocks * block], last query that sees the key at each position.
    first_min, first_max: [batch, blocks], minimum and maximum of first over each block. A position
        that sees nothing makes first_max `NOTHING`, so that no key block is full for its block.
    query_blocks, key_blocks: global number of each local block, ascending.
    query_slot, key_slot: [blocks], local number of each global block, -1 if absent.
    query_count: [blocks + 1], number of local query blocks below each global block.
    diagonals: bool [blocks], block diagonals (query block - key block) that occur between the
        shards. With striped layouts these are one residue class modulo the number of workers.
    holes: some block of the sequence is absent among the queries or keys.
    plain: the masks are causal only, without documents or padding, so only blocks on the diagonal
        are partial.
    """

    block: int
    blocks: int
    first: torch.Tensor
    last: torch.Tensor
    first_min: torch.Tensor
    first_max: torch.Tensor
    query_blocks: torch.Tensor
    key_blocks: torch.Tensor
    query_slot: torch.Tensor
    key_slot: torch.Tensor
    query_count: torch.Tensor
    diagonals: torch.Tensor
    holes: bool
    plain: bool

    @staticmethod
    def make(
        masks: Sequence[SequenceMask],
        query_positions: IntArray,
        key_positions: IntArray,
        block: int,
        device: torch.device | str = "cpu",
    ) -> BlockGeometry:
        """Build the geometry of one pair of shards.

        Args:
            masks: one per sequence of the batch.
            query_positions, key_positions: global positions of the shards, ascending.

        Raises:
            ValueError: the positions are not whole blocks (the sequence's last block may be short).
        """
        padded = masks[0].padded
        blocks = -(-padded // block)
        first = np.full((len(masks), blocks * block), NOTHING, np.int64)
        last = np.zeros_like(first)
        for row, mask in enumerate(masks):
            first[row, : mask.length] = mask.first[: mask.length]
            last[row, :] = mask.length - 1
            last[row, :padded] = mask.last()
        by_block = first.reshape(len(masks), blocks, block).copy()
        first_min = by_block.min(-1)
        # Positions beyond the padded sequence must not constrain full blocks.
        by_block[:, -1, block - (blocks * block - padded) :] = 0
        first_max = by_block.max(-1)

        def device_table(values: IntArray) -> torch.Tensor:
            return to_device(values.astype(np.int32), device)

        unset = torch.empty(0, dtype=torch.int32, device=device)
        whole = BlockGeometry(
            block=block,
            blocks=blocks,
            first=device_table(first),
            last=device_table(last),
            first_min=device_table(first_min),
            first_max=device_table(first_max),
            query_blocks=unset,
            key_blocks=unset,
            query_slot=unset,
            key_slot=unset,
            query_count=unset,
            diagonals=unset,
            holes=True,
            plain=all(mask.length == padded and not mask.first.any() for mask in masks),
        )
        return whole.between(query_positions, key_positions, padded)

    def between(
        self, query_positions: IntArray, key_positions: IntArray, padded: int
    ) -> BlockGeometry:
        """Return the geometry of another pair of shards under the same masks.

        padded: tokens of the padded sequence.

        Raises:
            ValueError: the positions are not whole blocks.
        """
        query_blocks, key_blocks = (
            _whole_blocks(p, self.block, padded) for p in (query_positions, key_positions)
        )
        slots = np.full((2, self.blocks), -1, np.int64)
        slots[0, query_blocks], slots[1, key_blocks] = (
            np.arange(len(query_blocks)),
            np.arange(len(key_blocks)),
        )
        count = np.searchsorted(query_blocks, np.arange(self.blocks + 1))
        # Find which differences of block numbers occur by correlating the two sets.
        present = slots >= 0
        size = 2 * self.blocks
        spectrum = np.fft.rfft(present[0], size) * np.conj(np.fft.rfft(present[1], size))
        diagonals = np.fft.irfft(spectrum, size)[: self.blocks] > 0.5
        device = self.first.device
        arrays = (query_blocks, key_blocks, slots[0], slots[1], count)
        q, k, q_slot, k_slot, q_count = (to_device(t.astype(np.int32), device) for t in arrays)
        return replace(
            self,
            query_blocks=q,
            key_blocks=k,
            query_slot=q_slot,
            key_slot=k_slot,
            query_count=q_count,
            holes=bool((slots < 0).any()),
            diagonals=to_device(diagonals, device),
        )

    @property
    def all_keys(self) -> bool:
        """Whether no key block is absent, so that a key's slot is its position."""
        return self.key_blocks.numel() == self.blocks

    @cached_property
    def key_starts(self) -> torch.Tensor:
        """int32 [blocks + 1], slot of each block's first key.

        Negative for absent blocks and for the entry past the last block.
        """
        return torch.nn.functional.pad(self.key_slot, (0, 1), value=-1) * self.block


def _whole_blocks(positions: IntArray, block: int, padded: int) -> IntArray:
    numbers = np.unique(positions // block)
    whole = (
        np.concatenate([np.arange(n * block, min((n + 1) * block, padded)) for n in numbers])
        if len(numbers)
        else positions
    )
    if not np.array_equal(whole, positions):
        raise ValueError(
            f"A shard of {len(positions)} positions is not made of whole blocks of {block}."
        )
    return numbers


@dataclass(frozen=True)
class Tiles:
    """What one kernel call computes: queries [batch, q] against keys [batch, k].

    low, high: int32 [batch, q] on the device, the key slots that each row sees (`KeySpans`).
    num_keys: key slots k.
    pairs: query-key pairs per head that the mask allows, summed over the batch.
    slices: the mask as rectangles, per sequence of the batch.
    cache: what a kernel derives from the mask (block lists), shared by all layers and by backward.
    geometry: block positions; required for an index.
    index: narrows the mask for one layer; None for dense attention.
    index_cache: what a kernel derives from the index (slots of columns), kept from a layer's
        forward to its backward.
    """

    low: torch.Tensor
    high: torch.Tensor
    num_keys: int
    pairs: int
    slices: tuple[tuple[KeySlice, ...], ...]
    cache: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    geometry: BlockGeometry | None = None
    index: Index | None = None
    index_cache: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def make(
        spans: Sequence[KeySpans],
        device: torch.device | str = "cpu",
        geometry: BlockGeometry | None = None,
    ) -> Tiles:
        """Build tiles from one `KeySpans` per sequence of the batch, all of one size."""
        host = torch.from_numpy(
            np.stack([np.stack([s.low, s.high]) for s in spans]).astype(np.int32)
        )
        if torch.device(device).type == "cuda":
            host = host.pin_memory().to(device, non_blocking=True)
        return Tiles(
            low=host[:, 0].contiguous(),
            high=host[:, 1].contiguous(),
            num_keys=spans[0].num_keys,
            pairs=sum(s.pairs for s in spans),
            slices=tuple(tuple(s.slices()) for s in spans),
            geometry=geometry,
        )

    def with_index(self, index: Index | None) -> Tiles:
        """Return the same mask narrowed by a layer's index. The mask's cache is shared."""
        if index is None:
            return self
        assert self.geometry is not None, "an index needs tiles with a block geometry"
        assert (index.block, index.blocks) == (self.geometry.block, self.geometry.blocks)
        return replace(self, index=index, index_cache={})

    def without_index_cache(self) -> Tiles:
        """Return the tiles as a forward pass finds them, with an empty index_cache."""
        return replace(self, index_cache={})

    def positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the global positions of the query and key slots, int64 on the device."""
        assert self.geometry is not None
        within = torch.arange(self.geometry.block, device=self.low.device)
        queries, keys = (
            (b.long()[:, None] * self.geometry.block + within).flatten()[:n]
            for b, n in (
                (self.geometry.query_blocks, self.low.shape[1]),
                (self.geometry.key_blocks, self.num_keys),
            )
        )
        return queries, keys

    def seen(self) -> torch.Tensor:
        """Return bool [batch, heads or 1, queries, keys], mask and index by their definitions.

        For the oracle and for small masks.
        """
        slots = torch.arange(self.num_keys, device=self.low.device)
        seen = ((slots >= self.low[..., None]) & (slots < self.high[..., None]))[:, None]
        return seen if self.index is None else seen & self.index.allowed(*self.positions())

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute. Callers skip the kernel, never the communication."""
        return self.pairs == 0

    @cached_property
    def same_for_batch(self) -> bool:
        """Whether all sequences have the same rectangles, so that one kernel call serves them."""
        return all(s == self.slices[0] for s in self.slices)
