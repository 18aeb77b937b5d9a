"""Mask and index as one kernel call sees them, for one query shard and one key shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtrain_cli.attention.device_copy import map_tensors, to_device
from mtrain_cli.attention.index import Index
from mtrain_cli.attention.mask import IntArray, KeySlice, KeySpans, SequenceMask
from mtrain_cli.attention.mask_tables import BlockGeometry, MaskTables
from mtrain_cli.attention.partials import Pair


@dataclass(frozen=True)
class Tiles:
    """The query-key pairs that one kernel call computes.

    low, high: int32 [batch, intervals, queries]. Each query sees the key slots ``low <= j < high``
        of each interval. Intervals are disjoint and ascend, apart from empty ones.
    cache: what kernels derive from the mask, shared by all layers and both passes.
    index: narrows the mask for one layer; None for dense attention.
    index_cache: what kernels derive from the index in a layer's forward pass, for its backward
        pass.
    """

    low: Tensor
    high: Tensor
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
        """Build tiles from one `KeySpans` per sequence of the batch, all of the same shape."""
        intervals = max(s.intervals for s in spans)
        bounds = np.zeros((2, len(spans), intervals, spans[0].low.shape[1]), np.int32)
        for row, s in enumerate(spans):
            bounds[0, row, : s.intervals], bounds[1, row, : s.intervals] = s.low, s.high
        low, high = map(torch.from_numpy, bounds)
        return Tiles(low, high, tuple(spans), geometry=geometry).to(device)

    @staticmethod
    def between(
        masks: Sequence[SequenceMask],
        queries: IntArray,
        keys: IntArray,
        tables: MaskTables | None = None,
    ) -> Tiles:
        """Build the tiles of a query shard and a key shard on the host."""
        geometry = None if tables is None else tables.between(queries, keys)
        return Tiles.make([mask.spans(queries, keys) for mask in masks], geometry=geometry)

    def to(self, device: torch.device | str) -> Tiles:
        return map_tensors(self, lambda tensor: to_device(tensor, device))

    @property
    def intervals(self) -> int:
        return self.low.shape[1]

    @property
    def num_queries(self) -> int:
        return self.low.shape[2]

    @property
    def one_interval(self) -> Pair:
        """Low and high, [batch, queries], of a mask with one interval per query."""
        assert self.intervals == 1
        return self.low[:, 0], self.high[:, 0]

    @property
    def num_keys(self) -> int:
        return self.spans[0].num_keys

    @property
    def pairs(self) -> int:
        """Number of query-key pairs per head that the mask allows, summed over the batch."""
        return sum(spans.pairs for spans in self.spans)

    @property
    def slices(self) -> tuple[tuple[KeySlice, ...], ...]:
        """The mask of each sequence of the batch as slices. Dense kernels read them."""
        return tuple(spans.slices for spans in self.spans)

    def with_index(self, index: Index | None) -> Tiles:
        """Return the tiles narrowed by a layer's index. The result shares this object's `cache`."""
        if index is None:
            return self
        assert self.geometry is not None, "an index needs tiles with a block geometry"
        assert (index.block, index.blocks) == (self.geometry.block, self.geometry.blocks)
        return replace(self, index=index, index_cache={})

    def without_index_cache(self) -> Tiles:
        return replace(self, index_cache={})

    def positions(self) -> Pair:
        """Return the global positions of the query and key slots, int64 on the device."""
        geometry = self.geometry
        assert geometry is not None
        within = torch.arange(geometry.block, device=self.low.device)
        queries, keys = (
            (numbers.long()[:, None] * geometry.block + within).flatten()
            for numbers in (geometry.query_blocks, geometry.key_blocks)
        )
        return queries[: self.num_queries], keys[: self.num_keys]

    def seen(self) -> Tensor:
        """Return which query sees which key, [batch, heads or 1, queries, keys]."""
        slots = torch.arange(self.num_keys, device=self.low.device)
        seen = (slots >= self.low[..., None]) & (slots < self.high[..., None])
        seen = seen.any(1, keepdim=True)
        return seen if self.index is None else seen & self.index.allowed(*self.positions())

    @property
    def empty(self) -> bool:
        """Whether the mask allows no pair, so that callers skip the kernel, but communicate."""
        return self.pairs == 0

    @cached_property
    def same_for_batch(self) -> bool:
        """Whether all sequences have the same slices, so one kernel call can serve them all."""
        return all(s == self.slices[0] for s in self.slices)
