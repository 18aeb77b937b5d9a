"""The counts and the picture of a mask equal its dense table."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from attention.dense_problems import random_slices

from mtrain_cli.attention.mask import SequenceMask, SliceKind
from mtrain_cli.parallel.cast_rows import CastRows
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.reporting.mask_view import density, share_of


@pytest.mark.parametrize("layout_name", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("seed", range(4))
def test_shares_of_workers(layout_name, seed):
    layout = make_layout(layout_name, 3, 50, 4)
    padded = layout.padded_seq
    slices = random_slices(np.random.default_rng(seed), 50, 5)
    mask = SequenceMask.from_slices(slices, 50, padded)
    seen = mask.spans(np.arange(padded), np.arange(padded)).seen()
    share = share_of(mask, layout)
    moved = []
    for rank in range(3):
        own = layout.positions(rank)
        assert share.traffic.pairs[rank] == seen[own].sum()
        assert share.slices[rank] == len(mask.spans(own, np.arange(padded)).slices)
        rows = CastRows.make(layout, [mask], rank, [range(3)])
        moved.append(sum(rows.casts[0].received))
    assert share.traffic.received.tolist() == moved
    assert share.remote == pytest.approx(np.mean(moved) / (2 * layout.tokens_per_worker))


def test_an_index_moves_whole_blocks():
    """A query of rank 1 sees one key of rank 0."""
    layout = make_layout("contiguous", 2, 512, 4)
    mask = SequenceMask.from_slices([(256, 257, 255, 257, SliceKind.FULL)], 512, 512)
    # Dense attention moves a 16th of a shard, or less.
    assert share_of(mask, layout).traffic.received.tolist() == [0, 16]
    assert share_of(mask, layout, 64).traffic.received.tolist() == [0, 64]
    assert share_of(mask, layout, 64).remote == 64 / 512


@pytest.mark.parametrize(("length", "cells"), [(60, 60), (60, 7), (5, 128)])
def test_the_density_of_cells(length, cells):
    slices = random_slices(np.random.default_rng(1), length, 5)
    mask = SequenceMask.from_slices(slices, length, length + 2)
    everywhere = np.arange(length)
    seen = mask.spans(everywhere, everywhere).seen()
    edges = np.unique(np.linspace(0, length, cells + 1).astype(int))
    wanted = [
        [seen[a:b, c:d].mean() for c, d in itertools.pairwise(edges)]
        for a, b in itertools.pairwise(edges)
    ]
    np.testing.assert_allclose(density(mask, cells), wanted)


def test_a_mask_without_pairs_has_no_imbalance():
    mask = SequenceMask.from_slices([], 8, 8)
    assert share_of(mask, make_layout("contiguous", 2, 8, 4)).traffic.imbalance == 1.0
    assert share_of(mask, make_layout("contiguous", 1, 8, 4)).remote == 0.0
