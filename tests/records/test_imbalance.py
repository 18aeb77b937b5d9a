"""Imbalance degrees and computation ratios of matrices with known answers."""

from __future__ import annotations

import numpy as np
import pytest

from mtrain_cli.records.imbalance import degrees, imbalance, ratios


@pytest.mark.parametrize(
    ("table", "worker", "step", "total", "critical"),
    [
        ([[2, 2], [2, 2]], 1, 1, 1, 1),
        ([[4, 0], [0, 4]], 2, 2, 1, 2),  # equal sums, never at the same time
        ([[3, 3], [1, 1]], 1.5, 1, 1.5, 1.5),
        ([[1, 3], [1, 3]], 1, 1.5, 1, 1),
        ([[8, 1], [0, 1]], 1.5, (8 / 4.5 + 2) / 2, 9 / 5, 9 / 5),
        (
            [[5, 0, 1], [3, 0, 3]],
            (5 / 4 + 3 / 2) / 2,
            (5 / 3 + 1) / 2,
            1,
            8 / 6,
        ),  # no worker computes in step 1
        # means, not medians, of three workers and of three steps
        ([[9], [2], [1]], 9 / 4, 1, 9 / 4, 9 / 4),
        ([[9, 2, 1]], 1, 9 / 4, 1, 1),
        ([[0, 0], [0, 0]], 1, 1, 1, 1),
        ([[7]], 1, 1, 1, 1),
    ],
)
def test_degrees_of_small_matrices(table, worker, step, total, critical):
    found = imbalance(table)
    assert (found.worker, found.step, found.total, found.critical) == pytest.approx(
        (worker, step, total, critical)
    )


@pytest.mark.parametrize(
    "table", [[], [[]], [1.0], [[-1.0, 2.0]], [[float("nan")]], [[float("inf")]]]
)
def test_tables_that_are_not_times_are_refused(table):
    with pytest.raises(ValueError, match="finite numbers"):
        imbalance(table)


@pytest.mark.parametrize(
    ("attention", "elapsed", "wall", "step", "total"),
    [
        ([[2, 2], [2, 2]], [[2, 2], [2, 2]], None, 1, 1),
        (
            [[1, 3], [2, 2]],
            [[2, 3], [4, 4]],
            None,
            (1 / 2 + 1 + 1 / 2 + 1 / 2) / 4,
            (4 / 8 + 4 / 8) / 2,
        ),
        ([[1, 3], [2, 2]], [[2, 3], [4, 4]], 10.0, (1 / 2 + 1 + 1 / 2 + 1 / 2) / 4, 0.4),
        (
            [[4, 0], [0, 4]],
            [[4, 1], [4, 4]],
            None,
            (1 + 0 + 0 + 1) / 4,
            (4 / 8 + 4 / 8) / 2,
        ),  # a worker that only waits counts as 0
        (
            [[2, 0], [2, 0]],
            [[2, 6], [2, 6]],
            None,
            1,
            2 / 8,
        ),  # a step without computation counts in the total only
        ([[3]], [[4]], None, 0.75, 0.75),
        ([[0, 0]], [[0, 0]], None, 0, 0),
        ([[2, 0]], [[2, 0]], 0.0, 1, 0),
    ],
)
def test_computation_ratios_of_small_matrices(attention, elapsed, wall, step, total):
    a, e = np.array(attention, float), np.array(elapsed, float)
    longest = e.sum(1).max() if wall is None else wall
    found = ratios(a[None], e[None], a.sum(1)[None], np.array([longest]))
    assert found[:, 0].tolist() == pytest.approx([step, total])


def test_tables_of_different_shapes_are_refused():
    with pytest.raises(ValueError, match="both must be"):
        ratios(np.ones((1, 1, 2)), np.ones((1, 2, 1)), np.ones((1, 1)), np.ones(1))


def test_many_tables_at_once_equal_each_alone():
    tables = np.random.default_rng(0).gamma(2, size=(7, 5, 6)) * (
        np.random.default_rng(1).random((7, 5, 6)) > 0.4
    )
    for table, found in zip(tables, degrees(tables).T, strict=True):
        alone = imbalance(table)
        assert tuple(found) == pytest.approx(
            (alone.worker, alone.step, alone.total, alone.critical)
        )
