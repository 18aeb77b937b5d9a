"""Tables of a batch's masks, by position and by block, for kernels, indices and work counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from mtrain_cli.attention.mask import IntArray, SequenceMask

# The value of `first` for a query that sees nothing: above every position, yet small enough that
# `first` + block fits in int32.
NOTHING = 1 << 30


@dataclass(frozen=True)
class BlockPairs:
    """The number of allowed query-key pairs in each pair of blocks of one sequence.

    Along the key blocks of a query block, it changes only where intervals of its queries start and
    at the diagonal. changes: differences from the previous key block, at the indices in ``places``.
    """

    rows: int
    blocks: int
    places: IntArray
    changes: IntArray

    @staticmethod
    def make(
        mask: SequenceMask, block: int, blocks: int, rows: IntArray | None = None
    ) -> BlockPairs:
        """Count the pairs that a mask allows."""
        rows = np.arange(blocks) if rows is None else rows
        first, q = mask.first[: mask.length], np.arange(mask.length)
        own = q // block
        # Runs of queries in the same block that see the same first key.
        starts = np.flatnonzero(np.diff(own, prepend=-1) | np.diff(first, prepend=-1))
        count = np.diff(starts, append=mask.length)
        slot = np.full(blocks, -1)
        slot[rows] = np.arange(len(rows))
        held = slot[own[starts]] >= 0
        starts, count = starts[held], count[held]
        own, first, begin = own[starts], first[starts], q[starts]
        row_start, first_block = slot[own] * (blocks + 1), first // block
        before = first_block < own
        # Pairs of a run in the block of its first key, in each block between, and in the run's own
        # block, where each query sees one key more than the query before it.
        in_first = np.where(before, count * ((first_block + 1) * block - first), 0)
        between = np.where(before, count * block, 0)
        last = count * (begin - np.maximum(own * block, first)) + count * (count + 1) // 2
        places = np.concatenate([first_block, first_block + 1, own, own + 1])
        changes = np.concatenate([in_first, between - in_first, last - between, -last])
        places, inverse = np.unique(places + np.tile(row_start, 4), return_inverse=True)
        summed = np.zeros(len(places), np.int64)
        np.add.at(summed, inverse, changes)
        return BlockPairs(len(rows), blocks, places, summed)

    def by_diagonal(self) -> tuple[IntArray, IntArray]:
        """Return the pairs, and the blocks with any, per block diagonal, int64 [blocks]."""
        row, column = np.divmod(self.places, self.blocks + 1)
        away = row - column
        # A change on diagonal d lasts until the main diagonal, so it adds to diagonals 0 to d. A
        # change past the main diagonal (d = -1) adds to none.
        changes = np.zeros(self.blocks + 1, np.int64)
        np.add.at(changes, away, self.changes)
        farthest = np.bincount(away[np.diff(row, prepend=-1) > 0], minlength=self.blocks)
        pairs, touched = (np.cumsum(t[::-1])[::-1] for t in (changes[:-1], farthest))
        return pairs.copy(), touched.copy()

    def table(self) -> IntArray:
        """Return the number of pairs in each pair of blocks, int64 [rows, blocks]."""
        return self.rows_from(0, self.rows)

    def rows_from(self, start: int, number: int) -> IntArray:
        """Return ``number`` rows of `table` from row ``start`` on, or fewer at the end."""
        number, wide = min(number, self.rows - start), self.blocks + 1
        table = np.zeros((number, wide), np.int64)
        here = slice(*np.searchsorted(self.places, (start * wide, (start + number) * wide)))
        table.flat[self.places[here] - start * wide] = self.changes[here]
        return table.cumsum(1)[:, :-1]


@dataclass(frozen=True)
class MaskTables:
    """The masks of a batch, shared by all shards and layers. Tensors are int32 unless noted.

    plain: whether every mask is causal only, without documents or padding. In that case only blocks
        on the diagonal are partial.
    first: [batch, blocks * block], position of the first key that the query at each position sees;
        `NOTHING` for padding.
    last: [batch, blocks * block], position of the last query that sees the key at each position.
    first_min, first_max: [batch, blocks], of ``first`` over each query block. first_max is
        `NOTHING` if a query of the block sees no key, so that no key block is full for it.
    changes: int64 [2, changes], `BlockPairs` of the bitmap's query blocks, for all sequences.
    """

    block: int
    blocks: int
    padded: int
    plain: bool
    lengths: Tensor
    first: Tensor
    last: Tensor
    first_min: Tensor
    first_max: Tensor
    per_diagonal: Tensor
    touched: Tensor
    rows: int
    changes: Tensor

    @staticmethod
    def make(
        masks: Sequence[SequenceMask],
        block: int,
        *,
        bitmap: bool = False,
        rows: IntArray | None = None,
    ) -> MaskTables:
        padded = masks[0].padded
        blocks = -(-padded // block)
        first = np.full((len(masks), blocks * block), NOTHING, np.int32)
        last = np.empty_like(first)
        pairs, held = [], []
        for row, mask in enumerate(masks):
            first[row, : mask.length] = mask.first[: mask.length]
            last[row, :padded], last[row, padded:] = mask.last(), mask.length - 1
            pairs.append(BlockPairs.make(mask, block, blocks))
            if bitmap:
                held.append(
                    pairs[-1] if rows is None else BlockPairs.make(mask, block, blocks, rows)
                )
        by_block = first.reshape(len(masks), blocks, block)
        first_max = by_block.max(-1)
        # Positions beyond the padded sequence must not constrain full blocks.
        first_max[:, -1] = by_block[:, -1, : padded - (blocks - 1) * block].max(-1)
        per_diagonal, touched = zip(*(p.by_diagonal() for p in pairs), strict=True)
        return MaskTables(
            block=block,
            blocks=blocks,
            padded=padded,
            plain=all(mask.plain for mask in masks),
            lengths=torch.tensor([mask.length for mask in masks]),
            first=torch.from_numpy(first),
            last=torch.from_numpy(last),
            first_min=torch.from_numpy(by_block.min(-1)),
            first_max=torch.from_numpy(first_max),
            per_diagonal=torch.from_numpy(np.stack(per_diagonal)),
            touched=torch.from_numpy(np.stack(touched)),
            rows=held[0].rows if held else 0,
            changes=_joined_changes(held),
        )

    @property
    def device(self) -> torch.device:
        return self.first.device

    @cached_property
    def per_block(self) -> Tensor:
        """Number of allowed pairs in each pair of blocks, [batch, rows of the bitmap, blocks].

        The dtype is int16, or int32 for blocks of more than 181 tokens.
        """
        dtype = torch.int16 if self.block**2 <= torch.iinfo(torch.int16).max else torch.int32
        shape = len(self.lengths), self.rows, self.blocks + 1
        table = torch.zeros(shape, dtype=dtype, device=self.changes.device)
        table.view(-1)[self.changes[0]] = self.changes[1].to(dtype)
        return table.cumsum(-1, dtype=dtype)[..., :-1]

    def between(self, query_positions: IntArray, key_positions: IntArray) -> BlockGeometry:
        """Return the geometry of a query shard and a key shard, on the host."""
        query_blocks, key_blocks = (
            whole_blocks(p, self.block, self.padded) for p in (query_positions, key_positions)
        )
        slots = np.full((2, self.blocks), -1, np.int32)
        slots[0, query_blocks] = np.arange(len(query_blocks))
        slots[1, key_blocks] = np.arange(len(key_blocks))
        present = slots >= 0
        # Find which differences of block numbers occur by correlating the two sets.
        size = 2 * self.blocks
        spectrum = np.fft.rfft(present[0], size) * np.conj(np.fft.rfft(present[1], size))
        diagonals = np.fft.irfft(spectrum, size)[: self.blocks] > 0.5
        below = np.append(0, np.cumsum(present[0]))
        arrays = [query_blocks, key_blocks, *slots, below]
        q, k, q_slot, k_slot, count = (torch.from_numpy(t.astype(np.int32)) for t in arrays)
        occur, holes = torch.from_numpy(diagonals), not present.all()
        return BlockGeometry(self, q, k, q_slot, k_slot, count, occur, holes)


def _joined_changes(pairs: Sequence[BlockPairs]) -> Tensor:
    """Return ``places`` and ``changes`` of several sequences as one table, int64 [2, changes]."""
    joined = [np.empty((2, 0), np.int64)]
    for row, p in enumerate(pairs):
        joined.append(np.stack([p.places + row * p.rows * (p.blocks + 1), p.changes]))
    return torch.from_numpy(np.concatenate(joined, 1))


@dataclass(frozen=True)
class BlockGeometry:
    """The masks of a batch, and the blocks that a query shard and a key shard hold.

    Tensors are int32. diagonals: bool [blocks], which (query block - key block) occur between them.
    """

    tables: MaskTables
    query_blocks: Tensor
    key_blocks: Tensor
    query_slot: Tensor
    key_slot: Tensor
    query_count: Tensor
    diagonals: Tensor
    holes: bool

    @property
    def block(self) -> int:
        return self.tables.block

    @property
    def blocks(self) -> int:
        return self.tables.blocks

    @property
    def all_keys(self) -> bool:
        """Whether the key shard holds every block, so that a key's slot is its position."""
        return self.key_blocks.numel() == self.blocks

    @cached_property
    def key_starts(self) -> Tensor:
        """int32 [blocks + 1], slot of each block's first key; negative if absent or at the end."""
        return torch.nn.functional.pad(self.key_slot, (0, 1), value=-1) * self.block


def whole_blocks(positions: IntArray, block: int, padded: int) -> IntArray:
    """Return the global block numbers of a shard."""
    starts = positions[::block]
    whole = (starts[:, None] + np.arange(block)).reshape(-1)
    if (starts % block).any() or not np.array_equal(whole[: whole.searchsorted(padded)], positions):
        raise ValueError(
            f"A shard of {len(positions)} positions is not made of whole blocks of {block}."
        )
    return starts // block
