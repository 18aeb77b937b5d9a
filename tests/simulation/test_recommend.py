"""Recommendations: the fastest that fits, what was rejected, and what helps if nothing fits."""

from __future__ import annotations

import dataclasses

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import Cluster, Constant, load_cluster
from mtrain_cli.config.exchanges import EXCHANGE_TRAITS, HEAD_SHARING
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.simulation.recommend import (
    DOES_NOT_FIT,
    RECOMPUTATIONS,
    Groups,
    _distinct,
    _Search,
    contexts,
    groupings,
    label,
    memory_settings,
    place,
    reasons,
    recommend,
    tensor_degrees,
)
from mtrain_cli.simulation.scenario import PairSource, Scenario, evaluate, plan_on
from mtrain_cli.simulation.what_if import InvalidSetup
from mtrain_cli.training.memory import GIB

TENSOR_PARALLEL, PIPELINE_PARALLEL = "topology.tensor_parallel", "topology.pipeline_parallel"
LAYOUTS, EXCHANGES = ("zigzag", "striped"), ("all_gather", "ring", "hierarchical_ring")


def scenario(*words: str, pairs: PairSource | None = None) -> Scenario:
    pairs = pairs or PairSource("clustered", 0.05, 256)
    words = (*words, *pairs.sparsity())
    if not any(word.startswith(TENSOR_PARALLEL) for word in words):
        words = (*words, f"{TENSOR_PARALLEL}=1")  # the search has a test of its own
    if not any(word.startswith(PIPELINE_PARALLEL) for word in words):
        words = (*words, f"{PIPELINE_PARALLEL}=1")  # so has this one
    config = compose(list(words))
    return Scenario(config, pairs.problem(config), words=words)


def small_memory(cluster: Cluster, gib: float) -> Cluster:
    return dataclasses.replace(
        cluster, gpu=dataclasses.replace(cluster.gpu, hbm_gib=Constant(gib, "guess", "", gib, gib))
    )


def test_the_best_is_the_fastest_that_fits():
    cluster = small_memory(load_cluster("a100_4x8", nodes=2), 30)
    one = scenario("model=qwen3b", "seq=128k", "train.global_batch=2")
    told: list[tuple[int, int]] = []
    found = recommend(
        cluster, one, 16, LAYOUTS, EXCHANGES, progress=lambda done, of: told.append((done, of))
    )
    every = []
    for context in (16, 8):
        for layout in LAYOUTS:
            for exchange in EXCHANGES:
                for kind in ("none", "selective", "full"):
                    train = dataclasses.replace(one.config.train, activation_checkpoint=kind)
                    config = dataclasses.replace(one.config, train=train)
                    plan = plan_on(
                        cluster,
                        config,
                        workers=16,
                        layout=layout,
                        exchange=exchange,
                        context_parallel=context,
                    )
                    if plan.fits:
                        every.append(
                            (
                                evaluate(cluster, one, plan, bounds=False).step.seconds.value,
                                label(plan),
                            )
                        )
    plain = [
        (o.step.seconds.value, label(o.plan))
        for o in found.ranked
        if not o.plan.config.train.keep_mlp and o.plan.config.train.shard == "full"
    ]
    assert sorted(plain) == sorted(
        entry for entry in every if "hierarchical" not in entry[1] or "2 x 8" not in entry[1]
    )
    assert found.ranked[0].step.seconds.value <= min(every)[0]
    times = [o.step.seconds.value for o in found.ranked]
    assert times[0] <= times[1]
    assert times[2:] == sorted(times[2:])
    assert told == [(i, len(told)) for i in range(len(told))]
    # A runner-up differs in more than recomputation.
    places = [(o.layout, o.plan.exchange.label, o.context) for o in found.ranked[:2]]
    assert places[0] != places[1]
    assert all(o.step.seconds.low < o.step.seconds.high for o in found.ranked[:2])
    unfit = [what for what, why in found.rejected if why == DOES_NOT_FIT]
    assert unfit
    assert all("of 28.5 GiB" in what for what in unfit)
    assert any(why == "train.global_batch=2: must be a multiple of 4" for _, why in found.rejected)
    said = "; ".join(reasons(found.ranked[0], found.ranked[1]))
    assert "memory" in said
    assert "of 28.5 GiB usable" in said


def test_each_plan_is_predicted_with_the_attention_that_it_recomputes():
    config = compose(["model=llama8b", "seq=64k"])
    cluster = load_cluster("h200_1x8")
    training = Scenario(config, PairSource("dense").problem(config))
    found = recommend(cluster, training, 8, ["striped"], ["ulysses", "ring"])
    assert len(found.ranked) > 4
    for outcome in found.ranked:
        alone = evaluate(cluster, training, outcome.plan, bounds=False)
        assert outcome.step.seconds.value == alone.step.seconds.value, label(outcome.plan)


def test_reasons_name_what_takes_longer():
    cluster = load_cluster("a100_4x8")
    one = scenario("model=qwen3b", "seq=512k", pairs=PairSource("clustered", 0.05, 2048))
    best, other = (
        evaluate(
            cluster,
            one,
            plan_on(cluster, one.config, workers=32, layout=layout, exchange="ring"),
            bounds=False,
        )
        for layout in ("striped", "zigzag")
    )
    said = reasons(best, other)
    assert said[0].startswith(f"{other.step.seconds.value - best.step.seconds.value:.3g} s (")
    assert any(line.startswith("waiting for slower workers ") for line in said)
    assert any(line.startswith("worker imbalance of work 1.01 instead of") for line in said)
    assert any(line.startswith("waiting for keys and values ") for line in said)
    assert any(line.startswith("but ") for line in reasons(other, best))
    close = reasons(best, best)
    assert "less than the prediction can resolve" in close[0]


@pytest.mark.slow
def test_if_no_recomputation_fits_train_memory_auto_is_tried():
    cluster = load_cluster("h200_1x8")
    one = scenario("model=qwen3b", "seq=6m", pairs=PairSource("clustered", 0.01, 256))
    space = _Search(cluster, one, 8, ["striped"], ["ring"], RECOMPUTATIONS)
    plans = list(space.plans(Groups(8), "striped", "ring", "full"))
    assert [plan.fits for plan in plans] == [False, False, False, True]
    # Of 560 GiB for eight GPUs, the training would find the same.
    config = plans[-1].config
    words = [*one.words, *(f"{key}={value}" for key, value in memory_settings(config).items())]
    words.append(f"train.activation_checkpoint={config.train.activation_checkpoint}")
    typed = plan_on(cluster, compose(words), workers=8, layout="striped", exchange="ring")
    assert 0 < typed.memory.host <= 0.9 * 70 * GIB
    assert (typed.memory, typed.received, typed.flops) == (
        plans[-1].memory,
        plans[-1].received,
        plans[-1].flops,
    )
    asked = plan_on(
        cluster,
        compose([*one.words, "train.memory=auto"]),
        workers=8,
        layout="striped",
        exchange="ring",
    )
    assert asked.memory == typed.memory
    assert label(typed).startswith("striped ring, ")
    assert f"train.offload_activations={config.train.offload_activations}" in label(typed)
    # All layers would be too much for the host, though not for the GPU.
    all_away = [word for word in words if "offload" not in word] + [
        "train.offload_activations=true"
    ]
    refused = plan_on(cluster, compose(all_away), workers=8, layout="striped", exchange="ring")
    assert refused.memory.total < typed.memory.total
    assert not refused.fits
    # Settings of the user stay.
    assert all(
        p.config.train.activation_checkpoint == "full"
        for p in _Search(cluster, one, 8, ["striped"], ["ring"], ("full",)).plans(
            Groups(8), "striped", "ring", "full"
        )
    )


def test_settings_that_are_impossible_with_any_memory_raise():
    with pytest.raises(InvalidSetup, match="are too few for"):
        recommend(
            load_cluster("h200_1x8"), scenario("model=tiny", "seq=512"), 8, ("striped",), ("ring",)
        )
    with pytest.raises(ConfigError, match="cannot share"):
        recommend(
            load_cluster("a100_4x8"),
            scenario("model=qwen3b", "seq=128k"),
            32,
            ("striped",),
            ("ulysses",),
        )


def test_equal_configurations_are_tried_once():
    names = ("all_gather", "hierarchical_all_gather", "ring", "ulysses")
    assert _distinct(LAYOUTS, names, 1, 8) == [("zigzag", "all_gather")]
    assert _distinct(LAYOUTS, names, 8, 8) == [
        ("zigzag", "all_gather"),
        ("zigzag", "ring"),
        ("zigzag", "ulysses"),
        ("striped", "all_gather"),
        ("striped", "ring"),
    ]
    assert len(_distinct(LAYOUTS, names, 16, 8)) == 7
    assert _distinct(("striped",), ("hierarchical_ring",), 8, 8) == [
        ("striped", "hierarchical_ring")
    ]


def test_a_flat_exchange_with_the_traits_of_another_is_tried_too(monkeypatch):
    monkeypatch.setitem(EXCHANGE_TRAITS._all, "mirrored_ring", EXCHANGE_TRAITS["ring"])
    names = ("mirrored_ring", "ring", "hierarchical_ring")
    flat = [("striped", "mirrored_ring"), ("striped", "ring")]
    assert _distinct(("striped",), names, 8, 8) == flat


def test_an_exchange_that_only_shares_heads_is_tried_with_one_layout(monkeypatch):
    monkeypatch.setitem(HEAD_SHARING, "mirrored_ulysses", "all_gather")
    names = ("ring", "mirrored_ulysses")
    found = [("zigzag", "ring"), ("zigzag", "mirrored_ulysses"), ("striped", "ring")]
    assert _distinct(("zigzag", "striped"), names, 8, 8) == found


def test_mlp_products_are_kept_if_memory_allows():
    cluster = small_memory(load_cluster("a100_4x8", nodes=1), 30)
    one = scenario("model=qwen3b", "seq=64k")
    few = ("striped",), ("ring",)
    found = recommend(cluster, one, 8, *few)
    most = {
        o.plan.config.train.activation_checkpoint: o.plan.config.train.keep_mlp
        for o in found.ranked
        if o.plan.config.train.keep_mlp
    }
    assert set(most) == {"selective"}, (
        "full recomputation has no room by definition, and none keeps everything"
    )
    number = most["selective"]
    assert 1 < number < 36
    best = found.ranked[0]
    assert best.plan.config.train.keep_mlp == number
    assert f"selective recomputation, train.keep_mlp={number}" in label(best.plan)
    assert "train.keep_mlp was chosen to leave 10% of a GPU free" in reasons(best, found.ranked[1])
    # As if it had been typed: plan, step, and that one layer more would leave less room.
    typed = [compose([*one.words, f"train.keep_mlp={n}"]) for n in (number, number + 1)]
    same, more = (
        plan_on(cluster, config, workers=8, layout="striped", exchange="ring") for config in typed
    )
    assert (same.memory, same.flops, same.received) == (
        best.plan.memory,
        best.plan.flops,
        best.plan.received,
    )
    assert evaluate(cluster, one, same, bounds=False).step.parts == best.step.parts
    assert same.has_room_for(same.memory, 0.9)
    assert not more.has_room_for(more.memory, 0.9)
    without = next(
        o
        for o in found.ranked
        if o.plan.config.train == dataclasses.replace(best.plan.config.train, keep_mlp=False)
    )
    assert best.step.parts["recomputed"] < without.step.parts["recomputed"]
    assert best.step.seconds.value < without.step.seconds.value
    # Settings of the user stay.
    for value in ("false", "3"):
        asked = scenario("model=qwen3b", "seq=64k", f"train.keep_mlp={value}")
        kept = {o.plan.config.train.keep_mlp for o in recommend(cluster, asked, 8, *few).ranked}
        assert kept == {asked.config.train.keep_mlp}


@pytest.mark.slow
def test_if_nothing_fits_the_exchange_with_the_least_memory_is_reported():
    cluster = small_memory(load_cluster("h100_4x8", nodes=1), 20)
    one = scenario("model=qwen3b", "seq=2m", pairs=PairSource("clustered", 0.01, 256))
    found = recommend(cluster, one, 8, ("striped",), ("all_gather", "ring"))
    alone = [
        recommend(cluster, one, 8, ("striped",), (exchange,)).least
        for exchange in ("all_gather", "ring")
    ]
    assert not found.ranked
    assert found.least.exchange.name == "ring"
    assert found.least.memory.total == alone[1].memory.total < alone[0].memory.total
    nearest = next(what for what, why in found.rejected if why == DOES_NOT_FIT)
    assert nearest.startswith("striped ring, full recomputation")


def test_the_search_compares_tensor_groups():
    pairs = PairSource("dense")
    config = compose(["model=qwen7b", "seq=16k"])
    one = Scenario(config, pairs.problem(config))
    found = recommend(load_cluster("h100_4x8", nodes=1), one, 8, ("striped",), ("all_gather",))
    groups = {(o.plan.dims.cp, o.plan.dims.tp) for o in found.ranked}
    assert groups == {(8, 1), (4, 2), (2, 4)}
    shared = [o for o in found.ranked if o.plan.dims.tp == 4]
    assert all("1 data x 2 context x 4 tensor" in label(o.plan) for o in shared)
    times = [o.step.seconds.value for o in found.ranked]
    assert found.ranked[0].step.seconds.value == min(times)
    whole = next(o for o in found.ranked if o.plan.dims.tp == 1)
    assert "waiting for hidden states" in "; ".join(reasons(shared[0], whole))


def with_stages(*words: str, pairs: PairSource | None = None) -> Scenario:
    words = (TENSOR_PARALLEL + "=1", "model=qwen7b", "seq=32k", *words)
    config = compose(list(words))
    return Scenario(config, (pairs or PairSource("dense")).problem(config), words=words)


def test_the_search_compares_stages():
    cluster, one = load_cluster("h100_4x8", nodes=1), with_stages("train.global_batch=8")
    found = recommend(cluster, one, 8, ("striped",), ("all_gather",), ("selective",))
    places = {
        (o.plan.dims.pp, o.plan.dims.cp, o.plan.config.topology.virtual_stages)
        for o in found.ranked
    }
    # Eight stages of one worker also take turns; with two groups, four micro-batches are too few.
    assert places >= {(1, 8, 1), (2, 4, 1), (2, 4, 2), (4, 2, 1), (4, 2, 2), (8, 1, 1), (8, 1, 2)}
    assert (8, 1, 2) in places
    assert all(8 // (pp * cp) * pp <= 8 for pp, cp, _ in places)
    times = [o.step.seconds.value for o in found.ranked]
    assert found.ranked[0].step.seconds.value == min(times)
    for outcome in found.ranked:
        alone = evaluate(cluster, one, outcome.plan, bounds=False)
        assert outcome.step.seconds.value == alone.step.seconds.value, label(outcome.plan)
        # A pipeline gathers its weights once per step, because they fit.
        if outcome.plan.dims.pp > 1:
            assert outcome.plan.config.train.shard == "gradients"
    staged = next(o for o in found.ranked if place(o)[2] == Groups(2, 1, 4, 2))
    assert "4 pipeline x 1 data x 2 context of 2 virtual stages" in label(staged.plan)
    whole = next(o for o in found.ranked if o.plan.dims.pp == 1)
    assert "waiting for other stages" in "; ".join(reasons(staged, whole))


def test_stages_that_do_not_fit_are_named_and_gather_weights_more_often():
    """A whole stage of weights does not fit. With train.shard=full, some stages do."""
    cluster = small_memory(load_cluster("h100_4x8", nodes=1), 28)
    one = with_stages("train.global_batch=8", PIPELINE_PARALLEL + "=2")
    found = recommend(cluster, one, 8, ("striped",), ("all_gather",), ("full",))
    assert {o.plan.config.train.shard for o in found.ranked} == {"full"}
    assert {o.plan.dims.pp for o in found.ranked} == {2}
    unfit = [what for what, why in found.rejected if why == DOES_NOT_FIT]
    assert any("2 pipeline x" in what and "train.shard=gradients" in what for what in unfit)


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
