"""Missing, repeated and unsound steps are named; those of an intact file are not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_metrics import STEP, read_metrics, write

from mtrain_cli.records.step_remarks import loss_remark, nothing_left_out, step_remarks


def of(*numbers: int, last: int = 0) -> list[str]:
    return step_remarks([replace(STEP, step=number) for number in numbers], last)


def test_an_intact_file_has_no_remark(tmp_path):
    assert of() == of(1) == of(1, 2, 3, last=3) == of(1, 2, 3, last=2) == []
    write(tmp_path, [1, 2, 3, 4, 5])
    write(tmp_path, [4, 5, 6], start_step=3)  # a run that resumes at its checkpoint
    assert step_remarks(read_metrics(tmp_path), 6) == []


def test_missing_steps_are_named_at_the_start_inside_and_at_the_end():
    assert of(2, 3) == ["step 1 is missing"]
    assert of(1, 4, 6, 10**15) == [f"steps 2-3, 5, 7-{10**15 - 1} are missing"]
    assert of(1, last=3) == ["steps 2-3 are missing"]
    assert of(last=1) == ["step 1 is missing"]


def test_repeated_and_disordered_steps_are_named():
    assert of(1, 2, 2, 2, 3) == ["step 2 appears more than once"]
    assert of(1, 2, 1, 2) == ["steps 1-2 appear more than once", "the steps are not in order"]
    assert of(1, 3, 2) == ["the steps are not in order"]


@pytest.mark.parametrize("loss", [None, float("nan"), float("-inf")])
def test_a_step_without_a_finite_loss_is_named_unless_it_had_no_label(loss):
    steps = [STEP, replace(STEP, step=2, loss=loss), replace(STEP, step=3, loss=loss)]
    assert step_remarks(steps) == ["steps 2-3 have no finite loss"]
    unlabelled = replace(STEP, step=3, loss=None, skipped=True)
    assert step_remarks([*steps[:2], unlabelled]) == ["step 2 has no finite loss"]


def test_a_skipped_step_whose_loss_is_not_finite_is_named():
    """An update that a spike skipped had a label."""
    spike = replace(STEP, loss=float("nan"), skipped=True)
    assert step_remarks([spike]) == ["step 1 has no finite loss"]


def test_steps_in_any_order_are_named_in_their_order():
    assert loss_remark([3, 1, 2, 3]) == "steps 1-3 have no finite loss"


@pytest.mark.parametrize(
    ("density", "allowed", "note"),
    [
        (1.0, 1.0, "density 100%: the pattern leaves nothing out at this length"),
        (0.996, 1.0, "density 100%: the pattern leaves nothing out at this length"),
        (
            0.43,
            0.43,
            "density 43%, as with dense attention: the pattern leaves nothing out at this length",
        ),
        (0.99, 1.0, ""),
        (0.40, 0.43, ""),
        (1.0, None, ""),  # a dense step
    ],
)
def test_a_pattern_that_leaves_nothing_out_is_noted(density, allowed, note):
    assert nothing_left_out(replace(STEP, density=density, dense_density=allowed)) == note
