"""The costs of methods of parallelism: bytes as counted in real steps, and formulas."""

from __future__ import annotations

from typing import Any

import gloo
import pytest
import torch.distributed as dist

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.config.schema import Config
from mtrain_cli.parallel import collectives, transport
from mtrain_cli.simulation.scenario import plan_on
from mtrain_cli.training.run_plan import RunPlan
from mtrain_cli.training.trainer import Trainer
from mtrain_extras.methods.methods import (
    METHODS,
    ImpossibleMethod,
    MethodCost,
    compare,
    configured,
    cost_of,
)

RUN = [
    "seq=256", "topology.device=cpu", "topology.block_size=16", "model.hidden_size=32",
    "model.num_layers=4", "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=8",
    "model.intermediate_size=64", "model.vocab_size=264", "data.document_mask=false",
    "model.tie_word_embeddings=false", "train.global_batch=4",
    "train.activation_checkpoint=selective",
]  # fmt: skip
REAL = [method.name for method in METHODS if not method.formula_of]
# By name, as FSDP2 calls its collectives: the names changed after torch 2.11.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)


class Counter:
    """Counts the bytes that reach this worker in the collectives and hops of a step."""

    def __init__(self) -> None:
        self.bytes = 0

    def patch(self, patch: pytest.MonkeyPatch) -> None:
        for owner, name in ((dist, GATHER), (collectives, "_gather")):
            patch.setattr(owner, name, self._counting(getattr(owner, name), self._gathered))
        for owner, name in ((dist, SCATTER), (collectives, "_scatter")):
            patch.setattr(owner, name, self._counting(getattr(owner, name), self._scattered))
        trade = "start_all_to_all"
        patch.setattr(transport, trade, self._counting(getattr(transport, trade), self._traded))
        patch.setattr(dist, "batch_isend_irecv", self._counting(dist.batch_isend_irecv, _received))

    def _counting(self, function: Any, size: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = args or (next(kwargs[k] for k in kwargs if "output" in k), None)
            if len(tensors) == 1 or tensors[1] is None:
                inputs = [kwargs[k] for k in kwargs if "input" in k]
                tensors = (*tensors[:1], *inputs)
            self.bytes += size(*tensors)
            return function(*args, **kwargs)

        return call

    @staticmethod
    def _gathered(whole: Any, own: Any, *_: Any) -> int:
        return whole.nbytes - own.nbytes

    @staticmethod
    def _scattered(own: Any, whole: Any, *_: Any) -> int:
        return whole.nbytes - own.nbytes

    @staticmethod
    def _traded(arrived: Any, *_: Any) -> int:
        return arrived.nbytes // 2  # of two workers, one is the worker itself


def _received(operations: list[Any], *_: Any) -> int:
    return sum(each.tensor.nbytes for each in operations if each.op is dist.irecv)


def counted(rank: int, world: int) -> dict[str, tuple[int, MethodCost]]:
    """Return the bytes that reach this worker in a step of each method, and its cost."""
    found = {}
    for method in METHODS:
        if method.formula_of:
            continue
        config = configured(compose(RUN), method, world, world)
        topology = config.topology
        tp, pp = topology.tensor_parallel, topology.pipeline_parallel
        place = gloo.environment(rank, world, int(topology.context_parallel), None, tp, pp)
        trainer, counter = Trainer(config, place), Counter()
        compute = trainer.run_step.forward_backward

        def measured(*args, compute=compute, counter=counter):
            with pytest.MonkeyPatch.context() as patch:
                counter.patch(patch)
                return compute(*args)

        trainer.run_step.forward_backward = measured  # type: ignore[method-assign]
        trainer.train_step(False)
        found[method.name] = counter.bytes, cost_of(trainer.plan)
        trainer.close()
    return found


@pytest.mark.slow
def test_a_real_step_of_each_method_receives_the_bytes_of_its_row():
    """Two workers. The stages of a pipeline hold different weights, and each end one message."""
    ranks = gloo.run(2, counted)
    assert list(ranks[0]) == REAL
    for name in REAL:
        received = [found[name][0] for found in ranks]
        cost = ranks[0][name][1]
        if name != "PP":
            assert received == 2 * [cost.received], name
    # The row counts a stage in the middle, with messages from both sides.
    hidden = 256 * 32 * 4 * 4
    assert max(found["PP"][0] for found in ranks) == ranks[0]["PP"][1].received - hidden


def costs(*words: str, workers: int = 8) -> dict[str, MethodCost | ImpossibleMethod]:
    cluster = load_cluster("h100_4x8", nodes=1)
    config = compose(["model=qwen7b", "seq=32k", *words])

    def plan(config: Config) -> RunPlan:
        return plan_on(cluster, config, workers=workers)

    return {each.name: each for each in compare(config, workers, 8, plan)}


def test_every_method_has_a_row():
    found = costs()
    assert list(found) == [method.name for method in METHODS]
    assert [name for name, each in found.items() if each.formula] == ["DP", "TP"]
    degrees = {name: each.workers for name, each in found.items()}
    assert degrees["ZeRO-3"] == degrees["DP"] == "8 data x 1 context"
    assert degrees["TP + SP"] == "2 data x 1 context x 4 tensor"
    assert degrees["PP"] == "8 pipeline x 1 data x 1 context"
    assert degrees["Ulysses"] == "2 data x 4 context"
    assert degrees["ring"] == degrees["zigzag ring"] == "1 data x 8 context"
    assert found["PP"].idle > 0
    assert all(each.idle == 0 for name, each in found.items() if name != "PP")


def test_shards_are_those_of_the_zero_stages():
    """Of W weights on 8 workers: 4 bytes of float32, 8 of AdamW states, 2 of bfloat16."""
    found, weights = costs(), 7_615_616_512
    dp, one, two, three = (found[name] for name in ("DP", "ZeRO-1", "ZeRO-2", "ZeRO-3"))
    assert (dp.weights, dp.gradients, dp.optimizer) == (6 * weights, 4 * weights, 8 * weights)
    assert dp.received == 2 * 7 / 8 * 4 * weights
    assert one.optimizer == three.optimizer == pytest.approx(weights, rel=1e-3)
    assert one.weights == pytest.approx(2.5 * weights, rel=1e-3)
    assert three.weights < one.weights / 2
    # In two micro-batches: weights and gradients once, or weights four times and gradients twice.
    assert (one.gradients, two.gradients) == (4 * weights, pytest.approx(weights / 2, rel=1e-3))
    assert one.received == pytest.approx(7 / 8 * (2 + 4) * weights, rel=1e-3)
    assert two.received == pytest.approx(7 / 8 * (2 + 8) * weights, rel=1e-3)
    assert 7 / 8 * 14 * weights < three.received < 7 / 8 * 16 * weights


def test_a_contiguous_ring_is_unbalanced_and_a_zigzag_is_not():
    """Of 8 parts of a causal mask, the last one has 15 / 8 of the mean."""
    found = costs()
    assert found["ring"].imbalance == pytest.approx(15 / 8, rel=1e-3)
    assert found["zigzag ring"].imbalance == pytest.approx(1, rel=1e-3)
    assert found["ring"].received == found["zigzag ring"].received
    assert found["Ulysses"].imbalance == 1


def test_sequence_parallelism_keeps_fewer_hidden_states():
    found = costs()
    alone, shared = found["TP"], found["TP + SP"]
    assert alone.activations > shared.activations
    assert alone.weights == shared.weights
    # 28 layers; a worker keeps 1 of 4 parts of the input with sequence parallelism.
    hidden = 32768 * 3584 * 2
    assert alone.activations - shared.activations == 28 * hidden * 3 // 4


def test_a_method_that_cannot_run_says_why():
    found = costs("optim.offload=true")
    refused = {name for name, each in found.items() if isinstance(each, ImpossibleMethod)}
    assert refused == {"TP", "TP + SP", "PP"}
    assert "optim.offload=true" in found["PP"].why
    assert found["TP + SP"].why == (
        "no degree above 1 fits 28 heads, 4 KV heads, MLP of 18,944, 8 GPUs of a node with these "
        "settings"
    )
    limits = {name: each.limit for name, each in costs().items()}
    assert limits["PP"] == "28 layers"
    assert limits["Ulysses"] == "28 heads, 4 KV heads"
    assert limits["TP"] == "28 heads, 4 KV heads, MLP of 18,944, 8 GPUs of a node"
