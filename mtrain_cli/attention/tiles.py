"""Mask and index as one kernel call sees them: the mask made once per batch and shared by all layers, the index per layer."""

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

# The first position that a query sees, for one that sees nothing: above all positions, and kernels add a block to it in int32.
NOTHING = 1 << 30


@dataclass(frozen=True)
class BlockGeometry:
    """Where the blocks of a query shard and a key shard stand in the sequence, and what the masks leave of them; int32 on the device.

    block, blocks: tokens of a block, and blocks of the whole sequence.
    first, last: [batch, blocks * block], the first position that the query at a position sees (`NOTHING` for padding), and the last query
        that sees the key at a position.
    first_min, first_max: [batch, blocks], smallest and largest of first over the positions of a block; NOTHING where one sees nothing, so
        that no key block is full for it.
    query_blocks, key_blocks: global number of each local block, ascending; query_slot, key_slot: [blocks], the inverse, -1 where absent.
    query_count: [blocks + 1], local query blocks below a global one.
    diagonals: bool [blocks], which block diagonals (query block - key block) the two shards have; one residue class of the number of
        workers where layouts are striped.
    holes: some block of the sequence is absent among queries or keys.
    plain: the masks are causal alone, without documents or padding, so that only blocks on the diagonal are seen in part.
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
        """masks: one per sequence of the batch.

        Raises:
            ValueError: the positions are not whole blocks (the last block of the sequence may be short).
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
        # Positions beyond the end of the tensors constrain nothing.
        by_block[:, -1, block - (blocks * block - padded) :] = 0
        first_max = by_block.max(-1)

        def moved(values: IntArray) -> torch.Tensor:
            return to_device(values.astype(np.int32), device)

        nothing = torch.empty(0, dtype=torch.int32, device=device)
        whole = BlockGeometry(
            block=block,
            blocks=blocks,
            first=moved(first),
            last=moved(last),
            first_min=moved(first_min),
            first_max=moved(first_max),
            query_blocks=nothing,
            key_blocks=nothing,
            query_slot=nothing,
            key_slot=nothing,
            query_count=nothing,
            diagonals=nothing,
            holes=True,
            plain=all(mask.length == padded and not mask.first.any() for mask in masks),
        )
        return whole.between(query_positions, key_positions, padded)

    def between(
        self, query_positions: IntArray, key_positions: IntArray, padded: int
    ) -> BlockGeometry:
        """The same masks for another pair of shards. padded: tokens of the padded sequence.

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
        # Which differences occur: a correlation of the two sets of numbers.
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
        """No block of keys is absent, so that a key's slot is its position."""
        return self.key_blocks.numel() == self.blocks

    @cached_property
    def key_starts(self) -> torch.Tensor:
        """int32 [blocks + 1], the slot of the first key of each block, negative where it is absent and for the number beyond the last."""
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
            f"A shard of {len(positions)} positions does not consist of whole blocks of {block}."
        )
    return numbers


@dataclass(frozen=True)
class Tiles:
    """What one kernel call computes: queries [batch, q] against keys [batch, k].

    low, high: int32 [batch, q] on the compute device, the key slots that a row sees (`KeySpans`).
    num_keys: key slots k. pairs: query-key pairs computed, summed over the batch, per head.
    slices: per sequence of the batch, the same mask as rectangles.
    cache: what a kernel derives from the mask (block lists), kept for the other layers and for backward.
    geometry, index: set where a dynamic index narrows the mask; pairs then counts the mask alone.
    of_index: what a kernel derives from the index (slots of columns), kept as long as these tiles are, from forward to backward of a layer.
    """

    low: torch.Tensor
    high: torch.Tensor
    num_keys: int
    pairs: int
    slices: tuple[tuple[KeySlice, ...], ...]
    cache: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    geometry: BlockGeometry | None = None
    index: Index | None = None
    of_index: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def make(
        spans: Sequence[KeySpans],
        device: torch.device | str = "cpu",
        geometry: BlockGeometry | None = None,
    ) -> Tiles:
        """One `KeySpans` per sequence of the batch, all of one size."""
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

    def under(self, index: Index | None) -> Tiles:
        """The same mask narrowed by the index of one layer; what is cached of the mask is shared."""
        if index is None:
            return self
        assert self.geometry is not None, "tiles for an index know where their blocks stand"
        assert (index.block, index.blocks) == (self.geometry.block, self.geometry.blocks)
        return replace(self, index=index, of_index={})

    def anew(self) -> Tiles:
        """The same, as a layer finds them in its forward pass: nothing is derived from the index yet."""
        return replace(self, of_index={})

    def positions(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Global positions of the query and key slots, int64 on the device."""
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
        """bool [batch, heads or 1, queries, keys]: mask and index from their definitions, for the oracle and for small masks."""
        slots = torch.arange(self.num_keys, device=self.low.device)
        seen = ((slots >= self.low[..., None]) & (slots < self.high[..., None]))[:, None]
        return seen if self.index is None else seen & self.index.allowed(*self.positions())

    @property
    def empty(self) -> bool:
        """Nothing to compute: the executor skips the kernel, never the communication."""
        return self.pairs == 0

    @cached_property
    def same_for_batch(self) -> bool:
        """All sequences of the batch have the same rectangles, so one kernel call may serve them together."""
        return all(s == self.slices[0] for s in self.slices)
