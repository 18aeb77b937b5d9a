"""Collectives get the bandwidth that other messages leave while a layer computes."""

from __future__ import annotations

import pytest

from mtrain_cli.simulation.calibration import HIGH, LOW, VALUE
from mtrain_cli.simulation.weight_transfers import WeightTransfer, overlapped_us


def test_weights_get_the_bandwidth_that_attention_leaves():
    outer, inner = (
        WeightTransfer(us=30.0, busy=20.0, outer=True),
        WeightTransfer(us=30.0, busy=20.0, outer=False),
    )
    assert overlapped_us([outer], 100.0, (0.0, 0.0), VALUE) == 30
    assert overlapped_us([outer], 100.0, (90.0, 0.0), VALUE) == 30, "another link"
    assert overlapped_us([outer], 100.0, (0.0, 60.0), VALUE) == pytest.approx(50)
    assert overlapped_us([outer], 100.0, (0.0, 60.0), LOW) == 30
    assert overlapped_us([inner], 100.0, (60.0, 0.0), HIGH) == pytest.approx(50)
    # Half of the link for 40 us does 20 of the 30 us; the others come after it.
    assert overlapped_us(
        [WeightTransfer(30.0, 30.0, outer=False)], 40.0, (20.0, 0.0), VALUE
    ) == pytest.approx(50)
    assert overlapped_us([outer, outer], 10.0, (0.0, 10.0), VALUE) == pytest.approx(70), (
        "nothing is left"
    )
    assert overlapped_us([WeightTransfer(0.0, 0.0, outer=False)], 10.0, (0.0, 0.0), VALUE) == 0
