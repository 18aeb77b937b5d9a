"""Which keys the queries of a partial pair of blocks see, one bit per pair of a query and a key."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from mtrain_cli.attention.block_lists import block_flags
from mtrain_cli.attention.mask import IntArray, KeySpans
from mtrain_cli.attention.tiles import Tiles

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
    of_keys: [numbers, BLOCK, 4], a row per key. `word_and_bit` gives the bit of each query.
    """

    ids: torch.Tensor
    of_queries: torch.Tensor
    of_keys: torch.Tensor


def mask_words(tiles: Tiles) -> MaskWords | None:
    """Return the bits of all partial pairs of blocks, or None if they are too many."""
    if "words" not in tiles.cache:
        most = sum(most_partial_blocks(spans) for spans in tiles.spans)
        tiles.cache["words"] = _make_words(tiles, max(1, most)) if _fit(most) else None
    return tiles.cache["words"]


def word_bytes(sequences: int, queries: int, keys: int, most: int) -> int:
    """Return the size of the result of `mask_words` in bytes; 0 without a result.

    most: sum of `most_partial_blocks` over the sequences.
    """
    ids = 4 * sequences * -(-queries // BLOCK) * max(2, -(-keys // BLOCK))
    return ids + max(1, most) * _BYTES_OF_PAIR if _fit(most) else 0


def _fit(most: int) -> bool:
    return most * _BYTES_OF_PAIR <= _MOST_BYTES


def word_and_bit(offset: IntArray | int) -> tuple[IntArray | int, IntArray | int]:
    """Return the word and the bit of a token, from its offset in the block.

    On Hopper, thread t of the four threads that share a row holds the columns 8 j + 2 t and 8 j +
    2 t + 1 for each j. The bits of a word follow the order of these columns.
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


def _transposed(words: torch.Tensor) -> torch.Tensor:
    """Return the words of keys from the words of queries, both int32 [numbers, BLOCK, 4]."""
    bit = torch.arange(32, dtype=torch.int32, device=words.device)
    bits = (words[..., None] >> bit) & 1  # [numbers, queries, words of keys, bits of keys]
    # Token 8 j + 2 w + e has bit 2 j + e of word w.
    bits = bits.unflatten(3, (16, 2)).unflatten(1, (16, 4, 2))
    rows = bits.permute(0, 5, 4, 6, 2, 1, 3).reshape(-1, BLOCK, _WORDS, 32)
    return (rows << bit).sum(-1, dtype=torch.int32)


@cache
def _bits_below(device: str) -> torch.Tensor:
    """Return the words of a query that sees the first n keys of a block, int32 [BLOCK + 1, 4]."""
    table = np.zeros((BLOCK + 1, _WORDS), np.uint32)
    for offset in range(BLOCK):
        word, bit = word_and_bit(offset)
        table[offset + 1 :, word] |= np.uint32(1 << int(bit))
    return torch.from_numpy(table.view(np.int32)).to(device)
