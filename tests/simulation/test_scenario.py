"""Scenarios: the command that starts a predicted training."""

from __future__ import annotations

import dataclasses

import pytest
from attention.missing_packages import hide_packages
from masked_documents import masked_store

from mtrain_cli.attention.index import VerticalSlash
from mtrain_cli.commands.simulate_request import Request
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.simulation.calibration import VALUE
from mtrain_cli.simulation.scenario import (
    PairSource,
    Scenario,
    evaluate,
    plan_on,
    predict_training,
    train_line,
)
from mtrain_cli.training.flops import causal_pairs


def scenario_of(*words: str) -> Scenario:
    pairs = PairSource("clustered", 0.05, 256)
    config = compose([*words, *pairs.sparsity()])
    return Scenario(config, pairs.problem(config), words=(*words, *pairs.sparsity()))


def test_the_printed_command_composes_to_the_same_plan():
    cluster = load_cluster("h200_1x8")
    one = scenario_of(
        "model=qwen3b", "seq=64k", "train.global_batch=2", "topology.layout=contiguous"
    )
    plan = plan_on(
        cluster, one.config, workers=8, layout="zigzag", exchange="ring", context_parallel=4
    )
    changes = {
        "topology.layout": "zigzag",
        "topology.exchange": "ring",
        "topology.context_parallel": 4,
    }
    line = train_line(cluster, plan, one.words, changes)
    assert line.startswith("mtrain train ")
    again = compose([*line.split()[2:], "topology.gpus_per_node=8", "topology.device=cuda"])
    assert dataclasses.replace(again, run=plan.config.run) == plan.config
    many = load_cluster("a100_4x8")
    text = train_line(
        many, plan_on(many, one.config, workers=32, layout="zigzag", exchange="ring"), one.words, {}
    )
    assert text.startswith(
        "torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400 -m "
        "mtrain_cli train model="
    )


@pytest.mark.parametrize("kernel", ["auto", "flash4", "triton"])
def test_a_prediction_ignores_which_packages_this_machine_has(kernel, monkeypatch):
    """Where mtrain runs now says nothing about the cluster to predict."""
    cluster = load_cluster("h200_1x8")
    scenario = scenario_of("model=qwen3b", "seq=32k", f"train.kernel={kernel}")

    def predict():
        outcome = predict_training(cluster, scenario, 8, "striped", "ring", number=0, rows=False)
        return outcome.plan.kernel, outcome.step.seconds

    with_packages = predict()
    hide_packages(monkeypatch)
    assert predict() == with_packages
    assert with_packages[0] == ("flash4" if kernel == "auto" else kernel)


@pytest.mark.parametrize("seq", [512, 4096])
def test_a_prediction_is_for_the_masks_of_the_data(tmp_path, seq):
    """The data have 680 tokens."""
    pairs, cluster = PairSource("dense"), load_cluster("h200_1x8")
    words = ("model=qwen3b", f"seq={seq}", "data=tokens", f"data.path={masked_store(tmp_path)}",
             "topology.block_size=16")  # fmt: skip
    computed = {}
    for key in ("mask", "null"):
        config = compose([*words, f"data.mask_key={key}"])
        scenario = Scenario(config, pairs.problem(config), words=words)
        outcome = predict_training(cluster, scenario, 8, "balanced", "group_cast")
        pairs_of_a_sequence = outcome.attention.facts["density"] * causal_pairs(seq)
        computed[key] = pairs_of_a_sequence, outcome.plan.flops.model
        found = [line for line in outcome.remarks if line.startswith("data.mask_key=mask: ")]
        assert len(found) == (key == "mask")
        if key == "mask":
            (line,) = found
            read = (
                "masks of the first 2 sequences were read" if seq == 512 else "cannot be read (seq="
            )
            assert read in line
        documents = [line for line in outcome.remarks if "every sequence is one document" in line]
        assert len(documents) == (key == "null")
    masks = pairs.problem(compose([*words, "data.mask_key=mask"])).masks
    if seq == 512:
        assert computed["mask"][0] == pytest.approx(masks[0].pairs)
        assert masks[0].pairs < computed["null"][0] / 10
        assert computed["mask"][1] < computed["null"][1]
    else:
        assert computed["mask"] == computed["null"]


def dense(*words: str) -> Scenario:
    config = compose(["seq=16k", "model.num_layers=6", *words])
    return Scenario(config, PairSource("dense").problem(config))


@pytest.mark.parametrize("exchange", ["ring", "group_cast"])
def test_layers_with_different_masks_are_priced_per_kind(exchange):
    cluster, one = load_cluster("h200_1x8"), ["topology.stages=0", "topology.stages_backward=0"]
    window = [*one, "mask=sliding_window", "mask.window=1k"]
    found = {
        name: predict_training(cluster, dense(*words), 4, "zigzag", exchange, rows=True).attention
        for name, words in {
            "window": window,
            "full": one,
            "mixed": [*window, "mask.full_every=3"],
        }.items()
    }

    def mean(value):
        return (4 * value(found["window"]) + 2 * value(found["full"])) / 6

    for get in (
        lambda p: p.duration.value,
        lambda p: p.duration.high,
        lambda p: p.facts["density"],
        lambda p: p.passes["backward"].work.worker,
        lambda p: sum(p.passes["forward"].exposed.values()),
    ):
        assert get(found["mixed"]) == pytest.approx(mean(get))
    rows = found["mixed"].rows
    attention = rows[rows["pairs"] > 0]
    pairs = {layer: attention["pairs"][attention["layer"] == layer].sum() for layer in range(6)}
    assert {layer for layer in pairs if pairs[layer] > pairs[0]} == {2, 5}
    assert found["mixed"].facts["layers"] == 6
    assert found["mixed"].facts["layer_kinds"] == {"window": [0, 1, 3, 4], "full": [2, 5]}
    assert sum(pairs.values()) == sum(
        count * found[name].rows["pairs"].sum() for name, count in (("window", 4), ("full", 2))
    )


def test_layers_with_different_masks_have_every_sequence_of_the_micro_batch():
    words = ["mask=sliding_window", "mask.window=1k", "mask.full_every=3"]
    one, two = (dense(*words, f"train.micro_batch={n}", f"train.global_batch={n}") for n in (1, 2))
    masks, full = two.problem.kinds
    assert [len(masks[0]), len(full[0])] == [2, 2]
    assert [masks[1], full[1]] == [[0, 1, 3, 4], [2, 5]]
    cluster = load_cluster("h200_1x8")
    pairs = [
        predict_training(cluster, each, 4, "zigzag", "ring", rows=True).attention.rows["pairs"]
        for each in (one, two)
    ]
    assert pairs[1].sum() == 2 * pairs[0].sum()


def test_plan_and_attention_share_the_configured_chunk():
    cluster, words = load_cluster("h200_1x8"), ("mask=sliding_window", "mask.window=1k")
    for chunk in (512, 3072):
        scenario = dense(*words, f"topology.balanced_chunk={chunk}")
        found = predict_training(cluster, scenario, 4, "balanced", "group_cast")
        padded = -(-(1 << 14) // (4 * chunk)) * 4 * chunk
        assert found.plan.layout.block_size == chunk
        assert found.plan.layout.padded_seq == found.attention.facts["padded_seq"] == padded
        predict_training(cluster, scenario, 4, "zigzag", "group_cast")  # does not read the chunk


CLUSTER = load_cluster("h200_1x8", "--cluster")
WORDS = ("model=qwen0.5b", "seq=8k", "model.num_layers=6", "topology.exchange=ring")
SPARSE = (*WORDS, "sparsity=vertical_slash", "topology.layout=striped")
DENSE = (*WORDS, "sparsity=dense", "topology.layout=striped", "topology.block_size=128")


def request(*words, **options):
    return Request(tuple(words), cluster="h200_1x8", **options)


def predicted(*words, **options):
    scenario = request(*words).scenario()
    plan = plan_on(CLUSTER, scenario.config, workers=4)
    return evaluate(CLUSTER, scenario, plan, bounds=False, **options)


def test_the_sparse_layers_repeat_the_drawn_ones_and_the_others_have_no_index():
    work = request(*SPARSE, "sparsity.dense_layers=2", layers=3).scenario().problem
    indices = [work.index(layer) for layer in work.layers]
    assert [index is None for index in indices] == [False] * 4 + [True] * 2
    assert work.drawn == 3
    assert work.layer_kinds == {"sparse": [0, 1, 2, 3], "dense": [4, 5]}
    assert all(isinstance(index, VerticalSlash) for index in indices[:4])


def test_a_list_of_dense_layers_gives_its_sparse_layers_the_drawn_indices():
    words = (*SPARSE, "sparsity.dense_layers=[0,3]")
    work = request(*words, layers=2).scenario().problem
    assert work.layer_kinds == {"sparse": [1, 2, 4, 5], "dense": [0, 3]}
    assert [layer for layer in work.layers if work.index(layer) is None] == [0, 3]
    drawn = [work.index(layer).columns for layer in (1, 2, 4, 5)]
    same = [one.equal(other) for one in drawn[:2] for other in drawn[2:]]
    assert same == [True, False, False, True]
    found, at_end = predicted(*words), predicted(*SPARSE, "sparsity.dense_layers=2")
    assert found.attention.facts["density"] == pytest.approx(
        at_end.attention.facts["density"], 0.01
    )
    assert found.step.seconds.value == pytest.approx(at_end.step.seconds.value, 0.01)


def test_attention_is_the_mean_over_sparse_and_dense_layers():
    mixed = predicted(*SPARSE, "sparsity.dense_layers=2", rows=True)
    sparse, dense = predicted(*SPARSE), predicted(*DENSE)
    assert mixed.attention.exchange == sparse.attention.exchange == dense.attention.exchange
    for name, found in mixed.attention.passes.items():
        ends = [of.attention.passes[name] for of in (sparse, dense)]
        assert ends[0].spent["attention"] != ends[1].spent["attention"]
        for values in (
            (each.duration.value for each in (found, *ends)),
            (each.spent["index"] for each in (found, *ends)),
            (each.spent["attention"] for each in (found, *ends)),
        ):
            mean, of_sparse, of_dense = values
            assert mean == pytest.approx((4 * of_sparse + 2 * of_dense) / 6)
    density = mixed.attention.facts["density"]
    assert density == pytest.approx((4 * sparse.attention.facts["density"] + 2) / 6)
    assert sparse.step.flop < mixed.step.flop < dense.step.flop
    assert set(mixed.attention.rows["layer"]) == {-1, *range(6)}


def test_dense_layers_have_the_prices_of_their_kernel():
    words = (*SPARSE, "sparsity.dense_layers=2", "train.kernel=triton")
    mixed, triton = predicted(*words), predicted(*SPARSE, "train.kernel=triton")
    assert (mixed.plan.kernel, mixed.plan.dense_kernel[0]) == ("triton", "flash4")
    assert mixed.attention.costs[VALUE].kernels == triton.attention.costs[VALUE].kernels
    only = mixed.attention.of_layers({4, 5})
    dense = predicted(*DENSE)
    assert dense.plan.kernel == "flash4"
    assert only.duration.value == pytest.approx(dense.attention.duration.value)
    assert only.facts["density"] == pytest.approx(1.0)
    sparse = mixed.attention.of_layers({0, 3})
    assert sparse.duration.value == pytest.approx(triton.attention.duration.value)
    # Bounds, and plans that share this attention, ask for the same layers again.
    assert mixed.attention.of_layers([3, 0]) is sparse
    assert mixed.attention.of_layers(range(6)) is mixed.attention


@pytest.mark.parametrize("degree", [1, 2])
def test_lists_of_blocks_are_predicted_for_a_length_that_nobody_trained(degree):
    words = ["model=qwen0.5b", "seq=64k", "sparsity=block_topk", "sparsity.density=0.1"]
    words += ["sparsity.score=exact"]
    words += ["topology.layout=striped", "topology.exchange=ring"]
    words += [f"topology.tensor_parallel={degree}"]
    found = predicted(*words)
    assert found.attention.facts["density"] == pytest.approx(0.1, rel=0.02)
    assert found.plan.kernel == "triton"
    work = request(*words, columns=5000).scenario().problem
    assert work.part(0, 2).scores == work.scores / 2 > 0
    hot = work.index(0).bits[0]
    assert sum(bool(hot[0, key:, key].all()) for key in range(480)) > 30
    assert all(hot[0].equal(head) for head in hot[:7]), "heads of a KV group share a list"
    assert found.step.parts["index"] > 5 * predicted(*SPARSE).step.parts["index"]


def test_learned_scores_are_predicted_for_each_kv_head():
    words = ["model=qwen0.5b", "seq=64k", "sparsity=block_topk", "topology.exchange=ring"]
    learned, exact = (
        request(*words, f"sparsity.score={name}").scenario().problem.scores
        for name in ("learned", "exact")
    )
    update = 2_700 * 14 * 65536
    assert learned - update == pytest.approx(0.82 * exact * 2 / 14), "2 KV heads, not 14 heads"
