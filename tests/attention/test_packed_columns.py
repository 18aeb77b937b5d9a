"""Packed columns are gathered by the index, and their gradients return to the same places only."""

from __future__ import annotations

import pytest
import torch
from attention.sparse_problems import make_problem

from mtrain_cli.attention.packed_columns import (
    COLUMN_TILE,
    add_column_gradients,
    local_columns,
    pack_columns,
    whole_columns,
)


@pytest.mark.parametrize("where", ["whole", "striped"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_column_gradients_are_added_where_the_columns_came_from(where, dtype):
    p = make_problem(
        0, "both", seq=61, block=16, heads=4, kv_heads=2, dim=8, documents=False, where=where
    )
    columns, slots = local_columns(p.tiles)
    packed = pack_columns(p.k, p.v, p.tiles)
    # Whole numbers sum exactly in both dtypes. Empty places hold NaN, which must not be used.
    parts = [torch.randint(-3, 4, (2, *t.shape)).float() for t in packed]
    for part in parts:
        part[:, slots < 0] = float("nan")
    got = [torch.randint(-3, 4, t.shape).to(dtype) for t in (p.k, p.v)]
    want = [t.clone() for t in got]
    add_column_gradients(*got, *parts, p.tiles)
    keys = p.tiles.positions()[1].tolist()
    num_columns = 0
    for b, h, place in torch.cartesian_prod(*(torch.arange(n) for n in slots.shape)).tolist():
        if int(columns[b, h, place]) not in keys:
            assert slots[b, h, place] == -1
            continue
        num_columns += 1
        key = keys.index(int(columns[b, h, place]))
        for source, kept, target, part in zip((p.k, p.v), packed, want, parts, strict=True):
            assert torch.equal(kept[b, h, place], source[b, key, h // 2])
            target[b, key, h // 2] += part[:, b, h, place].sum(0).to(dtype)
    assert 0 < num_columns < slots.numel()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_columns_are_padded_to_whole_tiles_with_empty_places():
    p = make_problem(
        0, "columns", seq=61, block=16, heads=4, kv_heads=2, dim=8, documents=False, where="whole"
    )
    given, empty = p.tiles.index.columns, p.tiles.index.blocks * p.tiles.index.block
    width = given.shape[-1]
    assert width % COLUMN_TILE
    padded = whole_columns(p.tiles.index)
    assert padded.shape[-1] == COLUMN_TILE
    assert padded[..., :width].equal(given)
    assert (padded[..., width:] == empty).all()
    assert (local_columns(p.tiles)[1][..., width:] == -1).all()
