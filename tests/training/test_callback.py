"""Callbacks see every hook of a real training, in order, and may replace the attention."""

from __future__ import annotations

from pathlib import Path

import gloo
import pytest
from training.test_loop import SMALL, place

from mtrain_cli.composition.compose import compose
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.training import loop
from mtrain_cli.training.callback import Callback, FinishedStep
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
