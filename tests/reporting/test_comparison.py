"""Comparisons of runs: noise, final losses, facts that differ."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from reporting.test_tables import printed
from reporting.training_runs import trained
from synthetic_records import Play, facts_of, recorded_once, ring, rows_of, write

from mtrain_cli.reporting.comparison import compare_table, comparison
from mtrain_cli.reporting.report_source import ReportSource, open_source


def noisy(folder, seed: int, scale: float = 1.0) -> ReportSource:
    random = np.random.default_rng(seed)
    parts = []
    for i in range(6):
        times = random.normal(1, 0.05, (2, 4, 4)) * scale
        parts.append(
            rows_of(
                Play(ring(4), lambda d, r, s, t=times: float(t[int(d == "backward"), r, s])),
                iteration=i,
            )
        )
    return open_source(write(folder, parts, [facts_of(ring(4))]))


def test_only_differences_beyond_noise_are_shown(tmp_path):
    first, same, slower = (
        noisy(tmp_path / "a", 1),
        noisy(tmp_path / "b", 2),
        noisy(tmp_path / "c", 3, 1.3),
    )
    found = {(row.run, row.what): row for row in comparison([first, same, slower])}
    assert found["c", "forward ms"].ratio == pytest.approx(1.3, rel=0.1)
    # No number that could be read as a gain or a cost.
    assert found["b", "forward ms"].difference == "within noise"
    assert found["c", "forward ms"].difference.startswith("+")
    assert found["c", "worker imbalance, work"].ratio == 1
    text = printed(compare_table([first, same, slower]))
    assert "within noise" in text
    assert max(map(len, text.splitlines())) <= 100


def test_one_sample_has_no_noise_to_compare_with(tmp_path):
    both = [open_source(recorded_once(tmp_path / name, Play(ring(2)))) for name in "ab"]
    assert {row.difference for row in comparison(both)} == {"unknown"}


def test_final_losses_are_compared(tmp_path):
    rows = {
        row.what: row for row in comparison([trained("one", tmp_path), trained("two", tmp_path)])
    }
    assert rows["loss, last tenth of the steps"].first == pytest.approx(4 - 38.5 / 40)
    assert rows["held-out loss, last"].first == 3.0
    assert rows["held-out loss, last"].difference == "unknown", "one value has no spread"


def test_steps_without_a_time_and_losses_that_are_not_finite_are_compared(tmp_path):
    one = trained("one", tmp_path)
    odd = [dataclasses.replace(m) for m in one.metrics]
    odd[20] = dataclasses.replace(odd[20], seconds=None)
    odd[21] = dataclasses.replace(odd[21], tokens_per_second_per_gpu=None, loss=float("nan"))
    last = dataclasses.replace(one.evaluations[-1], loss=None)
    other = trained("two", tmp_path, metrics=tuple(odd), evaluations=(last,))
    rows = {row.what: row for row in comparison([one, other])}
    assert rows["tokens/s/worker, mean"].other == rows["tokens/s/worker, mean"].first == 10.0
    assert math.isnan(rows["held-out loss, last"].other)
    (row,) = [row for row in comparison([other, one]) if row.what == "held-out loss, last"]
    assert (math.isnan(row.first), row.other, row.difference) == (True, 3.0, "unknown")
