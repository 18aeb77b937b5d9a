"""Dynamic indices: which key blocks and single key columns a pattern chose, per query head, out of what the mask allows.

An index is made for one layer and step, in global positions, whatever the layout. Two forms exist. `VerticalSlash` holds block diagonals
(slashes) and single columns: kilobytes at any length, and its transpose is a change of sign. `BlockBitmap` holds a bit for every
pair of blocks. In both, a pair of query and key counts once, however many lines contain it, and a mask always applies on top.
"""

from __future__ import annotations

import zipfile
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.attention.mask import IntArray, SequenceMask

_COUNTED_AT_ONCE = 1 << 24  # bits


@dataclass(frozen=True)
class Index(ABC):
    """block: tokens of a block; blocks: blocks of the padded sequence, whose last block may be short."""

    block: int
    blocks: int

    @property
    @abstractmethod
    def heads(self) -> tuple[int, int]:
        """Batch and query heads."""

    @abstractmethod
    def chosen(self, query_blocks: torch.Tensor, key_blocks: torch.Tensor) -> torch.Tensor:
        """bool [batch, heads, queries, keys]: which pairs of blocks (given by their global numbers) are chosen as a whole."""

    @abstractmethod
    def part(self, i: int, n: int) -> Index:
        """The i-th of n equal parts of the heads."""

    def allowed(self, query_positions: torch.Tensor, key_positions: torch.Tensor) -> torch.Tensor:
        """bool [batch, heads, queries, keys]: the index from its definition, position by position, without the mask."""
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
        """Exact work under the masks, from the index alone: no attention is computed, and nothing waits for the device.

        The work of all queries, or of a bitmap that of the query blocks it holds, which ``work`` has to be made for.
        """

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """What `save` writes."""

    def to(self, device: torch.device | str) -> Index:
        """The same index with its tensors elsewhere."""
        moved: dict[str, Any] = {name: t.to(device) for name, t in self.tensors().items()}
        return replace(self, **moved)

    def save(self, path: Path) -> None:
        """Writes the index to exactly that file, in NumPy's .npz format."""
        values: dict[str, Any] = {name: t.cpu().numpy() for name, t in self.tensors().items()}
        if isinstance(self, GatedBitmap):
            values["chunk"] = self.chunk
        with Path(path).open("wb") as file:  # a path, unlike a file, would be given another ending
            np.savez_compressed(
                file, kind=type(self).__name__, block=self.block, blocks=self.blocks, **values
            )

    def same_as(self, other: Index) -> bool:
        """Whether both choose the same blocks and columns."""
        if type(self) is not type(other) or (self.block, self.blocks, self.heads) != (
            other.block,
            other.blocks,
            other.heads,
        ):
            return False
        mine, theirs = self.tensors(), other.tensors()
        return all(
            _same(mine[name].cpu(), theirs[name].cpu(), self.blocks * self.block) for name in mine
        )


def _part(of_heads: torch.Tensor, i: int, n: int) -> torch.Tensor:
    return of_heads.unflatten(1, (n, -1))[:, i].contiguous()


def _same(a: torch.Tensor, b: torch.Tensor, unused: int) -> bool:
    """Equal but for the width that columns were filled up to."""
    width = max(a.shape[-1], b.shape[-1])
    a, b = (
        torch.nn.functional.pad(t.long(), (0, width - t.shape[-1]), value=unused) for t in (a, b)
    )
    return torch.equal(a, b)


def load_index(path: Path, device: torch.device | str = "cpu") -> Index:
    """Reads what `Index.save` wrote.

    Raises:
        ValueError: the file holds no index.
    """
    kinds = {cls.__name__: cls for cls in (VerticalSlash, BlockBitmap, GatedBitmap)}
    # Whatever NumPy, zipfile or a constructor makes of another file: an array, a pickle, a damaged or foreign archive.
    foreign = (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
    )
    try:
        with np.load(path, allow_pickle=False) as file:
            values: dict[str, Any] = {
                name: torch.from_numpy(file[name]).to(device)
                for name in file.files
                if name not in ("kind", "block", "blocks", "chunk")
            }
            if "chunk" in file.files:
                values["chunk"] = int(file["chunk"])
            return kinds[str(file["kind"])](int(file["block"]), int(file["blocks"]), **values)
    except foreign as error:
        raise ValueError(f"{path}: holds no index of mtrain.") from error


@dataclass(frozen=True)
class IndexCounts:
    """Work of one index per sequence and head, int64 [batch, heads].

    pairs: query-key pairs that index and mask allow: the useful work. blocks: pairs of blocks that hold at least one pair of a chosen
    block. columns: single columns. column_pairs: the part of pairs that only columns give. slashes: block diagonals (0 for a bitmap).
    """

    pairs: torch.Tensor
    blocks: torch.Tensor
    columns: torch.Tensor
    column_pairs: torch.Tensor
    slashes: torch.Tensor

    def flop(self, head_dim: int) -> tuple[int, int]:
        """Forward and backward FLOP of the useful work over batch and heads: 2 and 5 products of 2 * head_dim a pair."""
        pairs = int(self.pairs.sum())
        return 4 * head_dim * pairs, 10 * head_dim * pairs

    def parts(self, n: int) -> list[IndexCounts]:
        """Of n equal parts of the heads, views."""
        split = [getattr(self, f.name).unflatten(1, (n, -1)).unbind(1) for f in fields(self)]
        return [IndexCounts(*of_part) for of_part in zip(*split, strict=True)]


@dataclass(frozen=True)
class MaskWork:
    """What the masks of a batch leave to compute, in blocks; tensors made once per batch, int64 but for per_block (`block_pairs`).

    per_diagonal, touched: [batch, blocks], allowed pairs in each block diagonal, and pairs of blocks that hold any. last: [batch, blocks *
    block], the last query that sees the key at a position. lengths: [batch] tokens that are no padding. per_block: [batch, query
    blocks, blocks] allowed pairs of each pair of blocks, for bitmaps only and for the query blocks that these hold. first: [batch, blocks *
    block], the first key that the query at a position sees, for bitmaps only.
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
        """masks: one per sequence of the batch. rows: the query blocks that a bitmap holds, ascending; None for all."""
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
        per_diagonal, touched, last_of, lengths = (to_device(t, device) for t in arrays)
        per_block = block_pairs(masks, block, blocks, rows, device) if bitmap else None
        if not bitmap:
            return MaskWork(per_diagonal, touched, last_of, lengths, None)
        first = np.full_like(last, blocks * block)  # padding sees nothing
        for row, mask in enumerate(masks):
            first[row, : mask.length] = mask.first[: mask.length]
        return MaskWork(
            per_diagonal, touched, last_of, lengths, per_block, to_device(first, device)
        )


@dataclass(frozen=True)
class VerticalSlash(Index):
    """slashes: bool [batch, heads, blocks], block diagonals: query block i computes key block i - d for every d that is set.

    columns: int32 [batch, heads, width], ascending positions of single keys that every later query computes; ``blocks * block`` fills
        what is not used.
    most: no head has more diagonals, as far as the host knows without asking the device; 0: it does not know.
    """

    slashes: torch.Tensor
    columns: torch.Tensor
    most: int = 0

    @property
    def heads(self) -> tuple[int, int]:
        return self.slashes.shape[0], self.slashes.shape[1]

    def part(self, i: int, n: int) -> VerticalSlash:
        return (
            self
            if n == 1
            else replace(self, slashes=_part(self.slashes, i, n), columns=_part(self.columns, i, n))
        )

    @staticmethod
    def joined(indices: Sequence[VerticalSlash]) -> VerticalSlash:
        """The heads of several indices of the same sequences side by side: what `part` takes apart again."""
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
            most=0,
        )

    def without_columns(self) -> VerticalSlash:
        """Its block diagonals alone."""
        return replace(self, columns=self.columns[..., :0])

    def chosen(self, query_blocks: torch.Tensor, key_blocks: torch.Tensor) -> torch.Tensor:
        away = query_blocks[:, None] - key_blocks[None, :]
        return self.slashes[:, :, away.clamp(min=0)] & (away >= 0)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"slashes": self.slashes, "columns": self.columns}

    def counts(self, work: MaskWork) -> IndexCounts:
        on = self.slashes.long()
        real = self.columns < work.lengths[:, None, None]
        columns = self.columns.long().masked_fill(~real, 0)
        last = work.last[:, None].expand(-1, self.heads[1], -1).gather(-1, columns)
        alone = (last - columns + 1 - self._covered(columns, last)).masked_fill(~real, 0).sum(-1)
        pairs = (on * work.per_diagonal[:, None]).sum(-1) + alone
        return IndexCounts(
            pairs, (on * work.touched[:, None]).sum(-1), real.sum(-1), alone, on.sum(-1)
        )

    def _covered(self, columns: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """Query positions key <= q <= last whose block lies on a diagonal that holds the key's block; like columns."""
        on = self.slashes.long()
        upto = torch.nn.functional.pad(on.cumsum(-1), (1, 0))
        own, end = columns // self.block, last // self.block
        away = end - own
        # Blocks strictly between the key's own and the last one count in full, the own one from the key on, the last one up to its row.
        between = (
            torch.where(away > 0, upto.gather(-1, away.clamp(min=1)) - upto[..., 1:2], 0)
            * self.block
        )
        first_rows = torch.where(away > 0, (own + 1) * self.block - columns, last - columns + 1)
        last_rows = torch.where(away > 0, on.gather(-1, away) * (last - end * self.block + 1), 0)
        return on[..., :1] * first_rows + between + last_rows


def diagonal_work(
    mask: SequenceMask, block: int, blocks: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Per block diagonal d: allowed pairs in it, and pairs of blocks that hold any. int64 [blocks] each."""
    q = np.arange(mask.length)
    first = mask.first[: mask.length]
    own = q // block
    away = own - first // block
    pairs = np.zeros(blocks + 1, np.int64)
    # Each row sees all of the blocks between the first visible one and its own, the end of the first, and its own up to itself.
    one = away == 0
    np.add.at(pairs, np.zeros(one.sum(), np.int64), (q - first + 1)[one])
    more = ~one
    np.add.at(pairs, np.zeros(more.sum(), np.int64), (q - own * block + 1)[more])
    np.add.at(pairs, away[more], ((first // block + 1) * block - first)[more])
    steps = np.zeros(blocks + 2, np.int64)
    np.add.at(steps, np.full(more.sum(), 1), block)
    np.add.at(steps, away[more], -block)
    pairs[:blocks] += np.cumsum(steps)[:blocks]
    touched = np.zeros(blocks, np.int64)
    reach = np.zeros(blocks, np.int64) - 1
    np.maximum.at(reach, own, away)
    for r in reach[reach >= 0]:
        touched[: r + 1] += 1
    return pairs[:blocks], touched


@dataclass(frozen=True)
class BlockBitmap(Index):
    """bits: bool [batch, heads, held, blocks], query block by key block; only key blocks up to the query's own are ever set.

    rows: int32 [held], ascending: which query blocks of the sequence are held. A worker of a context group holds those of its own queries.
    """

    bits: torch.Tensor
    rows: torch.Tensor

    @staticmethod
    def whole(block: int, bits: torch.Tensor) -> BlockBitmap:
        """All query blocks: bits [batch, heads, blocks, blocks]."""
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
        """int32 [blocks], the row of bits that holds each query block, -1 where none does."""
        slots = torch.full((self.blocks,), -1, dtype=torch.int32, device=self.rows.device)
        return slots.index_copy_(
            0,
            self.rows.long(),
            torch.arange(len(self.rows), dtype=torch.int32, device=self.rows.device),
        )

    def part(self, i: int, n: int) -> BlockBitmap:
        return self if n == 1 else replace(self, bits=_part(self.bits, i, n))

    def chosen(self, query_blocks: torch.Tensor, key_blocks: torch.Tensor) -> torch.Tensor:
        """As for every index; nothing is chosen for query blocks that are not held."""
        slots = self.slots[query_blocks].long()
        return self.bits[:, :, slots.clamp(min=0)][..., key_blocks] & (slots >= 0)[:, None]

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"bits": self.bits, "rows": self.rows}

    def counts(self, work: MaskWork) -> IndexCounts:
        assert work.per_block is not None, "work for bitmaps is asked for"
        assert work.per_block.shape[1:] == self.bits.shape[2:], (
            "work is made for the query blocks that are held"
        )
        zero = torch.zeros(self.heads, dtype=torch.int64, device=self.bits.device)
        pairs, blocks = zero.clone(), zero.clone()
        # Sums of integers are made on copies of 32 or 64 bits a number: a few rows at a time.
        at_once = max(1, _COUNTED_AT_ONCE // max(1, self.bits[:, :, :1].numel()))
        exact = torch.int32 if self.blocks * self.block**2 < 2**31 else torch.int64
        for bits, of_mask in zip(
            self.bits.split(at_once, 2), work.per_block[:, None].split(at_once, 2), strict=True
        ):
            pairs += (bits * of_mask).sum(-1, dtype=exact).sum(-1)
            blocks += (bits & (of_mask > 0)).sum(-1, dtype=torch.int32).sum(-1)
        return IndexCounts(pairs, blocks, zero, zero, zero)


@dataclass(frozen=True)
class GatedBitmap(BlockBitmap):
    """A bitmap in which each query sees its own chunks of keys. A block of keys is set if any query of the block sees its chunk, so
    that a kernel skips the others.

    gates: int32 [batch, heads, held * block, words], bit c % 32 of word c // 32: the query sees chunk c. None is set for padding.
    chunk: keys of a chunk, a multiple of block.
    """

    gates: torch.Tensor
    chunk: int

    def part(self, i: int, n: int) -> GatedBitmap:
        return (
            self
            if n == 1
            else replace(self, bits=_part(self.bits, i, n), gates=_part(self.gates, i, n))
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        return {**super().tensors(), "gates": self.gates}

    def same_as(self, other: Index) -> bool:
        return (
            isinstance(other, GatedBitmap) and self.chunk == other.chunk and super().same_as(other)
        )

    def gated(self, held: slice) -> torch.Tensor:
        """bool [batch, heads, rows, chunks] of some of the held rows."""
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
        """A query counts the keys of its chunks that the mask allows it."""
        assert work.first is not None, "work for bitmaps is asked for"
        whole = super().counts(work)
        within = torch.arange(self.block, device=self.rows.device)
        positions = (self.rows.long()[:, None] * self.block + within).flatten()
        starts = torch.arange(0, self.blocks * self.block, self.chunk, device=self.rows.device)
        pairs = torch.zeros_like(whole.pairs)
        at_once = max(1, _COUNTED_AT_ONCE // max(1, len(starts) * self.heads[0] * self.heads[1]))
        for begin in range(0, len(positions), at_once):
            some = slice(begin, begin + at_once)
            end = (positions[some, None] + 1).clamp(max=starts + self.chunk)
            keys = (end - work.first[:, positions[some], None].clamp(min=starts)).clamp_(
                min=0
            )  # [batch, rows, chunks]
            pairs += (self.gated(some) * keys[:, None]).sum((-1, -2))
        return replace(whole, pairs=pairs)


def block_pairs(
    masks: Sequence[SequenceMask],
    block: int,
    blocks: int,
    rows: IntArray | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Allowed pairs in each pair of blocks, int16 [batch, query blocks, blocks], int32 for blocks of more than 181 tokens.

    rows: which query blocks, ascending; None for all. Along a row of blocks the number changes where a document begins and at the diagonal
    only: the host finds these few places, and the device adds up the changes.
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
    """Where in [query blocks, blocks + 1], flat, the pairs of a block of keys differ from those of the block before it, and by how much."""
    first, q = mask.first[: mask.length], np.arange(mask.length)
    own = q // block
    # Runs of rows of one query block and document.
    starts = np.flatnonzero(np.diff(own, prepend=-1) | np.diff(first, prepend=-1))
    count = np.diff(starts, append=mask.length)
    own, first, begin = own[starts], first[starts], q[starts]
    away = first // block
    # In the block of the first key, in those between, and in the query's own, whose rows see one key more each.
    there = np.where(away < own, count * ((away + 1) * block - first), 0)
    between = count * block
    last = count * (begin - np.maximum(own * block, first)) + count * (count + 1) // 2
    slot = np.full(blocks, -1)
    slot[rows] = np.arange(len(rows))
    line = slot[own] * (blocks + 1)
    ahead = away < own
    places = np.concatenate(
        [(line + away)[ahead], (line + away + 1)[ahead], line + own, line + own + 1]
    )
    changes = np.concatenate(
        [there[ahead], (between - there)[ahead], last - np.where(ahead, between, 0), -last]
    )
    held = np.concatenate([(slot[own] >= 0)[ahead]] * 2 + [slot[own] >= 0] * 2)
    places, of = np.unique(places[held], return_inverse=True)
    summed = np.zeros(len(places), np.int64)
    np.add.at(summed, of, changes[held])
    return places, summed
