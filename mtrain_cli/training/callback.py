"""Hooks of a training run, for code that watches, records or logs the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mtrain_cli.model.decoder import Attend
    from mtrain_cli.records.metrics import StepMetrics
    from mtrain_cli.training.batch import Batch, PackedSample
    from mtrain_cli.training.step import StepResult
    from mtrain_cli.training.trainer import Trainer


@dataclass(frozen=True)
class FinishedStep:
    """One optimizer step, as callbacks see it."""

    result: StepResult
    metrics: StepMetrics  # the step's line of metrics.jsonl
    last: bool  # whether it is the last of `train.steps`


class Callback:
    """An object that follows a training run. Override the hooks that you need.

    All workers call the hooks at the same points of a step, in the order of `Trainer.callbacks`, so
    hooks may communicate.

    needs_samples: whether `on_samples` needs the whole sequences, which may take gigabytes and
        otherwise are dropped. Set this before the first step.
    """

    needs_samples = False

    def before_training(self) -> None:
        """Run before the first step, and after loading a checkpoint if the run resumes."""

    def before_step(self) -> None:
        """Run before a step reads its data."""

    def on_samples(self, samples: Sequence[Sequence[PackedSample]]) -> None:
        """Receive the samples of each micro-batch of a step. Leave no gradients behind."""

    def wrap_attention(self, batch: Batch, attend: Attend) -> Attend:  # noqa: ARG002 - a hook
        """Return a micro-batch's attention. The wrapper of the first callback is outermost."""
        return attend

    def after_step(self, step: FinishedStep) -> None:
        """Run after a step has updated the weights."""

    def on_checkpoint(self, step: int) -> None:
        """Run when a background thread starts to write the checkpoint of `step`."""

    def on_error(self, error: Exception) -> None:
        """Run when a step, a save or a callback fails. Do not communicate: workers may be gone."""

    def close(self) -> None:
        """Run once after the last step, when the last checkpoint is on disk."""


class PeriodicEvaluation(Callback):
    """Evaluates at the start and end of training and every ``train.eval_every`` steps."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def before_training(self) -> None:
        self._evaluate_after(is_end=self._trainer.step == 0)

    def after_step(self, step: FinishedStep) -> None:
        # After a stop request the user waits for the checkpoint, so do not evaluate.
        if not step.result.stop:
            self._evaluate_after(is_end=step.last)

    def _evaluate_after(self, *, is_end: bool) -> None:
        every = self._trainer.config.train.eval_every
        self.evaluate(due=is_end or bool(every and self._trainer.step % every == 0))

    def evaluate(self, *, due: bool) -> None:
        """Evaluate the model if ``due``. Called after every step."""
        raise NotImplementedError
