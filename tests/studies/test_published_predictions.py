"""Predictions of published rows: formulas and counts by hand, and the rows of BurstEngine."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from mtrain_cli.config.cluster import load_cluster
from mtrain_extras.studies.published import (
    MFU,
    SPEED,
    PublishedRow,
    PublishedTable,
    PublishedValue,
    names,
    read,
)
from mtrain_extras.studies.published_predictions import predict_table
from mtrain_extras.studies.published_tables import errors
from mtrain_extras.studies.study_published import _scenario


def predicted(table: PublishedTable):
    return predict_table(table, lambda row: _scenario(table.cluster, None, row), lambda *_: None)


def test_formulas_of_table_1_by_hand():
    table = read("burst-table1")
    found = {value.row: value for value in predicted(table).values}
    cluster = load_cluster("a800_4x8")
    # The shard of one tensor: 1M tokens over 32 GPUs, 40 heads of 128, 2 bytes each.
    size = 2**20 / 32 * 40 * 128 * 2
    inner = cluster.inner.latency_us.value + size / 200e3
    outer = cluster.outer.latency_us.value + size / 25e3
    inside, between = 28 * inner, 4 * outer
    assert found["RingAttention"].published == pytest.approx(6 * 32 * outer / 1e3)
    assert found["BurstAttention"].published == pytest.approx(5 * max(inside, between) / 1e3)
    assert found["DoubleRing"].published == pytest.approx(
        (4 * max(inside, between) + 2 * (inside + between)) / 1e3
    )
    # The formula of DoubleRing adds up the times of both links.
    assert {name: round(value.ratio, 2) for name, value in found.items()} == {
        "RingAttention": 0.96, "DoubleRing": 0.67, "BurstAttention": 0.88
    }  # fmt: skip


def test_a_quarter_of_the_messages_of_a_causal_ring_is_redundant():
    """Of the 24 remote chunks of four workers, queries see 18, counted on the fingers of zigzag."""
    causal, window = predicted(read("magi-masks")).values
    assert causal.predicted == pytest.approx(25, abs=1e-6)
    assert 90 < window.predicted < 100
    assert window.published is None
    assert window.ratio is None


def test_published_steps_on_a800s_are_within_the_target_with_nothing_fitted():
    table = read("burst-table4")
    (row,) = (row for row in table.rows if row.nodes == 4)
    rate, share, _ = predicted(replace(table, rows=(row,))).values
    assert abs(rate.ratio - 1) < 0.25
    assert rate.low < rate.published < rate.high
    assert share.ratio == pytest.approx(rate.ratio, rel=0.05)
    assert rate.note.startswith(row.note)


def test_a_comparison_divides_by_another_row():
    row = PublishedRow(
        "slow", (), ("model=qwen3b", "seq=64k"), "contiguous", "ring", attention_only=True
    )
    values = (
        PublishedValue("speed-up", 1.5, "slow"),
        PublishedValue("worker degree lower", 1.2, "slow"),
    )
    fast = replace(row, name="fast", values=values, layout="zigzag", note="why")
    table = PublishedTable("x", "t", "p", "w", "h200_1x8", (row, fast), ("left out",))
    found = predicted(table)
    speed, degree = found.values
    assert 1.3 < speed.predicted < 2.2  # the last contiguous worker has 1.9 times the mean work
    assert degree.predicted > 1.2
    assert (speed.note, degree.note) == ("why", "")
    assert found.remarks == ("left out",)


def test_a_row_with_the_pairs_of_another_pattern_is_in_no_mean():
    (value,) = predicted(read("fig7")).values
    assert not value.counts
    assert value.ratio is not None
    assert errors([predicted(read("fig7"))]) == []


def assert_no_bound_above_the_peak(table: PublishedTable) -> None:
    peak = {MFU: 100.0, SPEED: load_cluster(table.cluster).gpu.peak_tflops.value}
    for value in predicted(table).values:
        low, high = value.low or value.predicted, value.high or value.predicted
        assert low <= value.predicted <= high
        assert high <= peak.get(value.quantity, math.inf), value.row


def test_no_bound_of_the_scaling_study_is_above_the_peak():
    table = read("magi-scaling")
    assert_no_bound_above_the_peak(replace(table, rows=table.rows[:1]))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in names() if read(name).cluster])
def test_no_bound_of_a_study_is_above_the_peak(name):
    assert_no_bound_above_the_peak(read(name))
