"""Training under each kind of mask gives the same losses on one worker and on two."""

from __future__ import annotations

import gloo
import pytest
from slow_cases import mostly_slow
from training.masked_runs import SMALL, changes_of_losses, trained

from mtrain_cli.composition.compose import compose
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.training.evaluation import evaluate
from mtrain_cli.training.trainer import Trainer

SEQ = ["seq=300", "data.eval_sequences=2"]
STEPS = 10
WINDOW = ["mask=sliding_window", "mask.window=40"]
BUDGETS = ["block=16", "last_q=16", "p_v=0.5", "p_s=0.5", "min_columns=4"]
VIDEO = ("mask.frames=6", "mask.height=5", "mask.width=10", "mask.window=[2,3,5]")
CASES = {
    "window": WINDOW,
    "window, sparse": [*WINDOW, "sparsity=vertical_slash", *(f"sparsity.{b}" for b in BUDGETS)],
    "window, sinks": [*WINDOW, "mask.global_tokens=8", "data.document_mask=false"],
    "prefix": ["mask=prefix_lm", "mask.prefix=100", "data.document_mask=false"],
    "blocks": ["mask=block_causal", "mask.block=8"],
    "block window": ["mask=block_window", "mask.block=24", "mask.back=2"],
    "chunks": ["mask=chunked", "mask.chunk=24"],
    "chunks, sparse": [
        "mask=chunked",
        "mask.chunk=40",
        "sparsity=vertical_slash",
        *(f"sparsity.{b}" for b in BUDGETS),
    ],
    "dilated": ["mask=dilated", "mask.block=8", "mask.stride=3", "mask.count=4"],
    "video": ["mask=video", "mask.causal=true", *VIDEO, "data.document_mask=false"],
    "window, mixed": [*WINDOW, "mask.full_every=2"],
    "causal": [],
}
WAYS = {
    "window": ["topology.exchange=ring", "topology.layout=zigzag"],
    "prefix": ["topology.exchange=all_gather", "topology.layout=contiguous"],
    "window, sinks": ["topology.exchange=ring", "topology.layout=striped"],
    "blocks": ["topology.exchange=ulysses"],
    "chunks": ["topology.exchange=group_cast", "topology.layout=balanced"],
    "video": ["topology.exchange=group_cast", "topology.layout=balanced"],
    "dilated": ["topology.exchange=group_cast", "topology.layout=zigzag", "topology.stages=1"],
}


def words(name: str, world: int = 1) -> list[str]:
    return [*SEQ, *CASES[name], *(WAYS.get(name, []) if world > 1 else [])]


@pytest.fixture(scope="module")
def causal() -> list[float]:
    (run,) = gloo.run(1, trained, words("causal"), STEPS)
    return run.losses


@mostly_slow(
    "name",
    [
        "window",
        "prefix",
        "blocks",
        "video",
        "window, mixed",
        pytest.param("window, sparse", marks=pytest.mark.slow),
        pytest.param("chunks, sparse", marks=pytest.mark.slow),
        pytest.param("window, sinks", marks=pytest.mark.slow),
        "dilated",
        "chunks",
    ],
    keep=(0, 1),
)
def test_two_workers_train_like_one(name, causal):
    (alone,) = gloo.run(1, trained, words(name), STEPS)
    for run in gloo.run(2, trained, words(name, 2), STEPS):
        assert run.losses == pytest.approx(alone.losses, abs=2e-5)
        assert run.held_out == pytest.approx(alone.held_out, abs=2e-5)
    assert alone.losses[-1] < alone.losses[0]
    assert abs(causal[0] - alone.losses[0]) > 1e-6, "the mask has an effect"


@mostly_slow(
    "name", ["prefix", "blocks", "block window", "chunks", "video", "dilated"], keep=(0, 1, 3)
)
def test_no_loss_depends_on_its_label_in_the_input(name):
    ((counted, shown),) = gloo.run(1, changes_of_losses, words(name))
    assert len(counted) > 1
    assert max(counted) < 1e-6
    assert name in ("video", "dilated", "chunks") or max(shown) > 1e-4


def pairs_of_layers(rank: int, world: int) -> tuple[list[dict[int, int]], float]:
    """The pairs that the mask of each layer allows in a step and in evaluation; pairs of a step."""
    layers: list[dict[int, int]] = []
    original = ContextAttention.__call__

    def record(self, q, k, v, layer):
        layers[-1][layer] = self.plan.allowed_pairs
        return original(self, q, k, v, layer)

    full = ["mask.full_every=3", "mask.full_first=1", "model.num_layers=7"]
    config = compose([*SMALL, *SEQ, *WINDOW, *full, "data.document_mask=false"])
    trainer = Trainer(config, gloo.environment(rank, world, world))
    ContextAttention.__call__ = record
    layers.append({})
    result = trainer.train_step(False)
    layers.append({})
    evaluate(trainer)
    trainer.close()
    return layers, result.pairs


def test_each_layer_has_its_own_mask():
    """Layers 1, 3 and 6 of 7 see all earlier tokens."""
    ((layers, pairs),) = gloo.run(1, pairs_of_layers)
    causal, window = 300 * 301 // 2, 300 * 40 - 40 * 39 // 2
    expected = {layer: causal if layer in (0, 2, 5) else window for layer in range(7)}
    assert layers == [expected, expected], "in training and in evaluation"
    assert pairs == round((4 * window + 3 * causal) / 7)
