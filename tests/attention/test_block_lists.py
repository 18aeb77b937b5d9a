"""Block lists hold exactly the blocks that index and mask leave, each once."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from attention.dense_problems import make_dense_problem, random_slices
from attention.sparse_problems import Problem, make_problem

from mtrain_cli.attention import block_lists as module
from mtrain_cli.attention.block_lists import (
    BLOCK,
    block_flags,
    index_lists,
    list_widths,
    lists_of_spans,
    mask_list_bytes,
    mask_words,
    most_partial_blocks,
    word_and_bit,
    word_bytes,
)
from mtrain_cli.attention.mask import KeySpans, SequenceMask
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.config.mask_settings import MASKS

SMALL = 16


def split_into_blocks(seen: torch.Tensor) -> torch.Tensor:
    """Reshape to [..., query blocks, key blocks, SMALL, SMALL]; padding sees nothing."""
    pad = (0, -seen.shape[-1] % SMALL, 0, -seen.shape[-2] % SMALL)
    return (
        torch.nn.functional.pad(seen, pad)
        .unflatten(-1, (-1, SMALL))
        .unflatten(-3, (-1, SMALL))
        .transpose(-3, -2)
    )


def mask_from_lists(
    lists: dict[str, torch.Tensor], name: str, shape: torch.Size, width: int
) -> torch.Tensor:
    """Return bool ``shape`` [batch, heads, rows, blocks] of the listed blocks.

    Every list must ascend.
    """
    mask = torch.zeros(shape, dtype=torch.bool)
    count, numbers = lists[f"{name}_count"], lists[name]
    assert count.dtype == numbers.dtype == torch.int32
    assert count.shape == shape[:-1]
    assert numbers.shape == (*shape[:-1], width)
    for place in torch.cartesian_prod(*(torch.arange(n) for n in shape[:-1])).tolist():
        row = numbers[tuple(place)][: count[tuple(place)]].tolist()
        assert row == sorted(set(row))
        mask[tuple(place)][row] = True
    return mask


def blocks_of(p: Problem) -> torch.Tensor:
    """Return the pairs of chosen blocks that the mask leaves, without columns.

    bool [batch, heads, query blocks, key blocks, SMALL, SMALL].
    """
    queries, keys = p.tiles.positions()
    return split_into_blocks(p.tiles.seen() & p.tiles.index.chosen(queries // SMALL, keys // SMALL))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("kind", ["slashes", "columns", "both", "all", "none", "bitmap"])
@pytest.mark.parametrize(
    ("documents", "window"), [(False, 0), (True, 0), (None, 0), (None, 40), (True, 5)]
)
@pytest.mark.parametrize("where", ["whole", "striped queries", "striped", "later queries"])
def test_lists_hold_the_blocks_that_index_and_mask_leave(
    kind, documents, window, where, transposed
):
    for seed, seq in ((0, 109), (1, 96), (2, 33)):
        p = make_problem(
            seed, kind, seq=seq, block=SMALL, documents=documents, window=window, where=where
        )
        seen = blocks_of(p)
        touched, whole = seen.any(-1).any(-1), seen.all(-1).all(-1)
        if transposed:
            touched, whole = touched.transpose(-1, -2), whole.transpose(-1, -2)
        lists = index_lists(p.tiles, transposed)
        # A row lists at most one block per diagonal of its head, and at most one partial block if
        # the mask is purely causal.
        blocks = max(2, touched.shape[-1])
        full_width = (
            min(blocks, max(2, int(p.tiles.index.slashes.sum(-1).max())))
            if kind == "both"
            else blocks
        )
        plain = documents is None and not 0 < window < seq
        widths = 2 if plain else full_width, full_width
        partial, full = (
            mask_from_lists(lists, name, touched.shape, width)
            for name, width in zip(("partial", "full"), widths, strict=True)
        )
        assert not (partial & full).any()
        assert not (touched & ~(partial | full)).any(), "no pair is missing"
        # Full blocks are computed without a mask, so beyond the tensors' end anything may be set.
        queries, keys = p.tiles.seen().shape[-2:]
        real = split_into_blocks(torch.ones(queries, keys, dtype=torch.bool))
        holds = (seen | ~real).all(-1).all(-1)
        assert not (full & ~(holds.transpose(-1, -2) if transposed else holds)).any(), (
            "no pair is added"
        )
        assert not ((partial | full) & ~touched).any(), "no listed block is empty"
        assert not (whole & ~full & ~on_diagonal(p, transposed)).any(), (
            "full blocks are not listed as partial"
        )


def test_more_diagonals_than_max_slashes_raise_an_error():
    p = make_problem(0, "all", seq=109, block=SMALL, documents=False)
    tiles = p.tiles.with_index(dataclasses.replace(p.tiles.index, max_slashes=3))
    with pytest.raises(AssertionError, match="more diagonals than its `max_slashes` allows"):
        index_lists(tiles, False)


def test_widths_of_lists():
    assert list_widths(4096, 0, plain=False) == (4096, 4096)
    assert list_widths(4096, 205, plain=False) == (205, 205)
    assert list_widths(4096, 205, plain=True) == (2, 205)
    assert list_widths(100, 205, plain=False) == (100, 100)
    assert list_widths(1, 1, plain=True) == (2, 2)


def on_diagonal(p: Problem, transposed: bool) -> torch.Tensor:
    queries, keys = p.tiles.geometry.query_blocks, p.tiles.geometry.key_blocks
    same = queries[:, None] == keys
    return same.T if transposed else same


@pytest.mark.parametrize("slices", [0, 3, 9])
@pytest.mark.parametrize("seed", range(12))
def test_lists_of_spans_equal_the_mask(seed, slices):
    spans, q, k, _, _ = make_dense_problem(seed, 4, 4, slices=slices)
    tiles = Tiles.make(spans)
    block = 8
    by_query, by_key = lists_of_spans(tiles.low, tiles.high, tiles.num_keys, block)
    allocated = sum(t.nbytes for lists in (by_query, by_key) for t in lists.values())
    assert mask_list_bytes(2, q.shape[1], k.shape[1], block) == allocated
    rows, columns = -(-q.shape[1] // block), -(-k.shape[1] // block)
    seen = tiles.seen()[:, 0]
    want: dict[str, set[tuple[int, int, int]]] = {"partial": set(), "full": set()}
    for b, i, j in np.ndindex(2, rows, columns):
        begin, end = j * block, min((j + 1) * block, tiles.num_keys)
        own = slice(i * block, (i + 1) * block)
        inside = (tiles.low[b, :, own] <= begin) & (tiles.high[b, :, own] >= end)
        if inside.any(0).all():
            want["full"].add((b, i, j))
        elif seen[b, own, begin:end].any():
            want["partial"].add((b, i, j))
    for name, pairs in want.items():
        for lists, of_key in ((by_query, False), (by_key, True)):
            found = [
                (b, *((int(other), own) if of_key else (own, int(other))))
                for b, own in np.ndindex(2, columns if of_key else rows)
                for other in lists[name][b, 0, own, : lists[f"{name}_count"][b, 0, own]]
            ]
            assert sorted(found) == sorted(pairs), (name, of_key)


def test_some_lists_of_several_intervals_have_full_blocks():
    mask = MaskRule(False, MASKS["dilated"](block=16, stride=2, count=3))(None, 96, 96)
    tiles = Tiles.make([mask.spans(np.arange(96), np.arange(96))])
    lists, _ = lists_of_spans(tiles.low, tiles.high, 96, 8)
    assert lists["full_count"][0, 0].tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5]


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
