"""The predicted step of a pipeline plays its schedule with the times of its stages."""

from __future__ import annotations

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.simulation.predicted_step import StageTime, hop_us, timed_step
from mtrain_cli.simulation.scenario import (
    PairSource,
    PredictedScenario,
    Scenario,
    plan_on,
    predict_training,
)
from mtrain_cli.training.run_plan import RunPlan

CLUSTER = load_cluster("h100_4x8", nodes=2)
WORDS = (
    "model=qwen7b", "model.num_layers=8", "seq=32k", "train.global_batch=8",
    "train.shard=gradients",
)  # fmt: skip
TWO = ("topology.pipeline_parallel=2", "topology.stage_layers=[4,4]")


def predicted(*words: str, workers: int = 8) -> PredictedScenario:
    config = compose([*WORDS, *words])
    scenario = Scenario(config, PairSource("dense").problem(config))
    return predict_training(CLUSTER, scenario, workers, "striped", "all_gather")


def planned(*words: str, workers: int = 8) -> RunPlan:
    config = compose([*WORDS, *words])
    return plan_on(CLUSTER, config, workers=workers, layout="striped", exchange="all_gather")


@pytest.mark.parametrize(
    ("words", "parts"), [(("topology.stage_layers=[4,4]",), 1), (("topology.virtual_stages=2",), 2)]
)
def test_equal_stages_take_the_time_of_the_formula(words, parts):
    """(m + (p - 1) / v) (F + B) for m micro-batches."""
    plan = planned(TWO[0], *words, "model.vocab_size=264")
    assert plan.pipeline is not None
    assert plan.pipeline.layers == (8 // 2 // parts,) * 2 * parts
    passes = (8.0 / parts,) * parts, (16.0 / parts,) * parts
    stages = [StageTime(*passes, loss=0.0)] * 2
    assert timed_step(plan, stages, 0.0).played.makespan == pytest.approx((8 + 1 / parts) * 3)
    with_loss = [stages[0], StageTime(*passes, loss=8.0)]
    played = timed_step(plan, with_loss, 0.0).played
    assert played.busy(0) == pytest.approx(24)
    assert played.busy(1) == pytest.approx(32)


def test_the_loss_is_in_the_pass_that_forms_its_gradients():
    stages = [StageTime((8.0,), (8.0,), 0.0), StageTime((8.0,), (8.0,), 80.0)]
    for word, first in (("forward", 1 + 10), ("recompute", 1 + 2.5)):
        plan = planned(*TWO, f"train.loss_gradients={word}")
        spans = [span for span in timed_step(plan, stages, 0.0).played.spans if span.stage == 1]
        assert spans[0].end - spans[0].begin == pytest.approx(first)


def test_weights_are_gathered_among_the_workers_of_a_stage():
    staged = predicted(*TWO)
    assert staged.step.sent <= staged.plan.received.weights
    assert staged.step.sent == pytest.approx(staged.plan.received.weights, rel=0.25)
    assert staged.step.sent < 0.6 * predicted().step.sent


def test_a_hop_crosses_nodes_if_stages_are_on_different_nodes():
    found = {}
    for workers in (8, 16):
        plan = planned(*TWO, "topology.context_parallel=4", workers=workers)
        costs = predicted(*TWO, "topology.context_parallel=4", workers=workers).attention.costs
        assert plan.pipeline is not None
        found[workers] = hop_us(CLUSTER, costs["value"], plan, plan.pipeline)
    assert found[16] > 2 * found[8] > 0


def test_stages_that_do_not_divide_the_workers_are_refused():
    with pytest.raises(ConfigError, match=r"topology.pipeline_parallel=3: must divide the 8 work"):
        predicted("topology.pipeline_parallel=3")


def test_a_stage_deals_its_time_out_in_proportion_to_its_virtual_stages():
    whole = {"forward": 8.0, "backward": 30.0, "loss": 5.0}
    parts = [{"forward": 1.0, "backward": 1.0}, {"forward": 3.0, "backward": 2.0}]
    assert StageTime.of(whole, parts) == StageTime((2.0, 6.0), (10.0, 20.0), 5.0)


def test_virtual_stages_whose_layers_are_alike_take_time_by_their_number_of_layers():
    words = "topology.virtual_stages=2", "topology.stage_layers=[1,2,3,2]"
    pipeline = predicted(TWO[0], "model.vocab_size=264", *words).step.pipeline
    assert pipeline is not None
    assert pipeline.forward[2] == pytest.approx(3 * pipeline.forward[0], rel=1e-9)
    assert pipeline.backward[2] == pytest.approx(3 * pipeline.backward[0], rel=1e-9)


SPARSE = (
    "sparsity=vertical_slash", "sparsity.dense_layers=4",
    "model.vocab_size=264", "topology.pipeline_parallel=2",
)  # fmt: skip


def sparse_step(*words: str) -> PredictedScenario:
    config = compose([*WORDS, *SPARSE, *words])
    source = PairSource("clustered", density=0.05, columns=64)
    scenario = Scenario(config, source.problem(config))
    return predict_training(CLUSTER, scenario, 8, "striped", "all_gather")


@pytest.mark.parametrize(
    ("words", "sparse", "dense"),
    [
        (("topology.stage_layers=[4,4]",), (0,), (1,)),
        (("topology.virtual_stages=2", "topology.stage_layers=[2,2,2,2]"), (0, 1), (2, 3)),
    ],
)
def test_passes_take_the_time_of_their_own_kind_of_layers(words, sparse, dense):
    """Half of the layers is dense: stages hold one kind, or a virtual stage of each kind."""
    step = sparse_step(*words).step
    played = step.pipeline
    assert played is not None
    of_kind = [
        [played.forward[number] + played.backward[number] for number in numbers]
        for numbers in (sparse, dense)
    ]
    assert min(of_kind[1]) > 1.3 * max(of_kind[0])
    assert sum(step.parts.values()) == pytest.approx(step.seconds.value)
    busy = [played.played.busy(stage) for stage in range(2)]
    assert step.parts["pipeline"] * 1e6 == pytest.approx(played.played.makespan - max(busy))
    if len(sparse) == 2:
        assert busy[0] == pytest.approx(busy[1], rel=0.02)


def test_stages_of_one_kind_take_the_time_of_a_model_of_that_kind():
    """A stage of sparse layers, and one of dense layers, as in models whose layers are alike."""
    mixed = sparse_step("topology.stage_layers=[4,4]").step.pipeline
    sparse = sparse_step("sparsity.dense_layers=0", "topology.stage_layers=[4,4]").step.pipeline
    dense = predicted("model.vocab_size=264", *TWO).step.pipeline
    assert mixed is not None
    assert sparse is not None
    assert dense is not None
    assert mixed.forward[0] == pytest.approx(sparse.forward[0])
    assert mixed.backward[0] == pytest.approx(sparse.backward[0])
    assert mixed.forward[1] == pytest.approx(dense.forward[1], rel=1e-6)
    assert mixed.backward[1] == pytest.approx(dense.backward[1], rel=1e-6)


def test_virtual_stages_with_and_without_experts_have_times_of_their_own():
    """The first half of the layers has an MLP, the others have experts."""
    words = [
        *("model=tiny_moe", "model.num_layers=8", "model.moe.dense_layers=4"),
        *("model.moe.expert_size=4096", "seq=32k", "train.global_batch=8"),
        *("topology.pipeline_parallel=2", "topology.virtual_stages=2"),
        "topology.stage_layers=[2,2,2,2]",
    ]
    config = compose(words)
    scenario = Scenario(config, PairSource("dense").problem(config))
    pipeline = predict_training(CLUSTER, scenario, 8, "striped", "all_gather").step.pipeline
    assert pipeline is not None
    assert min(pipeline.forward[2:]) > 1.2 * max(pipeline.forward[:2])
    assert min(pipeline.backward[2:]) > 1.2 * max(pipeline.backward[:2])
