"""Callbacks see every hook of a real training, in order, and may replace the attention."""

from __future__ import annotations

import random
import re
import time
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import gloo
import pytest
import torch
from torch import nn
from training.test_loop import SMALL, place

from mtrain_cli.composition.compose import compose
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.model import parallelize
from mtrain_cli.training import loop
from mtrain_cli.training.callback import (
    LAYERS,
    MIN_STEPS,
    STRAGGLER_STEPS,
    STRAGGLER_WARM_UP,
    Callback,
    ComputeTimer,
    FinishedStep,
    SpikeWatch,
    StragglerWatch,
)
from mtrain_cli.training.step import NonFiniteError, StepReport, check_finite
from mtrain_cli.training.trainer import Trainer


class Log(Callback):
    """Writes down what it sees."""

    def __init__(self, trainer: Trainer, run_dir: RunDir, _message) -> None:
        self.trainer, self.checkpoints = trainer, run_dir.checkpoints
        self.seen: list[tuple] = []
        logs.append(self)

    def before_training(self) -> None:
        self.seen.append(("before training", self.trainer.step))

    def before_step(self) -> None:
        self.seen.append(("before step", self.trainer.step))

    def on_samples(self, samples) -> None:
        self.seen.append(("samples", [len(micro_batch) for micro_batch in samples]))

    def wrap_attention(self, _batch, attend):
        def counted(*arguments):
            self.seen.append(("attention", arguments[-1]))
            return attend(*arguments)

        return counted

    def after_step(self, step: FinishedStep) -> None:
        ranks = len(step.result.reports)
        self.seen.append(("after step", step.metrics.step, step.last, ranks))

    def on_checkpoint(self, step: int) -> None:
        self.seen.append(("checkpoint", step))

    def on_error(self, error: Exception) -> None:
        self.seen.append(("error", type(error).__name__))

    def close(self) -> None:
        complete = (self.checkpoints / f"step-{self.trainer.step}").is_dir()
        self.seen.append(("close", complete))


class NeedsSamples(Log):
    needs_samples = True


logs: list[Log] = []


def trained(rank: int, world: int, folder: str, make: type[Log]) -> list[tuple]:
    logs.clear()
    config = compose([*SMALL, "train.steps=2", "train.activation_checkpoint=none"])
    loop.train(config, RunDir(Path(folder)), place(rank, world), False, [make])
    return logs[0].seen


def test_every_worker_calls_every_hook_in_order(tmp_path):
    def step(number: int, last: bool) -> list[tuple]:
        return [
            ("before step", number),
            ("samples", [0]),
            ("attention", 0),
            ("after step", number + 1, last, 2),
        ]

    expected = [
        ("before training", 0),
        *step(0, False),
        *step(1, True),
        ("checkpoint", 2),
        ("close", True),
    ]
    assert gloo.run(2, trained, str(tmp_path), Log) == [expected, expected]


def test_samples_are_kept_only_for_a_callback_that_needs_them(tmp_path):
    (seen,) = gloo.run(1, trained, str(tmp_path), NeedsSamples)
    assert [entry for entry in seen if entry[0] == "samples"] == [("samples", [1])] * 2


def fails(rank: int, world: int, folder: str) -> list[tuple]:
    step = Trainer.train_step

    def poisoned(self: Trainer, stop: bool, save: bool):
        if self.step == 1:
            check_finite([StepReport(float("nan"), 1.0, 0.0, 0.0, 0.0, 0.0)], self.step + 1)
        return step(self, stop, save)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "train_step", poisoned)
        with pytest.raises(NonFiniteError):
            trained(rank, world, folder, Log)
    return logs[0].seen[-2:]


def test_an_error_reaches_the_callbacks_and_ends_the_training(tmp_path):
    (seen,) = gloo.run(1, fails, str(tmp_path))
    assert seen == [("before step", 1), ("error", "NonFiniteError")]


class FailsAfterAStep(Log):
    """Fails in two hooks; the first error is the one that counts."""

    def after_step(self, _step: FinishedStep) -> None:
        raise OSError("no space left")

    def on_error(self, error: Exception) -> None:
        super().on_error(error)
        raise ValueError("again")


def fails_in_a_callback(rank: int, world: int, folder: str) -> list[tuple]:
    with pytest.raises(OSError, match="no space left") as caught:
        trained(rank, world, folder, FailsAfterAStep)
    assert caught.value.__notes__ == ["FailsAfterAStep.on_error failed: again"]
    return logs[0].seen[-1:]


def test_an_error_in_a_callback_reaches_the_callbacks(tmp_path):
    (seen,) = gloo.run(1, fails_in_a_callback, str(tmp_path))
    assert seen == [("error", "OSError")]


def falling(step: int, noise: random.Random) -> tuple[float, float]:
    """Return a loss and gradient norm of an ordinary training."""
    return 2 + 3 * 0.98**step + noise.gauss(0, 0.05), 1.5 * noise.lognormvariate(0, 0.3)


def watched(values: list[tuple[float, float]], sigma: float = 8.0) -> list[tuple[int, str]]:
    watch = SpikeWatch(sigma)
    lines = [(step, watch.check(step, *pair)[1]) for step, pair in enumerate(values, start=1)]
    return [(step, line) for step, line in lines if line]


def test_an_ordinary_training_has_no_spikes():
    for seed in range(20):
        noise = random.Random(seed)
        assert watched([falling(step, noise) for step in range(400)]) == []


@pytest.mark.parametrize("which", ["loss", "norm"])
def test_a_spike_is_reported_once_with_its_size_and_once_at_its_end(which):
    noise = random.Random(0)
    values = [falling(step, noise) for step in range(200)]
    for step in (100, 101, 102):
        loss, norm = values[step]
        values[step] = (loss + 4, norm) if which == "loss" else (loss, 40 * norm)
    (first, match), (last, over) = watched(values)
    assert (first, last) == (101, 104)
    assert match.startswith(
        f"step 101 is a spike: {'loss' if which == 'loss' else 'gradient norm'} "
    )
    assert match.endswith(" of the last 64 steps")
    assert over == "step 104 is back to normal; the spike lasted 3 steps"
    assert watched(values, sigma=0) == []


def test_a_lasting_change_becomes_normal():
    noise = random.Random(0)
    values = [(2 + noise.gauss(0, 0.05) + (3 if step >= 100 else 0), 1.0) for step in range(200)]
    (first, _), (last, _) = watched(values)
    assert first == 101
    assert 101 + 20 < last < 101 + 40


def test_the_first_steps_are_never_spikes():
    values = [(1.0, 1.0)] * (MIN_STEPS - 1) + [(100.0, 100.0)]
    assert watched(values) == []
    steps = [step for step, _ in watched([(1.0, 1.0)] * MIN_STEPS + [(100.0, 100.0)])]
    assert steps == [MIN_STEPS + 1]


def test_the_watch_resumes_from_a_checkpoint():
    noise = random.Random(1)
    values = [falling(step, noise) for step in range(60)]
    whole, first, second = SpikeWatch(8), SpikeWatch(8), SpikeWatch(8)
    for step, pair in enumerate(values[:40]):
        whole.check(step, *pair)
        first.check(step, *pair)
    second.load_state(first.state())
    assert whole.check(40, 9.0, 1.0) == second.check(40, 9.0, 1.0)
    assert second.state() == whole.state()


def slow_by(factors: list[float], steps: int, watch: StragglerWatch) -> list[str]:
    noise = random.Random(0)
    return [
        line
        for _ in range(steps)
        for line in watch.check([f * (1 + noise.gauss(0, 0.02)) for f in factors])
    ]


def test_a_straggler_is_reported_once_and_again_when_it_recovers():
    watch = StragglerWatch(0.1, "cpu", ["a, GPU 0", "a, GPU 1", "b, GPU 0"], print)
    assert slow_by([1, 1, 1], 50, watch) == []
    (line,) = slow_by([1, 1.3, 1], 100, watch)
    match = re.fullmatch(
        r"rank 1 \(a, GPU 1\) is a straggler: it takes (1\.\d\d)x as long as the others for "
        r"the same part of a layer, in most of the last 20 steps",
        line,
    )
    assert match is not None
    assert 1.2 < float(match[1]) < 1.4
    recovered = "rank 1 (a, GPU 1) has caught up with the others"
    assert slow_by([1, 1, 1], 100, watch) == [recovered]


def test_an_occasional_slow_step_makes_no_straggler():
    watch = StragglerWatch(0.1, "cpu", ["a", "b"], print)
    noise = random.Random(0)
    lines = [
        line
        for step in range(200)
        for line in watch.check([1.0, 3.0 if step % 5 == 0 else 1 + noise.gauss(0, 0.01)])
    ]
    assert lines == []
    assert slow_by([1, 1.3], 100, StragglerWatch(0, "cpu", ["a", "b"], print)) == []


def stepped(
    rank: int, world: int, slow: int, spike: int
) -> tuple[list[str], list[bool], list[float], float]:
    """Train with one slow rank in a layer and a hundredfold loss in one step."""
    trainer = Trainer(
        compose([*SMALL, "optim.skip_spikes=true", "train.steps=60", "topology.device=cpu"]),
        place(rank, world),
    )
    whole, rest = trainer.decoder.forward, parallelize.feed_forward

    def dawdling(*arguments, **options):
        time.sleep(0.05)
        return rest(*arguments, **options)

    if rank == slow:
        parallelize.feed_forward = dawdling
    lines, skipped, weights = [], [], []
    watches = StragglerWatch(trainer.config.run.straggler, "cpu", trainer.places, lines.append)
    for step in range(1, STRAGGLER_STEPS + STRAGGLER_WARM_UP + 5):
        trainer.decoder.forward = (lambda *a: 100 * whole(*a)) if step == spike else whole
        before = trainer.decoder.norm.weight.to_local().clone()
        for callback in (*trainer.callbacks, watches):
            callback.before_step()
        result = trainer.train_step(False)
        lines += result.warnings
        watches.after_step(FinishedStep(result, trainer.metrics(result, 1.0), last=False))
        skipped.append(result.skipped)
        weights.append(float((trainer.decoder.norm.weight.to_local() - before).abs().sum()))
    return lines, skipped, weights, float(trainer.decoder.norm.weight.full_tensor().sum())


@pytest.mark.slow
def test_workers_report_the_straggler_and_skip_the_update_of_a_spike_together():
    spike = 20
    results = gloo.run(3, stepped, 1, spike)
    lines = results[0][0]
    assert [line for line in lines if "rank" in line and "straggler" in line] == [
        line for line in lines if line.startswith("rank 1 (")
    ]
    assert sum(line.startswith("rank 1 (") for line in lines) == 1, lines
    assert "for the same part of a layer" in next(
        line for line in lines if line.startswith("rank 1 (")
    )
    assert any(
        line.startswith(f"step {spike} is a spike: loss ")
        and line.endswith("; its update is skipped")
        for line in lines
    )
    for others in results:
        assert [step for step, skipped in enumerate(others[1], start=1) if skipped] == [spike]
        moved = [moved > 0 for moved in others[2]]
        assert all(moved[: spike - 1] + moved[spike:])
        assert not moved[spike - 1]
        assert others[3] == results[0][3]
    assert torch.isfinite(torch.tensor(results[0][3]))


class Clock:
    """A clock that stands still while the test computes."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(
        "mtrain_cli.parallel.recording.time", SimpleNamespace(perf_counter=clock.perf_counter)
    )
    return clock


class Layer(nn.Module):
    """A layer whose attention takes 100 s, and whose other work takes `seconds`."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, attend, clock: Clock, seconds: float) -> None:
        attend(clock, None, None, self.index)
        clock.now += seconds


def attention(clock: Clock, *_: object) -> None:
    clock.now += 100


def made(layers: int) -> tuple[list[Layer], ComputeTimer]:
    model = [Layer(index) for index in range(layers)]
    return model, ComputeTimer(dict(enumerate(model)), torch.device("cpu"))


def forward(model: list[Layer], timer: ComputeTimer, clock: Clock, seconds: float = 2) -> None:
    attend = timer.wrap_attention(None, attention)
    for layer in model:
        layer(attend, clock, seconds)


def test_a_step_counts_what_layers_do_after_attention(clock):
    model, timer = made(3)
    timer.before_step()
    assert timer.seconds == 0, "no step has been measured"
    forward(model, timer, clock)
    timer.before_step()
    assert timer.seconds == 6
    timer.before_step()
    assert timer.seconds == 0, "the last step ran no layer"


def test_later_micro_batches_and_recomputation_do_not_count(clock):
    model, timer = made(2)
    timer.before_step()
    forward(model, timer, clock)
    forward(model, timer, clock, seconds=50)
    timer.before_step()
    assert timer.seconds == 4


def test_a_step_that_stops_early_is_not_measured(clock):
    model, timer = made(2)
    timer.before_step()
    forward(model[:1], timer, clock)
    timer.before_step()
    assert timer.seconds == 0


@pytest.mark.parametrize("layers", [1, LAYERS, 3 * LAYERS])
def test_at_most_eight_layers_are_timed_evenly_spread(layers):
    timed = [layer.index for layer in made(layers)[0] if layer._forward_hooks]
    assert len(timed) == min(layers, LAYERS)
    assert len({after - before for before, after in pairwise(timed)}) <= 1


def test_all_stages_of_a_pipeline_time_as_many_layers(clock):
    """A stage with layers 4 to 9, where another stage has three layers."""
    layers = {number: Layer(number) for number in range(4, 10)}
    timer = ComputeTimer(layers, torch.device("cpu"), most=3)
    timer.before_step()
    forward(list(layers.values()), timer, clock)
    timer.before_step()
    assert timer.seconds == 3 * 2
    assert [number for number, layer in layers.items() if layer._forward_hooks] == [4, 6, 8]


def test_waits_for_other_workers_do_not_count(clock):
    """Each layer waits 5 s of its 2 + 5 s. Waits outside a timed part change nothing."""
    model, timer = made(2)
    attend = timer.wrap_attention(None, attention)

    def wait() -> None:
        with timer.waiting():
            clock.now += 5

    class Sharing(Layer):
        def forward(self, attend, clock, seconds):
            wait()
            attend(clock, None, None, self.index)
            clock.now += seconds
            wait()

    for layer in model:
        layer.__class__ = Sharing
    timer.before_step()
    for layer in model:
        layer(attend, clock, 2)
        wait()
    timer.before_step()
    assert timer.seconds == 4
    for layer in model:
        layer(attend, clock, 3)
    timer.before_step()
    assert timer.seconds == 6
