"""The predicted waits of tensor parallelism follow the messages that a layer sends."""

from __future__ import annotations

import dataclasses

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import Constant, load_cluster
from mtrain_cli.simulation.expert_cost import TensorMessages, cluster_of_groups
from mtrain_cli.simulation.scenario import (
    PairSource,
    PredictedScenario,
    Scenario,
    plan_on,
    predict_training,
)
from mtrain_cli.step.program import Layer

CLUSTER = load_cluster("h100_4x8", nodes=2)
WORDS = ("model=qwen7b", "model.num_layers=3", "seq=32k", "topology.tensor_parallel=2")


def predicted(*words: str, workers: int = 8, slow: dict[int, float] | None = None, **of_pairs):
    pairs = PairSource(of_pairs.pop("name", "dense"), **of_pairs)
    config = compose([*WORDS, *words, *pairs.sparsity()])
    scenario = Scenario(config, pairs.problem(config), slow=slow or {})
    return predict_training(CLUSTER, scenario, workers, "striped", "all_gather")


def messages(tiles: tuple[int, ...], keeps: bool = False) -> TensorMessages:
    """Return messages of 1 byte a row, where each of the seven products takes equal time."""
    layer = Layer(checkpointed=False, keeps=keeps, tiles=tiles)
    return TensorMessages([(3, layer)], 1, dict.fromkeys(("o", "gate", "up", "down"), 10))


def test_one_tile_waits_for_every_message():
    found = messages((8,)).forward(100.0, lambda size: 2.0 * size)
    assert (found.exposed, found.hidden, found.size) == (pytest.approx(4 * 16), 0.0, 4 * 8)
    back = messages((8,)).backward(100.0, lambda size: 2.0 * size)
    assert back.size == 6 * 8
    # The gathered gradient travels behind the gathered input, while gate and up compute: 2 of 11
    # products.
    assert back.exposed == pytest.approx(5 * 16 + max(0.0, 16 - 100 * 2 / 11))
    kept = messages((8,), keeps=True).backward(100.0, lambda size: 2.0 * size)
    assert (kept.size, kept.exposed) == (5 * 8, pytest.approx(5 * 16))


def test_messages_of_tiles_hide_behind_the_products_of_other_tiles():
    """Two tiles. A product takes 12.5 a tile, a message 4.

    Forward: tile 1 computes o (12.5) while tile 0's sum arrives, and so on. Exposed are the message
    before attention (8) and the last one of the last tile.
    """
    found = messages((4, 4)).forward(100.0, float)
    assert found.size == 4 * 8
    assert found.exposed < messages((8,)).forward(100.0, float).exposed
    assert found.exposed + found.hidden == pytest.approx(4 * 8)
    slow = messages((4, 4)).forward(100.0, lambda size: 100.0 * size)
    assert slow.exposed > 600 * 4
    free = messages((4, 4)).backward(100.0, lambda size: 0.0)  # noqa: ARG005
    assert (free.exposed, free.hidden) == (pytest.approx(0.0), 0.0)


@pytest.mark.parametrize(
    "words",
    [
        ("train.activation_checkpoint=none",),
        ("train.activation_checkpoint=selective", "train.keep_mlp=1"),
        ("topology.tensor_parallel=4", "train.tile_mib=64"),
        ("train.global_batch=2", "topology.context_parallel=2"),
    ],
)
def test_a_step_receives_the_bytes_that_training_counts(words):
    found = predicted(*words)
    plan = found.plan
    per_micro_batch = plan.received.tensor_forward + plan.received.tensor_backward
    layers = plan.config.model.num_layers
    expected = plan.micro_batches * layers * per_micro_batch
    assert found.step.hidden_states == pytest.approx(expected, rel=1e-6)
    assert found.step.sent == pytest.approx(plan.received.weights, rel=1e-3)
    assert found.step.parts["tensor"] > 0
    assert sum(found.step.parts.values()) == pytest.approx(found.step.seconds.value)
    assert any(remark.startswith("tensor and pipeline") for remark in found.remarks)


def test_a_worker_of_a_tensor_group_does_its_part_of_the_flop():
    whole, half = predicted("topology.tensor_parallel=1"), predicted()
    assert "tensor" not in whole.step.parts
    assert whole.step.hidden_states == 0
    kept = "train.activation_checkpoint=none", "train.keep_mlp=true"
    whole, half = predicted("topology.tensor_parallel=1", *kept), predicted(*kept)
    assert half.step.flop == pytest.approx(whole.step.flop, rel=1e-3)
    for name in ("attention", "matrices", "optimizer"):
        assert half.step.parts[name] == pytest.approx(whole.step.parts[name], rel=0.15)


def slowest(found: PredictedScenario) -> float:
    return found.attention.duration.value


def test_a_tensor_group_is_as_slow_as_its_slowest_worker():
    base, one = predicted(), predicted(slow={3: 2.0})
    both = predicted(slow={2: 2.0, 3: 1.5})
    assert slowest(one) == pytest.approx(slowest(both))
    assert slowest(one) > 1.2 * slowest(base)
    assert one.step.seconds.value > base.step.seconds.value


def test_an_index_gives_each_worker_the_pairs_of_its_heads():
    found = predicted(name="uniform", density=0.1, columns=256)
    pairs = PairSource("clustered", 0.1, 256)
    config = compose([*WORDS, *pairs.sparsity()])
    workload = pairs.problem(config)
    first, second = workload.part(0, 2), workload.part(1, 2)
    whole = workload.index(0)
    assert whole is not None
    assert (first.made.heads, first.made.kv_heads) == (14, 2)
    assert first.index(0).slashes.equal(whole.slashes[:, :14])
    assert second.index(0).slashes.equal(whole.slashes[:, 14:])
    assert found.attention.facts["num_heads"] == 14
    assert found.attention.facts["tp"] == 2


def test_groups_on_shared_network_cards_divide_their_bandwidth():
    outer = CLUSTER.outer
    assert outer is not None
    groups = cluster_of_groups(CLUSTER, 2)
    assert (groups.gpus_per_node, groups.outer) == (4, outer)
    shared = dataclasses.replace(outer, shared_by=Constant(4, "guess", "", 2, 8))
    found = cluster_of_groups(dataclasses.replace(CLUSTER, outer=shared), 2).outer
    assert found is not None
    assert (found.shared_by.low, found.shared_by.value, found.shared_by.high) == (1, 2, 4)
    assert found.capacity_gbps.value == outer.capacity_gbps.value / 2
    assert cluster_of_groups(CLUSTER, 1) is CLUSTER


def test_a_context_group_of_tensor_groups_crosses_nodes_where_its_workers_do():
    """16 workers on two nodes: context groups of 8 tensor pairs, four pairs on a node."""
    config = compose(list(WORDS))
    plan = plan_on(CLUSTER, config, workers=16, layout="striped", exchange="ring")
    assert plan.environment.context_per_node == 4
    scenario = Scenario(config, PairSource("dense").problem(config))
    found = predict_training(CLUSTER, scenario, 16, "striped", "ring", rows=True)
    rows = found.attention.rows
    assert rows is not None
    assert set(rows["rank"]) == set(range(8))
    assert found.attention.facts["per_node"] == 4
