"""Count exactly the query-key pairs and block pairs that each worker computes in each step.

Workers that split the heads (Ulysses) form a group; without Ulysses, each worker is a group. A
table holds the pairs of every (query group, key group). Slashes are block diagonals, whose pairs
between two groups depend only on masks and layout, and are counted once for all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mtrain_cli.attention.index import (
    BlockBitmap,
    GatedBitmap,
    Index,
    StartBitmap,
    VerticalSlash,
)
from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.attention.mask_tables import BlockPairs
from mtrain_cli.parallel.layout import Balanced, Contiguous, Layout, Zigzag
from mtrain_cli.parallel.recording import BACKWARD, FORWARD
from mtrain_cli.parallel.schedule import Schedule
from mtrain_cli.simulation.causal_work import CausalRows, Chunks
from mtrain_cli.simulation.spmd_schedule import EVERYTHING, SpmdSchedule

if TYPE_CHECKING:
    from mtrain_cli.simulation.long_rings import RingWork

# FLOP per pair and head, divided by head_dim: forward has 2 products of 2 * head_dim FLOP, backward
# has 5, as in `IndexCounts.flop`.
FLOP_PER_PAIR = {FORWARD: 4, BACKWARD: 10}

AT_ONCE = 1 << 21  # most entries of a temporary table
MOST_PLAYED = 512  # groups whose work is counted in each step
Part = tuple[int, int]


@dataclass(frozen=True)
class StepWork:
    """The work of one pass of a layer, summed over a worker's heads and sequences; int64.

    pairs: [workers, steps], query-key pairs that masks and index allow.
    blocks: [workers, steps], chosen block pairs with an allowed pair, not counting single columns.
    columns: [workers], gathered single columns without padding; 0 if the steps compute them.
    column_pairs: [workers], pairs of gathered columns on no slash, which are not in ``pairs``.
    of_columns: [workers, steps], pairs of single columns on no slash, which are in ``pairs``.
    hidden: [workers, steps], pairs of chosen blocks that the gate of the query hides. They are not
        in ``pairs``, but kernels compute whole blocks.
    ring: the work of the long ring for which this one stands; None for its own work.
    """

    direction: str
    pairs: IntArray
    blocks: IntArray
    columns: IntArray
    column_pairs: IntArray
    of_columns: IntArray | None = None
    hidden: IntArray | None = None
    ring: RingWork | None = None

    @property
    def total_pairs(self) -> IntArray:
        """Return the pairs of all steps and of gathered columns, [workers]."""
        if self.ring is not None:
            return self.ring.total_pairs
        return self.pairs.sum(1) + self.column_pairs


@dataclass(frozen=True)
class WorkCounter:
    """Counts the work of any number of indices under one schedule, layout and batch of masks.

    shared_columns: whether a ring gathers the single columns of an index before its steps.
    owner: int64 [padded_seq], the group that holds each position.
    block_owner: int64 [blocks], the group that holds each block. None if groups do not hold whole
        blocks; an index is then impossible, and blocks are not counted.
    chunk: tokens of the equal chunks that the layout deals out.
    long: counts the work of the long ring for which this one stands; None in other cases.
    """

    schedule: Schedule
    masks: tuple[SequenceMask, ...]
    heads: int
    block: int
    shared_columns: bool
    owner: IntArray
    block_owner: IntArray | None
    chunk: int
    long: Callable[[Index | None], RingWork] | None = None

    @staticmethod
    def make(
        schedule: Schedule,
        layout: Layout,
        masks: Sequence[SequenceMask],
        heads: int,
        block: int | None = None,
        *,
        shared_columns: bool = True,
    ) -> WorkCounter:
        """Prepare the counts. block: of the indices, in tokens; None for the layout's.

        Raises:
            ValueError: layout, schedule, masks and heads do not fit together.
        """
        padded = layout.padded_seq
        if layout.workers != schedule.workers:
            raise ValueError(
                f"A layout for {layout.workers} workers does not fit a schedule for "
                f"{schedule.workers}."
            )
        if not masks or any(mask.padded != padded for mask in masks):
            raise ValueError(
                f"Masks of {[mask.padded for mask in masks]} positions do not fit a layout of "
                f"{padded} positions."
            )
        parts = {step.part[1] for step in schedule.forward[0] if step.keys}
        if any(heads % n for n in parts):
            raise ValueError(f"{heads} heads cannot be cut into {max(parts)} equal parts.")
        block = block or layout.block_size
        owner = np.empty(padded, np.int64)
        for rank in range(layout.workers):
            owner[layout.positions(rank)] = rank // schedule.heads
        block_owner = owner[::block].copy()
        whole = np.array_equal(np.repeat(block_owner, block)[:padded], owner)
        owned, shared = block_owner if whole else None, padded * schedule.heads // layout.workers
        equal = {
            Contiguous.name: shared,
            Zigzag.name: shared // 2,
            Balanced.name: layout.block_size,
        }
        chunk = equal.get(layout.name, layout.block_size * schedule.heads)
        of = owner, owned, chunk if layout.workers > schedule.heads else len(block_owner) * block
        return WorkCounter(schedule, tuple(masks), heads, block, shared_columns, *of)

    @property
    def groups(self) -> int:
        return self.schedule.workers // self.schedule.heads

    @property
    def blocks(self) -> int:
        return -(-len(self.owner) // self.block)

    @property
    def gathers_columns(self) -> bool:
        """Whether single columns are computed outside the steps."""
        return self.shared_columns and self.groups > 1 and not self.schedule.gathers

    def count(self, index: Index | None, rank: int | None = None) -> dict[str, StepWork]:
        """Count the work of a layer in both passes. index: None for dense attention.

        rank: count only this worker, for which a bitmap needs only its query blocks; None for all.

        Raises:
            ValueError: the index does not fit this batch or lacks query blocks.
        """
        if self.long is not None:
            return self.long(index).spread(self.schedule)
        steps = dict(self._places)
        if rank is not None:
            steps = {name: places[places[:, 0] == rank] for name, places in steps.items()}
        ranks = range(self.schedule.workers) if rank is None else (rank,)
        every = np.concatenate(list(steps.values()))
        most = int(every[:, 3].max(initial=0)) + 1
        one = np.unique(every[:, 2] * most + every[:, 3])  # much faster than unique rows
        wanted = {divmod(int(both), most) for both in one}
        wanted |= (
            {(r % self.schedule.heads, self.schedule.heads) for r in ranks}
            if self.gathers_columns
            else set()
        )
        parts = sorted(wanted)
        if index is not None:
            self._check(index)
        if isinstance(index, BlockBitmap):
            tables = self._of_bitmap(index, parts, np.unique(every[:, 4]))
        else:
            tables = {part: self._of_lines(index, part) for part in parts}
        return {name: self._by_step(name, of, ranks, tables) for name, of in steps.items()}

    @cached_property
    def _places(self) -> dict[str, IntArray]:
        """Return a table by pass, int64 [rows, 6], with rows for steps that compute attention.

        Columns are rank, step, i, n (the i-th of n parts of the heads), query group, and key group:
        -1 for all keys. A step that computes several key groups has several rows per rank.
        """
        spmd = SpmdSchedule.of(self.schedule)
        ranks = np.arange(self.schedule.workers)
        found = {}
        for name in (FORWARD, BACKWARD):
            rows = []
            for at, step in enumerate(spmd.steps(name)):
                if step.queries is None or step.keys is None:
                    continue
                queries = spmd.grid.groups_of(step.queries)
                for group in step.keys:
                    whole = step.keys == EVERYTHING
                    keys = np.array(-1) if whole else spmd.grid.groups_of(group)
                    columns = ranks, at, spmd.parts_of(step), step.part[1], queries, keys
                    rows.append(np.stack(np.broadcast_arrays(*columns), 1))
            found[name] = np.concatenate(rows)
        return found

    def _check(self, index: Index) -> None:
        if self.block_owner is None:
            raise ValueError(
                f"A worker does not hold whole blocks of {self.block}; an index needs them."
            )
        expected = (self.block, self.blocks, (len(self.masks), self.heads))
        if (index.block, index.blocks, index.heads) != expected:
            raise ValueError(
                f"An index of {index.blocks} blocks of {index.block} for {index.heads[0]} "
                f"sequences of {index.heads[1]} heads does not fit "
                f"{expected[1]} blocks of {self.block} for {len(self.masks)} sequences of "
                f"{self.heads} heads."
            )

    def _by_step(
        self, direction: str, places: IntArray, ranks: Sequence[int], tables: dict[Part, _Table]
    ) -> StepWork:
        steps = getattr(self.schedule, direction)
        shape = len(ranks), len(steps[ranks[0]])  # all ranks have the same number of steps
        pairs, blocks, of_columns, hidden = np.zeros((4, *shape), np.int64)
        columns, column_pairs = np.zeros(shape[0], np.int64), np.zeros(shape[0], np.int64)
        for part, table in tables.items():
            rank, step, _, _, q, k = places[(places[:, 2] == part[0]) & (places[:, 3] == part[1])].T
            in_steps = np.zeros_like(table.pairs) if self.gathers_columns else table.column_pairs
            counts = (pairs, table.pairs + in_steps), (blocks, table.blocks)
            for values, counted in (*counts, (of_columns, in_steps), (hidden, table.hidden)):
                of_pairs = np.column_stack([counted, counted.sum(1)])[q, k]
                np.add.at(values, (rank - ranks[0], step), of_pairs)
        if self.gathers_columns:
            for row, rank in enumerate(ranks):
                table = tables[rank % self.schedule.heads, self.schedule.heads]
                columns[row] = table.columns
                column_pairs[row] = table.column_pairs[rank // self.schedule.heads].sum()
        return StepWork(direction, pairs, blocks, columns, column_pairs, of_columns, hidden)

    @cached_property
    def _kinds(self) -> list[_Kind]:
        kinds: list[_Kind] = []
        for row, mask in enumerate(self.masks):
            same = next((kind for kind in kinds if mask.same_as(kind.mask)), None)
            if same is None:
                kinds.append(_Kind(mask, [row], self))
            else:
                same.rows.append(row)
        return kinds

    @cached_property
    def closed(self) -> bool:
        """Whether all masks are one document in equal chunks (`CausalRows`)."""
        return all(kind.chunks is not None for kind in self._kinds)

    @cached_property
    def sums_only(self) -> bool:
        """Whether tables have one column, the sum over all key groups: in large gathers."""
        gathers = self.schedule.gathers and not (
            self.schedule.stages or self.schedule.stages_backward
        )
        return gathers and self.closed and self.groups > MOST_PLAYED

    def lines(
        self, index: Index | None, kind: _Kind, part: Part
    ) -> tuple[NDArray[Any], NDArray[np.int32]]:
        """Return the slashes and the columns of a part of the heads, [rows, blocks or width]."""
        if index is None:
            length = len(self.owner) if self.block_owner is None else self.blocks
            number = len(kind.rows) * self.heads // part[1]
            return np.full((1, length), number), np.empty((1, 0), np.int32)
        assert isinstance(index, VerticalSlash)
        i, n = part
        heads = slice(i * self.heads // n, (i + 1) * self.heads // n)
        on, columns = (t.cpu().numpy()[kind.rows, heads] for t in (index.slashes, index.columns))
        on = on.reshape(-1, self.blocks)
        return on, columns.reshape(len(on), columns.shape[-1])

    def _of_lines(self, index: Index | None, part: Part) -> _Table:
        table = _Table.empty(self.groups, 1 if self.sums_only else self.groups)
        if self.gathers_columns:  # only their sums are needed
            table.column_pairs = table.column_pairs[:, :1]
        for kind in self._kinds:
            on, positions = self.lines(index, kind, part)
            pairs, blocks = kind.between(on.sum(0, dtype=np.int64))
            table.pairs += pairs
            table.blocks += blocks
            if positions.size:
                columns, column_pairs = kind.column_pairs(on, positions)
                table.column_pairs += column_pairs
                table.columns += columns
        return table

    def _of_bitmap(
        self, index: BlockBitmap, parts: Sequence[Part], queries: IntArray
    ) -> dict[Part, _Table]:
        assert self.block_owner is not None
        needed = np.flatnonzero(np.isin(self.block_owner, queries))
        slots = index.slots.cpu().numpy()[needed]
        if (slots < 0).any():
            raise ValueError(
                f"The index holds {len(index.rows)} of {self.blocks} query blocks, and "
                f"{(slots < 0).sum()} more are needed."
            )
        index = index.per_head() if isinstance(index, StartBitmap) else index
        bits = index.bits.cpu().numpy().view(np.uint8)
        # This matrix sums over the blocks of each group. float64 holds the sums exactly.
        to_group = np.eye(self.groups)[self.block_owner]
        tables = {part: _Table.empty(self.groups, self.groups) for part in parts}
        at_once = max(1, AT_ONCE // self.blocks)
        for begin in range(0, len(needed), at_once):
            rows, held = needed[begin : begin + at_once], slots[begin : begin + at_once]
            own = self.block_owner[rows]
            for kind in self._kinds:
                allowed = BlockPairs.make(kind.mask, self.block, self.blocks, rows).table()
                for (i, n), table in tables.items():
                    heads = range(i * self.heads // n, (i + 1) * self.heads // n)
                    small = len(kind.rows) * len(heads) < 256
                    chosen = np.zeros(allowed.shape, np.uint8 if small else np.int32)
                    for sequence in kind.rows:
                        for head in heads:
                            chosen += bits[sequence, head, held]
                    pairs = whole = chosen * allowed.astype(np.float64)
                    if isinstance(index, (GatedBitmap, StartBitmap)):
                        pairs = self._gated_pairs(index, kind, heads, rows, held, allowed)
                    blocks = (chosen * (allowed > 0)).astype(np.float64)
                    sums = (table.pairs, pairs), (table.blocks, blocks)
                    for total, counted in (*sums, (table.hidden, whole - pairs)):
                        np.add.at(total, own, np.rint(counted @ to_group).astype(np.int64))
        return tables

    def _gated_pairs(
        self,
        index: GatedBitmap | StartBitmap,
        kind: _Kind,
        heads: range,
        rows: IntArray,
        held: IntArray,
        allowed: IntArray,
    ) -> NDArray[np.float64]:
        """Return the allowed pairs of each block pair, summed over ``heads`` and sequences.

        rows, held: query blocks, and the rows of the index that hold them.
        allowed: pairs that the mask allows, [query blocks, blocks].
        """
        block, per_chunk = self.block, index.chunk // self.block
        found = np.zeros(allowed.shape)
        for place, (number, at) in enumerate(zip(rows, held, strict=True)):
            gates = index.gated(slice(int(at) * block, (int(at) + 1) * block))[list(kind.rows)][
                :, list(heads)
            ]
            seeing = gates.sum((0, 1)).cpu().numpy()  # [queries of the block, chunks]
            by_block = seeing.sum(0).repeat(per_chunk)[: self.blocks] * block
            found[place] = np.where(allowed[place] == block * block, by_block, 0)
            # In a block that the mask cuts, rows see different numbers of keys.
            query = int(number) * block + np.arange(
                min(block, kind.mask.length - int(number) * block)
            )
            for key in np.flatnonzero((allowed[place] > 0) & (allowed[place] < block * block)):
                keys = np.minimum(query + 1, (key + 1) * block) - np.maximum(
                    kind.mask.first[query], key * block
                )
                found[place, key] = (keys.clip(0) * seeing[: len(query), key // per_chunk]).sum()
        return found


@dataclass
class _Table:
    """The counts of one part of the heads, int64 [query groups, key groups]."""

    pairs: IntArray
    blocks: IntArray
    column_pairs: IntArray
    hidden: IntArray
    columns: int = 0

    @staticmethod
    def empty(groups: int, keys: int) -> _Table:
        return _Table(*np.zeros((4, groups, keys), np.int64))


@dataclass(frozen=True)
class _Kind:
    mask: SequenceMask
    rows: list[int]
    counter: WorkCounter

    @cached_property
    def chunks(self) -> Chunks | None:
        """The chunks of a mask that is one causal document; None for other masks."""
        counter, mask = self.counter, self.mask
        block = 1 if counter.block_owner is None else counter.block
        one = mask.is_causal_interval and not mask.low[:, : mask.length].any()
        if not one or counter.chunk % block:
            return None
        return Chunks.of(mask.length, block, counter.owner, counter.chunk)

    def between(self, chosen: IntArray) -> tuple[IntArray, IntArray]:
        """Return the pairs and the blocks of the chosen diagonals, as in `_Table`.

        A mask that is no interval up to the query has only equally chosen diagonals.
        """
        counter, owner, chunks = self.counter, self.counter.block_owner, self.chunks
        if chunks is not None:
            both = [CausalRows(chunks, chosen, touched=touched) for touched in (False, True)]
            if counter.sums_only:
                pairs, blocks = (rows.sums()[:, None] for rows in both)
            else:
                pairs, blocks = (
                    np.stack(list(map(rows.row, range(counter.groups)))) for rows in both
                )
            return pairs, blocks * (owner is not None)
        if owner is None or not self.mask.is_causal_interval:
            return chosen[0] * self.dense[0], chosen[0] * self.dense[1]
        by_key = np.zeros((2, counter.groups, counter.blocks), np.int64)
        for number, allowed in enumerate(self.block_pairs):
            keys = slice(number + 1 - len(allowed), number + 1)
            heads = chosen[: len(allowed)][::-1]
            by_key[0, owner[number], keys] += heads * allowed
            by_key[1, owner[number], keys] += heads * (allowed > 0)
        pairs, blocks = (_summed(table.T, owner).T for table in by_key)
        return pairs, blocks

    def column_pairs(self, on: NDArray[Any], positions: NDArray[np.int32]) -> tuple[int, IntArray]:
        """Return the number of columns, and their pairs on no slash, as in `_Table`."""
        owner = self.counter.block_owner
        assert owner is not None
        keys = 0 * owner if self.counter.sums_only or self.counter.gathers_columns else owner
        return column_pairs(self.last, self.counter.block, owner, keys, on, positions)

    @cached_property
    def last(self) -> IntArray:
        return self.mask.last()[: self.mask.length]

    @cached_property
    def block_pairs(self) -> list[IntArray]:
        """The allowed pairs of each query block with the key blocks from the first seen to it."""
        counter, rows = self.counter, np.arange(self.counter.blocks)
        found, at_once = [], max(1, AT_ONCE // counter.blocks)
        table = BlockPairs.make(self.mask, counter.block, counter.blocks)
        for begin in rows[::at_once]:
            for number, row in enumerate(table.rows_from(begin, at_once), begin):
                seen = np.flatnonzero(row)
                found.append(
                    row[seen[0] if len(seen) else number + 1 : number + 1].astype(np.int32)
                )
        return found

    @cached_property
    def dense(self) -> tuple[IntArray, IntArray]:
        """Return the pairs and the blocks of one head, [groups, groups] each."""
        counter, mask = self.counter, self.mask
        pairs = np.zeros((counter.groups, counter.groups), np.int64)
        of_query = counter.owner[: mask.length]
        low, high = mask.low[:, : mask.length], mask.high[:, : mask.length]
        for k in range(counter.groups):
            # below[p]: number of this group's keys before position p.
            below = np.append(0, np.cumsum(counter.owner == k))
            seen = (below[high] - below[low]).sum(0)
            pairs[:, k] = np.rint(np.bincount(of_query, seen, counter.groups))
        if counter.block_owner is None:
            return pairs, np.zeros_like(pairs)
        return pairs, _touched_blocks(mask, counter.block, counter.block_owner, counter.groups)


def _touched_blocks(mask: SequenceMask, block: int, owner: IntArray, groups: int) -> IntArray:
    blocks = len(owner)
    total = np.zeros((groups, groups), np.int64)
    to_group = np.eye(groups)[owner]
    at_once = max(1, AT_ONCE // blocks)
    for begin in range(0, blocks, at_once):
        rows = slice(begin * block, min((begin + at_once) * block, mask.length))
        low, high = mask.low[:, rows], mask.high[:, rows]
        seen = high > low
        query = np.broadcast_to(np.arange(low.shape[1]) // block, low.shape)[seen]
        # Each interval opens at its first key block and closes after its last one.
        edges = np.zeros((min(at_once, blocks - begin), blocks + 1), np.int64)
        np.add.at(edges, (query, low[seen] // block), 1)
        np.add.at(edges, (query, (high[seen] - 1) // block + 1), -1)
        touched = (edges.cumsum(1)[:, :-1] > 0).astype(np.float64)
        own = owner[begin : begin + len(touched)]
        np.add.at(total, own, np.rint(touched @ to_group).astype(np.int64))
    return total


def column_pairs(
    last: IntArray,
    block: int,
    owner: IntArray,
    key_owner: IntArray,
    slashes: NDArray[Any],
    columns: NDArray[np.int32],
) -> tuple[int, IntArray]:
    """Count single columns without padding, and their pairs on no slash, [groups, key groups].

    last: [length], the last query that sees each key, or the keys from it on.
    owner, key_owner: int64 [blocks], the groups that hold the queries and the keys of each block.
    slashes, columns: [rows, blocks] and positions [rows, width], a row for each head and sequence.
    """
    row, at = np.nonzero(columns < len(last))
    x, off, blocks = columns[row, at].astype(np.int64), (~slashes).astype(np.int64), len(owner)
    own, end = x // block, last[x] // block
    pairs = np.zeros((key_owner.max() + 1, blocks), np.int64)  # by key group and query block
    # The rows of the column's own block that see it, and of the last block, if that is another.
    seen = np.minimum(last[x], (own + 1) * block - 1) + 1 - x
    np.add.at(pairs, (key_owner[own], own), off[row, 0] * seen)
    seen = (end > own) * (last[x] - end * block + 1)
    np.add.at(pairs, (key_owner[own], end), off[row, end - own] * seen)
    # In the blocks between these two, all rows see all columns of a block.
    alike, number = np.unique((row * blocks + own) * blocks + end, return_counts=True)
    for place, count in zip(alike.tolist(), (number * block).tolist(), strict=True):
        (head, start), stop = divmod(place // blocks, blocks), place % blocks
        pairs[key_owner[start], start + 1 : stop] += count * off[head, 1 : stop - start]
    return len(x), _summed(pairs.T, owner)


def _summed(table: IntArray, owner: IntArray) -> IntArray:
    """Sum the rows of a table by the group that holds them."""
    order = np.argsort(owner, kind="stable")
    starts = np.flatnonzero(np.diff(owner[order], prepend=-1))
    sums = np.zeros((owner.max() + 1, table.shape[1]), np.int64)
    sums[owner[order][starts]] = np.add.reduceat(table[order], starts)
    return sums
