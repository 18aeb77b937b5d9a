"""Rows become sums per worker and slot, in any order of the rows."""

from __future__ import annotations

import json

import numpy as np
import pytest
from records.test_analysis import analysed, uneven
from synthetic_records import Play, facts_of, ring, rows_of, write

from mtrain_cli.records.analysis import analyse
from mtrain_cli.records.imbalance import imbalance
from mtrain_cli.records.record_files import open_records


def test_missing_ranks_are_listed_and_excluded(tmp_path):
    rows = rows_of(Play(ring(4), uneven))
    rows = rows[rows["rank"] != 3]
    (found,) = analyse(open_records(write(tmp_path, [rows], [facts_of(ring(4))])))
    assert (found.missing, found.partial) == ((3,), True)
    table = [[uneven("forward", rank, step) for step in range(4)] for rank in range(3)]
    assert found.passes["forward"].time.worker.mean == pytest.approx(
        imbalance(table).worker, rel=1e-5
    )


def test_a_group_without_any_rows_is_missing(tmp_path):
    rows = rows_of(Play(ring(2), uneven))
    (found,) = analyse(open_records(write(tmp_path, [rows], [facts_of(ring(2), groups=2)])))
    assert (found.missing, found.time.worker.n) == ((2, 3), 1)


def test_cases_and_iterations_may_interleave_in_a_file(tmp_path):
    first, second = Play(ring(2), uneven), Play(ring(4), lambda _d, r, _s: 1.0 + 2 * (r == 0))
    rows = np.concatenate(
        [rows_of(p, case=c, iteration=i) for i in range(2) for c, p in enumerate((first, second))]
    )
    shuffled = rows[np.random.default_rng(0).permutation(len(rows))]
    facts = [facts_of(p.schedule, label=name) for p, name in ((first, "a"), (second, "b"))]
    found = analyse(open_records(write(tmp_path / "mixed", [shuffled], facts)))
    assert [f.label for f in found] == ["a", "b"]
    alone = analysed(tmp_path / "alone", second, iterations=2)
    assert json.dumps(found[1].to_json()["passes"]) == json.dumps(alone.to_json()["passes"])
