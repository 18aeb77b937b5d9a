"""Dynamic indices: which key blocks and single key columns a pattern chose, per query head.

A `VerticalSlash` takes kilobytes at any length. Pairs in several of its lines are computed once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from mtrain_cli.attention.device_copy import map_tensors
from mtrain_cli.attention.mask_tables import MaskTables
from mtrain_cli.attention.partials import has_triton

_BITS_PER_PASS = 1 << 24


@dataclass(frozen=True)
class Index(ABC):
    """The query-key pairs that a pattern chose for one layer.

    by_head: names of the fields [batch, heads, ...].
    """

    block: int
    blocks: int
    by_head: ClassVar[tuple[str, ...]]

    @property
    def heads(self) -> tuple[int, int]:
        """Batch size and number of query heads."""
        batch, heads = getattr(self, self.by_head[0]).shape[:2]
        return batch, heads

    @abstractmethod
    def chosen(self, query_blocks: Tensor, key_blocks: Tensor) -> Tensor:
        """Return which pairs of blocks are chosen, bool [batch, heads, queries, keys]."""

    def part(self, i: int, n: int) -> Self:
        if n == 1:
            return self
        tensors = {name: getattr(self, name).unflatten(1, (n, -1))[:, i] for name in self.by_head}
        return replace(self, **{name: tensor.contiguous() for name, tensor in tensors.items()})

    def allowed(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Return which query-key pairs the index allows, bool [batch, heads, queries, keys]."""
        seen = self.chosen(query_positions // self.block, key_positions // self.block)
        if isinstance(self, VerticalSlash):
            table = torch.zeros(
                *self.heads, self.blocks * self.block + 1, dtype=torch.bool, device=seen.device
            )
            table.scatter_(-1, self.columns.long(), True)
            seen = seen | table[:, :, key_positions][:, :, None]
        return seen

    @abstractmethod
    def counts(self, tables: MaskTables) -> IndexCounts:
        """Count the work that index and masks leave, without waiting for the device.

        tables: for a bitmap, made with ``bitmap=True`` and its ``rows``, to which the counts refer.
        """

    def tensors(self) -> dict[str, Tensor]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def to(self, device: torch.device | str) -> Index:
        return map_tensors(self, lambda tensor: tensor.to(device))


@dataclass(frozen=True)
class IndexCounts:
    """The work that one index leaves, int64 [batch, heads].

    blocks: number of chosen (query block, key block) pairs that contain an allowed query-key pair.
    column_pairs: number of the allowed query-key pairs that no chosen block contains.
    slashes: number of block diagonals; 0 for a bitmap.
    """

    pairs: Tensor
    blocks: Tensor
    columns: Tensor
    column_pairs: Tensor
    slashes: Tensor

    def flop(self, head_dim: int) -> tuple[int, int]:
        """Return the FLOP of the allowed pairs: (forward, backward)."""
        pairs = int(self.pairs.sum())
        return 4 * head_dim * pairs, 10 * head_dim * pairs

    def parts(self, n: int) -> list[IndexCounts]:
        """Return the counts of each of n equal parts of the heads, as views."""
        split = [getattr(self, f.name).unflatten(1, (n, -1)).unbind(1) for f in fields(self)]
        return [IndexCounts(*counts) for counts in zip(*split, strict=True)]


@dataclass(frozen=True)
class VerticalSlash(Index):
    """Block diagonals and single columns.

    slashes: bool [batch, heads, blocks]. On a chosen diagonal d, query block i sees key block i -
        d.
    columns: int32 [batch, heads, width], ascending positions of keys that every later query sees.
        Unused entries hold ``blocks * block``.
    max_slashes: most diagonals of a head; 0 if only the device knows.
    has_own_blocks: whether diagonal 0 is surely chosen for every head.
    """

    slashes: Tensor
    columns: Tensor
    max_slashes: int = 0
    has_own_blocks: bool = False
    by_head: ClassVar = ("slashes", "columns")

    @staticmethod
    def joined(indices: Sequence[VerticalSlash]) -> VerticalSlash:
        """Join indices of the same sequences along the heads: the inverse of `part`."""
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
        return replace(self, columns=self.columns[..., :0])

    def chosen(self, query_blocks: Tensor, key_blocks: Tensor) -> Tensor:
        distance = query_blocks[:, None] - key_blocks[None, :]
        return self.slashes[:, :, distance.clamp(min=0)] & (distance >= 0)

    def counts(self, tables: MaskTables) -> IndexCounts:
        slashes = self.slashes.long()
        real = self.columns < tables.lengths[:, None, None]
        columns = self.columns.long().masked_fill(~real, 0)
        last = tables.last[:, None].expand(-1, self.heads[1], -1).gather(-1, columns).long()
        queries = last - columns + 1 - self._covered_queries(columns, last)
        column_pairs = queries.masked_fill(~real, 0).sum(-1)
        pairs = (slashes * tables.per_diagonal[:, None]).sum(-1) + column_pairs
        blocks = (slashes * tables.touched[:, None]).sum(-1)
        return IndexCounts(pairs, blocks, real.sum(-1), column_pairs, slashes.sum(-1))

    def _covered_queries(self, columns: Tensor, last: Tensor) -> Tensor:
        """Return for each column how many queries also see it through a chosen diagonal."""
        slashes = self.slashes.long()
        counts_below = torch.nn.functional.pad(slashes.cumsum(-1), (1, 0))
        own, end = columns // self.block, last // self.block
        distance = end - own
        # Add up the rows of the key's own block from the key on, all rows of the blocks between,
        # and the rows of the last block up to the last query.
        between = counts_below.gather(-1, distance.clamp(min=1)) - counts_below[..., 1:2]
        first_rows = torch.where(distance > 0, (own + 1) * self.block - columns, last - columns + 1)
        last_rows = slashes.gather(-1, distance) * (last - end * self.block + 1)
        later_rows = torch.where(distance > 0, between * self.block + last_rows, 0)
        return slashes[..., :1] * first_rows + later_rows


@dataclass(frozen=True)
class BlockBitmap(Index):
    """One bit per pair of blocks.

    rows: int32 [rows], query block numbers of the rows of ``bits``, ascending; a worker has only
        its own.
    """

    bits: Tensor
    rows: Tensor
    by_head: ClassVar[tuple[str, ...]] = ("bits",)

    @staticmethod
    def whole(block: int, bits: Tensor) -> BlockBitmap:
        """Return the bitmap of all query blocks. bits: [batch, heads, blocks, blocks]."""
        blocks = bits.shape[-1]
        assert bits.shape[-2] == blocks
        rows = torch.arange(blocks, dtype=torch.int32, device=bits.device)
        return BlockBitmap(block, blocks, bits, rows)

    def with_rows(self, rows: Tensor, change: Callable[[Tensor], Tensor]) -> Self:
        """Return the bitmap with other rows. change: applied to each tensor with an axis of rows.

        Such tensors are [batch, heads, rows, ...], or several rows for each row of ``bits``.
        """
        tensors: dict[str, Any] = {name: change(getattr(self, name)) for name in self.by_head}
        return replace(self, rows=rows, **tensors)

    @cached_property
    def slots(self) -> Tensor:
        """int32 [blocks], index of each query block's row in ``bits``; -1 if there is no row."""
        slots = torch.full((self.blocks,), -1, dtype=torch.int32, device=self.rows.device)
        numbers = torch.arange(len(self.rows), dtype=torch.int32, device=self.rows.device)
        return slots.index_copy_(0, self.rows.long(), numbers)

    def chosen(self, query_blocks: Tensor, key_blocks: Tensor) -> Tensor:
        """Return which pairs of blocks are chosen. Query blocks outside ``rows`` have none."""
        slots = self.slots[query_blocks].long()
        return self.bits[:, :, slots.clamp(min=0)][..., key_blocks] & (slots >= 0)[:, None]

    def counts(self, tables: MaskTables) -> IndexCounts:
        assert tables.per_block.shape[1:] == self.bits.shape[2:], (
            "give MaskTables.make(..., bitmap=True) the query blocks of the bitmap"
        )
        zero = torch.zeros(self.heads, dtype=torch.int64, device=self.bits.device)
        pairs, blocks = zero.clone(), zero.clone()
        # A sum converts the bits to 32- or 64-bit numbers, so sum a few rows at a time.
        at_once = max(1, _BITS_PER_PASS // max(1, self.bits[:, :, :1].numel()))
        exact = torch.int32 if self.blocks * self.block**2 < 2**31 else torch.int64
        for bits, mask_pairs in zip(
            self.bits.split(at_once, 2), tables.per_block[:, None].split(at_once, 2), strict=True
        ):
            pairs += (bits * mask_pairs).sum(-1, dtype=exact).sum(-1)
            blocks += (bits & (mask_pairs > 0)).sum(-1, dtype=torch.int32).sum(-1)
        return IndexCounts(pairs, blocks, zero, zero, zero)


@dataclass(frozen=True)
class GatedBitmap(BlockBitmap):
    """A bitmap in which each query chooses its own chunks of keys.

    gates: int32 [batch, heads, rows * block, words], the choice of each query: bit c % 32 of word
        c // 32 stands for chunk c. Padding has no bit set.
    """

    gates: Tensor
    chunk: int
    by_head: ClassVar = ("bits", "gates")

    def gated(self, queries: slice) -> Tensor:
        """Return which chunks each query of a slice chose, bool [batch, heads, queries, chunks]."""
        chunks = -(-self.blocks * self.block // self.chunk)
        bit = torch.arange(chunks, device=self.gates.device)
        return (self.gates[:, :, queries, bit // 32] >> (bit % 32)) & 1 != 0

    def allowed(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        slots = self.slots[query_positions // self.block].long().clamp(min=0)
        words = self.gates[:, :, slots * self.block + query_positions % self.block]
        chunks = key_positions // self.chunk
        return super().allowed(query_positions, key_positions) & (
            (words[..., chunks // 32] >> (chunks % 32)) & 1 != 0
        )

    def counts(self, tables: MaskTables) -> IndexCounts:
        """Count the work of the bitmap, but only query-key pairs whose chunk the query chose."""
        return replace(super().counts(tables), pairs=sum_of_gated(self, tables))


@dataclass(frozen=True)
class StartBitmap(BlockBitmap):
    """A bitmap in which a chosen block is seen from one query of its query block on.

    starts: uint8, shaped like ``bits``, offset of that query. It means nothing where the block is
        not chosen.
    sharing: how many query heads in a row share a head of ``bits`` and ``starts``.
    """

    starts: Tensor
    sharing: int = 1
    by_head: ClassVar = ("bits", "starts")

    @property
    def heads(self) -> tuple[int, int]:
        batch, own = self.bits.shape[:2]
        return batch, own * self.sharing

    def per_head(self) -> StartBitmap:
        """Return the same index with bits and starts of each query head."""
        if self.sharing == 1:
            return self
        bits, starts = (t.repeat_interleave(self.sharing, 1) for t in (self.bits, self.starts))
        return replace(self, bits=bits, starts=starts, sharing=1)

    def part(self, i: int, n: int) -> StartBitmap:
        whole = self.per_head() if self.bits.shape[1] % n else self
        return super(StartBitmap, whole).part(i, n)

    def chosen(self, query_blocks: Tensor, key_blocks: Tensor) -> Tensor:
        return super().chosen(query_blocks, key_blocks).repeat_interleave(self.sharing, 1)

    @property
    def chunk(self) -> int:
        return self.block

    def gated(self, queries: slice) -> Tensor:
        """Return which blocks each query of a slice sees, bool [batch, heads, queries, blocks]."""
        row = torch.arange(len(self.rows) * self.block, device=self.rows.device)[queries]
        seen = self._seen(row // self.block, row % self.block)
        return seen.repeat_interleave(self.sharing, 1)

    def _seen(self, slots: Tensor, in_block: Tensor) -> Tensor:
        return self.bits[:, :, slots] & (self.starts[:, :, slots] <= in_block[:, None])

    def allowed(self, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        slots = self.slots[query_positions // self.block].long()
        seen = self._seen(slots.clamp(min=0), query_positions % self.block)
        seen = seen[..., key_positions // self.block] & (slots >= 0)[:, None]
        return seen.repeat_interleave(self.sharing, 1)

    def counts(self, tables: MaskTables) -> IndexCounts:
        """Count the work of the bitmap, but only pairs from the first query of a block on."""
        if self.sharing > 1:
            own = replace(self, sharing=1).counts(tables)
            numbers = (getattr(own, f.name) for f in fields(own))
            return IndexCounts(*(n.repeat_interleave(self.sharing, 1) for n in numbers))
        block_counts = super().counts(tables)
        if self.bits.is_cuda and has_triton():
            from mtrain_cli.kernels.triton.block_scores import count_pairs

            pairs = count_pairs(self.bits, self.starts, self.rows, tables.first)
        else:
            pairs = sum_of_gated(self, tables)
        return replace(block_counts, pairs=pairs)


def sum_of_gated(index: GatedBitmap | StartBitmap, tables: MaskTables) -> Tensor:
    """Return the allowed query-key pairs whose chunk the query sees, int64 [batch, heads]."""
    within = torch.arange(index.block, device=index.rows.device)
    positions = (index.rows.long()[:, None] * index.block + within).flatten()
    starts = torch.arange(0, index.blocks * index.block, index.chunk, device=index.rows.device)
    pairs = torch.zeros(index.heads, dtype=torch.int64, device=index.rows.device)
    at_once = max(1, _BITS_PER_PASS // max(1, len(starts) * pairs.numel()))
    for begin in range(0, len(positions), at_once):
        rows = slice(begin, begin + at_once)
        end = (positions[rows, None] + 1).clamp(max=starts + index.chunk)
        first = tables.first[:, positions[rows], None].clamp(min=starts)
        keys = (end - first).clamp_(min=0).int()  # [batch, queries, chunks]
        pairs += (index.gated(rows) * keys[:, None]).sum((-1, -2), dtype=torch.int64)
    return pairs


def pack_bits(bits: Tensor) -> Tensor:
    """Pack bool [..., n] into int32 [..., ceil(n / 32)]: flag i is bit i % 32 of word i // 32."""
    words = torch.nn.functional.pad(bits, (0, -bits.shape[-1] % 32)).unflatten(-1, (-1, 32)).long()
    return (words << torch.arange(32, device=bits.device)).sum(-1).to(torch.int32)
