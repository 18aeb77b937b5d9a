"""Agreement of predictions with measurements, against figures worked out by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mtrain_cli.simulation.validation import CaseComparison, PassComparison, agreement, key_of


def compared(
    measured: float,
    predicted: float,
    low: float,
    high: float,
    degrees: tuple[float, float] = (1.0, 1.0),
) -> PassComparison:
    nothing = np.ones(1), np.ones(1)
    return PassComparison(
        None,
        measured,
        0.0,
        predicted,
        low,
        high,
        nothing,
        nothing,
        0.0,
        {"worker": degrees, "step": (1.0, 1.0)},
        4,
        3,
    )


def case(label: str, *passes: PassComparison) -> CaseComparison:
    return CaseComparison(
        "run",
        label,
        ("run", "dense", 8192, 4),
        dict(zip(("forward", "backward"), passes, strict=True)),
    )


def test_errors_of_both_signs_do_not_cancel():
    """Cases of 6, 6 and 4 ms, predicted as 3, 12 and 4 ms: errors -1/2, +1 and 0."""
    cases = [
        case(
            "first", compared(4, 2, 1, 3, (1.0, 1.3)), compared(2, 1, 1, 2)
        ),  # above its bounds; at the upper one
        case(
            "second", compared(4, 8, 5, 9, (1.5, 1.2)), compared(2, 4, 2, 5)
        ),  # below; at the lower one
        case("third", compared(2, 2, 1, 3), compared(2, 2, 1, 3)),
    ]
    found = agreement(cases)
    assert found["mape"] == pytest.approx(0.5)
    assert found["worst_error"] == pytest.approx(1.0), "with its sign, and not the first"
    assert found["common_factor"] == pytest.approx(1.0), (
        "the middle one of 1/2, 1, 2; their mean is 7/6"
    )
    assert found["mape_beside_common_factor"] == pytest.approx(0.5)
    assert found["mape_of_passes"] == pytest.approx({"forward": 0.5, "backward": 0.5})
    assert found["inside_bounds"] == pytest.approx(4 / 6)
    # +0.3 and -0.3 of twelve degrees.
    assert found["degree_mean_error"] == pytest.approx(0.6 / 12)
    assert found["degree_worst_error"] == pytest.approx(0.3)
    assert (found["work_cells"], found["work_cells_equal"]) == (24, 18)
    # Measured ranks 2.5, 2.5, 1 (6, 6, 4), predicted 1, 3, 2 (3, 12, 4): covariance 0.
    assert found["spearman"] == {"run: dense 8192 4": pytest.approx(0.0)}
    assert found["fastest_found"] == {"run: dense 8192 4": False}
    worst = dataclasses.replace(cases[0], passes={"forward": compared(10, 1, 0, 2)})
    assert agreement([cases[1], cases[2], worst])["worst_error"] == pytest.approx(1.0), (
        "-0.9 is smaller"
    )


def test_a_predicted_degree_that_is_too_large_has_a_positive_error():
    assert compared(1, 1, 1, 1, (1.0, 1.3)).to_json()["degrees"]["worker"] == {
        "measured": 1.0,
        "predicted": 1.3,
        "error": pytest.approx(0.3),
    }


def test_cases_that_differ_in_an_identifying_fact_are_different():
    facts = {
        "pattern": "dense",
        "layout": "zigzag",
        "exchange": "ring",
        "per_node": 8,
        "seq": 8192,
        "micro_batch": 1,
        "cp": 4,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 64,
        "kernel": "flash4",
    }
    others = {"pattern": "moba", "layout": "striped", "exchange": "all_gather", "kernel": "triton"}
    for name, value in facts.items():
        if name != "per_node":
            assert key_of(facts | {name: others.get(name, 2 * value)}) != key_of(facts), name
    assert key_of(facts | {"per_node": 2}) == key_of(facts), "a plain ring does not know nodes"
