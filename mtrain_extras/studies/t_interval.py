"""Intervals of Student's t for few seeds, paired."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean and its confidence interval.

    low, high: None for fewer than two values.
    """

    mean: float
    low: float | None
    high: float | None
    count: int

    def is_inside(self, spread: float) -> bool:
        """Return whether the whole interval lies between -spread and spread."""
        return self.low is not None and self.high is not None and (
            -spread <= self.low and self.high <= spread
        )  # fmt: skip


def interval(values: Sequence[float]) -> Interval | None:
    """Return the mean of independent values with its t-interval; None for no values."""
    if not values:
        return None
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Interval(mean, None, None, len(values))
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = t_quantile(0.5 + CONFIDENCE / 2, len(values) - 1) * error
    return Interval(mean, mean - half, mean + half, len(values))


def t_quantile(probability: float, degrees: int) -> float:
    """Return the quantile of Student's t. probability: from 0.5 to 1, without 1."""
    low, high = 0.0, 1.0
    while t_probability(high, degrees) < probability:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        if t_probability(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def t_probability(t: float, degrees: int) -> float:
    """Return the probability that Student's t is below ``t``, for t >= 0.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan(t / math.sqrt(degrees))
    cosine = math.cos(angle)
    if degrees % 2:
        total, term = 0.0, cosine
        for number in range(1, degrees - 1, 2):
            total += term
            term *= cosine**2 * (number + 1) / (number + 2)
        within = 2 / math.pi * (angle + math.sin(angle) * total)
    else:
        total, term = 0.0, 1.0
        for number in range(0, degrees, 2):
            total += term
            term *= cosine**2 * (number + 1) / (number + 2)
        within = math.sin(angle) * total
    return 0.5 + within / 2
