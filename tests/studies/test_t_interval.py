"""Quantiles against published tables, and intervals against a calculation by hand."""

from __future__ import annotations

import pytest

from mtrain_extras.studies.t_interval import Interval, interval, t_probability, t_quantile


@pytest.mark.parametrize(
    ("degrees", "expected"),
    # NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2, 0.975.
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (10, 2.228), (30, 2.042)],
)
def test_quantiles_are_those_of_the_tables(degrees, expected):
    assert t_quantile(0.975, degrees) == pytest.approx(expected, abs=5e-4)
    assert t_probability(t_quantile(0.975, degrees), degrees) == pytest.approx(0.975)


def test_the_interval_of_three_values():
    found = interval([1.0, 2.0, 3.0])
    half = 4.302653 / 3**0.5  # the standard deviation is 1
    assert found.mean == 2.0
    assert (found.low, found.high) == pytest.approx((2 - half, 2 + half))
    assert found.is_inside(2 + half + 1e-9)
    assert not found.is_inside(2 + half - 1e-6)


def test_few_values_have_no_interval():
    assert interval([]) is None
    one = interval([0.0])
    assert (one.mean, one.low, one.high) == (0.0, None, None)
    assert not one.is_inside(1e9)


@pytest.mark.parametrize(
    ("low", "high", "inside"),
    [(-0.5, 0.5, True), (-0.51, 0.5, False), (-0.5, 0.51, False), (-0.51, 0.0, False)],
)
def test_an_interval_is_inside_up_to_the_spread(low, high, inside):
    assert Interval(0.0, low, high, 3).is_inside(0.5) == inside
