"""Short training runs under a mask, on gloo processes."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import gloo
import numpy as np
import torch

from mtrain_cli.composition.compose import compose
from mtrain_cli.data.dataset import Sample
from mtrain_cli.data.labels import IGNORED
from mtrain_cli.training.evaluation import evaluate
from mtrain_cli.training.trainer import Trainer

SMALL = [
    "topology.block_size=16", "model.hidden_size=32", "model.num_layers=2", "model.head_dim=8",
    "model.intermediate_size=48", "train.dtype=float32", "optim.warmup_steps=2",
]  # fmt: skip


class Trained(NamedTuple):
    """losses: of each step. held_out: loss at the end. pairs: of the last step."""

    losses: list[float]
    held_out: float
    pairs: int


def trained(
    rank: int, world: int, words: list[str], steps: int, per_node: int | None = None
) -> Trained:
    """Train for some steps on a context group of ``world`` workers."""
    config = compose([*SMALL, f"train.steps={steps}", *words])
    trainer = Trainer(config, gloo.environment(rank, world, world, per_node))
    results = [trainer.train_step(False) for _ in range(steps)]
    held_out = evaluate(trainer)
    trainer.close()
    return Trained([result.loss for result in results], held_out.loss, results[-1].pairs)


def changes_of_losses(rank: int, world: int, words: list[str]) -> tuple[list[float], list[float]]:
    """How much losses change if the input has another token in place of the label.

    Returns the changes at positions whose label counts, and where the mask shows the label.
    """
    config = compose([*SMALL, *words, "data.eval_sequences=4"])
    trainer = Trainer(config, gloo.environment(rank, world, world))
    found: tuple[list[float], list[float]] = [], []

    def losses(sample: Sample, tokens: np.ndarray) -> torch.Tensor:
        batch = trainer.batch_maker([replace(sample, tokens=tokens)])
        labels = torch.full_like(batch.labels, IGNORED)
        labels[0, : config.seq] = torch.from_numpy(sample.labels)
        inputs = batch.tokens, batch.positions, labels
        return trainer.decoder.token_losses(*inputs, batch.attention)[0]

    for number, sample in enumerate(trainer.held_out):
        counts, before = trainer.batch_maker([sample]).labels[0], losses(sample, sample.tokens)
        labeled = np.flatnonzero(sample.labels[:-1] != IGNORED)
        for position in np.random.default_rng(number).permutation(labeled)[:25]:
            tokens = sample.tokens.copy()
            tokens[position + 1] = (tokens[position + 1] + 1) % 256
            change = float(losses(sample, tokens)[position] - before[position])
            found[int(counts[position] == IGNORED)].append(abs(change))
    trainer.close()
    return found
