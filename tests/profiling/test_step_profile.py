"""Summaries of a rank's recorded steps."""

from __future__ import annotations

from mtrain_cli.profiling import step_profile
from mtrain_cli.records.step_breakdown import StepBreakdown


def test_unrecorded_step_times_are_medians():
    result = StepBreakdown(steps=2, step=10, parts={}, hidden=0, kinds=[])
    one = step_profile._of_rank(
        0, step_profile._RankSummary(result, [3.0, 1.0, 2.5], [2.0, 4.0], None)
    )
    assert (one["plain_ms"], one["recorded_ms"]) == (2500, 3000)
    assert step_profile._median([0.5, None, 0.2, 0.4]) == 0.4
    assert step_profile._median([None]) is None
