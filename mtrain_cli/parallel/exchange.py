"""Exchanges: how keys and values reach the queries of a context group. Each executes a schedule, with any kernel.

k and v travel packed in one message [2, batch, tokens, kv_heads, head_dim]. Partial outputs and gradients are added in float32 (float64
where the inputs are); gradients also travel in it.
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
WHOLE_SEQUENCE = (-1,)  # in place of key shards: all of them, in sequence order


@dataclass(frozen=True)
class ShardTiles:
    """What one rank computes under the masks of a batch: the tiles of every pair of query and key shards that its steps name.

    Made once per batch. `under` narrows all of it by the dynamic index of one layer.
    """

    tiles: dict[tuple[Shards, Shards], Tiles]
    index: Index | None = None
    _narrow: dict[tuple, Tiles] = field(default_factory=dict, repr=False, compare=False)

    def under(self, index: Index | None) -> ShardTiles:
        return ShardTiles(self.tiles, index)

    def for_pair(
        self, queries: Shards, keys: Shards, part: tuple[int, int] = (0, 1), *, columns: bool = True
    ) -> Tiles:
        """part: (i, n), the i-th of n equal parts of the heads. columns: whether single columns of the index count, too."""
        tiles = self.tiles[queries, keys]
        if self.index is None:
            return tiles
        key = (queries, keys, part, columns)
        if key not in self._narrow:
            index = self.index.part(*part)
            if not columns and isinstance(index, VerticalSlash):
                index = index.without_columns()
            self._narrow[key] = tiles.under(index)
        return self._narrow[key]


class Exchange(ABC):
    """One way of moving keys and values, bound to a layout and a context group.

    part: (i, n), which part of the heads of the model its ranks work on, where others hold the rest.
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
        """Has the times of all later passes recorded, until it is called with None."""
        self.recorder = recorder

    @property
    def foreign_queries(self) -> bool:
        """Whether this rank computes attention of other ranks' queries, too."""
        return False

    @property
    def gathers_columns(self) -> bool:
        """Whether single columns of an index are gathered once, and computed apart from the steps."""
        return False

    @abstractmethod
    def needed_tiles(
        self, *, indexed: bool, forward_only: bool = False
    ) -> set[tuple[Shards, Shards]]:
        """Which tiles `forward`, and unless it is ``forward_only`` `backward`, ask for."""

    @property
    def num_queries(self) -> int:
        """How many queries of a sequence this rank computes for, where it shares heads those of all ranks that it shares them with."""
        return self.layout.tokens_per_worker

    @property
    def recompute_is_local(self) -> bool:
        """Whether `again` needs no other rank where nothing is computed again."""
        return True

    def make_tiles(
        self,
        masks: Sequence[SequenceMask],
        device: torch.device | str,
        block: int | None = None,
        *,
        early: int | None = None,
    ) -> ShardTiles:
        """masks: one per sequence of the batch. block: of the dynamic index that will narrow it, if any. early: only what a forward pass
        of the first so many queries of this rank asks for.

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
        """Query-key pairs that the masks leave this rank, per head and layer; a pair for a part of the heads counts as that part."""
        return sum(
            shard_tiles.tiles[self._tile(step)].pairs / self._part(step)[1]
            for step in self.forward_steps
            if step.keys
        )

    @abstractmethod
    def _tile(self, step: ScheduleStep) -> tuple[Shards, Shards]:
        """Under which name `ShardTiles` has what a step computes."""

    def _positions(self, shards: Shards):
        """Global positions of the slots of a shard, ascending."""
        if shards == WHOLE_SEQUENCE:
            return np.arange(self.layout.padded_seq, dtype=np.int64)
        (shard,) = shards
        return self.layout.positions(shard)

    def _part(self, step: ScheduleStep) -> tuple[int, int]:
        """The part of a step's heads among all heads of the model."""
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
        """-> out like q, lse, and what this rank saves for `backward`. what: for messages, such as ``layer 3``."""

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
        """-> dq, dk, dv of this rank's own queries, keys and values."""

    def kept_for_recompute(self, saved: Saved, early: int) -> Saved:
        """What of ``saved`` stays for `again`, which computes the first ``early`` queries once more: output and lse of the later ones.

        Of all queries, also the keys and values that came from other ranks: with grouped heads they are fewer bytes than what comes from
        here, and fetching them again would stop the backward pass.
        """
        _, keys, out, lse, *columns = saved
        if early:
            # Copies, or the whole would stay.
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
        """A forward pass once more, by what stayed of it (`kept`) -> out and what `backward` takes, as `forward` gave it.

        work: of the early queries (`work`). Only these are computed; where there are any, keys travel as they did before, on all ranks.
        """
        if not early:
            out, lse, *travelled = kept
            keys, *columns = travelled or [torch.stack([k, v])]
            return out, (q, keys, out, lse, *columns)
        late, late_lse = kept
        first, first_lse, saved = self.forward(
            q[:, :early].contiguous(), k, v, shard_tiles, kernel, scale, label
        )
        out, lse = torch.cat([first, late], 1), torch.cat([first_lse, late_lse], 2)
        return out, (q, saved[1], out, lse, *saved[4:])

    @property
    def _saves_own_keys(self) -> bool:
        """Whether the keys that `forward` saves are this rank's own."""
        return True

    @contextmanager
    def _transport(self, label: str, direction: str) -> Iterator[Transport]:
        """The transfers of one pass; all of them are complete at its end."""
        steps = self.forward_steps if direction == FORWARD else self.backward_steps
        transport = Transport(self.group, self.name, label, direction, len(steps), self.recorder)
        yield transport
        transport.finish()
        progress_record.note(f"after {transport.pass_name}")
