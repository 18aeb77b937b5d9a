"""An index counts its work exactly and allows the right pairs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention.equal_indices import same_index
from attention.sparse_problems import make_index, make_problem

from mtrain_cli.attention import index as index_module
from mtrain_cli.attention.index import BlockBitmap, VerticalSlash
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_tables import MaskTables

KINDS = ("slashes", "columns", "both", "all", "none", "bitmap", "gated", "starts")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [0, 1, 37])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_counts_equal_the_enumerated_pairs(kind, documents, window, seed):
    p = make_problem(seed, kind, seq=109 + seed, documents=documents, window=window)
    index = p.tiles.index
    counts = index.counts(
        MaskTables.make(p.masks, 16, bitmap="columns" not in p.tiles.index.by_head)
    )
    seen = p.tiles.seen()
    positions = p.tiles.positions()[0]
    chosen = index.chosen(positions // 16, positions // 16)
    assert counts.pairs.tolist() == seen.sum((-1, -2)).tolist()
    assert counts.column_pairs.tolist() == (seen & ~chosen).sum((-1, -2)).tolist()
    pad = -seen.shape[-1] % 16
    by_block = (
        torch.nn.functional.pad(seen & chosen, (0, pad, 0, pad))
        .unflatten(-1, (-1, 16))
        .unflatten(-3, (-1, 16))
        .any(-1)
        .any(-2)
    )
    if kind in ("gated", "starts"):
        assert bool((counts.blocks >= by_block.sum((-1, -2))).all()), (
            "a block is visited for queries of another document, too"
        )
    else:
        assert counts.blocks.tolist() == by_block.sum((-1, -2)).tolist()
    if isinstance(index, VerticalSlash):
        lengths = torch.tensor([m.length for m in p.masks])
        assert counts.columns.tolist() == (index.columns < lengths[:, None, None]).sum(-1).tolist()
        assert counts.slashes.tolist() == index.slashes.sum(-1).tolist()
    forward, backward = counts.flop(128)
    assert (forward, backward) == (512 * int(seen.sum()), 1280 * int(seen.sum()))


def test_joined_layers_have_the_counts_of_each_layer():
    p = make_problem(0, "both", seq=109)
    rng = np.random.default_rng(1)
    layers = [
        make_index(kind, rng, 2, 4, p.masks[0].padded, 16)
        for kind in ("both", "columns", "none", "both")
    ]
    assert len({index.columns.shape[-1] for index in layers}) > 2
    work, joined = MaskTables.make(p.masks, 16), VerticalSlash.joined(layers)
    for i, (index, counts) in enumerate(zip(layers, joined.counts(work).parts(4), strict=True)):
        assert same_index(joined.part(i, 4), index)
        assert all(
            torch.equal(getattr(counts, name), value)
            for name, value in vars(index.counts(work)).items()
        )


def test_bitmap_counts_are_exact_for_any_number_of_rows_per_pass(monkeypatch):
    masks = [SequenceMask.causal(1 << 16, 1 << 16)]
    blocks = 512
    work = MaskTables.make(masks, 128, bitmap=True)
    bits = torch.ones(1, 2, blocks, blocks, dtype=torch.bool).tril()
    bits[0, 1, 7, 3] = False
    for at_once in (1, 1000, 1 << 24):
        monkeypatch.setattr(index_module, "_BITS_PER_PASS", at_once)
        counts = BlockBitmap.whole(128, bits).counts(work)
        # More than float32 represents exactly.
        assert counts.pairs.tolist() == [[masks[0].pairs, masks[0].pairs - 128 * 128]]
        assert counts.blocks.tolist() == [[512 * 513 // 2, 512 * 513 // 2 - 1]]
