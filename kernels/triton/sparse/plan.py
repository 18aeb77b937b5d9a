"""The plan of a launch: which pairs are computed, and the two kernels that make parts of it: lists of blocks, and which packed columns lie
on a diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True)
class Plan:
    """Which pairs are computed, as int32 tensors on the device. ``blocks`` is the number of blocks of the whole sequence.

    first: [batch, blocks * block], the first position that the query at a position sees; above it for a position that sees nothing.
    last: [batch, blocks * block], the last query position that sees the key at a position.
    query_blocks, key_blocks: global block of each local block, ascending. query_slot, key_slot: the inverse over all blocks, -1 = absent.
    query_count: [blocks + 1], local query blocks below a global one.
    first_min, first_max: [batch, blocks], smallest and largest of first over the positions of a block: above all positions where none of
        them sees anything (first_min), or where one sees nothing (first_max).
    lines: [batch * heads, width] active diagonals, ascending, with upto [batch * heads, blocks + 1], their number below a diagonal; or, if
        listed, as `list_blocks` makes them, active key blocks [batch * heads, query blocks, width] of each query block at hand with upto
        [batch * heads, query blocks], their number, int16 if that is enough; None for columns alone. lines_t, upto_t: the same transposed,
        for backward only.
    slash: uint8 [batch * heads, blocks], the diagonals as a table (all zero if listed).
    column_positions: [batch * heads, width] ascending positions of single columns, blocks * block = none, with columns_upto [batch *
    heads, blocks + 1];
        width is a multiple of 128. covered: bits [batch * heads, local query blocks, width / 32] of the columns that lie on a diagonal of
        the query block, as `covered_columns` makes them.
    holes: some blocks of keys or queries are absent, so a visited block may have to be skipped.
    gates: int32 [batch * heads, held * block, words], if listed: bit c % 32 of word c // 32 says whether a query sees the keys of chunk c;
        None: every query sees the blocks that are listed. gate_slots: [blocks], the held place of each query block. chunk: keys of a chunk,
        a multiple of block.
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
    lines: torch.Tensor | None
    upto: torch.Tensor | None
    lines_t: torch.Tensor | None
    upto_t: torch.Tensor | None
    slash: torch.Tensor
    column_positions: torch.Tensor | None
    columns_upto: torch.Tensor | None
    covered: torch.Tensor | None
    listed: bool
    holes: bool
    gates: torch.Tensor | None = None
    gate_slots: torch.Tensor | None = None
    chunk: int = 0


@triton.jit
def _covered_columns(
    SLASH, BARS, QUERY_BLOCKS, COVERED, width, BLOCKS, BLOCK: tl.constexpr, WORDS: tl.constexpr
):
    i = tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    qb = tl.load(QUERY_BLOCKS + i)
    bit = tl.arange(0, 32)
    for begin in range(0, width // 32, WORDS):
        word = begin + tl.arange(0, WORDS)
        there = word < width // 32
        where = tl.load(
            BARS + bh * width + word[:, None] * 32 + bit[None, :], mask=there[:, None], other=0
        )
        away = qb - where // BLOCK
        covered = tl.load(
            SLASH + bh * BLOCKS + away, mask=(away >= 0) & there[:, None], other=1
        ).to(tl.int32)
        tl.store(
            COVERED + (bh * tl.num_programs(0) + i) * (width // 32) + word,
            tl.sum(covered << bit[None, :], 1),
            mask=there,
        )


def covered_columns(
    slash: torch.Tensor, column_positions: torch.Tensor, query_blocks: torch.Tensor, block: int
) -> torch.Tensor:
    """Bit c of int32 [batch * heads, query blocks, width / 32]: column c lies on an active diagonal of the query block or in its future."""
    flat, width = column_positions.shape
    covered = torch.empty(
        flat, query_blocks.numel(), width // 32, dtype=torch.int32, device=column_positions.device
    )
    _covered_columns[(query_blocks.numel(), flat)](
        slash,
        column_positions,
        query_blocks,
        covered,
        width,
        slash.shape[-1],
        BLOCK=block,
        WORDS=16,
    )
    return covered


@triton.jit
def _list_blocks(
    BITS, SLOTS, OWN, OTHERS, FIRST_MIN, LINES, UPTO, held, rows, others, width, BLOCKS,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, TRANSPOSED: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    bh = tl.program_id(1).to(tl.int64)
    own = tl.load(OWN + row, mask=row < rows, other=0)[:, None]
    to = LINES + (bh * rows + row[:, None]) * width
    count = tl.zeros([ROWS], tl.int32)
    for begin in range(0, others, WIDE):
        n = begin + tl.arange(0, WIDE)
        other = tl.load(OTHERS + n, mask=n < others, other=0)[None, :]
        q = other if TRANSPOSED else own
        k = own if TRANSPOSED else other
        there = (row < rows)[:, None] & (n < others)[None, :] & (k <= q)
        line = tl.load(SLOTS + q)
        first = tl.load(FIRST_MIN + bh // HEADS * BLOCKS + q)
        there = there & (line >= 0) & ((k + 1) * BLOCK > first)
        on = tl.load(BITS + (bh * held + line) * BLOCKS + k, mask=there, other=0).to(tl.int32)
        place = count[:, None] + tl.cumsum(on, 1) - 1
        tl.store(to + place, (other + tl.zeros_like(on)).to(LINES.dtype.element_ty), mask=on != 0)
        count += tl.sum(on, 1)
    tl.store(UPTO + bh * rows + row, count, mask=row < rows)


def list_blocks(
    bits: torch.Tensor,
    slots: torch.Tensor,
    query_blocks: torch.Tensor,
    key_blocks: torch.Tensor,
    first_min: torch.Tensor,
    block: int,
    transposed: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key blocks that bits and mask leave each query block at hand, or, transposed, query blocks of each key block at hand.

    bits: bool [batch, heads, held, blocks], with slots int32 [blocks], the row of each query block, -1 where none is held. query_blocks,
    key_blocks, first_min: as for `Plan`.
    -> numbers in the sequence, ascending, [batch * heads, rows, blocks of the other side], anything beyond their count int32
    [batch * heads, rows]. int16 while that holds the numbers: with the transposed list, 4 bytes for a pair of blocks.
    """
    batch, heads, held, blocks = bits.shape
    own, others = (key_blocks, query_blocks) if transposed else (query_blocks, key_blocks)
    dtype = torch.int16 if blocks <= torch.iinfo(torch.int16).max else torch.int32
    lines = torch.empty(batch * heads, own.numel(), others.numel(), dtype=dtype, device=bits.device)
    upto = torch.empty(batch * heads, own.numel(), dtype=torch.int32, device=bits.device)
    # Bits of neighbouring keys lie side by side: transposed, these are rows of a tile.
    rows, wide = (32, 64) if transposed else (4, 512)
    _list_blocks[(triton.cdiv(own.numel(), rows), batch * heads)](
        bits.contiguous().view(torch.uint8), slots, own, others, first_min, lines, upto,
        held, own.numel(), others.numel(), others.numel(), blocks,
        HEADS=heads, BLOCK=block, TRANSPOSED=transposed, ROWS=rows, WIDE=wide,
    )  # fmt: skip
    return lines, upto
