"""Fit the times of kernel calls to measurements.

The model: a call takes a fixed time, plus its work divided by a rate. Slashes and single columns
have separate rates. The error of a fit is a leave-one-out error: each point is predicted from a fit
to the other points.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class CalibrationPoint:
    """One measured call.

    flop: work on slashes, or the whole work of a dense call, in 1e12 FLOP.
    column_flop: work on single columns, in 1e12 FLOP.
    """

    flop: float
    column_flop: float
    ms: float


def fit(points: Sequence[CalibrationPoint]) -> tuple[float, float, float]:
    """Fit the calls of one form: minimize the sum of squared relative errors.

    Return the fixed ms, the ms per 1e12 FLOP, and the ms per 1e12 FLOP of single columns. None of
    them is negative.
    """
    return fit_together([points])[0]


def fit_together(forms: Sequence[Sequence[CalibrationPoint]]) -> list[tuple[float, float, float]]:
    """Fit several forms of calls to one kernel together; see `fit`.

    Each form has its own fixed time, and all forms share the two rates. The calls of one form may
    not suffice to fit both rates, because they all have the same ratio of slashes to columns or
    are all small.
    """
    rows = [(number, point) for number, points in enumerate(forms) for point in points]
    table = np.zeros((len(rows), len(forms) + 2))
    for row, (number, point) in zip(table, rows, strict=True):
        row[[number, -2, -1]] = np.array([1.0, point.flop, point.column_flop]) / point.ms
    # Fewer than three points of a form cannot determine a fixed time.
    lengths = [*map(len, forms), 3, 3]
    used = [i for i, length in enumerate(lengths) if table[:, i].any() and length > 2]
    best, least = np.zeros(table.shape[1]), np.inf
    ones = np.ones(len(rows))
    for count in range(1, len(used) + 1):
        for chosen in itertools.combinations(used, count):
            solution = np.zeros(table.shape[1])
            solution[list(chosen)] = np.linalg.lstsq(table[:, chosen], ones, rcond=None)[0]
            error = float(((table @ solution - 1) ** 2).sum())
            if (solution >= 0).all() and error < least * (1 - 1e-9):
                best, least = solution, error
    return [(float(fixed), float(best[-2]), float(best[-1])) for fixed in best[:-2]]


def held_out_errors(forms: Sequence[Sequence[CalibrationPoint]]) -> list[float]:
    """Return the mean absolute relative leave-one-out error of each form."""
    means = []
    for number, points in enumerate(forms):
        errors = []
        for i, left_out in enumerate(points):
            others = [list(p) for p in forms]
            del others[number][i]
            fixed, rate, column_rate = fit_together(others)[number]
            ms = fixed + left_out.flop * rate + left_out.column_flop * column_rate
            errors.append(abs(ms / left_out.ms - 1))
        means.append(float(np.mean(errors)) if len(points) > 2 else float("nan"))
    return means
