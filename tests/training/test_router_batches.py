"""Training with experts equals that of one worker: loss, gradients, choices and biases."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import gloo
import numpy as np
import pytest
import torch
from slow_cases import mostly_slow
from training.test_tensor_parallel_training import differences, make

from mtrain_cli.training.checkpointer import Checkpointer

MOE = (
    "model=tiny_moe", "model.moe.expert_size=20", "train.balance_loss=0.3",
    "train.router_z_loss=0.05",
)  # fmt: skip
SHARED = (*MOE, "model.moe.shared_size=12", "model.moe.dense_layers=1", "seq=151")
SIGMOID = (*MOE, "model.moe.score=sigmoid", "model.moe.scale=2.5", "model.moe.top_k=3")
NOT_NORMALIZED = (*MOE, "model.moe.normalize=false")
ONE = (*MOE, "model.moe.experts=1", "model.moe.top_k=1", "model.moe.normalize=false")
SLASHES = (
    *MOE, "seq=256", "sparsity=vertical_slash", "sparsity.block=16", "sparsity.last_q=16",
    "sparsity.min_slashes=2", "sparsity.max_slashes=5", "sparsity.min_columns=4",
    "sparsity.max_columns=12", "sparsity.dense_steps=0",
)  # fmt: skip


def exchange(name: str) -> str:
    return f"topology.exchange={name}"


@mostly_slow(
    ("tp", "cp", "dp", "model", "run"),
    [
        (1, 2, 1, MOE, (exchange("ring"), "train.activation_checkpoint=none")),
        (1, 2, 1, SHARED, (exchange("all_gather"), "train.activation_checkpoint=full")),
        (
            1,
            3,
            1,
            (*NOT_NORMALIZED, "seq=151"),
            (exchange("group_cast"), "topology.layout=balanced"),
        ),
        (1, 1, 2, SHARED, ("train.shard=optimizer", "train.activation_checkpoint=none")),
        (2, 1, 1, NOT_NORMALIZED, ("train.activation_checkpoint=none",)),
        (2, 2, 1, NOT_NORMALIZED, (exchange("ring"), "train.micro_batch=2")),
        (1, 4, 1, SIGMOID, (exchange("hierarchical_ring"), "topology.gpus_per_node=2")),
        (1, 2, 1, SLASHES, (exchange("ring"), "train.activation_checkpoint=sequence_selective")),
        (1, 2, 1, SHARED, (exchange("ring"), "train.offload_activations=true")),
    ],
    keep=(0, 1, 2, 3, 5, 7),
)
def test_loss_and_gradients_equal_those_of_one_worker(tp, cp, dp, model, run):
    found = differences(tp * cp * dp, tp, cp, model, run)
    bad = {name: value for name, value in found.items() if not value <= 1e-5}
    assert not bad, bad
    assert found["loss"] <= 1e-6


def steps(
    rank: int, world: int, tp: int, cp: int, overrides: tuple[str, ...], count: int, folder: str
) -> list[dict[str, Any]]:
    """Return metrics of steps and the biases after them. A folder resumes, then gets the state."""
    trainer = make(rank, world, tp, cp, overrides)
    checkpointer = Checkpointer(folder, 2) if folder else None
    if checkpointer and checkpointer.latest() is not None:
        trainer.resume(checkpointer)
    found = []
    for _ in range(count):
        result = trainer.train_step(False)
        metrics = trainer.metrics(result, 1.0)
        names = "loss", "balance_loss", "router_z", "router_entropy", "expert_load_by_layer"
        found.append({name: getattr(metrics, name) for name in names})
        found[-1]["bias"] = [layer.mlp.selection_bias.tolist() for layer in trainer.decoder.layers]
    if checkpointer:
        checkpointer.save(trainer.step, trainer.state(), asynchronous=False)
    trainer.close()
    return found


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for name, value in other.items():
            np.testing.assert_allclose(one[name], value, rtol=2e-5, atol=1e-7, err_msg=name)


BIASED = (*NOT_NORMALIZED, "train.balance_bias=0.01")


def test_metrics_and_biases_equal_those_of_one_worker():
    expected = gloo.run(1, steps, 1, 1, BIASED, 3, "")[0]
    assert max(map(abs, np.ravel(expected[-1]["bias"]))) > 0.015, "several updates add up"
    for tp, cp in ((1, 2), (2, 2)):
        for found in gloo.run(tp * cp, steps, tp, cp, BIASED, 3, ""):
            same(found, expected)


def test_a_checkpoint_holds_the_biases(tmp_path):
    expected = gloo.run(1, steps, 1, 1, BIASED, 4, "")[0]
    first = gloo.run(2, steps, 1, 2, BIASED, 2, str(tmp_path))[0]
    second = gloo.run(1, steps, 1, 1, BIASED, 2, str(tmp_path))[0]
    same(first + second, expected)


@pytest.mark.slow
def test_an_offloaded_optimizer_keeps_the_biases(tmp_path):
    words = (*BIASED, "optim.offload=true")
    expected = gloo.run(1, steps, 1, 1, BIASED, 4, "")[0]
    first = gloo.run(1, steps, 1, 1, words, 2, str(tmp_path))[0]
    second = gloo.run(1, steps, 1, 1, words, 2, str(tmp_path))[0]
    same(first + second, expected)


def test_a_skipped_update_leaves_the_biases_alone():
    assert gloo.run(1, skipped, BIASED) == [0.0]


def skipped(rank: int, world: int, overrides: tuple[str, ...]) -> float:
    trainer = make(rank, world, 1, 1, overrides)
    trainer.run_step._skips_update = lambda *_: (True, "")  # type: ignore[method-assign]
    trainer.train_step(False)
    trainer.close()
    biases = [layer.mlp.selection_bias for layer in trainer.decoder.layers]
    return float(torch.stack(biases).abs().max())


@pytest.mark.slow
def test_the_balance_loss_spreads_tokens_over_experts():
    model = (*MOE[:2], "model.init_std=0.3", "train.steps=30", "optim.warmup_steps=2")
    loads = {}
    for coefficient in (0.0, 0.5):
        words = (*model, f"train.balance_loss={coefficient}")
        loads[coefficient] = gloo.run(1, steps, 1, 1, words, 25, "")[0][-1]["balance_loss"]
    assert loads[0.5] < 1.1 < loads[0.0], loads


def test_waits_for_the_loads_of_other_workers_are_observed():
    for entered in gloo.run(2, observed):
        assert entered == 2 * 2, "each of two layers waits once in each of two sequences"


def observed(rank: int, world: int) -> int:
    trainer = make(rank, world, 1, world, MOE)
    assert trainer.router is not None
    entered: list[bool] = []
    trainer.router.observer.waiting = lambda: nullcontext(entered.append(True))
    trainer.train_step(False)
    trainer.close()
    return len(entered)
