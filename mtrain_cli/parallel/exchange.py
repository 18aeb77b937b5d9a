"""Exchanges: bring keys and values to the queries of a context group, by executing a schedule.

k and v travel as one packed message [2, batch, tokens, kv_heads, head_dim]. Partial outputs and
gradients accumulate in float32 (float64 for float64 inputs); gradients also travel in that dtype.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from mtrain_cli.attention.index import Index, VerticalSlash
from mtrain_cli.attention.kernel import Kernel
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.tiles import BlockGeometry, Tiles
from mtrain_cli.launch import progress_record
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.recording import FORWARD, Recorder
from mtrain_cli.parallel.schedule import Schedule, ScheduleStep, Steps
from mtrain_cli.parallel.transport import Buffers, Transport

Shards = tuple[int, ...]
Saved = tuple[torch.Tensor, ...]
Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
WHOLE_SEQUENCE = (-1,)  # stands for all key shards, in sequence order


@dataclass(frozen=True)
class ShardTiles:
    """The tiles of one rank under a batch's masks, by the (query, key) shards of its steps.

    Made once per batch. `under` narrows them by the dynamic index of one layer.
    """

    tiles: dict[tuple[Shards, Shards], Tiles]
    index: Index | None = None
    _narrow: dict[tuple, Tiles] = field(default_factory=dict, repr=False, compare=False)

    def under(self, index: Index | None) -> ShardTiles:
        return ShardTiles(self.tiles, index)

    def for_pair(
        self, queries: Shards, keys: Shards, part: tuple[int, int] = (0, 1), *, columns: bool = True
    ) -> Tiles:
        """Return the tiles of a pair of shards, narrowed by the index.

        part: (i, n), the i-th of n equal parts of the heads.
        columns: whether to include the single columns of the index.
        """
        tiles = self.tiles[queries, keys]
        if self.index is None:
            return tiles
        key = (queries, keys, part, columns)
        if key not in self._narrow:
            index = self.index.part(*part)
            if not columns and isinstance(index, VerticalSlash):
                index = index.without_columns()
            self._narrow[key] = tiles.with_index(index)
        return self._narrow[key]


class Exchange(ABC):
    """One way of moving keys and values, bound to a layout, a context group and a schedule.

    part: (i, n), the part of the model's heads that its ranks compute; (0, 1) is all heads.
    """

    def __init__(
        self,
        layout: Layout,
        group: ContextGroup,
        schedule: Schedule,
        part: tuple[int, int] = (0, 1),
    ) -> None:
        assert layout.workers == group.size == schedule.workers, (
            "A layout and a schedule are made for their context group."
        )
        self.layout = layout
        self.group = group
        self.schedule = schedule
        self.part = part
        self.forward_steps: Steps = schedule.forward[group.rank]
        self.backward_steps: Steps = schedule.backward[group.rank]
        self.buffers = Buffers()
        self.recorder: Recorder | None = None

    @property
    def name(self) -> str:
        return self.schedule.exchange

    def set_recorder(self, recorder: Recorder | None) -> None:
        """Record the times of all later passes; None stops recording."""
        self.recorder = recorder

    @property
    def foreign_queries(self) -> bool:
        """Whether this rank also computes attention for other ranks' queries."""
        return False

    @property
    def gathers_columns(self) -> bool:
        """Whether single columns of an index are gathered once and computed outside the steps."""
        return False

    @abstractmethod
    def needed_tiles(
        self, *, indexed: bool, forward_only: bool = False
    ) -> set[tuple[Shards, Shards]]:
        """Return the (query, key) shards of all tiles that `forward` and `backward` ask for.

        forward_only: leave out those of `backward`.
        """

    @property
    def num_queries(self) -> int:
        """Number of queries per sequence that this rank computes for.

        If ranks share heads, this counts the queries of all of them.
        """
        return self.layout.tokens_per_worker

    @property
    def recompute_is_local(self) -> bool:
        """Whether `recompute` with ``early=0`` sends no messages."""
        return True

    def make_tiles(
        self,
        masks: Sequence[SequenceMask],
        device: torch.device | str,
        block: int | None = None,
        *,
        early: int | None = None,
    ) -> ShardTiles:
        """Make the tiles of this rank for one batch.

        Args:
            masks: one per sequence of the batch.
            block: block size of the dynamic index that will narrow the tiles; None if dense.
            early: make only the tiles of a forward pass over this rank's first ``early`` queries.

        Raises:
            ValueError: a shard does not consist of whole blocks of the index.
        """
        needed = sorted(
            self.needed_tiles(indexed=block is not None, forward_only=early is not None)
        )
        positions = {shards: self._positions(shards) for pair in needed for shards in pair}
        everything = self._positions(WHOLE_SEQUENCE)
        geometry = (
            None
            if block is None
            else BlockGeometry.make(masks, everything, everything, block, device)
        )
        tiles = {}
        for queries, keys in needed:
            rows = positions[queries][:early]
            spans = [mask.spans(rows, positions[keys]) for mask in masks]
            between = (
                None
                if geometry is None
                else geometry.between(rows, positions[keys], masks[0].padded)
            )
            tiles[queries, keys] = Tiles.make(spans, device, between)
        return ShardTiles(tiles)

    def pairs(self, shard_tiles: ShardTiles) -> float:
        """Count the query-key pairs that the masks leave this rank, per head and layer.

        A pair in 1/n of the heads counts as 1/n.
        """
        return sum(
            shard_tiles.tiles[self._tile(step)].pairs / self._part(step)[1]
            for step in self.forward_steps
            if step.keys
        )

    @abstractmethod
    def _tile(self, step: ScheduleStep) -> tuple[Shards, Shards]:
        """Return the key of `ShardTiles.tiles` for a step."""

    def _positions(self, shards: Shards):
        """Return the global positions of a shard's slots, ascending."""
        if shards == WHOLE_SEQUENCE:
            return np.arange(self.layout.padded_seq, dtype=np.int64)
        (shard,) = shards
        return self.layout.positions(shard)

    def _part(self, step: ScheduleStep) -> tuple[int, int]:
        """Return the part of the model's heads that a step computes, as (i, n)."""
        return self.part[0] * step.part[1] + step.part[0], self.part[1] * step.part[1]

    @abstractmethod
    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        shard_tiles: ShardTiles,
        kernel: Kernel,
        scale: float,
        label: str = "",
    ) -> tuple[torch.Tensor, torch.Tensor, Saved]:
        """Compute attention of this rank's queries over the whole sequence.

        Args:
            q: [batch, tokens, heads, head_dim].
            k, v: [batch, tokens, kv_heads, head_dim].
            label: for messages, such as ``layer 3``.

        Returns:
            out like q; lse [batch, heads, tokens]; the tensors that `backward` needs.
        """

    @abstractmethod
    def backward(
        self,
        dout: torch.Tensor,
        saved: Saved,
        shard_tiles: ShardTiles,
        kernel: Kernel,
        scale: float,
        label: str = "",
    ) -> Triple:
        """Return dq, dk, dv of this rank's own queries, keys and values."""

    def kept_for_recompute(self, saved: Saved, early: int) -> Saved:
        """Return the part of ``saved`` to keep for `recompute` of the first ``early`` queries.

        That is out and lse of the later queries. If ``early`` is 0, also keep the KV that came from
        other ranks: with grouped heads it takes fewer bytes than this rank's own activations, and
        fetching it again would stall the backward pass.
        """
        _, keys, out, lse, *columns = saved
        if early:
            # Clone: a view would keep the whole tensor alive.
            return out[:, early:].clone(), lse[..., early:].clone()
        return (out, lse) if self._saves_own_keys else (out, lse, keys, *columns)

    def recompute(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kept: Saved,
        early: int,
        shard_tiles: ShardTiles,
        kernel: Kernel,
        scale: float,
        label: str = "",
    ) -> tuple[torch.Tensor, Saved]:
        """Run forward again, from what `kept_for_recompute` kept.

        Computes the first ``early`` queries only. If there are any, KV travels again as in forward,
        on all ranks.

        Args:
            shard_tiles: of the early queries (`make_tiles`).

        Returns:
            out, and the tensors that `backward` needs, as `forward` returned them.
        """
        if not early:
            out, lse, *foreign = kept
            keys, *columns = foreign or [torch.stack([k, v])]
            return out, (q, keys, out, lse, *columns)
        late, late_lse = kept
        first, first_lse, saved = self.forward(
            q[:, :early].contiguous(), k, v, shard_tiles, kernel, scale, label
        )
        out, lse = torch.cat([first, late], 1), torch.cat([first_lse, late_lse], 2)
        return out, (q, saved[1], out, lse, *saved[4:])

    @property
    def _saves_own_keys(self) -> bool:
        """Whether the KV that `forward` saves is this rank's own."""
        return True

    @contextmanager
    def _transport(self, label: str, direction: str) -> Iterator[Transport]:
        """Open the transport of one pass; wait for all its transfers at the end."""
        steps = self.forward_steps if direction == FORWARD else self.backward_steps
        transport = Transport(self.group, self.name, label, direction, len(steps), self.recorder)
        yield transport
        transport.finish()
        progress_record.note(f"after {transport.pass_name}")
