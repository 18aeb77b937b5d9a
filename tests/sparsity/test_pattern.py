"""Budgets: the fewest candidates that reach a share, including the one that crosses it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mtrain_cli.sparsity.pattern import select_by_mass


def kept(
    mass: list[float],
    share: float,
    forced: tuple[int, ...] = (),
    least: int = 0,
    most: int | None = None,
) -> list[int]:
    values = torch.tensor(mass, dtype=torch.float32)
    mask = torch.zeros(len(mass), dtype=torch.bool)
    mask[list(forced)] = True
    candidates, keep = select_by_mass(values[None], share, mask, least, most or len(mass))
    return candidates[keep].tolist()


def test_the_candidate_that_crosses_the_share_is_kept():
    assert kept([0.125, 0.5, 0.25, 0.125], 0.5) == [1]
    assert kept([0.125, 0.5, 0.25, 0.125], 0.51) == [1, 2]
    assert kept([0.125, 0.5, 0.25, 0.125], 0.75) == [1, 2]
    assert kept([0.125, 0.5, 0.25, 0.125], 0.76) == [1, 2, 0]
    assert kept([0.125, 0.5, 0.25, 0.125], 1.0) == [1, 2, 0, 3]


def test_ties_go_to_the_lower_number():
    assert kept([0.25, 0.25, 0.25, 0.25], 0.6) == [0, 1, 2]


def test_forced_candidates_come_first_and_count():
    assert kept([0.125, 0.5, 0.25, 0.125], 0.55, forced=(0,)) == [0, 1]
    assert kept([0.125, 0.5, 0.25, 0.125], 0.05, forced=(3, 0)) == [0, 3]


def test_bounds_are_respected():
    assert kept([0.125, 0.5, 0.25, 0.125], 0.1, least=3) == [1, 2, 0]
    assert kept([0.125, 0.5, 0.25, 0.125], 1.0, most=2) == [1, 2]
    assert kept([0.0, 0.0, 0.0], 0.9, least=1) == [0], "no mass at all"


def test_nan_has_no_mass():
    assert kept([float("nan"), 0.5, 0.5, float("inf")], 0.9) == [1, 2]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.floats(0.01, 1.0))
def test_no_smaller_set_reaches_the_share(values, share):
    total = sum(values) or 1.0
    mass = [float(np.float32(v / total)) for v in values]
    selected = kept(mass, share)
    units = [round(m * 2.0**38) for m in mass]
    held = sum(units[line] for line in selected)
    assert held >= share * sum(units)
    if selected:
        assert held - units[selected[-1]] < share * sum(units), (
            "without its last candidate it misses the share"
        )
        assert all(
            units[a] >= units[b] for a in selected for b in range(len(mass)) if b not in selected
        ), "it holds the largest candidates"


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_selected_independently(seed):
    rng = np.random.default_rng(seed)
    mass = torch.from_numpy(rng.dirichlet(np.full(40, 0.3), (2, 3)).astype(np.float32))
    none = torch.zeros(40, dtype=torch.bool)
    candidates, keep = select_by_mass(mass, 0.7, none, 0, 40)
    for b in range(2):
        for h in range(3):
            assert candidates[b, h][keep[b, h]].tolist() == kept(mass[b, h].tolist(), 0.7)
