"""The rows of keys and values that a group cast moves: those that the masks of a batch need.

From the layout and the masks, each rank derives the rows that it sends and receives, on the host
and without messages (MagiAttention, section 4.2). A dynamic index does not change them. A rank's
pool is its own rows by slot, then the rows that each cast delivers, by peer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.parallel.layout import Joined, Layout
from mtrain_cli.parallel.lowering import lower
from mtrain_cli.parallel.program import Program
from mtrain_cli.parallel.schedule import GROUP_CAST, Schedule
from mtrain_cli.parallel.traffic import ROW_BLOCK, MovedRows, blocks_needed, count_rows

_MOST_COUNTED = 1 << 25  # blocks of all ranks
_BLOCKS_PER_SHARD = 16  # at least, so that short shards have blocks, too
# By number of casts: the casts whose rows stage 1, and stage 2 if there is one, computes.
_CASTS_OF_STAGES: dict[int, tuple[tuple[int, ...], ...]] = {
    1: ((0,),),
    2: ((0, 1),),
    3: ((1,), (0, 2)),
}


@dataclass(frozen=True)
class Cast:
    """The rows that one group cast sends and receives on one rank.

    leaving: int64 [rows sent], number in the pool of each row that leaves, by peer and ascending.
    sent, received: number of rows by peer.
    """

    leaving: Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(frozen=True)
class Keys:
    """The keys with which a rank computes in one kernel call: its own rows, or rows of casts.

    places: int64 [keys], index in ``positions`` of each row, in the order of the pool.
    casts: numbers of the casts that bring the rows.
    """

    positions: IntArray
    places: Tensor
    casts: tuple[int, ...]

    @staticmethod
    def of(rows: IntArray, casts: tuple[int, ...]) -> Keys:
        """Return the keys for rows in the order of the pool. rows: int64 [keys], positions."""
        order = np.argsort(rows)
        return Keys(rows[order], torch.from_numpy(np.argsort(order)), casts)


@dataclass(frozen=True)
class CastRows:
    """The rows that one rank holds while it computes, and the casts that bring them.

    stages: received rows of stage 1 and of stage 2, if there are stages.
    casts: in the order in which they run. A cast across nodes comes before the cast inside the
        node, which forwards rows of the first. With three casts, the second moves rows of the node.
    """

    keys: Keys
    stages: tuple[Keys, ...]
    own: int
    casts: tuple[Cast, ...]

    def of_stage(self, stage: int | None) -> Keys:
        """Return the received rows of stage 1 or 2. None: own rows and all received rows."""
        return self.keys if stage is None else self.stages[stage - 1]

    def arriving(self, at: int) -> slice:
        """Return the place in the pool of the rows that cast number ``at`` delivers."""
        start = self.own + sum(sum(cast.received) for cast in self.casts[:at])
        return slice(start, start + sum(self.casts[at].received))

    @property
    def shares(self) -> tuple[tuple[Fraction, Fraction], ...]:
        """Rows that each cast sends and receives, divided by the number of this rank's rows."""
        return tuple(
            (Fraction(sum(c.sent), self.own), Fraction(sum(c.received), self.own))
            for c in self.casts
        )

    def picked(self, at: int, own: Tensor, arrived: Sequence[Tensor]) -> Tensor:
        """Return the rows that cast number ``at`` sends, [rows, 2, batch, kv_heads, head_dim]."""
        pool = own.movedim(2, 0)
        if arrived:
            pool = torch.cat([pool, *arrived])
        return pool.index_select(0, self.casts[at].leaving)

    def merged(
        self, own: Tensor | None, arrived: Sequence[Tensor], stage: int | None = None
    ) -> list[Tensor]:
        """Return k and v in order of position, each [batch, keys, kv_heads, head_dim].

        own, arrived: as in `picked`, of all casts; of a stage, its rows only and no own rows.
        """
        of, keys = self.of_stage(stage), []
        for i in (0, 1):
            sources = [rows[:, i].transpose(0, 1) for rows in arrived]
            sources = sources if own is None else [own[i], *sources]
            first = sources[0]
            whole = first.new_empty(first.shape[0], len(of.positions), *first.shape[2:])
            sizes = [rows.shape[1] for rows in sources]
            for places, rows in zip(of.places.split(sizes), sources, strict=True):
                whole.index_copy_(1, places, rows)
            keys.append(whole)
        return keys

    def split(
        self,
        dk: Tensor,
        dv: Tensor,
        dtype: torch.dtype,
        rows: Tensor | None = None,
        stage: int | None = None,
    ) -> Tensor:
        """Return gradients in the order of the pool, [rows, 2, batch, kv_heads, head_dim]."""
        of = self.of_stage(stage)
        if rows is None:
            pool = len(self.keys.positions)
            rows = dk.new_empty(pool, 2, dk.shape[0], *dk.shape[2:], dtype=dtype)
        targets = [rows] if stage is None else [rows[self.arriving(cast)] for cast in of.casts]
        sizes = [len(target) for target in targets]
        for i, gradient in enumerate((dk, dv)):
            in_order = gradient.transpose(0, 1).index_select(0, of.places)
            for target, part in zip(targets, in_order.split(sizes), strict=True):
                target[:, i] = part
            del in_order, part  # before the next gradient allocates its copy
        return rows

    def zeros(self, own: Tensor, dtype: torch.dtype) -> Tensor:
        two, batch, _, *heads = own.shape
        return own.new_zeros(len(self.keys.positions), two, batch, *heads, dtype=dtype)

    def add_returned(self, at: int, rows: Tensor, returned: Tensor) -> None:
        """Add what other ranks returned for the rows that cast number ``at`` sent."""
        cast = self.casts[at]
        parts = zip(cast.leaving.split(cast.sent), returned.split(cast.sent), strict=True)
        # A peer returns a row once, so no sum depends on the order in which a GPU adds.
        for where, part in parts:
            rows.index_add_(0, where, part)

    @staticmethod
    def make(
        layout: Layout,
        masks: Sequence[SequenceMask],
        rank: int,
        peers: Sequence[Sequence[int]],
        block: int | None = None,
        *,
        staged: bool = False,
    ) -> CastRows:
        """Plan the casts of a rank.

        peers: the ranks among which each cast runs: alone, or first the counterparts in other
            nodes, then the ranks of this node.
        """
        return _RowPlanner(layout, masks, block).rows(rank, peers, staged=staged)


def cast_peers(program: Program) -> tuple[tuple[int, ...], ...]:
    """Return the peers of a program's group casts: by cast, the ranks of `CastRows.make`."""
    found: dict[int, tuple[int, ...]] = {}
    for post in program.posts:
        if post.transfer.kind == GROUP_CAST:
            found[post.cast] = tuple(r // program.sharing for r in post.transfer.peers)
    return tuple(found.values())


def largest_shares(
    schedule: Schedule, layout: Layout, masks: Sequence[SequenceMask], block: int | None = None
) -> tuple[tuple[Fraction, Fraction], ...]:
    """Return the largest `CastRows.shares` of any rank, without making the rows of every rank.

    If counting would take too much memory, return `whole_shares`.
    """
    peers = cast_peers(lower(schedule, 0)) if schedule.traits.by_mask else ()
    if not peers or too_many_to_count(layout):
        return whole_shares(schedule)
    per_node = len(peers[-1]) if len(peers) > 1 else None
    (near, relayed, outer), rows = _count(schedule, layout, masks, per_node, block)
    moved = {1: [near + relayed], 2: [outer, near + relayed], 3: [outer, near, relayed]}[len(peers)]
    return tuple(
        (Fraction(int(of.sent.max()), rows), Fraction(int(of.received.max()), rows)) for of in moved
    )


def crossing_shares(
    schedule: Schedule,
    layout: Layout,
    masks: Sequence[SequenceMask],
    per_node: int,
    block: int | None = None,
) -> tuple[Fraction, ...]:
    """Return for each cast the rows that leave or reach the busiest node / rows of a shard.

    Empty if `largest_shares` does not count.
    """
    peers = cast_peers(lower(schedule, 0)) if schedule.traits.by_mask else ()
    if not peers or too_many_to_count(layout):
        return ()
    groups = max(1, per_node // schedule.heads)
    (near, _, outer), rows = _count(schedule, layout, masks, groups, block)
    crossing = [outer.sent, outer.received]
    if len(peers) == 1:
        (every, _, _), _ = _count(schedule, layout, masks, None, block)
        crossing = [every.sent - near.sent, every.received - near.received]
    busiest = max(int(of.reshape(-1, groups).sum(1).max()) for of in crossing)
    return Fraction(busiest, rows), *[Fraction(0)] * (len(peers) - 1)


def _count(
    schedule: Schedule,
    layout: Layout,
    masks: Sequence[SequenceMask],
    per_node: int | None,
    block: int | None,
) -> tuple[tuple[MovedRows, MovedRows, MovedRows], int]:
    """Return the rows that are near, relayed and outer, and the rows of a shard."""
    inside = layout if schedule.heads == 1 else Joined.of(layout, schedule.heads)
    shards, block = [*map(inside.positions, range(inside.workers))], row_block(inside, block)
    counted = count_rows([masks], shards, per_node=per_node, block=block)
    return counted, inside.tokens_per_worker * len(masks)


def row_block(layout: Layout, block: int | None = None) -> int:
    short = 1 << (layout.tokens_per_worker // _BLOCKS_PER_SHARD).bit_length() >> 1
    return block or min(ROW_BLOCK, max(1, short))


def whole_shares(schedule: Schedule) -> tuple[tuple[Fraction, Fraction], ...]:
    """Return the shares of casts that move whole shards, which are never smaller than others."""
    peers = cast_peers(lower(schedule, 0)) if schedule.traits.by_mask else ()
    if not peers:
        return ()
    nodes, mates = len(peers[0]), len(peers[-1]) - 1
    moved = {1: [mates], 2: [nodes - 1, mates * nodes], 3: [nodes - 1, mates, mates * (nodes - 1)]}[
        len(peers)
    ]
    return tuple((Fraction(n), Fraction(n)) for n in moved)


def too_many_to_count(layout: Layout) -> bool:
    """Return whether `largest_shares` would take too much memory to count blocks of rows."""
    return layout.workers * layout.padded_seq // row_block(layout) > _MOST_COUNTED


class _RowPlanner:
    def __init__(self, layout: Layout, masks: Sequence[SequenceMask], block: int | None) -> None:
        self.block = row_block(layout, block)
        self._positions = [layout.positions(rank) for rank in range(layout.workers)]
        self._needed = blocks_needed([masks], self._positions, self.block)[:, 0]

    def _wanted(self, positions: IntArray, ranks: Iterable[int]) -> IntArray:
        """Return the indices of the positions that one of the ranks needs, ascending."""
        needed = np.any(self._needed[list(ranks)], axis=0)
        return np.flatnonzero(np.asarray(needed)[positions // self.block])

    def rows(self, rank: int, peers: Sequence[Sequence[int]], *, staged: bool = False) -> CastRows:
        pool, casts = [self._positions[rank]], []
        for at, among in enumerate(peers):
            # The ranks that a peer serves: itself, or in a cast across nodes the peer's whole node.
            crosses = at == 0 and len(peers) > 1
            offsets = [mate - rank for mate in peers[-1]] if crosses else [0]
            start, held = self._sources(at, rank, peers)
            leaving, received = [], []
            for peer in among:
                if peer == rank:
                    leaving.append(np.empty(0, np.int64))
                    received.append(np.empty(0, np.int64))
                    continue
                leaving.append(start + self._wanted(held, [peer + offset for offset in offsets]))
                # Another rank of the node has other counterparts.
                of_peer = [[p + peer - rank for p in peers[0]], *peers[1:]]
                _, theirs = self._sources(at, peer, of_peer)
                received.append(theirs[self._wanted(theirs, [rank + o for o in offsets])])
            sent, arrived = (tuple(map(len, rows)) for rows in (leaving, received))
            casts.append(Cast(torch.from_numpy(np.concatenate(leaving)), sent, arrived))
            pool.append(np.concatenate(received))
        of_stages = _CASTS_OF_STAGES[len(casts)] if staged else ()
        stages = [Keys.of(np.concatenate([pool[1 + at] for at in of]), of) for of in of_stages]
        whole = Keys.of(np.concatenate(pool), tuple(range(len(casts))))
        return CastRows(whole, tuple(stages), len(pool[0]), tuple(casts))

    def _sources(self, at: int, rank: int, peers: Sequence[Sequence[int]]) -> tuple[int, IntArray]:
        own = self._positions[rank]
        if at == 0 or (at == 1 and len(peers) == 3):
            return 0, own
        others = [self._positions[peer] for peer in peers[0] if peer != rank]
        relayed = [theirs[self._wanted(theirs, peers[-1])] for theirs in others]
        if len(peers) == 3:
            return len(own), np.concatenate(relayed)
        return 0, np.concatenate([own, *relayed])
