"""Grade predictions as RULER does."""

from __future__ import annotations

import pytest

from mtrain_cli.evaluation.matching import (
    clean_prediction,
    percentage,
    string_match_all,
    string_match_part,
)

# 50 predictions and their expected answers.
_ANSWERS = [("1234567",), ("Alpha", "beta"), ("red-fox", "4821", "ZED"), ("né Stone", "x"), ("10",)]
_PREDICTIONS = [
    "1234567",
    "  it is 1234567.",
    "The words are ALPHA and BETA",
    "alpha",
    "red-fox, 4821 and zed",
    "RED-FOX\x00 4821",
    "NÉ STONE\n\n",
    "12345\x1f67 100",
    "",
    "\x07\x08",
]
_CASES = [(prediction, outputs) for outputs in _ANSWERS for prediction in _PREDICTIONS]
# Scores of NVIDIA/RULER, commit c3f5e3b, scripts/eval: of all cases, and of each group of answers.
_ALL = 15.33
_ALL_GROUPS = [20.0, 15.0, 16.67, 15.0, 10.0]
_PART = 20.0
_PART_GROUPS = [20.0, 20.0, 20.0, 30.0, 10.0]


def _score(metric, cases) -> float:
    return percentage([metric(clean_prediction(text), outputs) for text, outputs in cases])


@pytest.mark.parametrize(
    ("metric", "whole", "groups"),
    [(string_match_all, _ALL, _ALL_GROUPS), (string_match_part, _PART, _PART_GROUPS)],
)
def test_scores_of_50_predictions_equal_the_original(metric, whole, groups) -> None:
    assert len(_CASES) == 50
    assert _score(metric, _CASES) == whole
    assert [_score(metric, _CASES[i : i + 10]) for i in range(0, 50, 10)] == groups


def test_control_characters_become_line_breaks_and_separate_digits() -> None:
    assert clean_prediction(" \x00a\x1fb\tc\x7f \n") == "a\nb\nc\x7f"
    assert string_match_all(clean_prediction("12\x0034"), ("1234",)) == 0


def test_all_counts_the_share_and_part_needs_one() -> None:
    assert string_match_all("one three", ("ONE", "two", "three", "four")) == 0.5
    assert string_match_part("one three", ("two", "Three")) == 1
    assert string_match_part("one three", ("two", "four")) == 0
