"""The plan of one batch: which query-key pairs a rank computes, and at which step.

A plan joins a layout (which rank holds which tokens), the masks of a batch (which pairs are
allowed) and a schedule (which shards meet at which step). The thread that loads data makes the plan
of its rank, without messages. `ContextAttention` runs it, and ``print`` shows it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtrain_cli.attention.device_copy import map_tensors, packed, to_device, unpacked
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.parallel.cast_rows import CastRows
from mtrain_cli.parallel.exchange import Exchange, ShardTiles
from mtrain_cli.parallel.layout import Layout, Placement, early_queries
from mtrain_cli.parallel.program import Keys, Program, Shard, Stage, Whole
from mtrain_cli.parallel.schedule import Schedule
from mtrain_cli.sparsity.pattern import MaskedPositions


@dataclass(frozen=True, repr=False)
class Plan:
    """What one rank computes for one batch, in every layer.

    early: number of queries that recomputation computes again, counted from this rank's first; the
        first forward pass keeps out and lse of the others. None if it keeps nothing.
    pairs: number of query-key pairs that this rank computes under the masks, before any index, per
        head and layer. A pair for 1/n of the heads counts as 1/n.
    """

    placement: Placement
    schedule: Schedule
    rank: int
    masks: tuple[SequenceMask, ...]
    forward: Program
    backward: Program
    tiles: ShardTiles
    early: int | None
    early_tiles: ShardTiles | None
    masked: MaskedPositions | None
    allowed_pairs: int
    pairs: float
    buffer: Tensor | None = None

    @staticmethod
    def make(
        exchange: Exchange,
        masks: Sequence[SequenceMask],
        request: IndexRequest | None = None,
        *,
        layout: Layout | None = None,
        keep: float = 0.0,
    ) -> Plan:
        """Make a plan on the host, without the device or other ranks.

        keep: share of this rank's queries whose out and lse the first forward pass keeps for
            recomputation, counted from the last query.
        """
        placement, rank = exchange.placed(layout), exchange.group.rank
        block = masked = tables = None
        if request is not None:
            block, outer = request.block, placement.layout
            shards = [outer.positions(worker) for worker in range(outer.workers)]
            masked = MaskedPositions.make(masks, block, shards, rank, bitmap=request.bitmap)
            tables = masked.tables
        queries = placement.inside.tokens_per_worker
        early = early_queries(queries, keep, block)
        moved = exchange.cast_rows(masks, placement.inside, block)

        def tiles(rows: int | None) -> ShardTiles:
            needed = exchange.needed_tiles(indexed=block is not None, forward_only=rows is not None)
            keys = {keys for pair in needed for keys in pair}
            positions = {key: positions_of(placement.inside, key, moved) for key in keys}
            made = {
                (q, k): Tiles.between(masks, positions[q][:rows], positions[k], tables)
                for q, k in needed
            }
            if tables is None:  # find the rectangles here, not in the first call of a kernel
                _ = [pair.slices for pair in made.values()]
            return ShardTiles(made, placement, moved)

        forward, whole = exchange.program(backward=False), tiles(None)
        recomputes_all = early == queries
        return Plan(
            placement=placement,
            schedule=exchange.schedule,
            rank=rank,
            masks=tuple(masks),
            forward=forward,
            backward=exchange.program(backward=True),
            tiles=whole,
            early=None if recomputes_all else early,
            early_tiles=None if recomputes_all or not early else tiles(early),
            masked=masked,
            allowed_pairs=sum(mask.pairs for mask in masks),
            pairs=sum(
                whole.tiles[op.queries, op.keys].pairs / op.part[1] for op in forward.computes
            ),
        )

    def pinned(self) -> Plan:
        """Return the plan with its tables in one pinned buffer, for one asynchronous copy."""
        parts, buffer = packed(self._parts, pin=True)
        return replace(self, **parts, buffer=buffer)

    def to(self, device: torch.device | str) -> Plan:
        """Return the plan with its tables on a device, without waiting for the copies."""
        if self.buffer is None:
            parts = map_tensors(self._parts, lambda tensor: to_device(tensor, device))
        else:
            parts = unpacked(self._parts, self.buffer, device)
        return replace(self, **parts, buffer=None)

    @property
    def _parts(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("tiles", "early_tiles", "masked")}

    def __repr__(self) -> str:
        """Name the layout, and count the pairs of each step of forward."""
        layout, exchange = self.placement.inside, self.schedule.exchange
        lines = [
            f"Plan of rank {self.rank} of {self.schedule.workers}: {exchange}, {layout.name}, "
            f"{layout.tokens_per_worker:,} queries per sequence"
        ]
        for op in self.forward.computes:
            pairs = self.tiles.tiles[op.queries, op.keys].pairs
            lines.append(f"step {op.step}: {op.queries} x {op.keys}: {pairs:,} pairs")
        return "\n".join(lines)


def positions_of(layout: Layout, keys: Keys, rows: CastRows | None = None) -> IntArray:
    """Return the global positions of these tokens, ascending, int64[tokens]."""
    if isinstance(keys, Shard):
        return layout.positions(keys.number)
    if rows is not None:
        return rows.of_stage(keys.number if isinstance(keys, Stage) else None).positions
    assert isinstance(keys, Whole), "a stage is a part of a group cast"
    return np.arange(layout.padded_seq, dtype=np.int64)
