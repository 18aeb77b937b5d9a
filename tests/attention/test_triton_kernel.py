"""The tile plan of the Triton kernel."""

import pytest
import torch
from attention.sparse_problems import make_problem
from mtrain_cli.kernels.triton import sparse

from mtrain_cli.attention.triton_kernel import make_tile_plan


@pytest.mark.parametrize("kind", ["bitmap", "local bitmap"])
@pytest.mark.parametrize("where", ["whole", "striped", "later queries"])
def test_lists_hold_the_blocks_that_index_and_mask_leave(kind, where):
    p = make_problem(3, kind, seq=1609, where=where)
    index, geometry = p.tiles.index, p.tiles.geometry
    plan = make_tile_plan(p.tiles, backward=True)
    assert make_tile_plan(p.tiles).entries_t is None
    queries, keys = geometry.query_blocks.long(), geometry.key_blocks.long()
    touched = (keys <= queries[:, None]) & (
        (keys + 1) * 16 > geometry.tables.first_min[:, queries][..., None]
    )
    want = (index.chosen(queries, keys) & touched[:, None]).flatten(0, 1)
    for entries, counts, chosen, numbers in (
        (plan.entries, plan.counts, want, keys),
        (plan.entries_t, plan.counts_t, want.transpose(-1, -2), queries),
    ):
        assert entries.dtype == torch.int16
        assert torch.equal(counts.long(), chosen.sum(-1))
        ends = counts.flatten().tolist()
        for row, end, on in zip(entries.flatten(0, 1), ends, chosen.flatten(0, 1), strict=True):
            assert row[:end].tolist() == numbers[on].tolist()


def test_lists_of_many_blocks_use_int32():
    blocks, ends = 40_000, torch.tensor([39_998, 39_999], dtype=torch.int32)
    bits = torch.zeros(1, 1, 2, blocks, dtype=torch.bool)
    bits[0, 0, 0, [3, 600, 39_990]] = True
    slots = torch.full((blocks,), -1, dtype=torch.int32)
    slots[39_998:] = torch.arange(2, dtype=torch.int32)
    first = torch.zeros(1, blocks, dtype=torch.int32)
    entries, counts = sparse.list_blocks(
        bits, slots, ends, torch.arange(blocks, dtype=torch.int32), first, 16, transposed=False
    )
    assert (entries.dtype, entries[0, 0, :3].tolist(), counts.tolist()) == (
        torch.int32,
        [3, 600, 39_990],
        [[3, 0]],
    )
