"""The waits of expert parallelism follow the rows that a layer sends, and the loads of workers."""

from __future__ import annotations

import dataclasses
from math import comb

import numpy as np
import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.simulation import expert_cost
from mtrain_cli.simulation.calibration import HIGH, LOW, VALUE
from mtrain_cli.simulation.expert_cost import ExpertLoads, RowExchange, dealt_over
from mtrain_cli.simulation.non_attention_cost import ComputeCost, priced
from mtrain_cli.simulation.predicted_step import EXPERTS, PredictedStep
from mtrain_cli.simulation.scenario import (
    PairSource,
    PredictedScenario,
    Scenario,
    plan_on,
    predict_training,
)
from mtrain_cli.step.program import PassTime
from mtrain_cli.training.expert_traffic import expert_traffic
from mtrain_cli.training.flops import layer_kinds

CLUSTER = load_cluster("h100_4x8", nodes=2)
WORDS = ("model=qwen3_30b_a3b", "model.num_layers=3", "seq=32k")
UNEVEN = ExpertLoads(0.8)


def predicted(*words: str, loads: ExpertLoads | None = None, workers: int = 8) -> PredictedScenario:
    pairs = PairSource("dense")
    config = compose([*WORDS, *words])
    scenario = Scenario(config, pairs.problem(config), loads=loads or ExpertLoads())
    return predict_training(CLUSTER, scenario, workers, "striped", "all_gather")


def dealt(degree: int, *words: str, **more) -> PredictedScenario:
    return predicted(f"topology.expert_parallel={degree}", *words, **more)


def exchange(loads: ExpertLoads, *words: str, bound: str = VALUE) -> RowExchange:
    found = dealt(8, *words)
    costs = found.attention.costs[bound]
    result = RowExchange.of(found.plan, loads, CLUSTER, costs, 1.0)
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("degree", "words"),
    [
        (8, ("train.activation_checkpoint=none",)),
        (4, ("train.activation_checkpoint=selective", "topology.expert_chunks=3")),
        (8, ("topology.tensor_parallel=4", "train.global_batch=2")),
        (2, ("train.shard=gradients", "train.global_batch=4", "topology.context_parallel=4")),
        (4, ("model.moe.dense_layers=1", "model.intermediate_size=1024")),
        (4, ("topology.pipeline_parallel=2", "model.num_layers=4", "topology.stage_layers=[2,2]")),
    ],
)
def test_a_step_receives_the_bytes_that_training_counts(degree, words):
    even, found = (dealt(degree, *words, loads=loads) for loads in (None, UNEVEN))
    plan = found.plan
    formula = expert_traffic(plan.config, plan.dims, plan.layout, plan.dtype_bytes, degree)
    layers = layer_kinds(plan.config.model)[True] / plan.dims.pp
    assert even.step.experts is not None
    assert found.step.experts is not None
    assert even.step.experts.size == pytest.approx(layers * formula.rows, rel=1e-6)
    assert 0.9 < found.step.experts.size / even.step.experts.size < 1
    assert found.step.sent == pytest.approx(
        plan.received.weights, rel=0.2 if plan.dims.pp > 1 else 1e-3
    )
    assert sum(found.step.parts.values()) == pytest.approx(found.step.seconds.value)
    assert found.step.parts[EXPERTS] == pytest.approx(found.step.experts.exposed)
    assert found.step.parts["late"] >= found.step.experts.late > 0


def test_a_worker_alone_has_no_rows():
    found = predicted()
    assert found.step.experts is None
    assert EXPERTS not in found.step.parts
    assert "the busiest of 1 workers computes 1.00 times the mean" in " ".join(found.remarks)


def computing(one: RowExchange) -> tuple[np.ndarray, np.ndarray]:
    layer = one._layer
    return one._computing(layer.forward(), 0), one._computing(layer.backward(), 1)


LEAVE = 7 * (1 - comb(112, 8) / comb(128, 8))  # workers to which a token of eight workers is sent


@pytest.mark.parametrize("chunks", [1, 2])
def test_the_clocks_of_a_group_by_hand(chunks):
    """Equal loads: all workers compute alike, and messages of two chunks hide behind products."""
    one = exchange(ExpertLoads(), "train.activation_checkpoint=none", "topology.expert_chunks=1")
    forward, backward = computing(one)
    assert np.ptp(forward) == np.ptp(backward) == 0
    rows, scored, scored_back = (
        one._message(4096 * LEAVE * (2048 * 2 + n))[0] for n in (0, 64, 32)
    )
    counts = one._message(8 * (128 + 8) * 7, to_all=False)[0] + expert_cost.WAIT_FOR_NUMBERS.value
    found = one.forward()
    assert found.exposed == pytest.approx(rows + scored + counts, rel=1e-9)
    assert found.hidden == pytest.approx(0, abs=1e-6)
    assert found.span == pytest.approx(rows + scored + forward[0, 0])
    # Backward: the gradient's rows return with those of scores; products of the weights hide most.
    back = one.backward()
    hidden = min(scored_back, backward[0, 0] * 3 / 6)
    assert back.exposed == pytest.approx(rows + scored_back - hidden)
    assert back.late == found.late == 0
    if chunks > 1:
        words = "train.activation_checkpoint=none", f"topology.expert_chunks={chunks}"
        two = exchange(ExpertLoads(), *words)
        assert two.forward().hidden > 0
        assert two.forward().exposed < found.exposed
        assert two.forward().size == pytest.approx(found.size)


def test_the_mean_of_the_workers_is_what_the_step_counts():
    one = exchange(UNEVEN, "topology.expert_chunks=3")
    forward, backward = computing(one)
    work = one.experts.work()
    costs, moved = one.costs, one.experts.moved(np.array(4096.0 * 8))
    router = work[0].products[0]
    # The router, which each worker computes for its own tokens, is not in the clocks.
    for us, passes, size in ((forward, work[:1], moved[0]), (backward, work[1:], moved[1])):
        products = tuple(p for w in passes for p in w.products if p.flop != router.flop)
        expected = sum(priced(ComputeCost(moved=float(size), products=products), costs))
        assert us.mean() == pytest.approx(expected, rel=0.01)


def test_workers_wait_for_those_with_popular_experts():
    even, low, likely, high = (
        exchange(ExpertLoads()).forward(),
        *(exchange(UNEVEN, bound=bound).forward() for bound in (LOW, VALUE, HIGH)),
    )
    assert even.late == 0
    assert low.late < likely.late < high.late
    assert likely.exposed > even.exposed, "the busiest worker's messages take the longest"
    assert likely.size < even.size, "tokens choose several popular experts of one worker"


def test_recorded_loads_are_those_of_each_layer():
    """In one of two layers, the experts of one worker compute everything."""
    equal = np.full(128, 1 / 128)
    one = np.zeros(128)
    one[:16] = 1 / 16
    layers = ExpertLoads(shares=(tuple(equal), tuple(one)))
    found = exchange(layers).forward()
    worst = exchange(dataclasses.replace(layers, shares=layers.shares[1:])).forward()
    assert found.late == pytest.approx(worst.late / 2)
    assert "computes 4.50 times the mean" in " ".join(dealt(8, loads=layers).remarks)


def test_without_checkpointing_rows_travel_once_less():
    kept, again = (
        exchange(ExpertLoads(), f"train.activation_checkpoint={kind}").backward()
        for kind in ("none", "full")
    )
    assert again.size - kept.size == pytest.approx(4096 * LEAVE * 2048 * 2)


def test_groups_across_nodes_wait_longer():
    waits = 3e-6 * expert_cost.WAIT_FOR_NUMBERS.value  # of three layers
    across, inside = (dealt(n, workers=16).step.experts.exposed - waits for n in (16, 8))
    assert across > 2 * inside > 0


def test_in_forward_weights_hide_behind_the_experts_only(monkeypatch):
    """The host waits for the numbers of rows, so the next gather starts with the experts."""
    one = dealt(2)
    assert one.step.sent < predicted().step.sent
    seen: list[float] = []

    def never_exposed(self, rows):  # noqa: ARG001
        seen.append(rows.span)
        return 1e9, (0.0, 0.0)

    monkeypatch.setattr(PredictedStep, "_behind_rows", never_exposed)
    assert dealt(2).step.parts["weights"] < one.step.parts["weights"]
    assert seen[0] == one_pass(2).span


def one_pass(degree: int) -> PassTime:
    found = dealt(degree)
    costs = found.attention.costs[VALUE]
    result = RowExchange.of(found.plan, ExpertLoads(), CLUSTER, costs, 1.0)
    assert result is not None
    return result.forward()


def test_gradients_of_copies_are_summed_once_a_step():
    """With tensor parallelism, dealt experts have no copies."""
    tensor = "topology.tensor_parallel=4"
    whole, one = predicted(tensor), dealt(8, tensor)
    assert whole.step.hidden_states == one.step.hidden_states > 0
    assert whole.step.parts["tensor"] > one.step.parts["tensor"]
    assert one.step.flop == pytest.approx(dealt(8).step.flop, rel=1e-3)


def test_auto_takes_the_degree_of_the_shortest_time():
    config = compose([*WORDS, "seq=8k", "topology.expert_parallel=auto"])
    assert dealt_over(plan_on(CLUSTER, config, workers=16)) == 8
    config = compose([*WORDS, "seq=1m", "topology.expert_parallel=auto"])
    assert dealt_over(plan_on(CLUSTER, config, workers=8)) == 1


def test_a_degree_that_does_not_divide_the_workers_is_refused():
    with pytest.raises(ConfigError, match=r"expert_parallel=16: does not divide the 8 workers"):
        plan_on(CLUSTER, compose([*WORDS, "topology.expert_parallel=16"]), workers=8)
