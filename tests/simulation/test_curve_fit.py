"""Fits of kernel times recover their constants; leave-one-out errors."""

from __future__ import annotations

import numpy as np
import pytest

from mtrain_cli.simulation.calibration import CalibrationPoint, fit_together, held_out_errors


def fit(points):
    return fit_together([points])[0]


def made(fixed: float, rate: float, columns: float, noise: float = 0.0) -> list[CalibrationPoint]:
    rng = np.random.default_rng(0)
    works = [(f, c) for f in (0.5, 2.0, 8.0, 30.0) for c in (0.1, 0.5, 2.0)]
    return [
        CalibrationPoint(
            f, c, (fixed + rate * f + columns * c) * float(np.exp(rng.normal(0, noise)))
        )
        for f, c in works
    ]


def test_a_fit_recovers_the_constants_of_its_points():
    assert fit(made(0.3, 1.7, 3.4)) == pytest.approx((0.3, 1.7, 3.4))
    assert held_out_errors([made(0.3, 1.7, 3.4)])[0] == pytest.approx(0, abs=1e-9)
    assert 0.02 < held_out_errors([made(0.3, 1.7, 3.4, noise=0.05)])[0] < 0.08
    # No time is negative, and a single point does not determine a fixed time.
    assert (
        min(
            fit(
                [
                    CalibrationPoint(1, 0, 1.0),
                    CalibrationPoint(2, 0, 2.2),
                    CalibrationPoint(4, 0, 4.9),
                ]
            )
        )
        >= 0
    )
    assert fit([CalibrationPoint(2, 0, 3.0)]) == (0, pytest.approx(1.5), 0)


def test_calls_to_the_same_kernels_are_fitted_together():
    """Joint calls have a fifth of their work in columns; diagonals have only small, noisy calls."""
    rng = np.random.default_rng(1)
    both = [CalibrationPoint(f, f / 4, 0.2 + 1.7 * f + 3.4 * f / 4) for f in (0.5, 1.0, 2.0, 4.0)]
    diagonals = [
        CalibrationPoint(f, 0, (0.3 + 1.7 * f) * float(np.exp(rng.normal(0, 0.1))))
        for f in (0.05, 0.1, 0.2, 0.4)
    ]
    columns = [CalibrationPoint(0, f, 0.1 + 3.4 * f) for f in (0.1, 0.3, 0.5)]
    of_both, of_diagonals, of_columns = fit_together([both, diagonals, columns])
    assert of_both[1:] == of_diagonals[1:] == of_columns[1:] == pytest.approx((1.7, 3.4), rel=0.12)
    # A large call with other proportions. A fit to the joint calls only would be off.
    expected = 0.2 + 30 * 1.7 + 3.4
    assert of_both[0] + 30 * of_both[1] + of_both[2] == pytest.approx(expected, rel=0.12)
    apart = fit(both)
    assert abs(apart[0] + 30 * apart[1] + apart[2] - expected) > 0.25 * expected
    # A point that takes twice as long is predicted without itself, but with the other forms.
    strange = [*both[:3], CalibrationPoint(4.0, 1.0, 2 * both[3].ms)]
    apart = [fit([p for p in strange if p is not left_out]) for left_out in strange]
    errors = [
        abs((f + r * p.flop + c * p.column_flop) / p.ms - 1)
        for (f, r, c), p in zip(apart, strange, strict=True)
    ]
    assert errors[-1] == pytest.approx(0.5, abs=1e-6)
    assert held_out_errors([strange]) == pytest.approx([sum(errors) / 4])
    assert held_out_errors([both, diagonals, columns])[1] != pytest.approx(
        held_out_errors([diagonals])[0], rel=1e-3
    )
