"""The query-key pairs that a launch computes, with the kernels that build tables for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class TilePlan:
    """The query-key pairs that a launch computes. Tensors are int32 on the device unless noted.

    block: tokens per block.
    blocks: blocks in the whole sequence.
    first: [batch, blocks * block], first position that the query at each position sees; above every
        position if the query sees nothing.
    last: [batch, blocks * block], last query position that sees the key at each position.
    query_blocks, key_blocks: global number of each local block, ascending.
    query_slot, key_slot: [blocks], local number of each global block, -1 if absent.
    query_count: [blocks + 1], number of local query blocks below each global block.
    first_min, first_max: [batch, blocks], minimum and maximum of first over each block. A query
        that sees nothing raises first_max above every position; a block of such queries raises
        first_min too.
    entries, counts: the key blocks that a query block visits; None if the launch computes columns
        only.
        Diagonals: chosen diagonals [batch * heads, width], ascending, and the number of chosen
            diagonals below each diagonal [batch * heads, blocks + 1].
        Lists: key blocks of each local query block [batch * heads, query blocks, width] and their
            number [batch * heads, query blocks], from `list_blocks`. Entries are int16 if int16
            can hold every block number.
    entries_t, counts_t: the query blocks that a key block visits, for dk and dv. None in the
        forward pass.
    slash: uint8 [batch * heads, blocks], 1 for each chosen diagonal; all zero if ``listed``.
    column_positions: [batch * heads, width], ascending positions of single columns. Unused entries
        hold ``blocks * block``. width is a multiple of 128.
    columns_below: [batch * heads, blocks + 1], number of columns below the start of each block.
    covered: [batch * heads, local query blocks, width / 32], one bit per column, from
        `covered_columns`.
    listed: whether entries are block lists rather than diagonals.
    holes: whether some query or key block of the sequence is absent, so that a kernel may visit a
        block that it must skip.
    gates: [batch * heads, query blocks * block, words], for lists only. Bit c % 32 of word c // 32
        is 1 if the query sees the keys of chunk c. None if queries see all listed blocks.
    gate_slots: [blocks], the number of each query block among the query blocks of gates.
    chunk: keys per chunk, a multiple of block.
    starts: whether the upper 8 of the 32 bits of a list's entries hold the first query of the query
        block that sees the key block.
    sharing: how many query heads in a row share the lists of one; their tensors have fewer heads.
    """

    block: int
    blocks: int
    first: torch.Tensor
    last: torch.Tensor
    query_blocks: torch.Tensor
    key_blocks: torch.Tensor
    query_slot: torch.Tensor
    key_slot: torch.Tensor
    query_count: torch.Tensor
    first_min: torch.Tensor
    first_max: torch.Tensor
    entries: torch.Tensor | None
    counts: torch.Tensor | None
    entries_t: torch.Tensor | None
    counts_t: torch.Tensor | None
    slash: torch.Tensor
    column_positions: torch.Tensor | None
    columns_below: torch.Tensor | None
    covered: torch.Tensor | None
    listed: bool
    holes: bool
    gates: torch.Tensor | None = None
    gate_slots: torch.Tensor | None = None
    chunk: int = 0
    starts: bool = False
    sharing: int = 1


@triton.jit
def _covered_columns(
    SLASH,
    COLUMN_POSITIONS,
    QUERY_BLOCKS,
    COVERED,
    rows,
    width,
    BLOCKS,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
    OF_TILES: tl.constexpr,
):
    i = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    qb = tl.load(QUERY_BLOCKS + i)
    bit = tl.arange(0, 32)
    for begin in range(0, width // 32, WORDS):
        word = begin + tl.arange(0, WORDS)
        valid = word < width // 32
        if OF_TILES:  # column 8 j + 2 w + e of a tile has bit 2 j + e of its word w
            place = (word // 4 * 128 + word % 4 * 2)[:, None] + (bit // 2 * 8 + bit % 2)[None, :]
        else:
            place = word[:, None] * 32 + bit[None, :]
        positions = tl.load(COLUMN_POSITIONS + bh * width + place, mask=valid[:, None], other=0)
        diagonal = qb - positions // BLOCK
        covered = tl.load(
            SLASH + bh * BLOCKS + diagonal, mask=(diagonal >= 0) & valid[:, None], other=1
        ).to(tl.int32)
        if OF_TILES:
            covered = 1 - covered
        tl.store(
            COVERED + (bh * rows + i) * (width // 32) + word,
            tl.sum(covered << bit[None, :], 1),
            mask=valid,
        )


def covered_columns(
    slash: torch.Tensor,
    column_positions: torch.Tensor,
    query_blocks: torch.Tensor,
    block: int,
    of_tiles: bool = False,
) -> torch.Tensor:
    """Return which columns each query block must skip, one bit per column.

    A query block skips a column that a chosen diagonal already computes, or that is in a later
    block. The result is int32 [batch * heads, query blocks, width / 32].

    of_tiles: return the columns that a query block does not skip instead, in the order of
        `attention.block_lists.word_and_bit` in tiles of 128 columns, for at least 2 query blocks.
    """
    flat, width = column_positions.shape
    rows = max(2, query_blocks.numel()) if of_tiles else query_blocks.numel()
    covered = torch.empty(
        flat, rows, width // 32, dtype=torch.int32, device=column_positions.device
    )
    _covered_columns[(query_blocks.numel(), flat)](
        slash,
        column_positions,
        query_blocks,
        covered,
        rows,
        width,
        slash.shape[-1],
        BLOCK=block,
        WORDS=16,
        OF_TILES=of_tiles,
    )
    return covered


@triton.jit
def _list_blocks(
    BITS, STARTS, SLOTS, OWN, OTHERS, FIRST_MIN, ENTRIES, COUNTS, held, rows, others, width, BLOCKS,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, TRANSPOSED: tl.constexpr, GATED: tl.constexpr,
    ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    bh = tl.program_id(1).to(tl.int64)
    own = tl.load(OWN + row, mask=row < rows, other=0)[:, None]
    row_start = ENTRIES + (bh * rows + row[:, None]) * width
    count = tl.zeros([ROWS], tl.int32)
    for begin in range(0, others, WIDE):
        n = begin + tl.arange(0, WIDE)
        other = tl.load(OTHERS + n, mask=n < others, other=0)[None, :]
        q = other if TRANSPOSED else own
        k = own if TRANSPOSED else other
        valid = (row < rows)[:, None] & (n < others)[None, :] & (k <= q)
        slot = tl.load(SLOTS + q)
        first = tl.load(FIRST_MIN + bh // HEADS * BLOCKS + q)
        valid = valid & (slot >= 0) & ((k + 1) * BLOCK > first)
        place = (bh * held + slot) * BLOCKS + k
        chosen = tl.load(BITS + place, mask=valid, other=0).to(tl.int32)
        # A prefix sum gives each chosen block its place, so the list ascends without atomics.
        target = count[:, None] + tl.cumsum(chosen, 1) - 1
        entry = other + tl.zeros_like(chosen)
        if GATED:
            start = tl.load(STARTS + place, mask=chosen != 0, other=0)
            entry |= start.to(tl.int32) << 24
        tl.store(row_start + target, entry.to(ENTRIES.dtype.element_ty), mask=chosen != 0)
        count += tl.sum(chosen, 1)
    tl.store(COUNTS + bh * rows + row, count, mask=row < rows)


def list_blocks(
    bits: torch.Tensor,
    slots: torch.Tensor,
    query_blocks: torch.Tensor,
    key_blocks: torch.Tensor,
    first_min: torch.Tensor,
    block: int,
    transposed: bool,
    starts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """List each query block's key blocks or, if transposed, each key block's query blocks.

    A pair of blocks is listed if its bit is set and the mask allows any of its query-key pairs.

    Args:
        bits: bool [batch, heads, rows of bits, blocks].
        slots: int32 [blocks], the row of bits of each query block, -1 if the block has no row.
        query_blocks, key_blocks, first_min: as in `TilePlan`.
        starts: uint8, shaped like bits, for the upper 8 bits of the entries; None for none.

    Returns:
        entries: [batch * heads, rows, blocks of the other side], ascending global block numbers.
            Entries beyond a row's count are undefined. The dtype is int16 if int16 can hold every
            number and there are no starts, else int32. With int16, both lists take 4 bytes per pair
            of blocks.
        counts: int32 [batch * heads, rows], number of entries of each row.
    """
    batch, heads, held, blocks = bits.shape
    own, others = (key_blocks, query_blocks) if transposed else (query_blocks, key_blocks)
    small = starts is None and blocks <= torch.iinfo(torch.int16).max
    dtype = torch.int16 if small else torch.int32
    entries = torch.empty(
        batch * heads, own.numel(), others.numel(), dtype=dtype, device=bits.device
    )
    counts = torch.empty(batch * heads, own.numel(), dtype=torch.int32, device=bits.device)
    # Bits are contiguous along keys. Rows of transposed lists are keys, so take many rows at once.
    rows, wide = (32, 64) if transposed else (4, 512)
    _list_blocks[(triton.cdiv(own.numel(), rows), batch * heads)](
        bits.contiguous().view(torch.uint8), bits if starts is None else starts.contiguous(), slots,
        own, others, first_min, entries, counts,
        held, own.numel(), others.numel(), others.numel(), blocks,
        HEADS=heads, BLOCK=block, TRANSPOSED=transposed, GATED=starts is not None, ROWS=rows,
        WIDE=wide,
    )  # fmt: skip
    return entries, counts
