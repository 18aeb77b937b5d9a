"""The groups of workers that a search tries."""

from __future__ import annotations

from mtrain_cli.composition.compose import compose
from mtrain_cli.simulation.recommend import Groups, contexts, groupings, tensor_degrees
from mtrain_cli.simulation.scenario import PairSource, Scenario


def test_context_groups_fill_nodes_or_divide_them():
    config = compose(["model=tiny"])
    assert contexts(config, 32, 8) == [32, 16, 8, 4, 2, 1]
    assert contexts(config, 48, 8) == [48, 24, 16, 8, 4, 2, 1]
    assert contexts(compose(["model=tiny", "topology.context_parallel=4"]), 32, 8) == [4]


def test_the_search_tries_degrees_that_divide_the_model_and_a_node():
    """qwen7b has 28 heads, 4 key-value heads and an MLP of 18,944 = 2^9 * 37."""
    pairs = PairSource("dense")

    def degrees(per_node: int, *words: str) -> list[int]:
        config = compose(["model=qwen7b", "seq=32k", *words])
        return tensor_degrees(Scenario(config, pairs.problem(config), words=words), per_node)

    assert degrees(8) == [1, 2, 4]
    assert degrees(2) == [1, 2]
    assert degrees(6) == [1, 2]
    assert degrees(8, "model.num_kv_heads=2") == [1, 2]
    assert degrees(8, "topology.tensor_parallel=1") == [1]
    assert degrees(8, "topology.tensor_parallel=4") == [4]


def staged(workers: int, *words: str) -> list[Groups]:
    words = ("model=qwen7b", "seq=32k", "topology.tensor_parallel=1", *words)
    config = compose(list(words))
    scenario = Scenario(config, PairSource("dense").problem(config), words=words)
    return [groups for groups in groupings(scenario, workers, 8) if groups.stages > 1]


def test_a_pipeline_needs_a_micro_batch_per_stage():
    """Four groups have one sequence each, two groups two, and one group four."""
    found = staged(8, "train.global_batch=4")
    assert {(g.stages, 8 // g.sharing) for g in found} == {(2, 1), (2, 2), (4, 1)}
    assert staged(8) == []
    assert {g.stages for g in staged(8, "topology.pipeline_parallel=8")} == {8}


def test_virtual_stages_need_whole_rounds_of_micro_batches_and_layers():
    def virtual(workers: int, *words: str) -> set[tuple[int, int]]:
        found = staged(workers, "topology.context_parallel=1", *words)
        return {(groups.stages, groups.virtual) for groups in found}

    assert virtual(2, "train.global_batch=3") == {(2, 1)}
    assert virtual(2, "train.global_batch=4") == {(2, 1), (2, 2)}
    both = {(n, v) for n in (2, 3, 6) for v in (1, 2)}
    assert virtual(6, "train.global_batch=36") == both
    few = virtual(6, "train.global_batch=36", "model.num_layers=5")
    assert few == {(2, 1), (2, 2), (3, 1)}


def test_settings_of_the_user_stay():
    batch, two = "train.global_batch=8", "topology.pipeline_parallel=2"
    assert {g.stages for g in staged(8, batch, two)} == {2}
    assert {g.virtual for g in staged(8, batch, two)} == {1, 2}
    assert {g.virtual for g in staged(8, batch, two, "topology.virtual_stages=2")} == {2}
    assert {g.virtual for g in staged(8, batch, two, "topology.virtual_stages=1")} == {1}
    assert {g.virtual for g in staged(8, batch, two, "topology.schedule=gpipe")} == {1}
    layers = "topology.stage_layers=[14,14]"
    assert {g.virtual for g in staged(8, batch, two, layers)} == {1}
    assert staged(8, batch, "topology.pipeline_parallel=1") == []
    # Offload needs the whole model on each worker.
    assert staged(8, batch, "optim.offload=true") == []


def test_groups_are_described_by_their_degrees():
    assert str(Groups(1)) == "one worker"
    assert str(Groups(4, 2, 2, 2)) == "context=4 tensor=2 stages=2 virtual=2"


def test_experts_are_dealt_as_auto_does_or_not_at_all():
    def degrees(*words: str) -> set[int | str]:
        model = ("model=qwen3_30b_a3b", "seq=32k", *words)
        scenario = Scenario(compose(list(model)), None, words=words)  # type: ignore[arg-type]
        return {groups.experts for groups in groupings(scenario, 8, 8)}

    assert degrees() == {1, "auto"}
    assert degrees("topology.expert_parallel=4") == {4}
    assert degrees("topology.expert_parallel=1") == {1}
    assert degrees("optim.offload=true") == {1}
    assert degrees("model.moe.experts=0", "model=qwen3b") == {1}
