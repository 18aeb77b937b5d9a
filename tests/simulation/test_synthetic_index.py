"""Synthetic indices have the density that they state, and differ between layers and heads."""

from __future__ import annotations

import numpy as np
import pytest

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_tables import MaskTables
from mtrain_cli.simulation.synthetic_index import SyntheticBlocks, SyntheticIndex
from mtrain_cli.training.flops import causal_pairs


def test_a_synthetic_index_has_the_density_that_it_states():
    family = SyntheticIndex(density=0.05, columns=100)
    index = family.index(3, 1 << 17, 2)
    area = index.blocks - np.arange(index.blocks)
    shares = (index.slashes.numpy() * area).sum(-1) / area.sum()
    assert ((shares >= 0.05) & (shares < 0.053)).all()
    assert index.slashes[..., 0].all()
    assert all(len(set(row.tolist())) == 100 for row in index.columns[0])
    other = family.index(4, 1 << 17, 2)
    assert not np.array_equal(index.slashes.numpy(), other.slashes.numpy())
    assert not np.array_equal(index.columns.numpy(), other.columns.numpy())
    assert np.array_equal(index.columns.numpy(), family.index(3, 1 << 17, 2).columns.numpy())


@pytest.mark.parametrize("hot", [0, 20])
@pytest.mark.parametrize("block", [32, 128])
def test_drawn_lists_have_their_density_forced_blocks_and_hot_blocks(block, hot):
    """512 blocks of any size, in lists of two groups of two heads."""
    seq, family = 512 * block - 5, SyntheticBlocks(0.1, hot, block, groups=2)
    index = family.index(3, seq, 4)
    tables = MaskTables.make([SequenceMask.causal(seq, seq)], block, bitmap=True)
    densities = index.counts(tables).pairs[0].numpy() / causal_pairs(seq)
    assert densities == pytest.approx([0.1] * 4, rel=0.002)
    bits = index.bits[0].numpy()
    assert not np.triu(bits, 1).any()
    assert np.array_equal(bits[0], bits[1])
    assert np.array_equal(bits[2], bits[3])
    assert not np.array_equal(bits[0], bits[2])
    for chosen in (bits[0], bits[2]):
        assert chosen.diagonal().all()
        assert chosen.diagonal(-1).all()
        assert chosen[:, 0].all()
        # Blocks near the end have few later queries, which may all choose them by chance.
        by_all = np.array([chosen[key:, key].all() for key in range(1, 480)])
        assert hot - 4 <= by_all.sum() <= hot
        assert (hot > 0) == by_all.any()
        rows = chosen.sum(1)[256:] / np.arange(256, 512)
        assert rows.std() > 0.5 * (rows.mean() - hot / 512), "some blocks of queries want more"
        assert rows.max() < 4 * rows.mean()
    assert np.array_equal(bits, family.index(3, seq, 4).bits[0])
    assert not np.array_equal(bits, family.index(4, seq, 4).bits[0])


@pytest.mark.parametrize("density", [0.02, 0.6])
def test_rows_that_want_more_blocks_than_there_are_leave_them_to_others(density):
    index = SyntheticBlocks(density, 0, 16).index(0, 512 * 16, 1)
    tables = MaskTables.make([SequenceMask.causal(512 * 16, 512 * 16)], 16, bitmap=True)
    found = float(index.counts(tables).pairs) / causal_pairs(512 * 16)
    assert found == pytest.approx(density, rel=0.005)
