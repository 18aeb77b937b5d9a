"""Warn, once, that a router sends all tokens to the same expert."""

from __future__ import annotations

from collections.abc import Callable

from mtrain_cli.config.schema import MoeConfig
from mtrain_cli.training.callback import Callback, FinishedStep

_ALL = 0.999  # share of the tokens of a step that counts as all


class ExpertWatch(Callback):
    """Warn of the first layer whose router chooses one expert for all tokens of a step.

    Such a layer trains, but its other experts learn less. With ``top_k = experts``, every expert
    computes all tokens, so there is nothing to warn of. Runs on the first worker.
    """

    def __init__(self, moe: MoeConfig, warn: Callable[[str], None]) -> None:
        """Watch the loads of experts. warn: function that shows a line to the user."""
        self._moe, self._warn, self._warned = moe, warn, moe.experts <= moe.top_k

    def after_step(self, step: FinishedStep) -> None:
        loads = step.metrics.expert_load_by_layer
        if self._warned or not loads:
            return
        moe = self._moe
        largest = moe.experts / moe.top_k  # load of an expert that computes every token
        found = [n for n, load in enumerate(loads, moe.dense_layers) if load >= _ALL * largest]
        if not found:
            return
        self._warned = True
        self._warn(
            f"step {step.metrics.step}: in layer {found[0]}, all tokens chose the same expert (of "
            f"{moe.experts}, {moe.top_k} per token); a larger train.balance_loss or "
            "train.balance_bias spreads them. Later steps give no warning; metrics.jsonl has "
            "expert_load_by_layer"
        )
