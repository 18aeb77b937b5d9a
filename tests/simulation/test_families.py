"""Synthetic indices have the stated density, and `drifting` ones move."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mtrain_cli.simulation.families import FAMILIES, IndexFamily


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_the_density_that_it_states(name):
    family = IndexFamily(name, density=0.05, columns=100)
    index = family.index(3, 1 << 17, 2)
    area = index.blocks - np.arange(index.blocks)
    shares = (index.slashes.numpy() * area).sum(-1) / area.sum()
    assert ((shares >= 0.05) & (shares < 0.053)).all()
    assert index.slashes[..., 0].all()
    assert all(len(set(row.tolist())) == 100 for row in index.columns[0])
    other = family.index(4, 1 << 17, 2)
    assert np.array_equal(index.slashes.numpy(), other.slashes.numpy()) == (name == "local")
    assert not np.array_equal(index.columns.numpy(), other.columns.numpy())
    assert np.array_equal(index.columns.numpy(), family.index(3, 1 << 17, 2).columns.numpy())


def test_drifting_diagonals_move_with_layers_and_steps_and_stay_together():
    family = IndexFamily("drifting", density=0.05, columns=16)

    def kept(later: int) -> float:
        """Share of layer 0's diagonals within a layer's drift of a diagonal of a later layer."""
        first, then = (family.index(layer, 1 << 17, 4).slashes.numpy()[0] for layer in (0, later))
        blocks = first.shape[-1]
        reach = blocks // 64 + 1
        near = np.array(
            [
                [then[h, max(0, d - reach) : d + reach + 1].any() for d in range(blocks)]
                for h in range(4)
            ]
        )
        return float((first & near).sum() / first.sum())

    assert kept(1) > 0.9
    assert kept(40) < 0.6
    moved = dataclasses.replace(family, step=2).index(3, 1 << 17, 4)
    assert np.array_equal(moved.slashes.numpy(), family.index(5, 1 << 17, 4).slashes.numpy()), (
        "a step is as far as a layer"
    )
