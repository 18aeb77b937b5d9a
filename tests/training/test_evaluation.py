"""Held-out losses by context length are equal for every layout, exchange and number of workers."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import gloo
import numpy as np
import pytest
import torch

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch.environment import Environment
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.reporting.report_source import open_source
from mtrain_cli.reporting.training import positions_table
from mtrain_cli.training.evaluation import (
    ContextBucket,
    Evaluation,
    EvaluationWriter,
    bucket_edges,
    evaluate,
    read_evaluations,
)
from mtrain_cli.training.loop import train
from mtrain_cli.training.trainer import Trainer

SMALL = [
    "seq=300", "topology.block_size=16", "model.hidden_size=32", "model.num_layers=2",
    "model.head_dim=8", "model.intermediate_size=48",
    "optim.warmup_steps=2", "train.steps=4", "data.eval_sequences=3",
]  # fmt: skip


def place(rank: int, world: int, cp: int) -> Environment:
    return gloo.environment(rank, world, cp)


def evaluated(rank: int, world: int, cases: list[tuple[int, list[str]]]) -> list[Evaluation]:
    """Evaluate a model after one step, for each (workers that share a sequence, overrides)."""
    results = []
    for cp, overrides in cases:
        trainer = Trainer(compose([*SMALL, *overrides]), place(rank, world, cp))
        trainer.train_step(False)
        results.append(evaluate(trainer))
        trainer.train_step(False)
        trainer.close()
    return results


DOCUMENTS = ["train.global_batch=2"]
PLAIN = [*DOCUMENTS, "data.document_mask=false"]
BUDGETS = ["block=16", "last_q=16", "p_v=0.5", "p_s=0.5", "min_columns=4"]
SPARSE = [*PLAIN, "sparsity=vertical_slash", *(f"sparsity.{budget}" for budget in BUDGETS)]


@pytest.fixture(scope="module")
def alone() -> list[Evaluation]:
    return gloo.run(1, evaluated, [(1, DOCUMENTS), (1, PLAIN), (1, SPARSE)])[0]


def test_losses_by_context_equal_those_of_one_worker(alone: list[Evaluation]) -> None:
    cases = [
        (1, DOCUMENTS),
        (2, [*PLAIN, "topology.layout=zigzag", "topology.exchange=ring"]),
        (2, SPARSE),
    ]
    rows = gloo.run(2, evaluated, cases)
    for rank in rows:
        for evaluation, expected in zip(rank, alone, strict=True):
            assert [(b.begin, b.end, b.tokens) for b in evaluation.buckets] == [
                (b.begin, b.end, b.tokens) for b in expected.buckets
            ]
            assert [b.loss for b in evaluation.buckets] == pytest.approx(
                [b.loss for b in expected.buckets], rel=2e-5
            )
            assert evaluation.loss == pytest.approx(expected.loss, rel=2e-5)
    assert {rank[2].attention for rank in rows} == {"vertical_slash"}
    assert abs(alone[2].loss - alone[1].loss) > 1e-5, "the sparse pattern must skip some pairs"


def by_definition(
    _rank: int, _world: int
) -> tuple[Evaluation, dict[tuple[int, int], tuple[int, float]]]:
    trainer = Trainer(compose([*SMALL, *DOCUMENTS]), place(0, 1, 1))
    evaluation = evaluate(trainer)
    sums: dict[tuple[int, int], list[float]] = {(0, 128): [], (128, 256): [], (256, 300): []}
    for sample in trainer.held_out:
        batch = trainer.batch_maker([sample])
        trainer.decoder.unshard()
        with torch.no_grad():
            logits = trainer.decoder.logits(batch.tokens, batch.positions, batch.attend)
        losses = torch.nn.functional.cross_entropy(
            logits[0].double(), batch.labels[0], reduction="none", ignore_index=-100
        )
        for position, (label, document) in enumerate(
            zip(sample.labels, sample.documents, strict=True)
        ):
            context = position - int(np.flatnonzero(sample.documents == document)[0])
            if label >= 0:
                next(sums[span] for span in sums if span[0] <= context < span[1]).append(
                    float(losses[position])
                )
    return evaluation, {
        span: (len(losses), float(np.mean(losses)) if losses else 0.0)
        for span, losses in sums.items()
    }


def test_a_bucket_is_the_mean_over_tokens_by_their_context_in_the_document() -> None:
    ((evaluation, expected),) = gloo.run(1, by_definition)
    assert {(b.begin, b.end): b.tokens for b in evaluation.buckets} == {
        span: count for span, (count, _) in expected.items()
    }
    for bucket in evaluation.buckets:
        assert (bucket.loss or 0.0) == pytest.approx(
            expected[bucket.begin, bucket.end][1], rel=1e-5
        )
    assert evaluation.sequences == 3


@pytest.mark.parametrize(
    ("seq", "expected"),
    [
        (64, [0, 64]),
        (128, [0, 128]),
        (129, [0, 128, 129]),
        (4096, [0, 128, 256, 512, 1024, 2048, 4096]),
    ],
)
def test_buckets_double_and_end_with_the_sequence(seq: int, expected: list[int]) -> None:
    assert bucket_edges(seq).tolist() == expected


def whole(rank: int, world: int, folder: str, words: list[str], resume: bool) -> None:
    run_dir = RunDir(Path(folder))
    run_dir.path.mkdir(exist_ok=True)
    train(compose([*SMALL, *words]), run_dir, place(rank, world, world), resume)


def test_a_run_evaluates_at_both_ends_and_periodically_also_after_a_resume(tmp_path: Path) -> None:
    gloo.run(1, whole, str(tmp_path), ["train.eval_every=3"], False)
    first, _ = read_evaluations(tmp_path)
    assert [e.step for e in first] == [0, 3, 4]
    assert first[-1].loss < first[0].loss
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= m["data_seconds"] <= m["seconds"] for m in metrics)
    gloo.run(1, whole, str(tmp_path), ["train.eval_every=3", "train.steps=6"], True)
    again, _ = read_evaluations(tmp_path)
    assert [e.step for e in again] == [0, 3, 4, 6]
    assert again[:3] == first
    # Nothing is left to train, and the evaluation of the last checkpoint exists: no second one.
    gloo.run(1, whole, str(tmp_path), ["train.eval_every=3", "train.steps=6"], True)
    assert read_evaluations(tmp_path) == (again, [])
    table = positions_table([open_source(tmp_path)])
    assert table is not None
    assert len(table.rows) == 4


def test_a_resume_removes_later_rows_and_cut_lines(tmp_path: Path) -> None:
    writer = EvaluationWriter(tmp_path, 0)
    row = Evaluation(2, 1.0, 10, 1, 0.1, "dense", ())
    for step in (2, 4):
        assert writer.write(dataclasses.replace(row, step=step)) is None
    with writer.path.open("a") as file:
        file.write('{"step": 6, "lo')
    EvaluationWriter(tmp_path, 2)
    evaluations, damaged = read_evaluations(tmp_path)
    assert ([e.step for e in evaluations], damaged) == ([2], [])


def test_a_loss_that_is_not_finite_is_written_as_null_and_read_back(tmp_path: Path) -> None:
    bucket = ContextBucket(0, 128, 10, math.nan)
    row = Evaluation(2, math.inf, 10, 1, 0.1, "dense", (bucket,))
    assert EvaluationWriter(tmp_path, 0).write(row) is None
    text = (tmp_path / "evaluations.jsonl").read_text()
    json.loads(text, parse_constant=pytest.fail)
    (read,), damaged = read_evaluations(tmp_path)
    assert (read.loss, read.buckets[0].loss, damaged) == (None, None, [])
    assert read.line().startswith("held-out loss not finite at step 2")


def test_impossible_evaluations_are_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"^train.eval_every=5: has nothing to evaluate; set data.eval_sequences",
    ):
        compose(["train.eval_every=5"])
    with pytest.raises(ConfigError, match=r"^data.eval_sequences=-1: must be 0 or more"):
        compose(["data.eval_sequences=-1"])
