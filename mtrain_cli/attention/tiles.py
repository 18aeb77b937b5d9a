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

from mtrain_cli.attention.device_copy import map_tensors, to_device
from mtrain_cli.attention.index import Index
from mtrain_cli.attention.mask import IntArray, KeySlice, KeySpans, SequenceMask
from mtrain_cli.attention.mask_tables import BlockGeometry, MaskTables


@dataclass(frozen=True)
class Tiles:
    """What one kernel call computes: queries [batch, q] against keys [batch, k].

    low, high: int32 [batch, q], the key slots ``low <= j < high`` that each row sees.
    spans: the same on the host, one per sequence.
    cache: what a kernel derives from the mask (block lists), shared by all layers and by backward.
    geometry: block positions; required for an index.
    index: narrows the mask for one layer; None for dense attention.
    index_cache: what a kernel derives from the index (slots of columns), kept from a layer's
        forward to its backward.
    """

    low: torch.Tensor
    high: torch.Tensor
    spans: tuple[KeySpans, ...]
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
        bounds = np.stack([(s.low, s.high) for s in spans], 1).astype(np.int32)
        low, high = map(torch.from_numpy, bounds)
        return Tiles(low, high, tuple(spans), geometry=geometry).to(device)

    @staticmethod
    def between(
        masks: Sequence[SequenceMask],
        queries: IntArray,
        keys: IntArray,
        tables: MaskTables | None = None,
    ) -> Tiles:
        """Build the tiles of a query shard and a key shard on the host.

        Args:
            masks: one per sequence of the batch.
            queries, keys: global positions, ascending.
            tables: the masks' tables by block of the index; None for dense attention.

        Raises:
            ValueError: there are tables, and a shard is not whole blocks.
        """
        geometry = None if tables is None else tables.between(queries, keys)
        return Tiles.make([mask.spans(queries, keys) for mask in masks], geometry=geometry)

    def to(self, device: torch.device | str) -> Tiles:
        """Return the tiles on a device; on a CPU they share memory with these."""
        return map_tensors(self, lambda tensor: to_device(tensor, device))

    @property
    def num_keys(self) -> int:
        """Number of key slots k."""
        return self.spans[0].num_keys

    @property
    def pairs(self) -> int:
        """Query-key pairs per head that the mask allows, summed over the batch."""
        return sum(spans.pairs for spans in self.spans)

    @property
    def slices(self) -> tuple[tuple[KeySlice, ...], ...]:
        """The mask as rectangles, per sequence of the batch. Kernels use them without an index."""
        return tuple(spans.slices for spans in self.spans)

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
