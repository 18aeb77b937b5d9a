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
from mtrain_cli.parallel.schedule import GROUP_CAST, OUTER, Schedule, casts_by_stage
from mtrain_cli.parallel.traffic import (
    ROW_BLOCK,
    MovedRows,
    Nodes,
    Route,
    WantedRows,
    blocks_needed,
    rows_needed,
)

_MOST_COUNTED = 1 << 25  # blocks of all ranks
_BLOCKS_PER_SHARD = 16  # at least, so that short shards have blocks, too


def cast_routes(schedule: Schedule, *, backward: bool = False) -> tuple[Route, ...]:
    """Return the routes of the group casts of a pass; () if it has none."""
    heads, steps = schedule.heads, (schedule.backward if backward else schedule.forward)[0]
    posted = [t for step in steps for t in step.post if t.kind == GROUP_CAST]
    casts = [t for t in posted if t.part == posted[0].part]
    casts = casts_by_stage(casts, backward=backward)
    numbers, found = [t.number for t in casts], []
    for t in casts:
        relays = numbers.index(t.after) if t.after in numbers else None
        senders = [at for at, peer in enumerate(t.peers) if at and peer in t.receives]
        senders = senders if relays is None else [*range(1, len(t.peers))]
        away = tuple(sorted(len(t.peers) - at for at in senders))
        own = relays is None or 0 in (rank // heads for rank in t.sends)
        found.append(Route(t.channel == OUTER, away, own, relays))
    return tuple(found)


def _routes_of_passes(schedule: Schedule) -> list[tuple[Route, tuple[Route, ...]]]:
    """Return the casts of `ShardSizes.casts`, each with all routes of its pass."""
    if not schedule.traits.by_mask:
        return []
    same = schedule.stages == schedule.stages_backward
    passes = [cast_routes(schedule, backward=b) for b in (False, True)[: 2 - same]]
    return [(route, routes) for routes in passes for route in routes]


def node_size(schedule: Schedule) -> int:
    """Return the number of ranks among which casts inside a node run."""
    nodes = Nodes.of_groups(schedule.workers, schedule.per_node, schedule.heads)
    return nodes.per_node if schedule.traits.hierarchical and nodes.several else nodes.workers


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

    stages: received rows of each stage from 1, if there are stages.
    casts: by stage. A cast across nodes comes before the cast inside the node that forwards its
        rows.
    """

    keys: Keys
    stages: tuple[Keys, ...]
    own: int
    casts: tuple[Cast, ...]

    def of_stage(self, stage: int | None) -> Keys:
        """Return the received rows of a stage from 1. None: own rows and all received rows."""
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
        leaving = self.casts[at].leaving
        if arrived and at > 1:  # only rows of the cast before
            return arrived[0].index_select(0, leaving - self.arriving(at - 1).start)
        pool = own.movedim(2, 0)
        return (torch.cat([pool, *arrived]) if arrived else pool).index_select(0, leaving)

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
            rows.index_add_(0, where, part.to(rows.dtype))

    @staticmethod
    def make(
        layout: Layout,
        masks: Sequence[SequenceMask],
        rank: int,
        schedule: Schedule,
        block: int | None = None,
    ) -> tuple[CastRows, CastRows]:
        """Plan the casts of a rank in forward and backward. layout: of groups that share heads."""
        planner = _RowPlanner(layout, masks, node_size(schedule), block)
        routes, again = (cast_routes(schedule, backward=b) for b in (False, True))
        forward = planner.rows(rank, routes, staged=schedule.stages > 0)
        if schedule.stages == schedule.stages_backward:
            return forward, forward
        return forward, planner.rows(rank, again, staged=schedule.stages_backward > 0)


def largest_shares(
    schedule: Schedule, layout: Layout, masks: Sequence[SequenceMask], block: int | None = None
) -> tuple[tuple[Fraction, Fraction], ...]:
    """Return the largest `CastRows.shares` of any rank, without making the rows of every rank.

    If counting would take too much memory, return `whole_shares`.
    """
    return cast_shares(schedule, layout, masks, layout.workers, block)[0]


def wanted_rows(
    schedule: Schedule, inside: Layout, masks: Sequence[SequenceMask], block: int | None = None
) -> WantedRows:
    """Count the rows that ranks need of each other. inside: layout of groups that share heads."""
    shards = [inside.positions(rank) for rank in range(inside.workers)]
    needed = rows_needed([masks], shards, row_block(inside, block))
    return WantedRows.of(*needed, node_size(schedule))


def shares_of(
    schedule: Schedule, wanted: WantedRows, rows: int
) -> tuple[tuple[Fraction, Fraction], ...]:
    """Return the `ShardSizes.casts` of a schedule. rows: number of rows that a rank holds."""
    moved = (wanted.moved(*of_pass) for of_pass in _routes_of_passes(schedule))
    return tuple(
        (Fraction(int(of.sent.max()), rows), Fraction(int(of.received.max()), rows)) for of in moved
    )


def cast_shares(
    schedule: Schedule,
    layout: Layout,
    masks: Sequence[SequenceMask],
    per_node: int,
    block: int | None = None,
) -> tuple[tuple[tuple[Fraction, Fraction], ...], tuple[tuple[Fraction, ...], ...]]:
    """Return `largest_shares`, and the rows of each cast that cross nodes / rows of a shard.

    The latter are those of the busiest network card. They depend on how many neighbors share one: 1
    to ``per_node``, in turn. A row counts for each of them that moves a part of its heads. Empty if
    no rows cross, or `largest_shares` does not count.
    """
    if not schedule.traits.by_mask or too_many_to_count(layout):
        return whole_shares(schedule), ()
    inside = layout if schedule.heads == 1 else Joined.of(layout, schedule.heads)
    wanted, heads = wanted_rows(schedule, inside, masks, block), schedule.heads
    largest = shares_of(schedule, wanted, inside.tokens_per_worker)
    if per_node >= layout.workers:
        return largest, ()
    place = np.arange(inside.workers) % (groups := max(1, per_node // heads))

    def busiest(moved: MovedRows, sharing: int) -> Fraction:
        first = np.flatnonzero(place % max(1, sharing // heads) == 0)
        most = max(np.add.reduceat(rows, first).max() for rows in (moved.sent, moved.received))
        return Fraction(min(heads, sharing) * int(most), inside.tokens_per_worker)

    crossing = [wanted.crossing(route, groups) for route, _ in _routes_of_passes(schedule)]
    return largest, tuple(tuple(busiest(of, n + 1) for n in range(per_node)) for of in crossing)


def row_block(layout: Layout, block: int | None = None) -> int:
    short = 1 << (layout.tokens_per_worker // _BLOCKS_PER_SHARD).bit_length() >> 1
    return block or min(ROW_BLOCK, max(1, short))


def whole_shares(schedule: Schedule) -> tuple[tuple[Fraction, Fraction], ...]:
    """Return the shares of casts that move whole shards, which are never smaller than others."""
    found = []
    for route, routes in _routes_of_passes(schedule):
        relayed = 0 if route.relays is None else len(routes[route.relays].away)
        shards = Fraction(len(route.away) * (route.own + relayed))
        found.append((shards, shards))
    return tuple(found)


def too_many_to_count(layout: Layout) -> bool:
    """Return whether `largest_shares` would take too much memory to count blocks of rows."""
    return layout.workers * layout.padded_seq // row_block(layout) > _MOST_COUNTED


class _RowPlanner:
    def __init__(
        self, layout: Layout, masks: Sequence[SequenceMask], size: int, block: int | None
    ) -> None:
        self.block, self.size = row_block(layout, block), size
        self._positions = [layout.positions(rank) for rank in range(layout.workers)]
        self._needed = blocks_needed([masks], self._positions, self.block)[:, 0]

    def _wanted(self, positions: IntArray, ranks: Iterable[int]) -> IntArray:
        """Return the indices of the positions that one of the ranks needs, ascending."""
        needed = np.any(self._needed[list(ranks)], axis=0)
        return np.flatnonzero(np.asarray(needed)[positions // self.block])

    def rows(self, rank: int, routes: Sequence[Route], *, staged: bool) -> CastRows:
        pool, casts, none = [self._positions[rank]], [], np.empty(0, np.int64)
        for route in routes:
            start = 0
            if not route.own:
                assert route.relays is not None
                start = sum(map(len, pool[: 1 + route.relays]))
            held, peers = self._held(rank, route, routes), self._senders(rank, route)
            leaving, received = [], []
            for peer, back in peers:
                forth = -back % len(peers)
                to = self._served(peer, route)
                leaving.append(start + self._wanted(held, to) if forth in route.away else none)
                theirs = self._held(peer, route, routes) if back in route.away else none
                received.append(theirs[self._wanted(theirs, self._served(rank, route))])
            sent, arrived = (tuple(map(len, rows)) for rows in (leaving, received))
            casts.append(Cast(torch.from_numpy(np.concatenate(leaving)), sent, arrived))
            pool.append(np.concatenate(received))
        last = [(at, r.relays) for at, r in enumerate(routes) if not r.across] if staged else []
        of_stages = [(at,) if relays is None else (relays, at) for at, relays in last]
        stages = [Keys.of(np.concatenate([pool[1 + at] for at in of]), of) for of in of_stages]
        whole = Keys.of(np.concatenate(pool), tuple(range(len(casts))))
        return CastRows(whole, tuple(stages), len(pool[0]), tuple(casts))

    def _senders(self, rank: int, route: Route) -> list[tuple[int, int]]:
        """Return the peers of a cast, and by how many places each comes before this rank."""
        size, workers = self.size, len(self._positions)
        first, local = rank - rank % size, rank % size
        peers = range(local, workers, size) if route.across else range(first, first + size)
        return [(peer, (peers.index(rank) - at) % len(peers)) for at, peer in enumerate(peers)]

    def _served(self, rank: int, route: Route) -> range:
        """Return the ranks for which a rank receives rows: in a cast across nodes, its node."""
        first = rank - rank % self.size
        return range(first, first + self.size) if route.across else range(rank, rank + 1)

    def _held(self, rank: int, route: Route, routes: Sequence[Route]) -> IntArray:
        """Return the positions of the rows that a rank may send, in the order of its pool."""
        found = [self._positions[rank]] if route.own else []
        if route.relays is not None:
            before = routes[route.relays]
            served = self._served(rank, before)
            senders = [p for p, back in self._senders(rank, before) if back in before.away]
            theirs = [self._positions[peer] for peer in senders]
            found += [rows[self._wanted(rows, served)] for rows in theirs]
        return np.concatenate(found)
