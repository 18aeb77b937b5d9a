"""The attention to predict, with layers of two kinds."""

from __future__ import annotations

import pytest

from mtrain_cli.attention.index import VerticalSlash
from mtrain_cli.commands.simulate_request import Request
from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.simulation.calibration import VALUE
from mtrain_cli.simulation.scenario import evaluate, plan_on

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
