"""The counts and the picture of a mask equal its dense table."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from attention.dense_problems import random_slices

from mtrain_cli.attention.mask import SequenceMask
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
    for rank in range(3):
        own = layout.positions(rank)
        needed = seen[own].any(0)
        assert share.pairs[rank] == seen[own].sum()
        assert share.remote[rank] == np.delete(needed, own).sum()
    assert share.imbalance == pytest.approx(max(share.pairs) / np.mean(share.pairs))
    assert 0 <= share.remote_share <= 1


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
    assert share_of(mask, make_layout("contiguous", 2, 8, 4)).imbalance == 1.0
    assert share_of(mask, make_layout("contiguous", 1, 8, 4)).remote_share == 0.0
