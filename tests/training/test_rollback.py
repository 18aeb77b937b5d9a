"""Spikes and steps that are not finite: what is left out, and that the rest is as without it."""

from __future__ import annotations

import itertools
import json
import math
import random
import time
from pathlib import Path

import gloo
import pytest
import torch
from slow_cases import mostly_slow

from mtrain_cli.composition.compose import compose
from mtrain_cli.config import resolved_file
from mtrain_cli.data.sampler import Sampler
from mtrain_cli.evaluation.in_training import TaskEvaluations
from mtrain_cli.evaluation.results import read_whole_results
from mtrain_cli.launch.failures import RunError
from mtrain_cli.launch.manifest import Manifest
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.profiling.periodic_profile import TrainingProfile
from mtrain_cli.records.record_files import open_records
from mtrain_cli.training import callback
from mtrain_cli.training.checkpointer import load_model_state
from mtrain_cli.training.loop import train
from mtrain_cli.training.trainer import Trainer

# Step n reads the sequences 2n - 2 and 2n - 1. The checkpoint of step 6 is at sequence 12.
SMALL = [
    "seq=64", "topology.block_size=16", "model.hidden_size=32", "model.num_layers=1",
    "model.head_dim=8", "model.intermediate_size=48", "optim.warmup_steps=2", "optim.lr=0.01",
    "train.steps=10", "train.checkpoint_every=3", "train.global_batch=2", "run.spike_sigma=0",
]  # fmt: skip
ON = "train.rollback.limit=1"
SPIKE_AT_8 = {15: 50.0}


def run(
    rank: int,
    world: int,
    folder: str,
    words: list[str],
    bad: dict[int, float] | None = None,
    without: tuple[int, int] = (0, 0),
    lost_at: int = 0,
    resume: bool = False,
    dp: int = 1,
    callbacks: tuple = (),
) -> str:
    """Train and return the text of the error that ended the run, "" without one.

    bad: {sequence of the data: factor of the loss of its step}.
    without: sequences (first, end) that the data do not have.
    lost_at: step after a rollback at which the run ends as if a worker was lost.
    """
    run_dir = RunDir(Path(folder))
    run_dir.path.mkdir(exist_ok=True)
    sequence, train_step, bad = Sampler.sequence, Trainer.train_step, bad or {}

    def shorter(self: Sampler, number: int) -> int:
        first, end = without
        return sequence(self, number if number < first else number + end - first)

    def poisoned(self: Trainer, stop: bool, save: bool):
        if self.train_state.rollbacks and self.step + 1 == lost_at:
            last = run_dir.checkpoints / f"step-{self.step // 3 * 3}" / "manifest.json"
            while not last.exists():  # it is written in the background
                time.sleep(0.01)
            raise RunError("a worker is lost")
        whole, sampler = self.decoder.forward, self.sampler
        read = {sampler.position(sampler.consumed + i) for i in range(2)}
        factor = math.prod(bad.get(number, 1.0) for number in read)
        self.decoder.forward = lambda *inputs: factor * whole(*inputs)
        try:
            return train_step(self, stop, save)
        finally:
            self.decoder.forward = whole

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(callback, "MIN_STEPS", 4)
        patch.setattr(Sampler, "sequence", shorter)
        patch.setattr(Trainer, "train_step", poisoned)
        environment = gloo.environment(rank, world, cp=world // dp)
        try:
            train(compose([*SMALL, *words]), run_dir, environment, resume, callbacks)
        except RunError as error:
            return str(error)
    return ""


_TIMES = {"seconds", "data_seconds", "tokens_per_second_per_gpu", "targets_per_second_per_gpu"}


def rows(folder: Path, file: str = "metrics.jsonl", but: str = "") -> list[dict]:
    lines = (folder / file).read_text().splitlines()
    drop = {*_TIMES, "index_seconds", but}
    return [{k: v for k, v in json.loads(line).items() if k not in drop} for line in lines]


def events(folder: Path) -> list[tuple[int, int, int, int]]:
    names = "reached", "step", "first", "end"
    return [tuple(row[name] for name in names) for row in rows(folder, "rollbacks.jsonl")]


def assert_same(one: Path, other: Path, but: str = "") -> None:
    """Assert that two runs have the same steps and weights, bitwise."""
    assert rows(one, but=but) == rows(other, but=but)
    assert [row["step"] for row in rows(one)] == [*range(1, 11)]
    first, second = load_model_state(one)[1], load_model_state(other)[1]
    assert all(torch.equal(first[name], second[name]) for name in first | second)
    kept = [Manifest.read(run / "checkpoints/step-10").trainer for run in (one, other)]
    assert {**kept[0], "rollbacks": 0} == {**kept[1], "rollbacks": 0}


LEARNED = [
    "seq=256", "sparsity=block_topk", "sparsity.score=learned", "sparsity.block=16",
    "sparsity.dense_steps=2", "sparsity.rank=8", "sparsity.density=0.5",
]  # fmt: skip


@mostly_slow(
    ("dp", "words"),
    [
        (1, []),
        (2, ["optim.offload=true"]),
        (2, ["model=tiny_moe", "train.balance_bias=0.01"]),
        (1, LEARNED),
        (1, ["train.dtype=bfloat16", "train.micro_batch=2", "optim.skip_spikes=true",
             "run.spike_sigma=8"]),
    ],
    keep=(0,),
)  # fmt: skip
def test_a_rolled_back_run_equals_one_that_never_saw_the_data(tmp_path, dp, words):
    words = [*words, ON, "data.eval_sequences=2", "train.eval_every=1"]
    spike, never = tmp_path / "spike", tmp_path / "never"
    common = {"dp": dp}
    assert gloo.run(2, with_options, str(spike), words, {"bad": SPIKE_AT_8, **common}) == ["", ""]
    assert gloo.run(2, with_options, str(never), words, {"without": (12, 16), **common}) == ["", ""]
    assert_same(spike, never, but="epoch")
    assert rows(spike)[-1]["epoch"] > rows(never)[-1]["epoch"], "passes count what is left out"
    assert rows(spike, "evaluations.jsonl") == rows(never, "evaluations.jsonl")
    assert events(spike) == [(8, 6, 12, 16)]
    (line,) = [x for x in (spike / "log.txt").read_text().splitlines() if "rollback" in x]
    assert line.startswith(
        "warning: rollback 1 of at most 1: back to the checkpoint of step 6, without the 4 "
        "sequences up to step 8: step 8: loss "
    )


def with_options(rank: int, world: int, folder: str, words: list[str], options: dict) -> str:
    return run(rank, world, folder, words, **options)


def test_a_run_without_a_spike_is_as_without_the_feature(tmp_path):
    for name, words in (("on", [ON, "train.skip_nonfinite=2"]), ("off", [])):
        gloo.run(2, run, str(tmp_path / name), words)
    assert_same(tmp_path / "on", tmp_path / "off")
    assert not (tmp_path / "on" / "rollbacks.jsonl").exists()


@mostly_slow(("lost_at", "removed"), [(8, ""), (10, "rollbacks.jsonl"), (10, "")], keep=(0, 1))
def test_a_resumed_run_leaves_out_the_same_data(tmp_path, lost_at, removed):
    """It resumes from step 6, whose checkpoint knows of no rollback, or from step 9."""
    whole, lost = tmp_path / "whole", tmp_path / "lost"
    gloo.run(1, with_options, str(whole), [ON], {"bad": SPIKE_AT_8})
    options = {"bad": SPIKE_AT_8, "lost_at": lost_at}
    assert gloo.run(1, with_options, str(lost), [ON], options) == ["a worker is lost"]
    if removed:  # as in a run that was fetched without it
        (lost / removed).unlink()
    options = {"bad": SPIKE_AT_8, "resume": True}
    assert gloo.run(1, with_options, str(lost), [ON], options) == [""]
    assert_same(lost, whole)
    assert events(whole) == [(8, 6, 12, 16)]
    assert (lost / "log.txt").read_text().count("rollback 1 of") == 1, "no second rollback"


def test_at_the_limit_the_run_stops_and_a_larger_limit_goes_on(tmp_path):
    folder, never = str(tmp_path / "run"), str(tmp_path / "never")
    bad = {**SPIKE_AT_8, 17: 50.0}  # after the rollback, step 7 reads the sequences 16 and 17
    (text,) = gloo.run(1, with_options, folder, [ON], {"bad": bad})
    assert text.startswith("step 7: loss ")
    assert text.endswith(
        "; train.rollback.limit=1 is reached; the previous checkpoint is intact. Try a lower "
        "optim.lr or more optim.warmup_steps."
    )
    more = ["train.rollback.limit=2"]
    assert gloo.run(1, with_options, folder, more, {"bad": bad, "resume": True}) == [""]
    gloo.run(1, with_options, never, more, {"without": (12, 18)})
    assert events(tmp_path / "run") == [(8, 6, 12, 16), (7, 6, 16, 18)]
    assert_same(tmp_path / "run", tmp_path / "never", but="epoch")


def test_a_step_that_is_not_finite_rolls_back_too(tmp_path):
    gloo.run(2, with_options, str(tmp_path), [ON], {"bad": {15: math.inf}})
    assert events(tmp_path) == [(8, 6, 12, 16)]
    (row,) = rows(tmp_path, "rollbacks.jsonl")
    assert row["reason"].startswith("step 8: the loss is not finite on ranks 0, 1; ")


@pytest.mark.parametrize("factor", [50.0, math.nan])
def test_without_a_checkpoint_there_is_no_rollback(tmp_path, factor):
    words = [ON, "train.checkpoint_every=9"]
    (text,) = gloo.run(1, with_options, str(tmp_path), words, {"bad": {15: factor}})
    if factor == 50.0:
        assert text == ""
        assert rows(tmp_path)[7]["loss"] > 2 * rows(tmp_path)[6]["loss"]
    else:
        assert text == (
            "step 8: the loss is not finite on rank 0; the step was not applied; there is no "
            "earlier checkpoint. Try a lower optim.lr or more optim.warmup_steps."
        )
    assert not (tmp_path / "rollbacks.jsonl").exists()


@pytest.mark.slow
def test_evaluations_and_profiles_have_each_step_once(tmp_path):
    words = [
        ON, "profile.every=2", "train.checkpoint_every=4", "data.eval_sequences=2",
        "train.eval_every=1", "eval.length=64", "train.eval_tasks=[perplexity]",
    ]  # fmt: skip
    spike, never, scores = tmp_path / "spike", tmp_path / "never", []
    for folder, own in ((spike, {"bad": SPIKE_AT_8}), (never, {"without": (8, 16)})):
        folder.mkdir()
        resolved_file.save(compose([*SMALL, *words]), folder / "resolved.yaml")
        options = {"callbacks": (TrainingProfile, TaskEvaluations), **own}
        assert gloo.run(2, with_options, str(folder), words, options) == ["", ""]
        recorded = open_records(folder / "profile")
        assert set(recorded.frame().iteration) == {2, 4, 6, 8, 10}
        assert recorded.summary["samples"] == 5
        results = read_whole_results(folder / "evaluation")[0]
        scores.append(sorted((result.step, result.score) for result in results))
    assert events(spike) == [(8, 4, 8, 16)]
    assert [step for step, _ in scores[0]] == [*range(11)]
    assert scores[0] == scores[1]
    assert "warning" not in (spike / "log.txt").read_text().replace("warning: rollback", "")


def test_the_update_of_a_step_that_is_not_finite_is_left_out(tmp_path):
    words = ["train.skip_nonfinite=1", "train.checkpoint_every=1", "train.keep_checkpoints=9"]
    bad = {9: math.nan, 15: math.inf}  # steps 5 and 8, not in a row
    assert gloo.run(2, with_options, str(tmp_path), words, {"bad": bad}) == ["", ""]
    left_out = [(r["step"], r["loss"], r["skipped"], r["skip_reason"]) for r in rows(tmp_path)]
    assert [row for row in left_out if row[2]] == [
        (5, None, True, "not finite"), (8, None, True, "not finite"),
    ]  # fmt: skip
    for before, after in itertools.pairwise(range(2, 11)):
        states = [load_model_state(tmp_path / f"checkpoints/step-{n}")[1] for n in (before, after)]
        same = all(torch.equal(states[0][name], states[1][name]) for name in states[0])
        assert same == (after in (5, 8)), f"step {after}"
    assert all(math.isfinite(r["loss"]) for r in rows(tmp_path) if r["step"] not in (5, 8))
    log = (tmp_path / "log.txt").read_text()
    assert "the step was not applied (1 of at most 1 in a row)" in log


@pytest.mark.parametrize("words", [[], [ON]])
def test_more_steps_in_a_row_stop_the_run_or_roll_it_back(tmp_path, words):
    words = ["train.skip_nonfinite=1", *words]
    (text,) = gloo.run(1, with_options, str(tmp_path), words, {"bad": {13: math.nan, 15: math.nan}})
    if ON in words:
        assert text == ""
        assert events(tmp_path) == [(8, 6, 12, 16)]
        assert all(row["loss"] is not None for row in rows(tmp_path))
    else:
        assert text.startswith(
            "step 8: the loss is not finite on rank 0; the step was not applied; "
            "the previous checkpoint is intact. "
        )
        assert "(1 of at most 1 in a row)" in (tmp_path / "log.txt").read_text()


def test_positions_are_those_of_the_sequences_that_are_not_left_out():
    chance = random.Random(3)
    for _ in range(50):
        starts = [chance.randrange(60) for _ in range(chance.randrange(5))]
        ranges = [(start, start + chance.randrange(1, 20)) for start in starts]
        left = [n for n in range(200) if not any(first <= n < end for first, end in ranges)]
        sampler = Sampler(10, 0)
        sampler.leave_out(ranges)
        assert [sampler.position(n) for n in range(len(left))] == left
