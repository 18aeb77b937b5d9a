"""Tables by block equal a count of single pairs, and geometry finds where blocks lie."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_tables import NOTHING, BlockPairs, MaskTables, whole_blocks


@pytest.mark.parametrize("block", [1, 3, 16, 128, 181, 182, 200])
@pytest.mark.parametrize("documents", [0, 1, 4, 60])
def test_block_pairs_equal_the_enumerated_pairs(block, documents):
    rng = np.random.default_rng(block + documents)
    padded, blocks = 333, -(-333 // block)
    masks = [
        SequenceMask.from_documents(np.sort(rng.integers(0, documents, length)), padded)
        if documents
        else SequenceMask.causal(length, padded)
        for length in (333, 330, 200, 1)
    ]
    seen = torch.zeros(len(masks), blocks * block, blocks * block, dtype=torch.bool)
    for table, mask in zip(seen, masks, strict=True):
        for q in range(mask.length):
            table[q, mask.first[q] : q + 1] = True
    want = seen.unflatten(-1, (-1, block)).unflatten(-3, (-1, block)).sum((-1, -3))
    actual = MaskTables.make(masks, block, bitmap=True).per_block
    assert actual.dtype == (torch.int16 if block <= 181 else torch.int32)
    assert torch.equal(actual.long(), want)
    rows = np.sort(rng.permutation(blocks)[: blocks // 2])
    some = MaskTables.make(masks, block, bitmap=True, rows=rows)
    assert torch.equal(some.per_block.long(), want[:, torch.from_numpy(rows)])
    for mask, pairs in zip(masks, want.numpy(), strict=True):
        assert np.array_equal(BlockPairs.make(mask, block, blocks, rows).table(), pairs[rows])
        table, diagonals = BlockPairs.make(mask, block, blocks), range(blocks)
        per_diagonal, touched = table.by_diagonal()
        assert per_diagonal.tolist() == [np.trace(pairs, -d) for d in diagonals]
        assert touched.tolist() == [np.trace(pairs > 0, -d) for d in diagonals]


def test_padding_prevents_full_blocks_but_positions_past_the_end_do_not():
    documents = np.repeat([0, 1, 2], [20, 16, 5])
    actual = MaskTables.make(
        [
            SequenceMask.from_documents(documents, 41),
            SequenceMask.causal(41, 41),
            SequenceMask.causal(40, 41),
        ],
        16,
    )
    assert actual.first_min.tolist() == [[0, 0, 20], [0, 0, 0], [0, 0, 0]]
    assert actual.first_max.tolist() == [[0, 20, 36], [0, 0, 0], [0, 0, NOTHING]]


@pytest.mark.parametrize("counts", [(12, 12), (12, 5), (5, 12), (4, 7), (1, 1)])
def test_geometry_finds_slots_and_diagonals_of_any_two_shards(counts):
    rng = np.random.default_rng(sum(counts))
    block, padded, blocks = 4, 45, 12
    tables = MaskTables.make([SequenceMask.causal(padded, padded)], block)
    query, key = (np.sort(rng.permutation(blocks)[:count]) for count in counts)
    shards = [
        np.concatenate([np.arange(b * block, min(padded, (b + 1) * block)) for b in numbers])
        for numbers in (query, key)
    ]
    assert np.array_equal(whole_blocks(shards[0], block, padded), query)
    geometry = tables.between(*shards)
    assert geometry.query_blocks.tolist() == query.tolist()
    assert geometry.key_blocks.tolist() == key.tolist()
    for slots, numbers in ((geometry.query_slot, query), (geometry.key_slot, key)):
        places = {int(number): slot for slot, number in enumerate(numbers)}
        assert slots.tolist() == [places.get(number, -1) for number in range(blocks)]
    assert geometry.query_count.tolist() == [int((query < n).sum()) for n in range(blocks + 1)]
    met = {int(q - k) for q in query for k in key}
    assert geometry.diagonals.tolist() == [d in met for d in range(blocks)]
    assert geometry.holes == (len(query) < blocks or len(key) < blocks)
    assert geometry.all_keys == (len(key) == blocks)
