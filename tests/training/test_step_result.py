"""Reports of ranks arrive in the order of their fields, and name the ranks that are not finite."""

from __future__ import annotations

from dataclasses import astuple

import pytest

from mtrain_cli.training.step_result import NonFiniteError, StepReport, StepResult, check_finite

FINE = StepReport(2.5, 4.0, 0.0, 0.0, 0.1, 0.2)


@pytest.mark.parametrize("sums", [(), (7.0, 8.0)])
def test_a_report_survives_as_a_row_of_numbers(sums):
    *plain, index_sums = astuple(StepReport(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, sums))
    row = [*plain, *index_sums]
    assert StepReport.of(row) == StepReport(1.0, 2.0, 3.0, 4.0, 5.0, 6.0, sums)


def test_the_slowest_loader_sets_the_time_of_the_data():
    slow = StepReport(2.5, 4.0, 0.0, 0.0, 9.0, 0.7)
    result = StepResult(2.5, 2.0, 1e-3, 64, 100.0, False, reports=(FINE, slow, FINE))
    assert result.data_seconds == 0.7
    assert StepResult(2.5, 2.0, 1e-3, 64, 100.0, False).data_seconds == 0


def test_finite_reports_pass():
    check_finite([FINE, FINE], 3)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_the_error_names_step_quantity_and_ranks(value):
    lost = StepReport(value, 4.0, 0.0, 0.0, 0.1, 0.2)
    with pytest.raises(NonFiniteError, match=r"^step 3: the loss is not finite on ranks 1, 2; "):
        check_finite([FINE, lost, lost, FINE], 3)
    with pytest.raises(NonFiniteError, match=r"^step 3: the gradient is not finite on rank 0; "):
        check_finite([StepReport(2.5, value, 0.0, 0.0, 0.1, 0.2), FINE], 3)
