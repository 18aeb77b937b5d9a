"""The rows of keys and values that a group cast moves: those that the masks of a batch need.

A rank needs the blocks of keys that its queries see under the masks. From the layout and the masks,
each rank derives the rows that it sends and receives, on the host and without messages
(MagiAttention, section 4.2). A dynamic index does not change these rows.

A rank numbers its rows in the order in which it gets them: its own rows by slot, then the rows that
each cast delivers, by peer. These rows are the rank's pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch

from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.parallel.layout import Joined, Layout
from mtrain_cli.parallel.lowering import lower
from mtrain_cli.parallel.program import Program
from mtrain_cli.parallel.schedule import GROUP_CAST, Schedule
from mtrain_cli.parallel.traffic import ROW_BLOCK, blocks_needed, count_traffic

_MOST_COUNTED = 1 << 25  # blocks of all ranks
_BLOCKS_PER_SHARD = 16  # at least, so that short shards have blocks, too


@dataclass(frozen=True)
class Cast:
    """The rows that one group cast sends and receives on one rank.

    leaving: int64 [rows sent], number in the pool of each row that leaves, by peer. Over the rows
        for one peer, the numbers ascend.
    sent, received: number of rows to and from each peer, in the order of `Transfer.peers`.
    """

    leaving: torch.Tensor
    sent: tuple[int, ...]
    received: tuple[int, ...]


@dataclass(frozen=True)
class CastRows:
    """The rows that one rank holds while it computes, and the casts that bring them.

    positions: int64 [rows], global position of each key with which the rank computes, ascending.
    pool: int64 [rows], index in ``positions`` of each row of the pool.
    own: number of this rank's own rows.
    casts: in the order in which they run. A hierarchical cast across nodes comes before the cast
        inside the node, which forwards rows of the first.
    """

    positions: IntArray
    pool: torch.Tensor
    own: int
    casts: tuple[Cast, ...]

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

    def picked(self, at: int, own: torch.Tensor, arrived: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the rows that cast number ``at`` sends, [rows, 2, batch, kv_heads, head_dim].

        own: this rank's k and v, [2, batch, tokens, kv_heads, head_dim].
        arrived: the rows that earlier casts delivered, each like the result.
        """
        pool = own.movedim(2, 0)
        if arrived:
            pool = torch.cat([pool, *arrived])
        return pool.index_select(0, self.casts[at].leaving)

    def merged(self, own: torch.Tensor, arrived: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return k and v in order of position, each [batch, keys, kv_heads, head_dim].

        own, arrived: as in `picked`. ``arrived`` has the rows of all casts.
        """
        keys = []
        for i in (0, 1):
            sources = own[i], *(rows[:, i].transpose(0, 1) for rows in arrived)
            whole = own.new_empty(own.shape[1], len(self.positions), *own.shape[3:])
            sizes = [rows.shape[1] for rows in sources]
            for places, rows in zip(self.pool.split(sizes), sources, strict=True):
                whole.index_copy_(1, places, rows)
            keys.append(whole)
        return keys

    def split(self, dk: torch.Tensor, dv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return gradients in the order of the pool, [rows, 2, batch, kv_heads, head_dim].

        dk, dv: [batch, keys, kv_heads, head_dim], in order of position.
        """
        rows = dk.new_empty(len(self.pool), 2, dk.shape[0], *dk.shape[2:], dtype=dtype)
        for i, gradient in enumerate((dk, dv)):
            rows[:, i] = gradient.transpose(0, 1).index_select(0, self.pool)
        return rows

    def add_returned(self, at: int, rows: torch.Tensor, returned: torch.Tensor) -> None:
        """Add what other ranks returned for the rows that cast number ``at`` sent.

        The peers' gradients are added in the order of the peers. A peer returns a row once, so the
        sum does not depend on the order in which a GPU adds.

        rows: result of `split`.
        returned: [rows sent, 2, batch, kv_heads, head_dim], by peer.
        """
        cast = self.casts[at]
        for where, part in zip(
            cast.leaving.split(cast.sent), returned.split(cast.sent), strict=True
        ):
            rows.index_add_(0, where, part)

    @staticmethod
    def make(
        layout: Layout,
        masks: Sequence[SequenceMask],
        rank: int,
        peers: Sequence[Sequence[int]],
        block: int | None = None,
    ) -> CastRows:
        """Plan the casts of a rank.

        Args:
            masks: one per sequence of the batch. A row moves if one of the sequences needs it.
            rank: number of the rank in ``layout``.
            peers: the ranks among which each cast runs, by cast. If there are two, the first are
                the counterparts in other nodes, and the second the ranks of this node.
            block: number of tokens per block of a dynamic index; None for dense attention.
        """
        return _RowPlanner(layout, masks, block).rows(rank, peers)


def cast_peers(program: Program) -> tuple[tuple[int, ...], ...]:
    """Return the peers of a program's group casts: by cast, the ranks of `CastRows.make`.

    Ranks that share heads count as one rank.
    """
    found: dict[str, tuple[int, ...]] = {}
    for post in program.posts:
        if post.transfer.kind == GROUP_CAST:
            found[post.transfer.channel] = tuple(r // program.sharing for r in post.transfer.peers)
    return tuple(found.values())


def largest_shares(
    schedule: Schedule,
    layout: Layout,
    masks: Sequence[SequenceMask],
    block: int | None = None,
) -> tuple[tuple[Fraction, Fraction], ...]:
    """Return the largest `CastRows.shares` of any rank, without making the rows of every rank.

    Return (), if the exchange has no group cast. If counting would take too much memory, return
    `whole_shares`.

    layout, masks, block: as in `CastRows.make`, but ``layout`` is that of the context group.
    """
    peers = cast_peers(lower(schedule, 0)) if schedule.traits.by_mask else ()
    if not peers or too_many_to_count(layout):
        return whole_shares(schedule)
    inside = layout if schedule.heads == 1 else Joined.of(layout, schedule.heads)
    traffic = count_traffic(
        [masks],
        [inside.positions(rank) for rank in range(inside.workers)],
        per_node=len(peers[-1]) if len(peers) > 1 else None,
        block=row_block(inside, block),
    )
    moved = (traffic.outer, traffic.inner)[-len(peers) :]
    rows = inside.tokens_per_worker * len(masks)
    return tuple(
        (Fraction(int(of.sent.max()), rows), Fraction(int(of.received.max()), rows)) for of in moved
    )


def row_block(layout: Layout, block: int | None = None) -> int:
    """Return the number of rows that a group cast moves together.

    block: number of tokens per block of a dynamic index; None for dense attention.
    """
    short = 1 << (layout.tokens_per_worker // _BLOCKS_PER_SHARD).bit_length() >> 1
    return block or min(ROW_BLOCK, max(1, short))


def whole_shares(schedule: Schedule) -> tuple[tuple[Fraction, Fraction], ...]:
    """Return the shares of casts that move whole shards, which are never smaller than others.

    Return (), if the exchange has no group cast.
    """
    peers = cast_peers(lower(schedule, 0)) if schedule.traits.by_mask else ()
    if not peers:
        return ()
    *across, within = (len(of) for of in peers)
    moved = [n - 1 for n in across] + [(within - 1) * (across[0] if across else 1)]
    return tuple((Fraction(n), Fraction(n)) for n in moved)


def too_many_to_count(layout: Layout) -> bool:
    """Return whether `largest_shares` would take too much memory to count blocks of rows."""
    return layout.workers * layout.padded_seq // ROW_BLOCK > _MOST_COUNTED


class _RowPlanner:
    """Finds the rows that move between the ranks of a layout under the masks of a batch."""

    def __init__(self, layout: Layout, masks: Sequence[SequenceMask], block: int | None) -> None:
        self.block = row_block(layout, block)
        self._positions = [layout.positions(rank) for rank in range(layout.workers)]
        self._needed = blocks_needed([masks], self._positions, self.block)[:, 0]

    def _wanted(self, positions: IntArray, ranks: Iterable[int]) -> IntArray:
        """Return the indices of the positions that one of the ranks needs, ascending."""
        needed = np.any(self._needed[list(ranks)], axis=0)
        return np.flatnonzero(np.asarray(needed)[positions // self.block])

    def rows(self, rank: int, peers: Sequence[Sequence[int]]) -> CastRows:
        """Return the rows of a rank. peers: as in `CastRows.make`."""
        pool, casts = [self._positions[rank]], []
        for at, among in enumerate(peers):
            # The ranks that a peer serves: itself, or in a cast across nodes the peer's whole node.
            offsets = [0] if at == len(peers) - 1 else [mate - rank for mate in peers[-1]]
            held = np.concatenate(pool)
            leaving, received = [], []
            for peer in among:
                if peer == rank:
                    leaving.append(np.empty(0, np.int64))
                    received.append(np.empty(0, np.int64))
                    continue
                leaving.append(self._wanted(held, [peer + offset for offset in offsets]))
                theirs = self._positions[peer]
                if at:
                    theirs = self._held(peer, [p + peer - rank for p in peers[0]], peers[-1])
                received.append(theirs[self._wanted(theirs, [rank + o for o in offsets])])
            sent, arrived = (tuple(map(len, rows)) for rows in (leaving, received))
            casts.append(Cast(torch.from_numpy(np.concatenate(leaving)), sent, arrived))
            pool.append(np.concatenate(received))
        order = np.argsort(np.concatenate(pool))
        places = torch.from_numpy(np.argsort(order))
        return CastRows(np.concatenate(pool)[order], places, len(pool[0]), tuple(casts))

    def _held(self, rank: int, counterparts: Sequence[int], node: Sequence[int]) -> IntArray:
        """Return the positions that a rank holds after the cast across nodes, in pool order."""
        others = [self._positions[peer] for peer in counterparts if peer != rank]
        return np.concatenate(
            [self._positions[rank], *(theirs[self._wanted(theirs, node)] for theirs in others)]
        )
