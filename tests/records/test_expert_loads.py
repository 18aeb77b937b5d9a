"""Loads of experts: degrees by hand, files in parts, and files that other programs wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_records import Play, facts_of, ring, rows_of, write

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.parallel.recording import DIRECTIONS, KINDS
from mtrain_cli.records.analysis import analyse
from mtrain_cli.records.expert_loads import (
    FACT,
    LOAD_PARTS,
    LOADS,
    ROW,
    ExpertAnalysis,
    analyse_experts,
    dealt_degree,
    expert_degrees,
    worker_tokens,
)
from mtrain_cli.records.record_files import ROW as RECORD
from mtrain_cli.records.record_files import (
    delete_parts_after,
    join_parts,
    open_records,
    write_part,
    write_rows,
)

# Tokens of two ranks by expert, in two layers.
TOKENS = np.array([[[8, 0, 2, 2], [4, 4, 0, 4]], [[3, 3, 3, 3], [3, 3, 3, 3]]])


def loads(tokens: Any = TOKENS, step: int = 1, dtype: Any = ROW, **more: Any) -> np.ndarray:
    """Return rows of tokens [layers, ranks, E]."""
    tokens = np.asarray(tokens)
    rows = np.zeros(tokens.size, dtype)
    rows["layer"], rows["rank"], rows["expert"] = np.indices(tokens.shape).reshape(3, -1)
    rows["tokens"], rows["step"] = tokens.reshape(-1), step
    for name, value in more.items():
        rows[name] = value
    return rows


def profile(
    folder: Path, *samples: np.ndarray, parallel: int = 1, label: str = "one", time: bool = True
) -> Path:
    """Write a profile of two ranks. time: whether to record the time of the experts."""
    facts = facts_of(ring(2), label=label, **{FACT: {"count": 4, "top_k": 2, "parallel": parallel}})
    rows = [rows_of(Play(ring(2)), layers=(0, 1))]
    if time:
        rows.append(passes())
    write(folder, [np.concatenate(rows)], [facts])
    for number, each in enumerate(samples):
        write_part(each, folder, number, LOAD_PARTS)
    return folder


def passes() -> np.ndarray:
    """Return the experts' passes of layer 0: rank 0 takes 1 + 2 ms, rank 1 takes 3 + 6 ms."""
    rows = np.zeros(4, RECORD)
    rows["phase"], rows["step"] = KINDS.index("experts"), -1
    rows["rank"], rows["dur_us"] = [0, 1, 0, 1], [1e3, 3e3, 2e3, 6e3]
    rows["direction"] = [DIRECTIONS.index(d) for d in ("forward",) * 2 + ("backward",) * 2]
    return rows


def analysed(folder: Path) -> ExpertAnalysis:
    (found,) = analyse_experts(open_records(folder))
    return found


def test_degrees_by_hand():
    # Workers compute 12 and 12 tokens; the largest experts of each have 8 and 4 of a mean of 3.
    assert expert_degrees(TOKENS[0]) == (1.0, pytest.approx((8 / 3 + 4 / 3) / 2))
    assert expert_degrees(np.array([[9, 1], [0, 0]])) == (2.0, pytest.approx(1.8))
    assert expert_degrees(np.zeros((2, 4))) == (1.0, 1.0)
    assert dealt_degree(np.array([12, 4, 2, 6]), 2) == pytest.approx(16 / 12)
    assert dealt_degree(np.array([12, 4, 2, 6]), 4) == pytest.approx(2.0)
    assert dealt_degree(np.zeros(4), 2) == 1.0


def test_experts_on_several_workers_compute_the_tokens_of_all_of_them():
    ranks = np.array([0, 1])
    computed = worker_tokens(TOKENS[0], ranks, 2)
    assert computed.tolist() == [[12, 4], [2, 6]]
    assert expert_degrees(computed)[0] == dealt_degree(TOKENS[0].sum(0), 2)
    four = worker_tokens(np.concatenate([TOKENS[0], TOKENS[1]]), np.array([4, 5, 6, 7]), 2)
    assert four.tolist() == [[12, 4], [2, 6], [6, 6], [6, 6]]


@pytest.mark.parametrize("joined", [False, True])
def test_an_analysis_covers_all_steps_and_layers(tmp_path, joined):
    """The first sample is of an earlier version, whose experts could drop tokens."""
    earlier = loads(dtype=[*ROW.descr, ("dropped", "<i8")])
    profile(tmp_path, earlier, loads(2 * TOKENS, step=4))
    if joined:
        join_parts(tmp_path, LOAD_PARTS, LOADS)
    found = analysed(tmp_path)
    assert (found.steps, found.layers, found.ranks, found.experts) == ((1, 4), (0, 1), (0, 1), 4)
    assert (found.worker.mean, found.worker.n) == (1.0, 4)
    assert found.step.mean == pytest.approx((2 + 1) / 2)
    assert found.largest.mean == pytest.approx((2 + 1) / 2)
    assert {n: value.mean for n, value in found.dealt.items()} == {
        2: pytest.approx((16 / 12 + 1) / 2),
        4: pytest.approx(1.5),
    }
    assert found.shares[1, 0] == pytest.approx([12 / 24, 4 / 24, 2 / 24, 6 / 24])
    document = found.to_json()
    assert document["worker"] == {"mean": 1.0, "std": 0.0, "n": 4}
    assert document["dealt"]["2"]["mean"] == pytest.approx(7 / 6, abs=1e-4)


def test_the_degree_of_time_compares_the_ranks(tmp_path):
    found = analysed(profile(tmp_path, loads()))
    assert found.time is not None
    assert found.time.mean == pytest.approx(9 / 6)
    assert found.ms == {"forward": pytest.approx(2.0), "backward": pytest.approx(4.0)}
    assert analysed(profile(tmp_path / "b", loads(), time=False)).time is None


def test_the_time_of_experts_is_no_part_of_attention(tmp_path):
    (a,) = analyse(open_records(profile(tmp_path / "a", loads())))
    (b,) = analyse(open_records(profile(tmp_path / "b", loads(), time=False)))
    assert a.to_json() == b.to_json()


def test_stages_of_a_pipeline_compute_different_layers(tmp_path):
    rows = loads()
    found = analysed(profile(tmp_path, rows[rows["rank"] == rows["layer"]]))
    assert found.worker.mean == 1.0


def test_expert_parallelism_is_taken_from_the_summary(tmp_path):
    found = analysed(profile(tmp_path, loads(), parallel=2))
    assert found.worker.mean == found.dealt[2].mean == pytest.approx((16 / 12 + 1) / 2)
    assert analysed(profile(tmp_path / "b", loads(), parallel=3)).worker.mean == 1.0


def test_parts_are_joined_and_repeated_steps_deleted(tmp_path):
    folder = profile(tmp_path)
    for step in (2, 4, 6):
        write_part(loads(step=step), folder, step, LOAD_PARTS)
    delete_parts_after(folder, 4, LOAD_PARTS)
    before = analysed(folder)
    assert before.steps == (2, 4)
    join_parts(folder, LOAD_PARTS, LOADS)
    assert (folder / LOADS).is_file()
    assert analysed(folder).to_json() == before.to_json()


def test_a_profile_without_the_file_has_no_loads(tmp_path):
    assert analyse_experts(open_records(profile(tmp_path))) == []
    join_parts(tmp_path, LOAD_PARTS, LOADS)
    assert not (tmp_path / LOADS).exists()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (loads(case=3), "loads of case 3"),
        (loads(-TOKENS), "negative numbers"),
        (np.zeros(2, [("case", np.int16)]), "has no column step"),
        (loads(expert=2**30), "more loads than a report can show"),
    ],
)
def test_a_foreign_file_is_refused_with_a_line(tmp_path, rows, message):
    write_rows(rows, profile(tmp_path) / LOADS)
    with pytest.raises(ConfigError, match=message):
        analyse_experts(open_records(tmp_path))


def test_a_damaged_or_changing_file_is_refused(tmp_path):
    (profile(tmp_path) / LOADS).write_bytes(b"PAR1 no")
    with pytest.raises(ConfigError, match="not a parquet file, or damaged"):
        analyse_experts(open_records(tmp_path))
    folder = profile(tmp_path / "b", loads(), loads(TOKENS[:1], step=2))
    with pytest.raises(ConfigError, match="step 2 has other layers"):
        analyse_experts(open_records(folder))
