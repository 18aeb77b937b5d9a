"""Garbage collections after a first step visit only newer objects."""

from __future__ import annotations

import gc
from typing import Any

import gloo
import pytest
import torch
from training.test_sparse_training import trainer

from mtrain_cli.training import out_of_memory


def visited(rank: int, world: int) -> dict[str, Any]:
    """Count the objects that a worker's collections visit before, between and after steps."""
    results: dict[str, Any] = {}
    gc.unfreeze()  # objects of `gloo_server`
    training = trainer(rank, world, 1, ["sparsity=vertical_slash"])
    parameter = next(training.decoder.parameters())
    results["aside before"] = gc.get_freeze_count()
    training.train_step(False)
    results["frozen"] = gc.get_freeze_count()
    training.train_step(False)
    results["frozen after a second step"] = gc.get_freeze_count()
    seen = gc.get_objects()
    results["seen"], results["the model"] = (
        len(seen),
        any(candidate is parameter for candidate in seen),
    )
    training.close()
    results["aside at the end"] = gc.get_freeze_count()
    results["the model at the end"] = any(candidate is parameter for candidate in gc.get_objects())
    return results


def test_after_the_first_step_collections_visit_only_new_objects():
    (results,) = gloo.run(1, visited)
    assert results["aside before"] == results["aside at the end"] == 0
    assert results["frozen"] > 50_000, "PyTorch alone has more"
    assert results["frozen after a second step"] <= results["frozen"]
    assert results["seen"] < results["frozen"] / 10
    assert not results["the model"]
    assert results["the model at the end"]


def times(rank: int, world: int) -> list[int]:
    """Return the steps after which all objects are frozen; the first two steps are dense."""
    results: list[int] = []
    training = trainer(rank, world, 1, ["sparsity=vertical_slash", "sparsity.dense_steps=2"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", lambda: results.append(training.step))
        for _ in range(5):
            training.train_step(False)
    training.close()
    return results


def test_the_first_sparse_step_freezes_objects_too():
    assert gloo.run(1, times) == [[1, 3]]


def test_an_out_of_memory_report_sees_frozen_objects():
    tensor = torch.zeros(7)
    gc.freeze()
    assert any(results is tensor for results in out_of_memory._tensors("cpu"))
