"""Waits in tensor groups are summed per rank and charged to the rank that starts late."""

from __future__ import annotations

import numpy as np
import pytest
from synthetic_records import Play, facts_of, ring, rows_of, write

from mtrain_cli.parallel.recording import KINDS
from mtrain_cli.records.analysis import analyse
from mtrain_cli.records.record_files import ROW, WORDS, open_records
from mtrain_cli.records.tensor_waits import TensorWaits

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
    twice = found.sum(found).mean(2)
    assert twice.late == pytest.approx(found.late)


def uneven(_direction: str, rank: int, step: int) -> float:
    return 1.0 + rank + 0.1 * step


RANK_AT = np.array([0, 2, 4, 1, 3, 5, -1])  # with tensor groups of two; -1 stays


def profile(folder, *, tensor: bool):
    """Return the analysis of two context groups of three ranks.

    tensor: give the groups the ranks 0, 2, 4 and 1, 3, 5, with tensor groups of two.
    """
    plays = [Play(ring(3), uneven), Play(ring(3), lambda *at: 3 * uneven(*at))]
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


def test_missing_ranks_keep_their_numbers(tmp_path):
    rows = rows_of(Play(ring(3), uneven), groups=2)
    rows["rank"], rows["peer"] = RANK_AT[rows["rank"]], RANK_AT[rows["peer"]]
    rows = rows[rows["rank"] != 2]
    facts = {**facts_of(ring(3), groups=2), "tp": 2}
    (found,) = analyse(open_records(write(tmp_path, [rows], [facts])))
    assert found.missing == (2,)
