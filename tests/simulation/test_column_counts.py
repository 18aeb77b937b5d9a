"""Pairs of single columns equal a count by definition, for every two groups."""

from __future__ import annotations

import numpy as np
import pytest

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.simulation import work_counts
from mtrain_cli.simulation.work_counts import ColumnCounter

LENGTH, BLOCK, GROUPS, ROWS = 58, 4, 3, 2  # the last block of 16 holds padding
BLOCKS = 16
OWNERS = {
    "contiguous": np.arange(BLOCKS) * GROUPS // BLOCKS,
    "striped": np.arange(BLOCKS) % GROUPS,
    "zigzag": np.minimum(np.arange(BLOCKS), np.arange(BLOCKS)[::-1]) % GROUPS,
    "random": np.random.default_rng(2).integers(0, GROUPS, BLOCKS),
}


def by_definition(mask: SequenceMask, owner, slashes, columns) -> np.ndarray:
    """Count, one by one, the queries that see a column in a block that no slash covers."""
    pairs = np.zeros((GROUPS, GROUPS), int)
    for row in range(ROWS):
        for key in columns[row][columns[row] < LENGTH]:
            for query in range(LENGTH):
                seen = mask.low[0, query] <= key < mask.high[0, query]
                if seen and not slashes[row, query // BLOCK - key // BLOCK]:
                    pairs[owner[query // BLOCK], owner[key // BLOCK]] += 1
    return pairs


@pytest.mark.parametrize("at_once", [1, work_counts.AT_ONCE])
@pytest.mark.parametrize("layout", OWNERS)
def test_pairs_of_columns_equal_their_definition(layout, at_once, monkeypatch):
    monkeypatch.setattr(work_counts, "AT_ONCE", at_once)
    rng = np.random.default_rng(4)
    documents = np.repeat([0, 1, 2], [9, 30, LENGTH - 39])
    mask = SequenceMask.from_documents(documents, BLOCKS * BLOCK)
    counter = ColumnCounter.make(mask, BLOCK, OWNERS[layout], GROUPS)
    columns = np.stack([rng.permutation(LENGTH + 3)[:20] for _ in range(ROWS)]).astype(np.int32)
    for share in (0.0, 0.4, 1.0):
        slashes = rng.random((ROWS, BLOCKS)) < share
        number, pairs = counter.count(slashes, columns)
        assert number == (columns < LENGTH).sum()
        assert np.array_equal(pairs, by_definition(mask, OWNERS[layout], slashes, columns))


def test_padding_alone_has_no_columns():
    mask = SequenceMask.causal(LENGTH, BLOCKS * BLOCK)
    counter = ColumnCounter.make(mask, BLOCK, OWNERS["striped"], GROUPS)
    padding = np.full((ROWS, 4), LENGTH, np.int32)
    number, pairs = counter.count(np.zeros((ROWS, BLOCKS), bool), padding)
    assert (number, pairs.tolist()) == (0, [[0] * GROUPS] * GROUPS)


@pytest.mark.parametrize(("layout", "stride"), [("striped", GROUPS), ("contiguous", 1)])
def test_stripes_are_one_piece_per_group(layout, stride):
    mask = SequenceMask.causal(LENGTH, BLOCKS * BLOCK)
    counter = ColumnCounter.make(mask, BLOCK, OWNERS[layout], GROUPS)
    assert (counter.stride, len(counter.start)) == (stride, GROUPS)
