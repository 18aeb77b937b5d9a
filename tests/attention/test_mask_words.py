"""The bits of partial blocks equal the mask, and the bound on the number of blocks holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention.dense_problems import random_slices

from mtrain_cli.attention import block_lists as module
from mtrain_cli.attention.block_lists import (
    BLOCK,
    block_flags,
    mask_words,
    most_partial_blocks,
    word_and_bit,
    word_bytes,
)
from mtrain_cli.attention.mask import KeySpans, SequenceMask
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.config.mask_settings import MASKS


def random_tiles(seed: int, slices: int) -> Tiles:
    """Two sequences of the same random shard of queries and shard of keys."""
    rng = np.random.default_rng(seed)
    padded = int(rng.integers(2, 900))
    queries, keys = (np.sort(rng.permutation(padded)[: max(1, padded * 2 // 3)]) for _ in range(2))
    masks = []
    for _ in range(2):
        length = int(rng.integers(1, padded + 1))
        if slices:
            masks.append(
                SequenceMask.from_slices(random_slices(rng, length, slices), length, padded)
            )
        else:
            ids = np.sort(rng.integers(0, 4, length))
            masks.append(SequenceMask.from_documents(ids, padded))
    return Tiles.make([mask.spans(queries, keys) for mask in masks])


def test_each_key_of_a_block_has_a_bit_of_its_own():
    words, bits = word_and_bit(np.arange(BLOCK))
    assert set(zip(words.tolist(), bits.tolist(), strict=True)) == {
        (word, bit) for word in range(4) for bit in range(32)
    }


@pytest.mark.parametrize("slices", [0, 2, 9])
@pytest.mark.parametrize("seed", range(6))
def test_words_equal_the_mask_in_every_partial_block(seed, slices, monkeypatch):
    monkeypatch.setattr(module, "_AT_ONCE", 3)
    tiles = random_tiles(seed, slices)
    found = mask_words(tiles)
    assert found is not None
    assert mask_words(tiles) is found
    ids, words = found.ids, found.of_queries
    assert ids.shape[2] >= 2
    partial, _ = block_flags(tiles.low, tiles.high, tiles.num_keys, BLOCK)
    pad = (0, -tiles.num_keys % BLOCK, 0, -tiles.num_queries % BLOCK)
    seen = torch.nn.functional.pad(tiles.seen()[:, 0], pad)
    word, bit = map(torch.from_numpy, word_and_bit(np.arange(BLOCK)))
    for b, i, j in partial.nonzero().tolist():
        got = (words[ids[b, i, j]][:, word] >> bit) & 1
        want = seen[b, i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
        assert torch.equal(got.bool(), want), (b, i, j)
        got = (found.of_keys[ids[b, i, j]][:, word] >> bit) & 1
        assert torch.equal(got.bool().T, want), (b, i, j)
    most = sum(map(most_partial_blocks, tiles.spans))
    assert int(partial.sum()) <= most
    assert len(words) == len(found.of_keys) == max(1, most)
    allocated = sum(t.nbytes for t in (ids, words, found.of_keys))
    assert word_bytes(2, tiles.num_queries, tiles.num_keys, most) == allocated


@pytest.mark.parametrize(
    ("kind", "keys", "seq", "slack"),
    [
        ("causal", {}, 1000, 0),
        ("full", {}, 1000, 0),
        ("sliding_window", {"window": 200, "global_tokens": 40}, 1000, 3),
        ("video", {"frames": 8, "height": 8, "width": 16, "window": (3, 4, 16)}, 1024, 8),
        ("dilated", {"block": 128, "stride": 3, "count": 3}, 1152, 0),
    ],
)
def test_the_bound_is_close_for_named_masks(kind, keys, seq, slack):
    spans = MaskRule(False, MASKS[kind](**keys))(None, seq, seq).spans(
        np.arange(seq), np.arange(seq)
    )
    tiles = Tiles.make([spans])
    partial, _ = block_flags(tiles.low, tiles.high, seq, BLOCK)
    assert 0 <= most_partial_blocks(spans) - int(partial.sum()) <= slack


def test_too_many_partial_blocks_have_no_words(monkeypatch):
    tiles = random_tiles(3, 9)
    most = sum(map(most_partial_blocks, tiles.spans))
    monkeypatch.setattr(module, "_MOST_BYTES", 2 * most * BLOCK * 16 - 1)
    assert mask_words(tiles) is None
    assert word_bytes(2, tiles.num_queries, tiles.num_keys, most) == 0
    assert "words" in tiles.cache
    monkeypatch.setattr(module, "_MOST_BYTES", 2 * most * BLOCK * 16)
    assert mask_words(random_tiles(3, 9)) is not None


def test_queries_that_see_nothing_have_no_bits():
    none = np.zeros((2, 130), np.int64)
    found = mask_words(Tiles.make([KeySpans(none, none, 5)]))
    assert found is not None
    assert found.ids.shape == (1, 2, 2)
    assert not found.of_queries.any()
    assert not found.of_keys.any()
