"""Tiles hold the pairs of one query shard and one key shard, for all layers or with an index."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention.sparse_problems import make_index

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_tables import MaskTables
from mtrain_cli.attention.tiles import Tiles

SEQ, BLOCK = 45, 8
DOCUMENTS = np.repeat([0, 1, 2], [20, 13, 10])
MASKS = (SequenceMask.from_documents(DOCUMENTS, SEQ), SequenceMask.causal(SEQ - 4, SEQ))


def shards() -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of odd blocks, among them the last short one, and of all but one."""
    number = np.arange(SEQ) // BLOCK
    return np.flatnonzero(number % 2 == 1), np.flatnonzero(number != 1)


def allowed(queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return the pairs of the two masks by definition, bool [2, queries, keys]."""
    causal = keys <= queries[:, None]
    ids = np.append(DOCUMENTS, [-1, -2])  # padding
    same = (ids[queries][:, None] == ids[keys]) & (ids[queries] >= 0)[:, None]
    return np.stack([causal & same, causal & (queries < SEQ - 4)[:, None]])


def test_tiles_between_two_shards_equal_the_masks():
    queries, keys = shards()
    tiles = Tiles.between(MASKS, queries, keys)
    want = allowed(queries, keys)
    assert torch.equal(tiles.seen()[:, 0], torch.from_numpy(want))
    assert tiles.pairs == int(want.sum())
    assert tiles.num_keys == len(keys)
    assert not tiles.same_for_batch
    assert Tiles.between(MASKS[:1] * 2, queries, keys).same_for_batch


def test_positions_are_those_of_the_shards():
    queries, keys = shards()
    tiles = Tiles.between(MASKS, queries, keys, MaskTables.make(MASKS, BLOCK))
    assert [t.tolist() for t in tiles.positions()] == [queries.tolist(), keys.tolist()]


def test_an_index_narrows_the_mask_and_shares_only_the_masks_cache():
    queries, keys = shards()
    tiles = Tiles.between(MASKS, queries, keys, MaskTables.make(MASKS, BLOCK))
    index = make_index("both", np.random.default_rng(0), 2, 4, SEQ, BLOCK)
    narrowed = tiles.with_index(index)
    of_index = index.allowed(torch.from_numpy(queries), torch.from_numpy(keys))
    assert torch.equal(narrowed.seen(), tiles.seen() & of_index)
    assert narrowed.cache is tiles.cache
    assert narrowed.index_cache is not tiles.index_cache
    narrowed.index_cache["slots"] = 1
    assert not narrowed.without_index_cache().index_cache
    assert tiles.with_index(None) is tiles
    with pytest.raises(AssertionError, match="block geometry"):
        Tiles.between(MASKS, queries, keys).with_index(index)


def test_tiles_without_an_allowed_pair_are_empty():
    everywhere = np.arange(SEQ)
    assert Tiles.between(MASKS, everywhere[:8], everywhere[8:]).empty
    assert not Tiles.between(MASKS, everywhere[:8], everywhere[:8]).empty


def test_shards_of_an_index_must_be_whole_blocks():
    everywhere = np.arange(SEQ)
    with pytest.raises(ValueError, match="whole blocks"):
        Tiles.between(MASKS, everywhere[3:], everywhere, MaskTables.make(MASKS, BLOCK))
