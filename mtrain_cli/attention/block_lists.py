"""Turn an index or a mask into block lists, the form that FlashAttention-4 reads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from mtrain_cli.attention.index import BlockBitmap, VerticalSlash
from mtrain_cli.attention.mask import IntArray, KeySpans
from mtrain_cli.attention.packed_columns import local_columns
from mtrain_cli.attention.partials import Pair, cuda_kernels_usable
from mtrain_cli.attention.tiles import Tiles

if TYPE_CHECKING:
    from mtrain_cli.attention.column_blocks import Front

_WARPS = 4
Lists = dict[str, Tensor]


def index_lists(tiles: Tiles, transposed: bool, front: Front | None = None) -> Lists:
    """List the blocks that both index and mask allow, without single columns.

    Args:
        front: key blocks of single columns before the first, which are listed, too.

    Returns:
        ``partial``: ascending local block numbers, int32 [batch, heads, rows, width], undefined
            beyond ``partial_count``, int32 [batch, heads, rows]; ``full`` and ``full_count``: the
            same for the blocks in which every query sees every key. `list_widths` gives widths.
    """
    index, geometry = tiles.index, tiles.geometry
    assert index is not None
    assert geometry is not None
    tables = geometry.tables
    batch, heads = index.heads
    queries, keys = geometry.query_blocks.numel(), geometry.key_blocks.numel()
    rows, candidates = (keys, queries) if transposed else (queries, keys)
    if isinstance(index, BlockBitmap):
        chosen, slots, held, bitmap, most = index.bits, index.slots, len(index.rows), True, 0
    else:
        assert isinstance(index, VerticalSlash)
        # For diagonals the kernel does not read ``slots``, so pass any tensor.
        chosen, slots, held, bitmap = index.slashes, geometry.query_slot, 1, False
        most = index.max_slashes
    widths = list_widths(candidates, most, tables.plain)
    if front is not None:
        wide = front.list_width(queries) if transposed else front.tiles + 1
        widths = max(wide, widths[0]), widths[1]
    before = front.blocks if front else 0
    above = before if transposed else 0
    if cuda_kernels_usable(tables.first):
        from mtrain_cli.kernels.cuda.nvrtc import launch

        shapes = [(batch, heads, above + rows, *width) for w in widths for width in ((), (w,))]
        lists = [torch.empty(shape, dtype=torch.int32, device=tables.device) for shape in shapes]
        # Without a front the kernel does not read the columns, so pass any tensor.
        columns, shape = slots, (1, 1, 0)
        if front is not None:
            columns, shape = local_columns(tiles)[0], (front.group, front.parts, front.tiles)
        launch(
            "block_lists", "block_lists",
            (-(-(above + rows) // _WARPS), batch * heads), 32 * _WARPS,
            chosen.contiguous(), slots, geometry.query_blocks, geometry.key_blocks,
            tables.first_min, tables.first_max, columns, *lists,
            heads, index.blocks, index.block, held, queries, keys, *widths, bitmap, transposed,
            *shape,
        )  # fmt: skip
        return dict(zip(("partial_count", "partial", "full_count", "full"), lists, strict=True))
    q, k = geometry.query_blocks.long(), geometry.key_blocks.long()
    first_min, first_max = (t[:, q][..., None] for t in (tables.first_min, tables.first_max))
    touched = (k <= q[:, None]) & ((k + 1) * index.block > first_min)
    full = touched & (k < q[:, None]) & (k * index.block >= first_max)
    active = index.chosen(q, k) & touched[:, None]
    result: dict[str, Tensor] = {}
    listed = {"partial": active & ~full[:, None], "full": active & full[:, None]}
    for (name, blocks), width in zip(listed.items(), widths, strict=True):
        indices, counts_below = set_indices(blocks.transpose(-1, -2) if transposed else blocks)
        assert int(counts_below[..., -1].max()) <= width, (
            "the index has more diagonals than its `max_slashes` allows"
        )
        # A negative pad cuts the list to its width.
        indices = torch.nn.functional.pad(indices, (0, width - candidates, above, 0))
        result[name] = indices + (before - above)
        result[name + "_count"] = torch.nn.functional.pad(counts_below[..., -1], (above, 0))
    return front.add_to(result, tiles, transposed) if front else result


def mask_lists(tiles: Tiles, block: int) -> tuple[Lists, Lists]:
    """Return `lists_of_spans` of a mask. All layers and both passes share the result."""
    key = f"lists of blocks of {block}"
    if key not in tiles.cache:
        tiles.cache[key] = lists_of_spans(tiles.low, tiles.high, tiles.num_keys, block)
    return tiles.cache[key]


def lists_of_spans(low: Tensor, high: Tensor, num_keys: int, block: int) -> tuple[Lists, Lists]:
    """List the pairs of blocks of `block_flags` in FlashAttention-4's form.

    The key blocks of each query block, and the query blocks of each key block, as `index_lists`
    gives them for one head.
    """
    lists: tuple[Lists, Lists] = {}, {}
    found = block_flags(low, high, num_keys, block)
    for name, blocks in zip(("partial", "full"), found, strict=True):
        for of_side, flags in zip(lists, (blocks, blocks.transpose(1, 2)), strict=True):
            indices, counts_below = set_indices(flags)
            # A list of width 1 fails the stride check of FlashAttention-4 4.0.0b36.
            indices = torch.nn.functional.pad(indices, (0, max(0, 2 - indices.shape[-1])))
            of_side[name] = indices[:, None]
            of_side[f"{name}_count"] = counts_below[:, None, :, -1].contiguous()
    return lists


def mask_list_bytes(sequences: int, queries: int, keys: int, block: int) -> int:
    rows, columns = -(-queries // block), -(-keys // block)
    entries = rows * max(2, columns) + columns * max(2, rows)
    return 4 * sequences * 2 * (entries + rows + columns)  # int32; partial and full


def block_flags(low: Tensor, high: Tensor, num_keys: int, block: int) -> Pair:
    """Return which pairs of blocks are partial and which are full, bool [batch, rows, columns].

    low, high: int [batch, intervals, queries]; disjoint intervals of keys low <= j < high.
    """
    sees, queries, columns = low < high, low.shape[2], -(-num_keys // block)
    starts, ends = low // block, (high - 1) // block + 1
    touched = _rows_over(starts, torch.where(sees, ends, starts), block, columns) > 0
    # A short last block ends with the keys: FlashAttention-4 itself masks positions beyond them.
    starts = (low + block - 1) // block
    ends = torch.where(high == num_keys, columns, high // block)
    rows = torch.arange(0, queries, block, device=low.device)
    rows = (queries - rows).clamp(max=block)[:, None]
    inside = _rows_over(starts, torch.where(sees, ends, starts).maximum(starts), block, columns)
    full = inside == rows
    return touched & ~full, full


def _rows_over(starts: Tensor, ends: Tensor, block: int, columns: int) -> Tensor:
    """Count how often the rows of each query block have a range over each key block."""
    batch, intervals, queries = starts.shape
    rows = -(-queries // block)
    edges = torch.zeros(batch, rows * (columns + 1), dtype=torch.int32, device=starts.device)
    row = torch.arange(queries, device=starts.device) // block * (columns + 1)
    one = torch.ones(batch, intervals * queries, dtype=torch.int32, device=starts.device)
    edges.scatter_add_(1, (row + starts).flatten(1), one)
    edges.scatter_add_(1, (row + ends).flatten(1), -one)
    return edges.view(batch, rows, columns + 1).cumsum(-1, dtype=torch.int32)[..., :-1]


def list_widths(candidates: int, max_diagonals: int, plain: bool) -> tuple[int, int]:
    """Return the widths of the lists: (of partial blocks, of full blocks).

    A diagonal gives each row one block. Under a purely causal mask, only its own block is partial.
    """
    # A list of width 1 fails the stride check of FlashAttention-4 4.0.0b36.
    full = max(2, min(candidates, max_diagonals or candidates))
    return 2 if plain else full, full


def set_indices(flags: Tensor) -> Pair:
    """Return the ascending indices of the set flags, then zeros, int32 [..., n].

    And the number of set flags below each index, int32 [..., n + 1].
    """
    n = flags.shape[-1]
    counts_below = torch.nn.functional.pad(flags.cumsum(-1, dtype=torch.int32), (1, 0))
    # Write the index of a set flag to its place among the set flags, and all other indices to place
    # n, which is cut off.
    targets = torch.where(flags, counts_below[..., :-1], n).long()
    indices = torch.zeros(*flags.shape[:-1], n + 1, dtype=torch.int32, device=flags.device)
    numbers = torch.arange(n, dtype=torch.int32, device=flags.device)
    indices.scatter_(-1, targets, numbers.expand(flags.shape))
    return indices[..., :n].contiguous(), counts_below


BLOCK = 128
_WORDS = 4  # of a row of a block: one per thread of the four that share a row on Hopper
_BYTES_OF_PAIR = 2 * BLOCK * _WORDS * 4  # of a partial pair of blocks: of queries and of keys
_MOST_BYTES = 512 << 20
_AT_ONCE = 512  # numbers whose words are transposed at once, which takes 64 KiB each


@dataclass(frozen=True)
class MaskWords:
    """The bits of all partial pairs of blocks of `BLOCK` tokens, int32.

    ids: [batch, query blocks, key blocks or 2], the number of each partial pair of blocks. Other
        entries are undefined.
    of_queries: [numbers, BLOCK, 4], a row per query. `word_and_bit` gives the bit of each key.
    """

    ids: Tensor
    of_queries: Tensor
    of_keys: Tensor


def mask_words(tiles: Tiles) -> MaskWords | None:
    """Return the bits of all partial pairs of blocks, or None if they are too many."""
    if "words" not in tiles.cache:
        most = sum(most_partial_blocks(spans) for spans in tiles.spans)
        tiles.cache["words"] = _make_words(tiles, max(1, most)) if _fit(most) else None
    return tiles.cache["words"]


def word_bytes(sequences: int, queries: int, keys: int, most: int) -> int:
    """Return the size of the result of `mask_words` in bytes; 0 without a result."""
    ids = 4 * sequences * -(-queries // BLOCK) * max(2, -(-keys // BLOCK))
    return ids + max(1, most) * _BYTES_OF_PAIR if _fit(most) else 0


def _fit(most: int) -> bool:
    return most * _BYTES_OF_PAIR <= _MOST_BYTES


def word_and_bit(offset: IntArray | int) -> tuple[IntArray | int, IntArray | int]:
    """Return the word and the bit of a token, from its offset in the block.

    On Hopper, thread t of the four of a row holds columns 8 j + 2 t and 8 j + 2 t + 1 for each j.
    """
    return offset // 2 % 4, offset // 8 * 2 + offset % 2


def most_partial_blocks(spans: KeySpans) -> int:
    """Return an upper bound on the number of partial pairs of blocks, without the device."""
    low, high = spans.low, spans.high
    queries = low.shape[1]
    starts = np.arange(0, queries, BLOCK)
    sees = low < high
    lowest = np.minimum.reduceat(np.where(sees, low, spans.num_keys), starts, 1)
    highest = np.maximum.reduceat(np.where(sees, high, 0), starts, 1)
    touched = np.maximum(-(-highest // BLOCK) - lowest // BLOCK, 0)
    inner_low = np.maximum.reduceat(low, starts, 1)
    inner_high = np.minimum.reduceat(high, starts, 1)
    stop = np.where(inner_high == spans.num_keys, -(-spans.num_keys // BLOCK), inner_high // BLOCK)
    return int((touched - np.maximum(stop + inner_low // -BLOCK, 0)).sum())


def _make_words(tiles: Tiles, most: int) -> MaskWords:
    low, high = tiles.low, tiles.high
    partial, _ = block_flags(low, high, tiles.num_keys, BLOCK)
    batch, rows, columns = partial.shape
    numbers = partial.flatten().cumsum(0) - 1
    device = low.device
    # The place of each number: its pair of blocks. Other pairs go to one more place, at the end.
    place = torch.where(partial.flatten(), numbers, most)
    pairs = torch.zeros(most + 1, dtype=torch.int64, device=device)
    pairs.scatter_(0, place, torch.arange(partial.numel(), device=device))
    row, column = pairs[:most] // columns, (pairs[:most] % columns)[:, None]
    below = _bits_below(str(device))
    words = torch.zeros(most, BLOCK, _WORDS, dtype=torch.int32, device=device)
    for bounds in zip(low.unbind(1), high.unbind(1), strict=True):
        for bound in bounds:
            padded = torch.nn.functional.pad(bound, (0, rows * BLOCK - bound.shape[1]))
            of_block = padded.reshape(batch * rows, BLOCK)[row]
            # The keys below high, without those below low, which are fewer.
            words ^= below[(of_block - column * BLOCK).clamp(0, BLOCK)]
    ids = numbers.clamp(min=0).to(torch.int32).view(batch, rows, columns)
    # FlashAttention-4 4.0.0b36 takes no tensor with several axes of size 1.
    ids = torch.nn.functional.pad(ids, (0, max(0, 2 - columns)))
    return MaskWords(ids, words, torch.cat([_transposed(w) for w in words.split(_AT_ONCE)]))


def _transposed(words: Tensor) -> Tensor:
    """Return the words of keys from the words of queries, both int32 [numbers, BLOCK, 4]."""
    bit = torch.arange(32, dtype=torch.int32, device=words.device)
    bits = (words[..., None] >> bit) & 1  # [numbers, queries, words of keys, bits of keys]
    # Token 8 j + 2 w + e has bit 2 j + e of word w.
    bits = bits.unflatten(3, (16, 2)).unflatten(1, (16, 4, 2))
    rows = bits.permute(0, 5, 4, 6, 2, 1, 3).reshape(-1, BLOCK, _WORDS, 32)
    return (rows << bit).sum(-1, dtype=torch.int32)


@cache
def _bits_below(device: str) -> Tensor:
    """Return the words of a query that sees the first n keys of a block, int32 [BLOCK + 1, 4]."""
    table = np.zeros((BLOCK + 1, _WORDS), np.uint32)
    for offset in range(BLOCK):
        word, bit = word_and_bit(offset)
        table[offset + 1 :, word] |= np.uint32(1 << int(bit))
    return torch.from_numpy(table.view(np.int32)).to(device)
