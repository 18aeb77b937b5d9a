"""Training under each kind of mask gives the same losses on one worker and on two."""

from __future__ import annotations

import gloo
import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.training.evaluation import evaluate
from mtrain_cli.training.trainer import Trainer

SMALL = [
    "seq=300", "topology.block_size=16", "model.hidden_size=32", "model.num_layers=2",
    "model.head_dim=8", "model.intermediate_size=48", "train.dtype=float32",
    "optim.warmup_steps=2", "train.steps=10", "data.eval_sequences=2",
]  # fmt: skip
STEPS = 10
WINDOW = ["mask=sliding_window", "mask.window=40"]
BUDGETS = ["block=16", "last_q=16", "p_v=0.5", "p_s=0.5", "min_columns=4"]
VIDEO = ("mask.frames=6", "mask.height=5", "mask.width=10", "mask.window=[2,3,5]")
CASES = {
    "window": WINDOW,
    "window, recomputed": [*WINDOW, "train.activation_checkpoint=sequence_selective"],
    "window, sparse": [*WINDOW, "sparsity=vertical_slash", *(f"sparsity.{b}" for b in BUDGETS)],
    "window, sinks": [*WINDOW, "mask.global_tokens=8", "data.document_mask=false"],
    "prefix": ["mask=prefix_lm", "mask.prefix=100", "data.document_mask=false"],
    "blocks": ["mask=block_causal", "mask.block=8"],
    "video": ["mask=video", "mask.causal=true", *VIDEO, "data.document_mask=false"],
    "window, mixed": [*WINDOW, "mask.full_every=2"],
    "causal": [],
}
OTHERS = ("recomputed", "sparse", "sinks")

WAYS = {
    "window": ["topology.exchange=ring", "topology.layout=zigzag"],
    "prefix": ["topology.exchange=all_gather", "topology.layout=contiguous"],
    "window, sinks": ["topology.exchange=ring", "topology.layout=striped"],
    "blocks": ["topology.exchange=ulysses"],
    "video": ["topology.exchange=group_cast", "topology.layout=balanced"],
}


def trained(rank: int, world: int, name: str) -> tuple[list[float], float]:
    """The loss of each step, and the held-out loss at the end."""
    words = [*SMALL, *CASES[name], *(WAYS.get(name, []) if world > 1 else [])]
    trainer = Trainer(compose(words), gloo.environment(rank, world, world))
    losses = [trainer.train_step(False).loss for _ in range(STEPS)]
    held_out = evaluate(trainer)
    trainer.close()
    return losses, held_out.loss


@pytest.fixture(scope="module")
def causal() -> list[float]:
    ((losses, _),) = gloo.run(1, trained, "causal")
    return losses


@pytest.mark.parametrize(
    "name",
    [
        "window",
        "prefix",
        "blocks",
        "video",
        "window, mixed",
        *(pytest.param(f"window, {n}", marks=pytest.mark.slow) for n in OTHERS),
    ],
)
def test_two_workers_train_like_one(name, causal):
    ((alone, held_out),) = gloo.run(1, trained, name)
    for losses, loss in gloo.run(2, trained, name):
        assert losses == pytest.approx(alone, abs=2e-5)
        assert loss == pytest.approx(held_out, abs=2e-5)
    assert alone[-1] < alone[0]
    assert abs(causal[0] - alone[0]) > 1e-6, "the mask has an effect"


def pairs_of_layers(rank: int, world: int) -> tuple[dict[int, int], float]:
    """The pairs that the mask of each layer allows, and the pairs of a step."""
    layers = {}
    original = ContextAttention.__call__

    def record(self, q, k, v, layer):
        layers[layer] = self.plan.allowed_pairs
        return original(self, q, k, v, layer)

    words = [*SMALL, *WINDOW, "mask.full_every=3", "model.num_layers=7"]
    config = compose([*words, "data.document_mask=false"])
    trainer = Trainer(config, gloo.environment(rank, world, world))
    ContextAttention.__call__ = record
    result = trainer.train_step(False)
    trainer.close()
    return layers, result.pairs


def test_each_layer_has_its_own_mask():
    """Layers 3 and 6 of 7 see all earlier tokens."""
    ((layers, pairs),) = gloo.run(1, pairs_of_layers)
    causal, window = 300 * 301 // 2, 300 * 40 - 40 * 39 // 2
    assert layers == {layer: causal if layer in (2, 5) else window for layer in range(7)}
    assert pairs == round((5 * window + 2 * causal) / 7)
