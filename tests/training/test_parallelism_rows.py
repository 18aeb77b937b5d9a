"""Plans and banners say what each dimension of parallelism does and costs."""

from __future__ import annotations

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.training.parallelism_rows import expert_rows, pipeline_rows, tensor_rows
from mtrain_cli.training.planning import make_plan

WORDS = [
    "model=qwen3b", "seq=32k", "topology=h200_1x8", "train.global_batch=16",
    "topology.exchange=all_gather",
]  # fmt: skip


def test_runs_without_them_have_no_rows():
    plan = make_plan(compose(WORDS))
    assert (tensor_rows(plan), pipeline_rows(plan)) == ([], [])


def test_a_tensor_group_says_what_a_worker_computes():
    (name, text), (_, cost) = tensor_rows(
        make_plan(compose([*WORDS, "topology.tensor_parallel=2"]))
    )
    assert (name, text) == (
        "tensor",
        "a worker computes 8 of 16 heads and 5,504 of 11,008 columns of the MLP",
    )
    assert cost.startswith("a worker receives ")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        # The rows of the table in docs/parallelism.md
        ("seq=32k topology.tensor_parallel=2", (34.61, 0.641, 54.00, 8.42, 2.62, 6.12, 23.56)),
        ("seq=128k topology.tensor_parallel=2", (67.75, 0.936, 72.37, 33.69, 10.50, 24.50, 23.56)),
        ("seq=512k topology.tensor_parallel=2", (200.31, 1.37, 145.87, 134.75, 42, 98, 23.56)),
    ],
)
def test_a_tensor_group_is_compared_with_context_parallelism_alone(words, expected):
    """All messages of a step count on both sides: keys, hidden states and weights."""
    own = ["model=qwen7b", "topology=h200_1x8", "topology.exchange=all_gather", *words.split()]
    plan = make_plan(compose(own))
    _, (_, text) = tensor_rows(plan)
    total, times, alone, hidden, keys, keys_alone, weights = expected
    assert text == (
        f"a worker receives {total:.2f} GiB per step, {times} times the bytes of context "
        f"parallelism alone ({alone:.2f} GiB): hidden states {hidden:.2f} GiB, keys and values "
        f"{keys:.2f} GiB instead of {keys_alone:.2f} GiB, weights and gradients {weights} GiB "
        "instead of 47.87 GiB"
    )
    # By hand, for 28 layers: 4 + 7 messages of the other worker's rows, each of 3,584 elements.
    # Keys and values of half of 4 heads from 3 shards, and of 4 heads from 7 smaller ones: forward,
    # again backward, and their float32 gradients, which take twice the bytes.
    seq, gib = plan.config.seq, 2**30
    assert round(28 * 11 * seq / 8 * 3584 * 2 / gib, 2) == hidden
    shard = 2 * 128 * 2  # bytes of a head's key and value
    assert 28 * 4 * 3 * seq / 4 * 2 * shard / gib == pytest.approx(keys, abs=0.006)
    assert 28 * 4 * 7 * seq / 8 * 4 * shard / gib == pytest.approx(keys_alone, abs=0.006)


def test_nothing_is_compared_where_context_parallelism_alone_is_refused():
    """512 tokens have only four blocks for eight workers."""
    words = "seq=512", "topology.workers=8", "topology.tensor_parallel=2", "topology.device=cpu"
    assert len(tensor_rows(make_plan(compose(words)))) == 1


def test_auto_shows_the_predicted_time_of_each_degree_of_experts():
    words = "model=tiny_moe", "topology=h200_1x8", "train.global_batch=8", "seq=8k"
    shown = expert_rows(make_plan(compose([*words, "topology.expert_parallel=auto"])))
    (_, chosen), (_, times) = shown
    head, _, each = times.partition(": ")
    assert head == "predicted ms of a layer and step by degree"
    assert "; predicted for h200_1x8: degree " in chosen
    found = dict(pair.split(": ") for pair in each.split(", "))
    assert list(found) == ["1", "2", "4", "8"]
    degree = chosen.partition("degree ")[2].split()[0]
    assert f"degree {degree} takes {found[degree]} ms" in chosen
    assert len(expert_rows(make_plan(compose([*words, "topology.expert_parallel=2"])))) == 1


def test_times_of_experts_on_a_cpu_are_those_of_gpus():
    words = "model=tiny_moe", "topology.device=cpu", "topology.workers=2"
    for degree in ("auto", "2"):
        (_, text), *_ = expert_rows(
            make_plan(compose([*words, f"topology.expert_parallel={degree}"]))
        )
        assert "; predicted for H200s (topology.cluster=auto), not for CPU processes: " in text


def test_a_pipeline_says_its_stages_idle_time_and_messages():
    words = [*WORDS, "topology.pipeline_parallel=4", "train.shard=gradients"]
    (name, text), (_, cost) = pipeline_rows(make_plan(compose(words)))
    assert name == "pipeline"
    assert text == (
        "4 stages of 10, 9, 10 and 7 layers; 1f1b, 16 micro-batches per step: stages idle 19% of "
        "the time"
    )
    assert cost == (
        "a message has 64.0 MiB of hidden states; a stage between others receives 2.00 GiB per step"
    )


def test_a_pipeline_says_which_density_of_sparse_layers_it_assumes():
    stages = [*WORDS, "topology.pipeline_parallel=2", "train.shard=gradients"]

    def shown(*words: str) -> list[str]:
        return [text for _, text in pipeline_rows(make_plan(compose([*stages, *words])))[2:]]

    assumed = "layers of stages and idle time assume that a sparse layer computes 10% of the pairs"
    dense, fixed = "sparsity.dense_layers=4", ["sparsity=fixed", "sparsity.density=0.2"]
    found = shown("sparsity=vertical_slash", dense)
    assert found == [f"{assumed}; topology.stage_layers sets other layers"]
    given = shown("sparsity=vertical_slash", dense, "topology.stage_layers=[18,18]")
    assert given == ["the idle time assumes that a sparse layer computes 10% of the pairs"]
    assert shown("sparsity=vertical_slash") == shown(*fixed, dense) == []


def test_gathering_weights_for_every_micro_batch_is_remarked():
    words = [*WORDS, "topology.pipeline_parallel=4", "train.shard=full"]
    assert pipeline_rows(make_plan(compose(words)))[2][1] == (
        "train.shard=full gathers weights again for every micro-batch; train.shard=gradients "
        "gathers them once a step"
    )
