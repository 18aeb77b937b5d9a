"""Collections of garbage after a first step: what they visit, and when all is visited again."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import gloo
import pytest
import torch
from training.test_sparse_training import trainer

from mtrain_cli.training import garbage_collection, out_of_memory


def visited(rank: int, world: int) -> dict[str, Any]:
    """What a worker's collections visit before, between and after the steps of a training."""
    found: dict[str, Any] = {}
    made = trainer(rank, world, 1, ["sparsity=vertical_slash"])
    parameter = next(made.decoder.parameters())
    found["aside before"] = gc.get_freeze_count()
    made.train_step(False)
    found["aside"] = gc.get_freeze_count()
    made.train_step(False)
    found["aside after a second step"] = gc.get_freeze_count()
    seen = gc.get_objects()
    found["seen"], found["the model"] = len(seen), any(candidate is parameter for candidate in seen)
    made.close()
    found["aside at the end"] = gc.get_freeze_count()
    found["the model at the end"] = any(candidate is parameter for candidate in gc.get_objects())
    return found


def test_after_a_first_step_collections_visit_what_came_since():
    (found,) = gloo.run(1, visited)
    assert found["aside before"] == found["aside at the end"] == 0
    assert found["aside"] > 50_000, "PyTorch alone has more"
    assert found["aside after a second step"] <= found["aside"]
    assert found["seen"] < found["aside"] / 10
    assert not found["the model"]
    assert found["the model at the end"]


def times(rank: int, world: int) -> list[int]:
    """After which steps, of which the first two are dense, everything is set aside."""
    found: list[int] = []
    made = trainer(rank, world, 1, ["sparsity=vertical_slash", "sparsity.dense_steps=2"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(garbage_collection, "freeze_garbage", lambda: found.append(made.step))
        for _ in range(5):
            made.train_step(False)
    made.close()
    return found


def test_the_first_step_under_an_index_is_a_first_step_too():
    assert gloo.run(1, times) == [[1, 3]]


def test_a_report_of_full_memory_knows_what_was_set_aside():
    tensor = torch.zeros(7)
    garbage_collection.freeze_garbage()
    assert any(found is tensor for found in out_of_memory._tensors("cpu"))


def test_garbage_that_was_set_aside_is_freed_the_next_time():
    class Ring:
        def __init__(self) -> None:
            self.own = self

    ring = Ring()
    known = weakref.ref(ring)
    garbage_collection.freeze_garbage()
    del ring
    gc.collect()
    assert known() is not None, "what was set aside is not visited"
    garbage_collection.freeze_garbage()
    assert known() is None
