"""A sample runs every case with and without recording, no case is always first, and the training
goes on as if nothing was sampled.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gloo

from mtrain_cli.composition.compose import compose
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.profiling import imbalance_benchmark
from mtrain_cli.profiling.imbalance_benchmark import _Rehearsal
from mtrain_cli.profiling.measurement import TRAINING, MeasurementPlan
from mtrain_cli.records.record_files import open_records
from mtrain_cli.training.trainer import Trainer


def samples(count: int) -> tuple[list[tuple[str, bool]], list[Any]]:
    """Take samples of two cases. Return (case, recorded) of each pass, and the writer's calls."""
    passes: list[tuple[str, bool]] = []
    calls: list[Any] = []
    seconds = iter(range(1, 100))
    writer = SimpleNamespace(
        cases=[SimpleNamespace(label="a"), SimpleNamespace(label="b")],
        samples=0,
        plan=SimpleNamespace(samples=count),
        recorded=lambda case, iteration, *_: calls.append((case.label, iteration)),
        timed=lambda case, plain, recorded: calls.append((case.label, plain, recorded)),
        save_indices=lambda: calls.append("indices"),
    )

    def sampled(number: int, done: int) -> None:
        writer.samples = done
        calls.append(("sampled", number, done))

    writer.sampled = sampled
    nothing = lambda *_: None  # noqa: E731
    rehearsal = object.__new__(_Rehearsal)
    rehearsal.writer = writer  # type: ignore[assignment]
    rehearsal.progress = SimpleNamespace(  # type: ignore[assignment]
        now=nothing, done=nothing, sampled=nothing
    )
    rehearsal.bench = SimpleNamespace(  # type: ignore[assignment]
        collector=SimpleNamespace(recorder=SimpleNamespace(read=nothing, iteration=nullcontext))
    )
    rehearsal.trainer = SimpleNamespace(step=6)  # type: ignore[assignment]
    rehearsal._warm = False

    def compute(case: Any, _: Any, *, recorded: bool) -> tuple[list[Any], None, float]:
        passes.append((case.label, recorded))
        return [], None, float(next(seconds))

    rehearsal._compute = compute  # type: ignore[method-assign]
    rehearsal.due = False
    rehearsal.on_samples([])
    assert not passes
    rehearsal.due = True
    for _ in range(count):
        rehearsal.on_samples([])
    return passes, calls


def test_cases_and_recording_take_turns_after_one_warm_up():
    passes, _ = samples(2)
    assert passes[:2] == [("a", True), ("b", True)]
    assert passes[2:6] == [("a", False), ("a", True), ("b", False), ("b", True)]
    assert passes[6:] == [("b", True), ("b", False), ("a", True), ("a", False)]


def test_indices_are_saved_after_the_first_sample_only():
    _, calls = samples(3)
    assert calls.count("indices") == 1
    assert calls.index(("sampled", 7, 1)) + 1 == calls.index("indices")


def profiled_and_plain(rank: int, world: int, folder: str) -> tuple[list[Any], list[Any]]:
    """Return (loss, gradient norm) of each step of a sampled training, and of the same training."""
    config = compose(
        [
            *("seq=64", "topology.block_size=16", "train.global_batch=2", "optim.warmup_steps=1"),
            *("model.hidden_size=32", "model.num_layers=1", "model.head_dim=8"),
            "model.intermediate_size=48",
        ]
    )
    run_dir, environment = RunDir(Path(folder)), gloo.environment(rank, world)
    cases = [("a", config), ("b", config)]
    plan = MeasurementPlan(TRAINING, cases, samples=2, warmup=2, every=2, quiet=True)
    plan.save(run_dir)
    seen: list[Any] = []

    class Watched(Trainer):
        def train_step(self, stop):
            result = super().train_step(stop)
            seen.append((result.loss, result.grad_norm))
            return result

    imbalance_benchmark.Trainer = Watched
    assert not imbalance_benchmark.train_and_record(config, run_dir, environment, False)
    trainer = Trainer(config, environment)
    results = [trainer.train_step(False) for _ in seen]
    return seen, [(result.loss, result.grad_norm) for result in results]


def test_samples_are_taken_every_few_steps_and_leave_the_training_as_it_is(tmp_path):
    ((profiled, plain),) = gloo.run(1, profiled_and_plain, str(tmp_path))
    assert profiled == plain
    assert len(plain) == 5, "samples before steps 3 and 5"
    assert len(set(plain)) == 5
    frame = open_records(tmp_path).frame()
    assert set(zip(frame.case, frame.iteration, strict=True)) == {
        (case, step) for case in (0, 1) for step in (3, 5)
    }
