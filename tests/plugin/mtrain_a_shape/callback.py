"""The callback of ``train.callbacks=[lowest_loss]``."""

from mtrain_cli.training.callback import Callback, FinishedStep


class LowestLoss(Callback):
    """Says when a step has the lowest loss so far."""

    def __init__(self, say) -> None:
        self._say = say
        self.lowest = float("inf")

    def after_step(self, step: FinishedStep) -> None:
        loss = step.result.loss  # equal on all workers; None if no token has a label
        if loss is not None and loss < self.lowest:
            self.lowest = loss
            self._say(f"step {step.metrics.step} has the lowest loss so far: {loss:.4f}")


def lowest_loss(trainer, run_dir, message) -> LowestLoss:
    """Make the callback. message: shows and logs a line on rank 0."""
    return LowestLoss(message)
