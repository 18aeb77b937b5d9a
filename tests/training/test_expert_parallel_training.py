"""Expert-parallel training equals that of one worker: loss, every gradient, norm and steps."""

from __future__ import annotations

import gloo
import numpy as np
import pytest
from training.test_router_batches import BIASED, CAPACITY, MOE, SHARED, SIGMOID, exchange, same
from training.test_router_batches import steps as router_steps
from training.test_tensor_parallel_training import differences


def experts(degree: int, *more: str) -> tuple[str, ...]:
    return (f"topology.expert_parallel={degree}", *more)


NONE, FULL = "train.activation_checkpoint=none", "train.activation_checkpoint=full"
EIGHT = (*MOE, "model.moe.experts=8")


@pytest.mark.parametrize(
    ("tp", "cp", "dp", "model", "run"),
    [
        (1, 2, 1, EIGHT, experts(2, exchange("ring"), NONE)),
        (1, 2, 1, (*SHARED, "model.moe.experts=8"), experts(2, FULL, "topology.expert_chunks=3")),
        (1, 2, 2, (*CAPACITY, "model.moe.experts=8"), experts(2, "train.shard=gradients")),
        (1, 2, 2, (*SIGMOID, "model.moe.experts=8"), experts(4, "train.shard=optimizer")),
        (2, 2, 1, (*SHARED, "model.moe.experts=8"), experts(4, "topology.expert_chunks=2")),
        (2, 1, 1, EIGHT, experts(2, "train.micro_batch=2")),
    ],
)
def test_loss_and_gradients_equal_those_of_one_worker(tp, cp, dp, model, run):
    found = differences(tp * cp * dp, tp, cp, model, run)
    bad = {name: value for name, value in found.items() if not value <= 1e-5}
    assert not bad, bad
    assert found["loss"] <= 1e-6
