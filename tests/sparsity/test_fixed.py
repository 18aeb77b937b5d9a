"""Drawn indices have the configured counts and depend only on seed, layer and length."""

from __future__ import annotations

import pytest
import torch
from attention.equal_indices import same_index
from sparsity.small_batch import BLOCK, SEQ, inputs, pattern

from mtrain_cli.sparsity.fixed import FixedPattern, fixed_index
from mtrain_cli.sparsity.pattern import display_name


def test_fixed_has_the_configured_counts_and_depends_only_on_the_seed():
    shape = {"batch": 1, "heads": 3, "seq": 1000, "block": 16, "slashes": 7, "columns": 20}
    index = fixed_index(seed=1, **shape)
    assert index.slashes.sum(-1).tolist() == [[7, 7, 7]]
    assert index.max_slashes == 7
    assert bool(index.slashes[..., :2].all())
    assert index.has_own_blocks
    assert (index.columns < 63 * 16).sum(-1).tolist() == [[20, 20, 20]]
    assert not torch.equal(index.columns[0, 0], index.columns[0, 1]), "every head draws its own"
    assert same_index(index, fixed_index(seed=1, **shape))
    assert not same_index(index, fixed_index(seed=2, **shape))
    assert display_name(FixedPattern(16, 7, 20, 0.0, 1)) == "fixed (SYNTHETIC)"
    assert display_name(pattern()) == "vertical_slash"


def test_fixed_diagonals_favour_the_recent_past():
    """Besides 0 and 1, every head has one more diagonal, weighted by the cube root of its place."""
    heads = 4000
    drawn = fixed_index(
        seed=3, batch=1, heads=heads, seq=256, block=16, slashes=3, columns=0
    ).slashes[0]
    assert drawn[:, :2].all()
    chance = torch.diff(torch.linspace(0, 1, 17).pow(1 / 3))[2:]
    want = chance / chance.sum() * heads
    got = drawn[:, 2:].sum(0)
    assert int(got.sum()) == heads
    assert (
        float(((got - want).square() / want).sum()) < 40
    )  # chi-square, 13 degrees of freedom: 1 in 10,000


def test_every_layer_draws_its_own_fixed_index():
    q, k, masked = inputs(0)
    made = FixedPattern(BLOCK, 3, 8, 0.0, 1)
    first, second = (made.estimate(q, k, masked, layer) for layer in (0, 1))
    assert same_index(made.estimate(q, k, masked, 0), first)
    assert not torch.equal(first.slashes, second.slashes)
    assert not torch.equal(first.columns, second.columns)


def test_a_text_one_token_shorter_keeps_the_index_of_the_training():
    made = FixedPattern(BLOCK, 3, 100, 0.0, 1)
    whole = -(-SEQ // BLOCK) * BLOCK
    long, short = (made.estimate(*inputs(0, length=length), 0) for length in (SEQ, SEQ - 1))
    assert torch.equal(long.slashes, short.slashes)
    assert torch.equal(long.columns.masked_fill(long.columns >= SEQ - 1, whole), short.columns)
    assert (long.columns == SEQ - 1).any(), "the last token is a column of some head"


@pytest.mark.parametrize("density", [0.05, 0.3, 0.6, 0.9])
def test_fixed_draws_the_fewest_diagonals_that_fill_the_density(density):
    shape = {"seed": 3, "batch": 1, "heads": 4, "seq": 9 * BLOCK, "block": BLOCK, "columns": 0}
    index = fixed_index(**shape, slashes=None, density=density)
    slashes = index.slashes
    assert index.max_slashes == int(slashes.sum(-1).max())
    area = torch.arange(9, 0, -1)
    for h, count in enumerate(slashes[0].sum(-1).tolist()):
        assert int((slashes[0, h] * area).sum()) >= density * 45
        # The same draw with one diagonal fewer.
        fewer = fixed_index(**shape, slashes=count - 1).slashes[0, h]
        assert count == 1 or int((fewer * area).sum()) < density * 45
