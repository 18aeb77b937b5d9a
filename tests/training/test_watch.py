"""Spikes and stragglers: which ones are reported, from numbers and in a training."""

from __future__ import annotations

import random
import re
import time

import gloo
import pytest
import torch
from training.test_loop import SMALL, place

from mtrain_cli.composition.compose import compose
from mtrain_cli.model import layer_execution
from mtrain_cli.training.callback import (
    MIN_STEPS,
    STRAGGLER_STEPS,
    STRAGGLER_WARM_UP,
    FinishedStep,
    SpikeWatch,
    StragglerWatch,
)
from mtrain_cli.training.trainer import Trainer


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
    whole, rest = trainer.decoder.forward, layer_execution.feed_forward

    def dawdling(*arguments, **options):
        time.sleep(0.05)
        return rest(*arguments, **options)

    if rank == slow:
        layer_execution.feed_forward = dawdling
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
