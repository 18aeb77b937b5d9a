"""Numbers and axes of figures: rounded, finite, and never more than the page can hold."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mtrain_cli.reporting import plots


def test_numbers_are_rounded_and_strict_json():
    values = [1.23456789, None, float("nan"), float("inf"), 0.000123456, 123456.7]
    rounded = plots.numbers(values)
    assert rounded == [1.2346, None, None, None, 0.00012346, 123460.0]
    json.dumps(rounded, allow_nan=False)
    assert plots.numbers([[1, 2], [3, 4]]) == [[1, 2], [3, 4]]
    assert plots.numbers([1.23456], digits=2) == [1.2]


@pytest.mark.parametrize("most", [1, 2, 5, 100])
def test_evenly_spaced_items_include_both_ends(most):
    items = list(range(17))
    shown = plots.evenly(items, most)
    assert len(shown) == min(most, len(items))
    assert shown[0] == 0
    assert most == 1 or shown[-1] == 16
    gaps = np.diff(shown)
    assert most < 3 or gaps.max() - gaps.min() <= 1
