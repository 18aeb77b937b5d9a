"""Training with a dynamic index: metrics, dense first steps, replicas, recomputation, refusals."""

from __future__ import annotations

from functools import cache

import gloo
import pytest
from slow_cases import mostly_slow

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.composition.compose import compose
from mtrain_cli.training.flops import causal_pairs, flops_per_token
from mtrain_cli.training.trainer import Trainer

SMALL = [
    "seq=200",
    "topology.block_size=16",
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.head_dim=8",
    "model.intermediate_size=48",
    "train.steps=6",
    "train.global_batch=2",
    "sparsity.block=16",
]
VERTICAL_SLASH = [
    "sparsity=vertical_slash",
    "sparsity.last_q=16",
    "sparsity.p_v=0.3",
    "sparsity.p_s=0.3",
    "sparsity.min_columns=4",
]


def trainer(
    rank: int, world: int, cp: int, overrides: list[str], per_node: int | None = None
) -> Trainer:
    environment = gloo.environment(rank, world, cp, per_node)
    return Trainer(compose([*SMALL, *overrides]), environment)


def steps(
    rank: int,
    world: int,
    overrides: list[str],
    count: int,
    cp: int = 1,
    per_node: int | None = None,
) -> list[dict]:
    training = trainer(rank, world, cp, overrides, per_node)
    results = []
    for _ in range(count):
        result = training.train_step(False)
        metrics = training.metrics(result, 1.0)
        results.append(
            {
                name: getattr(metrics, name)
                for name in (
                    "loss",
                    "grad_norm",
                    "density",
                    "slashes",
                    "columns",
                    "density_by_layer",
                    "index_cut",
                )
            }
        )
        assert (metrics.index_seconds is None) == (result.index is None)
    return results


def test_metrics_show_the_density_of_the_index():
    (results,) = gloo.run(1, steps, VERTICAL_SLASH, 2)
    for step in results:
        assert 0.2 < step["density"] < 0.8
        assert 1 <= step["slashes"] < 13
        assert 4 <= step["columns"] < 100
        assert len(step["density_by_layer"]) == 2
        assert step["density"] == pytest.approx(sum(step["density_by_layer"]) / 2)
        assert step["index_cut"] is None


@mostly_slow("row_cap", [1, 100], keep=(0,))
def test_metrics_show_what_a_cap_cuts_whatever_the_number_of_workers(row_cap):
    words = [
        "sparsity=block_topk", "sparsity.score=exact", "sparsity.block=16", "sparsity.density=0.7",
        f"sparsity.row_cap={row_cap}", "topology.layout=striped",
    ]  # fmt: skip
    ((alone,), *shared) = (gloo.run(n, steps, words, 1, n) for n in (1, 2))
    cut = alone[0]["index_cut"]
    assert (0 < cut < 1) == (row_cap == 1)
    assert [results[0]["index_cut"] for results in shared[0]] == [cut] * 2


@mostly_slow("micro_batch", [1, 2], keep=(1,))
def test_metrics_count_slashes_and_columns_per_head(micro_batch):
    lines = ["sparsity=fixed", "sparsity.slashes=3", "sparsity.columns=8", "sparsity.density=0"]
    (results,) = gloo.run(1, steps, [*lines, "seq=208", f"train.micro_batch={micro_batch}"], 2)
    assert [(step["slashes"], step["columns"]) for step in results] == [(3, 8)] * 2


def shares(rank: int, world: int, overrides: list[str], fixed: list[str]) -> list[dict]:
    """Return metrics of a dense and a sparse step of packed documents, at 1 GFLOP/s, in 1 s."""
    results = []
    for words in (["sparsity.block=null"], fixed):
        training = trainer(rank, world, world, [*overrides, *words])
        training._peak_flops = 1e9
        samples = [training.dataset[training.sampler.sequence(number)] for number in range(2)]
        pairs = (
            sum(SequenceMask.from_documents(sample.documents, 208).pairs for sample in samples) / 2
        )
        metrics = training.metrics(training.train_step(False), 1.0)
        named = {
            name: getattr(metrics, name)
            for name in ("mfu_model", "mfu_executed", "density", "density_by_layer")
        }
        results.append({"allowed": pairs, **named})
    return results


def test_mfu_and_density_of_packed_documents_follow_their_definitions(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text("a short document " * 3)
    data = ["seq=208", "data=text", f"data.path={tmp_path}"]
    every_pair = [
        "sparsity=fixed",
        "sparsity.slashes=13",
        "sparsity.columns=0",
        "sparsity.density=0",
    ]
    ((dense, sparse),) = gloo.run(1, shares, data, every_pair)
    assert dense["allowed"] < 0.5 * causal_pairs(208)
    flops = flops_per_token(
        compose([*SMALL, *data, "sparsity.block=null"]).model, 208, pairs=dense["allowed"]
    )
    assert dense["mfu_model"] == pytest.approx(2 * 208 * flops.model / 1e9)
    assert dense["mfu_model"] < dense["mfu_executed"]
    assert dense["density"] == pytest.approx(dense["allowed"] / causal_pairs(208))
    # An index that skips nothing has a dense step's density, overall and per layer, but no MFU.
    assert sparse["density"] == pytest.approx(dense["density"])
    assert sparse["density_by_layer"] == pytest.approx([dense["density"]] * 2)
    assert sparse["mfu_model"] is None
    assert sparse["mfu_executed"] == pytest.approx(dense["mfu_executed"])


def test_an_index_that_keeps_everything_equals_dense_attention():
    whole = [
        "sparsity=vertical_slash",
        "sparsity.last_q=16",
        "sparsity.p_v=1.0",
        "sparsity.p_s=1.0",
    ]
    (sparse,) = gloo.run(1, steps, whole, 2)
    (dense,) = gloo.run(1, steps, ["sparsity=dense", "sparsity.block=null"], 2)
    for a, b in zip(sparse, dense, strict=True):
        assert a["density"] == pytest.approx(b["density"])
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)
        assert (b["slashes"], b["density_by_layer"]) == (None, None)


def test_the_first_steps_may_be_dense():
    (results,) = gloo.run(1, steps, [*VERTICAL_SLASH, "sparsity.dense_steps=1"], 2)
    assert [step["slashes"] is None for step in results] == [True, False]
    assert results[0]["density"] > 0.9 > results[1]["density"]


@pytest.mark.slow
def test_the_last_layers_may_be_dense():
    words = [*VERTICAL_SLASH, "sparsity.dense_layers=1"]
    (alone,) = gloo.run(1, steps, words, 2)
    (sparse,) = gloo.run(1, steps, VERTICAL_SLASH, 1)
    documents = ["data.document_mask=false"]
    (whole,) = gloo.run(1, steps, [*words, *documents], 1)
    first, last = alone[0]["density_by_layer"]
    assert first == sparse[0]["density_by_layer"][0] < last
    assert alone[0]["density"] == pytest.approx((first + last) / 2)
    assert whole[0]["density_by_layer"][1] == 1
    for results in gloo.run(2, steps, words, 2, 2):
        for a, b in zip(results, alone, strict=True):
            for name in ("loss", "grad_norm", "density"):
                assert a[name] == pytest.approx(b[name], rel=1e-5), name


@mostly_slow("checkpoint", ["none", "full"], keep=(1,))
def test_recomputation_does_not_change_the_losses(checkpoint):
    (results,) = gloo.run(
        1, steps, [*VERTICAL_SLASH, f"train.activation_checkpoint={checkpoint}"], 2
    )
    (expected,) = gloo.run(1, steps, VERTICAL_SLASH, 2)
    for a, b in zip(results, expected, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)
        assert a["density_by_layer"] == b["density_by_layer"]


@pytest.mark.slow
def test_replicas_report_the_mean_of_all_sequences():
    (alone,) = gloo.run(1, steps, VERTICAL_SLASH, 2)
    for results in gloo.run(2, steps, VERTICAL_SLASH, 2):
        for a, b in zip(results, alone, strict=True):
            for name in ("loss", "density", "slashes", "columns"):
                assert a[name] == pytest.approx(b[name], rel=1e-5), name


@mostly_slow(
    "pattern",
    [
        ["sparsity=moba", "sparsity.chunk=32", "sparsity.top_k=2"],
        ["sparsity=xattention", "sparsity.stride=4", "sparsity.threshold=0.5"],
        ["sparsity=fixed", "sparsity.slashes=3", "sparsity.columns=8", "sparsity.density=0"],
    ],
    keep=(0, 1),
)
def test_every_pattern_trains(pattern):
    (results,) = gloo.run(
        1, steps, [*pattern, "optim.lr=0.01", "optim.warmup_steps=0", "optim.schedule=constant"], 6
    )
    assert all(0 < step["density"] < 0.9 for step in results)
    assert results[-1]["loss"] < results[0]["loss"] - 0.15


PATTERNS = {
    "vertical_slash": VERTICAL_SLASH,
    "moba": ["sparsity=moba", "sparsity.chunk=32", "sparsity.top_k=2"],
    "xattention": ["sparsity=xattention", "sparsity.stride=4", "sparsity.threshold=0.5"],
}
LEARNS = [
    "optim.lr=0.01",
    "optim.warmup_steps=0",
    "optim.schedule=constant",
    "topology.block_size=16",
]
WAYS = {
    "ring": ["topology.exchange=ring"],
    "ring, columns in steps": [
        "topology.exchange=ring",
        "topology.columns=in_steps",
        "topology.layout=zigzag",
    ],
    "queries": ["topology.exchange=ring", "topology.circulates=queries"],
    "all_gather": ["topology.exchange=all_gather", "topology.chunks=2"],
    "ulysses": ["topology.exchange=ulysses"],
    "nodes": ["topology.exchange=hierarchical_ring"],
    "one node": ["topology.exchange=hierarchical_all_gather"],
}


@cache
def alone(pattern: str) -> list[dict]:
    """Train ten steps on one worker."""
    (results,) = gloo.run(1, steps, [*PATTERNS[pattern], *LEARNS], 10)
    return results


@mostly_slow(
    ("world", "pattern", "way"),
    [
        (2, "vertical_slash", "ring"),
        (2, "vertical_slash", "ulysses"),
        pytest.param(2, "xattention", "one node", marks=pytest.mark.slow),
        pytest.param(2, "xattention", "ulysses", marks=pytest.mark.slow),
        (4, "vertical_slash", "nodes"),
        pytest.param(4, "moba", "queries", marks=pytest.mark.slow),
        pytest.param(2, "vertical_slash", "ring, columns in steps", marks=pytest.mark.slow),
        pytest.param(2, "vertical_slash", "queries", marks=pytest.mark.slow),
        pytest.param(2, "vertical_slash", "all_gather", marks=pytest.mark.slow),
        pytest.param(2, "moba", "ring", marks=pytest.mark.slow),
        pytest.param(4, "xattention", "nodes", marks=pytest.mark.slow),
    ],
    keep=(1,),
)
def test_workers_that_share_a_sequence_train_like_one(world, pattern, way):
    expected = alone(pattern)
    assert expected[-1]["loss"] < expected[0]["loss"] - 0.15
    overrides = [*PATTERNS[pattern], *LEARNS]
    for results in gloo.run(
        world, steps, [*overrides, *WAYS[way]], 10, world, 2 if way == "nodes" else None
    ):
        for a, b in zip(results, expected, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-5)
            for name in ("grad_norm", "density", "slashes", "columns", "density_by_layer"):
                assert a[name] == pytest.approx(b[name], rel=1e-3), name


FIXED = ["sparsity=fixed", "sparsity.slashes=3", "sparsity.columns=12"]


@mostly_slow(
    ("world", "cp", "words"),
    [
        (1, 1, ["train.micro_batch=2"]),
        (2, 1, []),
        (2, 2, ["topology.layout=zigzag"]),
        (3, 3, ["topology.layout=striped", "topology.exchange=ring"]),
        pytest.param(3, 3, ["topology.layout=contiguous"], marks=pytest.mark.slow),
        pytest.param(2, 2, ["topology.layout=striped"], marks=pytest.mark.slow),
    ],
    keep=(0, 2),
)
def test_a_fixed_index_does_not_depend_on_workers_layout_or_micro_batches(world, cp, words):
    """Each of them pads 200 tokens to a different length."""
    expected = fixed_alone()
    for results in gloo.run(world, steps, [*FIXED, *words], 2, cp):
        for a, b in zip(results, expected, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)
            for name in ("grad_norm", "density", "slashes", "columns", "density_by_layer"):
                assert a[name] == pytest.approx(b[name], rel=1e-4), name


@cache
def fixed_alone() -> list[dict]:
    (results,) = gloo.run(1, steps, FIXED, 2)
    return results
