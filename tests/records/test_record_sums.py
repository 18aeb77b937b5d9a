"""Rows become sums per worker and slot, in any order of the rows."""

from __future__ import annotations

import json

import numpy as np
import pytest
from records.test_analysis import analysed, uneven
from synthetic_records import Play, facts_of, ring, rows_of, write

from mtrain_cli.parallel.recording import KINDS
from mtrain_cli.records.analysis import analyse
from mtrain_cli.records.imbalance import imbalance
from mtrain_cli.records.record_files import ROW, WORDS, open_records
from mtrain_cli.records.record_sums import TensorWaits


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


# rank, peer, ms of a wait, ms of its late part. Ranks 0 and 1 are a group, and ranks 2 and 3.
WAITS = [(0, 1, 5.0, 4.0), (0, 1, 3.0, 2.0), (1, -1, 1.0, 0.0), (3, 2, 2.0, 1.5)]


def tensor_rows() -> np.ndarray:
    rows = np.zeros(len(WAITS), ROW)
    rows["layer"] = rows["step"] = rows["shard"] = -1
    rows["phase"], rows["link"] = KINDS.index("wait"), WORDS["link"].index("tensor")
    for row, (rank, peer, ms, late) in zip(rows, WAITS, strict=True):
        row["rank"], row["peer"], row["dur_us"], row["late_us"] = rank, peer, 1e3 * ms, 1e3 * late
    return rows


def arrays(rows: np.ndarray) -> dict[str, np.ndarray]:
    return {name: rows[name] for name in rows.dtype.names}


def test_late_waits_belong_to_a_pair_of_ranks():
    found = TensorWaits.none(4)
    other = tensor_rows()
    other["link"] = WORDS["link"].index("context")
    found.add(arrays(np.concatenate([tensor_rows(), other])))
    expected = np.zeros((4, 4))
    expected[0, 1], expected[3, 2] = 6.0, 1.5
    assert found.late == pytest.approx(expected)
    assert found.exposed == pytest.approx([2.0, 1.0, 0.0, 0.5])


def stepwise(_direction: str, rank: int, step: int) -> float:
    return 1.0 + rank + 0.1 * step


RANK_AT = np.array([0, 2, 4, 1, 3, 5, -1])  # with tensor groups of two; -1 stays


def profile(folder, *, tensor: bool):
    """Return the analysis of two context groups of three ranks.

    tensor: give the groups the ranks 0, 2, 4 and 1, 3, 5, with tensor groups of two.
    """
    plays = [Play(ring(3), stepwise), Play(ring(3), lambda *at: 3 * stepwise(*at))]
    rows = rows_of(lambda _iteration, _layer, group: plays[group], groups=2)
    facts = facts_of(ring(3), groups=2)
    if tensor:
        rows["rank"], rows["peer"] = RANK_AT[rows["rank"]], RANK_AT[rows["peer"]]
        rows, facts = np.concatenate([rows, tensor_rows()]), {**facts, "tp": 2}
    (found,) = analyse(open_records(write(folder, [rows], [facts])))
    return found


def test_context_groups_of_tensor_groups_are_analyzed_alike(tmp_path):
    plain, shared = profile(tmp_path / "a", tensor=False), profile(tmp_path / "b", tensor=True)
    assert shared.to_json()["passes"] == plain.to_json()["passes"]
    assert shared.to_json()["time"] == plain.to_json()["time"]
    order = np.argsort(RANK_AT[:-1])
    assert shared.bins == pytest.approx(plain.bins[:, order])
    assert shared.passes_ms == pytest.approx(plain.passes_ms[:, order])
    assert plain.tensor is None
    assert "tensor_ms" not in plain.to_json()
    # A sequence is shared by all ranks of both context groups, which compute other heads.
    assert (plain.tokens, shared.tokens) == (2 * 4096, 4096)


def test_causes_name_the_true_ranks(tmp_path):
    """Rank 5 of the last context group has the most work in both numberings."""
    plain, shared = profile(tmp_path / "a", tensor=False), profile(tmp_path / "b", tensor=True)
    found = [(c.rank, c.kind, c.direction, c.step, c.ms) for c in plain.causes]
    expected = [
        (None if rank is None else int(RANK_AT[rank]), *rest) for rank, *rest in found if rest
    ]
    own = [c for c in shared.causes if c.kind != "tensor" and "tensor" not in c.text]
    assert len(own) >= 2
    assert [(c.rank, c.kind, c.direction, c.step, c.ms) for c in own] == expected[: len(own)]
    assert "for rank 5" in own[0].text


def test_causes_name_the_tensor_group(tmp_path):
    found = profile(tmp_path, tensor=True)
    causes = {cause.rank: cause for cause in found.causes if cause.kind == "tensor"}
    assert causes[1].text == (
        "tensor group of ranks 0 to 1: rank 0 waits 6.00 ms per iteration for rank 1, which starts "
        "its messages later"
    )
    assert (causes[1].ms, causes[1].step) == (6.0, -1)
    assert found.to_json()["tensor_ms"]["late"][0][1] == 6.0


def test_missing_ranks_of_tensor_groups_keep_their_numbers(tmp_path):
    rows = rows_of(Play(ring(3), stepwise), groups=2)
    rows["rank"], rows["peer"] = RANK_AT[rows["rank"]], RANK_AT[rows["peer"]]
    rows = rows[rows["rank"] != 2]
    facts = {**facts_of(ring(3), groups=2), "tp": 2}
    (found,) = analyse(open_records(write(tmp_path, [rows], [facts])))
    assert found.missing == (2,)
