"""Pipeline-parallel training equals that of one worker: loss, every gradient, norm and steps."""

from __future__ import annotations

from typing import Any

import gloo
import numpy as np
import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.parallel.parameter_shards import own_region
from mtrain_cli.training.checkpointer import Checkpointer
from mtrain_cli.training.trainer import Trainer

SMALL = (
    "seq=150",
    "topology.block_size=16",
    "model.hidden_size=32",
    "model.num_layers=4",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=8",
    "model.intermediate_size=44",
    "model.qkv_bias=true",
    "data.document_mask=true",
    "train.global_batch=4",
    "optim.warmup_steps=2",
    "train.steps=12",
)
Gradients = dict[str, np.ndarray]
# (pipeline, context and tensor degree)
Degrees = tuple[int, int, int]
ALONE: Degrees = (1, 1, 1)


def make(rank: int, world: int, degrees: Degrees, overrides: tuple[str, ...]) -> Trainer:
    pp, cp, tp = degrees
    keys = (f"topology.pipeline_parallel={pp}", f"topology.tensor_parallel={tp}")
    config = compose([*SMALL, *overrides, *keys])
    return Trainer(config, gloo.environment(rank, world, cp, None, tp, pp))


def shards(
    rank: int, world: int, degrees: Degrees, overrides: tuple[str, ...]
) -> tuple[float, float, dict[str, tuple[Any, ...]]]:
    """Return loss, squared norm, and for each gradient its shape, region and shard."""
    trainer = make(rank, world, degrees, overrides)
    batches, _ = trainer._next_batches()
    valid, _ = trainer.totals(batches)
    attends = [trainer.attention_of(batch) for batch in batches]
    loss = trainer.forward_backward(batches, attends, valid)
    found = {
        name: (p.shape, [(s.start, s.stop) for s in own_region(p)], p.grad.to_local().numpy())
        for name, p in trainer.decoder.named_parameters()
    }
    return float(loss), float(trainer.states.squared_norm()), found


def whole(parts: list[tuple[float, float, dict[str, Any]]]) -> tuple[float, float, Gradients]:
    """Sum losses and squared norms over ranks, and join the shards of each gradient."""
    gradients: Gradients = {}
    for _, _, found in parts:
        for name, (shape, region, shard) in found.items():
            joined = gradients.setdefault(name, np.full(shape, np.nan, np.float32))
            place = tuple(slice(*ends) for ends in region)
            old = joined[place]
            assert np.array_equal(old[~np.isnan(old)], shard[~np.isnan(old)]), name
            joined[place] = shard
    for name, gradient in gradients.items():
        assert not np.isnan(gradient).any(), f"{name}: no rank has some elements"
    return sum(p[0] for p in parts), sum(p[1] for p in parts), gradients


_ALONE: dict[tuple[str, ...], tuple[float, float, Gradients]] = {}


def alone(overrides: tuple[str, ...]) -> tuple[float, float, Gradients]:
    if overrides not in _ALONE:
        _ALONE[overrides] = whole(gloo.run(1, shards, ALONE, overrides))
    return _ALONE[overrides]


def differences(
    world: int, degrees: Degrees, model: tuple[str, ...], run: tuple[str, ...]
) -> dict[str, float]:
    """Return relative differences of loss, norm and gradients from one worker."""
    expected, found = alone(model), whole(gloo.run(world, shards, degrees, (*model, *run)))
    assert found[2].keys() == expected[2].keys()
    result = {
        "loss": abs(found[0] / expected[0] - 1),
        "squared norm": abs(found[1] / expected[1] - 1),
    }
    for name, gradient in expected[2].items():
        assert np.abs(gradient).max() > 1e-6, f"{name}: a zero gradient would prove nothing"
        result[name] = float(np.linalg.norm(found[2][name] - gradient) / np.linalg.norm(gradient))
    return result


UNTIED = ("model.tie_word_embeddings=false", "model.qkv_bias=false")
GPIPE = "topology.schedule=gpipe"


@pytest.mark.parametrize(
    ("world", "degrees", "model", "run"),
    [
        (2, (2, 1, 1), UNTIED, ()),
        (2, (2, 1, 1), UNTIED, (GPIPE,)),
        (2, (2, 1, 1), (), ()),
    ],
)
def test_loss_and_gradients_equal_those_of_one_worker(world, degrees, model, run):
    found = differences(world, degrees, model, run)
    bad = {name: value for name, value in found.items() if not value <= 1e-5}
    assert not bad, bad
    print(f"loss {found['loss']:.1e}, gradients {max(found.values()):.1e}")


def steps(
    rank: int,
    world: int,
    degrees: Degrees,
    overrides: tuple[str, ...],
    count: int,
    folder: str | None = None,
) -> list[tuple[float, float]]:
    """Return (loss, gradient norm) of ``count`` steps. A folder resumes and gets a checkpoint."""
    trainer = make(rank, world, degrees, overrides)
    checkpointer = Checkpointer(folder, 2) if folder else None
    if checkpointer and checkpointer.latest() is not None:
        trainer.resume(checkpointer)
    result = []
    for _ in range(count):
        done = trainer.train_step(False)
        result.append((done.loss, done.grad_norm))
    if checkpointer:
        checkpointer.save(trainer.step, trainer.state(), asynchronous=False)
    trainer.close()
    return result
