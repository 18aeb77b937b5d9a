"""Expert-parallel training equals that of one worker: loss, every gradient, steps, checkpoints."""

from __future__ import annotations

from typing import Any

import gloo
import numpy as np
import pytest
from training import test_pipeline as pipelines
from training.test_router_batches import BIASED, CAPACITY, MOE, SHARED, SIGMOID, exchange, same
from training.test_router_batches import steps as router_steps
from training.test_tensor_parallel_training import differences, held_out, make, steps

from mtrain_cli.model.experts import expert_layers
from mtrain_cli.training.expert_traffic import expert_traffic

NONE, FULL = "train.activation_checkpoint=none", "train.activation_checkpoint=full"
DEALT = "topology.expert_parallel"


def dealt(degree: int, *more: str) -> tuple[str, ...]:
    return (f"{DEALT}={degree}", *more)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("tp", "cp", "dp", "model", "run"),
    [
        (1, 2, 1, MOE, dealt(2, exchange("ring"), NONE)),
        (1, 2, 1, SHARED, dealt(2, FULL, "topology.expert_chunks=3")),
        (1, 2, 2, CAPACITY, dealt(2, "train.shard=gradients")),
        (1, 2, 2, SIGMOID, dealt(4, "train.shard=optimizer")),
        (2, 2, 1, SHARED, dealt(4, "topology.expert_chunks=2")),
        (2, 1, 1, MOE, dealt(2, "train.micro_batch=2")),
        pytest.param(2, 2, 2, (*MOE, "train.global_batch=4"), dealt(8), marks=slow),
        pytest.param(1, 8, 1, (*SHARED, "topology.block_size=16"), dealt(4), marks=slow),
    ],
)
def test_loss_and_gradients_equal_those_of_one_worker(tp, cp, dp, model, run):
    found = differences(tp * cp * dp, tp, cp, model, run)
    bad = {name: value for name, value in found.items() if not value <= 1e-5}
    assert not bad, bad
    assert found["loss"] <= 1e-6


def test_stages_of_a_pipeline_deal_their_own_experts():
    degrees = (2, 2, 1)
    found = pipelines.differences(4, degrees, MOE, dealt(2, "topology.virtual_stages=2"))
    bad = {name: value for name, value in found.items() if not value <= 1e-5}
    assert not bad, bad


def test_drops_biases_and_metrics_equal_those_of_one_worker():
    expected = gloo.run(1, router_steps, 1, 1, BIASED, 3, "")[0]
    for found in gloo.run(2, router_steps, 1, 2, (*BIASED, *dealt(2)), 3, ""):
        same(found, expected)


def one_expert(rank: int, world: int, degree: int) -> tuple[float, int]:
    """Return the loss of a step in which expert 0 computes every token, and its received bytes."""
    words = (*MOE, f"{DEALT}={degree}", "model.moe.top_k=1", "model.moe.normalize=false")
    trainer = make(rank, world, 1, world, words)
    for mlp in expert_layers(trainer.decoder.layers):
        mlp.selection_bias[0] = 100.0
    loss = trainer.train_step(False).loss
    received = 0 if trainer.experts is None else trainer.experts.received[0]
    trainer.close()
    return loss, received


def test_all_tokens_on_one_expert_train_and_the_other_worker_takes_part():
    ((expected, _),) = gloo.run(1, one_expert, 1)
    (first, much), (second, little) = gloo.run(2, one_expert, 2)
    assert first == second == pytest.approx(expected, rel=1e-6)
    assert much > little > 0, "the worker of expert 0 receives rows, the other gets results back"


def received(rank: int, world: int, words: tuple[str, ...]) -> tuple[int, float]:
    """Return the bytes of rows that reach this worker in a step, counted and by the formula."""
    trainer = make(rank, world, 1, world, words)
    group = trainer.experts
    assert group is not None
    before = group.received[0]
    trainer.train_step(False)
    dims, layout = trainer.environment.dims, trainer.choices.layout
    formula = expert_traffic(trainer.config, dims, layout, 4, group.size).rows
    layers = len(expert_layers(trainer.decoder.layers))
    counted = group.received[0] - before
    trainer.close()
    return counted, layers * formula


@pytest.mark.parametrize("checkpoint", [NONE, FULL])
def test_a_step_receives_the_bytes_of_the_formula(checkpoint):
    """The formula assumes balance, so the test spreads the tokens."""
    words = (*MOE, *dealt(2), checkpoint, "seq=256", "topology.block_size=16", "model.moe.top_k=8")
    counts = gloo.run(2, received, words)
    for counted, formula in counts:
        assert counted == pytest.approx(formula, rel=1e-6)


def trained(
    rank: int, world: int, cp: int, tp: int, words: tuple[str, ...], count: int, folder: str
) -> list[tuple[float, float]]:
    return steps(rank, world, tp, cp, words, count, folder)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, 2, 1, dealt(2)), (1, 1, 1, ())),
        ((1, 1, 1, ()), (4, 2, 2, dealt(4))),
        pytest.param((4, 4, 1, dealt(2)), (4, 4, 1, dealt(4)), marks=slow),
    ],
)
def test_a_checkpoint_of_one_mesh_resumes_on_another(tmp_path, before, after):
    """before, after: workers, context-parallel and tensor-parallel degree, and overrides."""
    model = (*SHARED, "optim.clip_norm=0.5")
    expected = gloo.run(1, trained, 1, 1, model, 4, None)[0]
    parts = []
    for world, cp, tp, more in (before, after):
        parts += gloo.run(world, trained, cp, tp, (*model, *more), 2, str(tmp_path))[0]
    np.testing.assert_allclose(parts, expected, rtol=2e-5)
    assert all(norm > 0.5 for _, norm in expected), "clipping must change every step"


def test_resuming_on_the_same_mesh_is_bitwise_the_uninterrupted_run(tmp_path):
    words = (*MOE, *dealt(2))
    whole = gloo.run(2, trained, 2, 1, words, 3, None)
    first = gloo.run(2, trained, 2, 1, words, 1, str(tmp_path))
    second = gloo.run(2, trained, 2, 1, words, 2, str(tmp_path))
    assert [a + b for a, b in zip(first, second, strict=True)] == whole


def dealt_held_out(rank: int, world: int, words: tuple[str, ...]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("training.test_tensor_parallel_training.SMALL", (*SMALL, *words))
        return held_out(rank, world, 1, world)


SMALL = (
    *("seq=150", "topology.block_size=16", "train.global_batch=2", "optim.warmup_steps=2"),
    *("train.steps=12", *MOE),
)


def test_the_held_out_loss_equals_that_of_one_worker():
    expected = gloo.run(1, dealt_held_out, ())[0]
    for found in gloo.run(2, dealt_held_out, dealt(2)):
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
        losses = [[loss for _, loss in each if loss] for each in (found, expected)]
        np.testing.assert_allclose(*losses, rtol=1e-5)


def parts(rank: int, world: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    trainer = make(rank, world, 1, world, (*MOE, *dealt(2)))
    found = [
        (tuple(weight.shape), tuple(weight.to_local().shape))
        for mlp in expert_layers(trainer.decoder.layers)
        for weight in mlp.experts.parameters()
    ]
    trainer.close()
    return found


def test_a_worker_holds_its_part_of_the_experts():
    for found in gloo.run(4, parts):
        for whole, own in found:
            assert own[0] == whole[0] // 2, "experts are dealt over two workers"
            assert np.prod(own) == np.prod(whole) // 4, "and shared by the other two"
