"""Dynamic indices: which key blocks and single key columns a pattern chose, per query head.

An index is made per layer and step, in global positions, for any layout. `VerticalSlash` holds
block diagonals (slashes) and single columns: kilobytes at any length, and its transpose is a change
of sign. `BlockBitmap` holds one bit per pair of blocks. In both, a query-key pair counts once,
however many slashes and columns contain it, and the mask always applies on top.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.attention.mask import IntArray, SequenceMask

_BITS_PER_PASS = 1 << 24


@dataclass(frozen=True)
class Index(ABC):
    """The choice of one pattern for one layer.

    block: tokens per block.
    blocks: blocks of the padded sequence; the last may be short.
    """

    block: int
    blocks: int

    @property
    @abstractmethod
    def heads(self) -> tuple[int, int]:
        """Batch size and number of query heads."""

    @abstractmethod
    def chosen(self, query_blocks: torch.Tensor, key_blocks: torch.Tensor) -> torch.Tensor:
        """Return which pairs of blocks are chosen as a whole, bool [batch, heads, queries, keys].

        Arguments are global block numbers.
        """

    @abstractmethod
    def part(self, i: int, n: int) -> Index:
        """Return the i-th of n equal parts of the heads."""

    def allowed(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        """Return the index by its definition, without the mask, bool [batch, heads, queries, keys].

        Arguments are global positions.
        """
        seen = self.chosen(query_positions // self.block, key_positions // self.block)
        if isinstance(self, VerticalSlash):
            table = torch.zeros(
                *self.heads, self.blocks * self.block + 1, dtype=torch.bool, device=seen.device
            )
            table.scatter_(-1, self.columns.long(), True)
            seen = seen | table[:, :, key_positions][:, :, None]
        return seen

    @abstractmethod
    def counts(self, work: MaskWork) -> IndexCounts:
        """Return the exact work under the masks.

        Computes no attention and never waits for the device. A bitmap counts only the query blocks
        that it holds, and ``work`` must be made for these.
        """

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name."""

    def to(self, device: torch.device | str) -> Index:
        """Return the index with its tensors on a device."""
        moved: dict[str, Any] = {name: t.to(device) for name, t in self.tensors().items()}
        return replace(self, **moved)


def _head_part(tensor: torch.Tensor, i: int, n: int) -> torch.Tensor:
    return tensor.unflatten(1, (n, -1))[:, i].contiguous()


@dataclass(frozen=True)
class IndexCounts:
    """The work of one index per sequence and head, int64 [batch, heads].

    pairs: query-key pairs that index and mask allow, the useful work.
    blocks: pairs of blocks that hold at least one pair of a chosen block.
    columns: single columns.
    column_pairs: the pairs that only columns contribute, included in pairs.
    slashes: block diagonals; 0 for a bitmap.
    """

    pairs: torch.Tensor
    blocks: torch.Tensor
    columns: torch.Tensor
    column_pairs: torch.Tensor
    slashes: torch.Tensor

    def flop(self, head_dim: int) -> tuple[int, int]:
        """Return forward and backward FLOP of the useful work.

        A pair takes 2 products of 2 * head_dim FLOP forward and 5 backward.
        """
        pairs = int(self.pairs.sum())
        return 4 * head_dim * pairs, 10 * head_dim * pairs

    def parts(self, n: int) -> list[IndexCounts]:
        """Return the counts of n equal parts of the heads, as views."""
        split = [getattr(self, f.name).unflatten(1, (n, -1)).unbind(1) for f in fields(self)]
        return [IndexCounts(*columns_of_part) for columns_of_part in zip(*split, strict=True)]


@dataclass(frozen=True)
class MaskWork:
    """What the masks of a batch leave to compute, made once per batch; int64 except per_block.

    per_diagonal: [batch, blocks], allowed pairs in each block diagonal.
    touched: [batch, blocks], pairs of blocks in each diagonal that hold an allowed pair.
    last: [batch, blocks * block], last query that sees the key at each position.
    lengths: [batch], tokens without padding.
    per_block: [batch, query blocks, blocks], allowed pairs in each pair of blocks (`block_pairs`),
        for the query blocks that a bitmap holds; None unless bitmap.
    first: [batch, blocks * block], first key that the query at each position sees; None unless
        bitmap.
    """

    per_diagonal: torch.Tensor
    touched: torch.Tensor
    last: torch.Tensor
    lengths: torch.Tensor
    per_block: torch.Tensor | None
    first: torch.Tensor | None = None

    @staticmethod
    def make(
        masks: Sequence[SequenceMask],
        block: int,
        device: torch.device | str = "cpu",
        bitmap: bool = False,
        rows: IntArray | None = None,
    ) -> MaskWork:
        """Count the work that the masks leave.

        Args:
            masks: one per sequence of the batch.
            rows: the query blocks that a bitmap holds, ascending; None for all.
        """
        blocks = -(-masks[0].padded // block)
        by_diagonal = [diagonal_work(mask, block, blocks) for mask in masks]
        last = np.zeros((len(masks), blocks * block), np.int64)
        for row, mask in enumerate(masks):
            last[row, : mask.padded] = mask.last()
        arrays = (
            *map(np.stack, zip(*by_diagonal, strict=True)),
            last,
            np.array([mask.length for mask in masks]),
        )
        per_diagonal, touched, last_query, lengths = (to_device(t, device) for t in arrays)
        per_block = block_pairs(masks, block, blocks, rows, device) if bitmap else None
        if not bitmap:
            return MaskWork(per_diagonal, touched, last_query, lengths, None)
        first = np.full_like(last, blocks * block)  # padding sees no key
        for row, mask in enumerate(masks):
            first[row, : mask.length] = mask.first[: mask.length]
        return MaskWork(
            per_diagonal, touched, last_query, lengths, per_block, to_device(first, device)
        )


@dataclass(frozen=True)
class VerticalSlash(Index):
    """Block diagonals and single columns.

    slashes: bool [batch, heads, blocks]; for every set diagonal d, query block i attends to key
        block i - d.
    columns: int32 [batch, heads, width], ascending positions of keys that every later query attends
        to. Unused places hold ``blocks * block``.
    max_slashes: upper bound on the diagonals per head that the host knows without asking the
        device; 0 if unknown.
    """

    slashes: torch.Tensor
    columns: torch.Tensor
    max_slashes: int = 0

    @property
    def heads(self) -> tuple[int, int]:
        return self.slashes.shape[0], self.slashes.shape[1]

    def part(self, i: int, n: int) -> VerticalSlash:
        return (
            self
            if n == 1
            else replace(
                self, slashes=_head_part(self.slashes, i, n), columns=_head_part(self.columns, i, n)
            )
        )

    @staticmethod
    def joined(indices: Sequence[VerticalSlash]) -> VerticalSlash:
        """Join the heads of several indices of the same sequences, the inverse of `part`."""
        first = indices[0]
        assert all((i.block, i.blocks) == (first.block, first.blocks) for i in indices)
        width, none = max(i.columns.shape[-1] for i in indices), first.blocks * first.block
        columns = [
            torch.nn.functional.pad(i.columns, (0, width - i.columns.shape[-1]), value=none)
            for i in indices
        ]
        return replace(
            first,
            slashes=torch.cat([i.slashes for i in indices], 1),
            columns=torch.cat(columns, 1),
            max_slashes=0,
        )

    def without_columns(self) -> VerticalSlash:
        """Return the block diagonals alone."""
        return replace(self, columns=self.columns[..., :0])

    def chosen(self, query_blocks: torch.Tensor, key_blocks: torch.Tensor) -> torch.Tensor:
        distance = query_blocks[:, None] - key_blocks[None, :]
        return self.slashes[:, :, distance.clamp(min=0)] & (distance >= 0)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"slashes": self.slashes, "columns": self.columns}

    def counts(self, work: MaskWork) -> IndexCounts:
        slashes = self.slashes.long()
        real = self.columns < work.lengths[:, None, None]
        columns = self.columns.long().masked_fill(~real, 0)
        last = work.last[:, None].expand(-1, self.heads[1], -1).gather(-1, columns)
        alone = (
            (last - columns + 1 - self._covered_queries(columns, last))
            .masked_fill(~real, 0)
            .sum(-1)
        )
        pairs = (slashes * work.per_diagonal[:, None]).sum(-1) + alone
        return IndexCounts(
            pairs, (slashes * work.touched[:, None]).sum(-1), real.sum(-1), alone, slashes.sum(-1)
        )

    def _covered_queries(self, columns: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Count the queries that also see a column through a diagonal; shaped like columns.

        These are positions key <= q <= last whose block has the key's block on a chosen diagonal.
        """
        slashes = self.slashes.long()
        counts_below = torch.nn.functional.pad(slashes.cumsum(-1), (1, 0))
        own, end = columns // self.block, last // self.block
        distance = end - own
        # Blocks strictly between the key's block and the last one count in full, the key's block
        # from the key on, and the last block up to its row.
        between = (
            torch.where(
                distance > 0,
                counts_below.gather(-1, distance.clamp(min=1)) - counts_below[..., 1:2],
                0,
            )
            * self.block
        )
        first_rows = torch.where(distance > 0, (own + 1) * self.block - columns, last - columns + 1)
        last_rows = torch.where(
            distance > 0, slashes.gather(-1, distance) * (last - end * self.block + 1), 0
        )
        return slashes[..., :1] * first_rows + between + last_rows


def diagonal_work(
    mask: SequenceMask, block: int, blocks: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Count the allowed pairs in each block diagonal, and its pairs of blocks that hold any.

    Returns int64 [blocks] each.
    """
    q = np.arange(mask.length)
    first = mask.first[: mask.length]
    own = q // block
    distance = own - first // block
    pairs = np.zeros(blocks + 1, np.int64)
    # A row sees the end of its first visible block, its own block up to itself, and every block in
    # between.
    one = distance == 0
    np.add.at(pairs, np.zeros(one.sum(), np.int64), (q - first + 1)[one])
    more = ~one
    np.add.at(pairs, np.zeros(more.sum(), np.int64), (q - own * block + 1)[more])
    np.add.at(pairs, distance[more], ((first // block + 1) * block - first)[more])
    steps = np.zeros(blocks + 2, np.int64)
    np.add.at(steps, np.full(more.sum(), 1), block)
    np.add.at(steps, distance[more], -block)
    pairs[:blocks] += np.cumsum(steps)[:blocks]
    touched = np.zeros(blocks, np.int64)
    farthest = np.zeros(blocks, np.int64) - 1
    np.maximum.at(farthest, own, distance)
    for r in farthest[farthest >= 0]:
        touched[: r + 1] += 1
    return pairs[:blocks], touched


@dataclass(frozen=True)
class BlockBitmap(Index):
    """One bit per pair of blocks.

    bits: bool [batch, heads, held, blocks], query block by key block, never set above the diagonal.
    rows: int32 [held], the query blocks that are held, ascending. A context-parallel worker holds
        those of its own queries.
    """

    bits: torch.Tensor
    rows: torch.Tensor

    @staticmethod
    def whole(block: int, bits: torch.Tensor) -> BlockBitmap:
        """Return a bitmap that holds all query blocks. bits: [batch, heads, blocks, blocks]."""
        blocks = bits.shape[-1]
        assert bits.shape[-2] == blocks
        return BlockBitmap(
            block, blocks, bits, torch.arange(blocks, dtype=torch.int32, device=bits.device)
        )

    @property
    def heads(self) -> tuple[int, int]:
        return self.bits.shape[0], self.bits.shape[1]

    @cached_property
    def slots(self) -> torch.Tensor:
        """int32 [blocks], row of bits that holds each query block, -1 if none does."""
        slots = torch.full((self.blocks,), -1, dtype=torch.int32, device=self.rows.device)
        return slots.index_copy_(
            0,
            self.rows.long(),
            torch.arange(len(self.rows), dtype=torch.int32, device=self.rows.device),
        )

    def part(self, i: int, n: int) -> BlockBitmap:
        return self if n == 1 else replace(self, bits=_head_part(self.bits, i, n))

    def chosen(self, query_blocks: torch.Tensor, key_blocks: torch.Tensor) -> torch.Tensor:
        """Return the chosen pairs of blocks; none for query blocks that are not held."""
        slots = self.slots[query_blocks].long()
        return self.bits[:, :, slots.clamp(min=0)][..., key_blocks] & (slots >= 0)[:, None]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"bits": self.bits, "rows": self.rows}

    def counts(self, work: MaskWork) -> IndexCounts:
        assert work.per_block is not None, "bitmaps need MaskWork.make(..., bitmap=True)"
        assert work.per_block.shape[1:] == self.bits.shape[2:], (
            "work must be made for the query blocks that the bitmap holds"
        )
        zero = torch.zeros(self.heads, dtype=torch.int64, device=self.bits.device)
        pairs, blocks = zero.clone(), zero.clone()
        # Sums convert the bits to 32- or 64-bit copies, so sum a few rows at a time.
        at_once = max(1, _BITS_PER_PASS // max(1, self.bits[:, :, :1].numel()))
        exact = torch.int32 if self.blocks * self.block**2 < 2**31 else torch.int64
        for bits, mask_pairs in zip(
            self.bits.split(at_once, 2), work.per_block[:, None].split(at_once, 2), strict=True
        ):
            pairs += (bits * mask_pairs).sum(-1, dtype=exact).sum(-1)
            blocks += (bits & (mask_pairs > 0)).sum(-1, dtype=torch.int32).sum(-1)
        return IndexCounts(pairs, blocks, zero, zero, zero)


@dataclass(frozen=True)
class GatedBitmap(BlockBitmap):
    """A bitmap in which each query sees its own chunks of keys.

    A key block's bit is set if any query of the query block sees its chunk, so a kernel skips the
    others.

    gates: int32 [batch, heads, held * block, words]. Bit c % 32 of word c // 32: the query sees
        chunk c. Padding has no bit set.
    chunk: keys per chunk, a multiple of block.
    """

    gates: torch.Tensor
    chunk: int

    def part(self, i: int, n: int) -> GatedBitmap:
        return (
            self
            if n == 1
            else replace(self, bits=_head_part(self.bits, i, n), gates=_head_part(self.gates, i, n))
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        return {**super().tensors(), "gates": self.gates}

    def gated(self, held: slice) -> torch.Tensor:
        """Return the gates of some held rows, bool [batch, heads, rows, chunks]."""
        chunks = -(-self.blocks * self.block // self.chunk)
        bit = torch.arange(chunks, device=self.gates.device)
        return (self.gates[:, :, held, bit // 32] >> (bit % 32)) & 1 != 0

    def allowed(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        slots = self.slots[query_positions // self.block].long().clamp(min=0)
        words = self.gates[:, :, slots * self.block + query_positions % self.block]
        chunks = key_positions // self.chunk
        return super().allowed(query_positions, key_positions) & (
            (words[..., chunks // 32] >> (chunks % 32)) & 1 != 0
        )

    def counts(self, work: MaskWork) -> IndexCounts:
        """Count for each query the keys of its chunks that the mask allows."""
        assert work.first is not None, "bitmaps need MaskWork.make(..., bitmap=True)"
        block_counts = super().counts(work)
        within = torch.arange(self.block, device=self.rows.device)
        positions = (self.rows.long()[:, None] * self.block + within).flatten()
        starts = torch.arange(0, self.blocks * self.block, self.chunk, device=self.rows.device)
        pairs = torch.zeros_like(block_counts.pairs)
        at_once = max(1, _BITS_PER_PASS // max(1, len(starts) * self.heads[0] * self.heads[1]))
        for begin in range(0, len(positions), at_once):
            rows = slice(begin, begin + at_once)
            end = (positions[rows, None] + 1).clamp(max=starts + self.chunk)
            keys = (end - work.first[:, positions[rows], None].clamp(min=starts)).clamp_(
                min=0
            )  # [batch, rows, chunks]
            pairs += (self.gated(rows) * keys[:, None]).sum((-1, -2))
        return replace(block_counts, pairs=pairs)


def block_pairs(
    masks: Sequence[SequenceMask],
    block: int,
    blocks: int,
    rows: IntArray | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return the allowed pairs in each pair of blocks, [batch, query blocks, blocks].

    int16, or int32 for blocks of more than 181 tokens. Along a row of blocks the number changes
    only where a document begins and at the diagonal. The host finds these few places, and the
    device computes a cumulative sum of the changes.

    rows: the query blocks to count, ascending; None for all.
    """
    rows = np.arange(blocks) if rows is None else rows
    places, changes = zip(
        *(changes_of_pairs(mask, block, blocks, rows) for mask in masks), strict=True
    )
    shift = np.repeat(np.arange(len(masks)), [len(p) for p in places]) * (len(rows) * (blocks + 1))
    at, by = np.concatenate(places) + shift, np.concatenate(changes)
    dtype = torch.int16 if block * block <= torch.iinfo(torch.int16).max else torch.int32
    work = torch.zeros(len(masks), len(rows), blocks + 1, dtype=dtype, device=device)
    work.view(-1)[to_device(at, device)] = to_device(by, device).to(dtype)
    return work.cumsum(-1, dtype=dtype)[..., :-1]


def changes_of_pairs(
    mask: SequenceMask, block: int, blocks: int, rows: IntArray
) -> tuple[IntArray, IntArray]:
    """Return where the number of pairs changes along the rows of blocks, and by how much.

    Places are flat indices into [query blocks, blocks + 1].
    """
    first, q = mask.first[: mask.length], np.arange(mask.length)
    own = q // block
    # Runs of rows in the same query block and document.
    starts = np.flatnonzero(np.diff(own, prepend=-1) | np.diff(first, prepend=-1))
    count = np.diff(starts, append=mask.length)
    own, first, begin = own[starts], first[starts], q[starts]
    distance = first // block
    # Pairs in the block of the first key, in a block between, and in the query's own block, where
    # each row sees one key more than the row before.
    in_first = np.where(distance < own, count * ((distance + 1) * block - first), 0)
    between = count * block
    last = count * (begin - np.maximum(own * block, first)) + count * (count + 1) // 2
    slot = np.full(blocks, -1)
    slot[rows] = np.arange(len(rows))
    row_start = slot[own] * (blocks + 1)
    spans_blocks = distance < own
    places = np.concatenate(
        [
            (row_start + distance)[spans_blocks],
            (row_start + distance + 1)[spans_blocks],
            row_start + own,
            row_start + own + 1,
        ]
    )
    changes = np.concatenate(
        [
            in_first[spans_blocks],
            (between - in_first)[spans_blocks],
            last - np.where(spans_blocks, between, 0),
            -last,
        ]
    )
    held = np.concatenate([(slot[own] >= 0)[spans_blocks]] * 2 + [slot[own] >= 0] * 2)
    places, inverse = np.unique(places[held], return_inverse=True)
    summed = np.zeros(len(places), np.int64)
    np.add.at(summed, inverse, changes[held])
    return places, summed
