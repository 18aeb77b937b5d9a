"""The times of a pipeline's stages, from rows that a played schedule gives."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from synthetic_records import Play, facts_of, ring, rows_of, write

from mtrain_cli.parallel.pipeline_schedule import Pipeline, TimedPipeline
from mtrain_cli.parallel.recording import DIRECTIONS, KINDS
from mtrain_cli.records.analysis import CaseAnalysis, analyse
from mtrain_cli.records.pipeline_times import (
    PipelineTimes,
    StepSums,
    pipeline_of,
    predicted_pipeline,
    prediction_entry,
)
from mtrain_cli.records.record_files import PAYLOADS, ROW, WORDS, open_records

# Milliseconds of a pass through each virtual stage: the last one is the slowest.
TIMED = TimedPipeline(Pipeline("interleaved", 2, 2, 4), (1.0, 1.0, 1.0, 2.0), (2.0, 2.0, 2.0, 4.0))
EVEN = TimedPipeline(Pipeline("1f1b", 3, 1, 5), (1.0,) * 3, (2.0,) * 3)


def rows_of_stages(timed: TimedPipeline, of_a_stage: int = 1, start: float = 7.0) -> np.ndarray:
    """Return the rows of a step, with ``of_a_stage`` ranks that do the same on each stage."""
    spans = [
        (span, rank)
        for span in timed.played.spans
        for rank in range(span.stage * of_a_stage, (span.stage + 1) * of_a_stage)
    ]
    rows = np.zeros(len(spans), ROW)
    rows["layer"] = rows["shard"] = rows["peer"] = -1
    rows["phase"] = KINDS.index("stage")
    for row, (span, rank) in zip(rows, spans, strict=True):
        row["rank"], row["micro"], row["step"] = (
            rank,
            *(
                span.action.micro_batch,
                span.action.virtual_stage,
            ),
        )
        row["direction"] = DIRECTIONS.index(span.action.kind)
        row["start_us"], row["dur_us"] = (start + span.begin) * 1e3, (span.end - span.begin) * 1e3
    return rows


def wait(rank: int, ms: float, late: float, link: str = "stage") -> np.ndarray:
    rows = np.zeros(1, ROW)
    rows["layer"], rows["rank"], rows["dur_us"], rows["late_us"] = -1, rank, 1e3 * ms, 1e3 * late
    rows["phase"], rows["link"] = KINDS.index("wait"), WORDS["link"].index(link)
    rows["payload"] = PAYLOADS.index("activations")
    return rows


def arrays(*rows: np.ndarray) -> dict[str, np.ndarray]:
    whole = np.concatenate(rows)
    return {name: whole[name] for name in whole.dtype.names or ()}


@pytest.mark.parametrize("timed", [TIMED, EVEN])
def test_recorded_passes_give_the_bubble_of_the_schedule(timed):
    sums = StepSums(timed.pipeline, 2 * timed.pipeline.stages)
    rows = rows_of_stages(timed, 2)
    sums.add(arrays(rows[::2]))
    sums.add(arrays(rows[1::2], wait(1, 5, 3), wait(2, 4, 4), wait(3, 1, 0, "tensor")))
    found = sums.result()
    assert found is not None
    assert found.bubble == pytest.approx(timed.played.bubble)
    assert found.makespan == pytest.approx(timed.played.makespan)
    assert found.timed.forward == pytest.approx(timed.forward)
    assert found.timed.backward == pytest.approx(timed.backward)
    assert found.work == pytest.approx([timed.played.busy(s) for s in range(timed.pipeline.stages)])
    # Means over the two ranks of a stage.
    assert found.late is not None
    assert found.hops is not None
    assert found.late[:2] == pytest.approx([1.5, 2.0])
    assert found.hops[:2] == pytest.approx([1.0, 0.0])


def test_equal_stages_idle_as_the_formula_says_and_the_imbalance_is_apart():
    even = PipelineTimes.of(EVEN)
    assert even.bubble == pytest.approx(EVEN.pipeline.bubble)
    assert even.bubble == pytest.approx(2 / 7)
    assert even.imbalance == 1
    uneven = PipelineTimes.of(TIMED)
    assert TIMED.pipeline.bubble == pytest.approx(1 / 9)
    assert uneven.bubble > 1 / 9
    assert uneven.work.tolist() == [24, 36]
    assert uneven.imbalance == pytest.approx(1.2)


def test_iterations_count_alike():
    twice = TimedPipeline(EVEN.pipeline, *([2 * t for t in times] for times in EVEN_TIMES))
    found = []
    for timed in (EVEN, twice):
        sums = StepSums(timed.pipeline, 3)
        sums.add(arrays(rows_of_stages(timed), wait(0, timed.played.makespan, 0)))
        found.append(sums.result())
    mean = PipelineTimes.mean([times for times in found if times is not None])
    assert mean.makespan == pytest.approx(1.5 * EVEN.played.makespan)
    assert mean.timed.forward == pytest.approx((1.5,) * 3)
    assert mean.hops == pytest.approx([1.5 * EVEN.played.makespan, 0, 0])


EVEN_TIMES = (EVEN.forward, EVEN.backward)


def test_a_step_without_the_rows_of_a_stage_has_no_times():
    rows = rows_of_stages(EVEN)
    sums = StepSums(EVEN.pipeline, 3)
    sums.add(arrays(rows[rows["rank"] != 1]))
    assert sums.result() is None


def profile(folder: Path, *, pipeline: bool) -> CaseAnalysis:
    """Return the analysis of two stages with a context group of two each."""
    plays = [Play(ring(2)), Play(ring(2), lambda direction, *_: 3.0 * len(direction))]
    rows = rows_of(lambda _iteration, _layer, group: plays[group], groups=2, micros=4)
    facts = facts_of(ring(2), groups=2)
    if pipeline:
        facts |= {"pipeline": asdict(TIMED.pipeline)}
        rows = np.concatenate([rows, rows_of_stages(TIMED, 2), wait(0, 3, 2)])
    (found,) = analyse(open_records(write(folder, [rows], [facts])))
    return found


def test_passes_of_stages_leave_the_analysis_of_attention_alone(tmp_path):
    plain, staged = (profile(tmp_path / str(p), pipeline=p) for p in (False, True))
    results = staged.to_json()
    times = results.pop("pipeline")
    assert times["imbalance"] == pytest.approx(1.2)
    assert times["formula"] == pytest.approx(1 / 9, rel=1e-4)
    assert times["played_bubble"] == pytest.approx(times["bubble"], rel=1e-4)
    assert (times["late_ms"], times["hops_ms"]) == ([1, 0], [0.5, 0])
    # The stages share each sequence: half as many tokens as two groups with their own.
    assert (plain.tokens, results["tokens"]) == (2 * 4 * 4096, 4 * 4096)
    expected = plain.to_json()
    assert "pipeline" not in expected
    assert {**expected, "tokens": results["tokens"]} == results


@pytest.mark.parametrize(
    "changes",
    [
        {"schedule": "zero_bubble"},
        {"stages": 0},
        {"stages": "2"},
        {"stages": 2.5},
        {"virtual_stages": 1 << 20},
        {"micro_batches": 3},
        {"schedule": "1f1b"},
        {"micro_batches": None},
    ],
)
def test_a_damaged_pipeline_is_left_out(changes):
    entry = prediction_entry(TIMED)
    assert pipeline_of(entry) == TIMED.pipeline
    assert pipeline_of({**entry, **changes}) is None
    assert predicted_pipeline({**entry, **changes}) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"forward_ms": [1.0]},
        {"forward_ms": [1.0, 1.0, 1.0, -1.0]},
        {"backward_ms": [1.0, 1.0, "x", 1.0]},
        {"backward_ms": None},
        {"forward_ms": [0.0] * 4, "backward_ms": [0.0] * 4},
        {"hop_ms": None},
        {"hop_ms": float("nan")},
    ],
)
def test_damaged_times_of_a_prediction_are_left_out(changes: dict[str, Any]):
    entry = prediction_entry(TIMED)
    found = predicted_pipeline(entry)
    assert found is not None
    assert found.timed.forward == pytest.approx([ms / 1e3 for ms in TIMED.forward])
    assert predicted_pipeline({**entry, **changes}) is None
