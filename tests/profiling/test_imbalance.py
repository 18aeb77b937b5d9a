"""Imbalance degrees of matrices of which the answer is known, and what a recording of an exchange must hold."""

from __future__ import annotations

import pytest

from mtrain_cli.profiling.imbalance import imbalance


@pytest.mark.parametrize(
    ("table", "worker", "step", "total", "critical"),
    [
        ([[2, 2], [2, 2]], 1, 1, 1, 1),
        ([[4, 0], [0, 4]], 2, 2, 1, 2),  # each has as much, never at the same time
        ([[3, 3], [1, 1]], 1.5, 1, 1.5, 1.5),
        ([[1, 3], [1, 3]], 1, 1.5, 1, 1),
        ([[8, 1], [0, 1]], 1.5, (8 / 4.5 + 2) / 2, 9 / 5, 9 / 5),
        ([[5, 0, 1], [3, 0, 3]], (5 / 4 + 3 / 2) / 2, (5 / 3 + 1) / 2, 1, 8 / 6),  # in step 1 nobody computes
        ([[0, 0], [0, 0]], 1, 1, 1, 1),
        ([[7]], 1, 1, 1, 1),
    ],
)
def test_degrees_of_small_matrices(table, worker, step, total, critical):
    found = imbalance(table)
    assert (found.worker, found.step, found.total, found.critical) == pytest.approx((worker, step, total, critical))


@pytest.mark.parametrize("table", [[], [[]], [1.0], [[-1.0, 2.0]], [[float("nan")]], [[float("inf")]]])
def test_no_table_of_times_is_refused(table):
    with pytest.raises(ValueError, match="finite numbers"):
        imbalance(table)
