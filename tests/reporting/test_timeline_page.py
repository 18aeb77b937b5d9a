"""The timeline of one iteration: bars in order, thinned with a note."""

from __future__ import annotations

import itertools

import pytest
from reporting.test_html import page_of


def test_the_timeline_fills_the_pass_of_a_rank_in_order(tmp_path):
    text, drawn = page_of(tmp_path)
    assert "3 of " not in text
    for view, rank in itertools.product(drawn["timeline"], range(4)):
        background, *others = view["data"]
        computing = [trace for trace in others if not trace["name"].startswith("message")]
        bars = [
            bar
            for trace in computing
            for bar in zip(trace["base"], trace["x"], trace["y"], strict=True)
        ]
        spans = sorted((start, length) for start, length, y in bars if y == rank)
        for (start, length), (following, _) in itertools.pairwise(spans):
            assert start + length == pytest.approx(following, abs=2e-3)
        assert spans[0][0] == pytest.approx(0, abs=1e-6)
        # Where no phase covers it, the bar of the whole pass shows as a gap.
        assert background["name"] == "gap"
        assert dict(zip(background["y"], background["x"], strict=True))[rank] == pytest.approx(
            sum(spans[-1]), rel=1e-3
        )
    assert [trace for trace in view["data"] if trace["name"] == "message, context"]
    assert any(trace["name"] == "exposed (context link)" for trace in computing)
