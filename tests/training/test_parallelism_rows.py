"""Plans and banners say what each dimension of parallelism does and costs."""

from __future__ import annotations

from mtrain_cli.composition.compose import compose
from mtrain_cli.training.parallelism_rows import pipeline_rows, tensor_rows
from mtrain_cli.training.run_plan import make_plan

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
    assert cost.startswith("forward moves 16 times the bytes of context parallelism")


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


def test_gathering_weights_for_every_micro_batch_is_remarked():
    words = [*WORDS, "topology.pipeline_parallel=4", "train.shard=full"]
    assert pipeline_rows(make_plan(compose(words)))[2][1] == (
        "train.shard=full gathers weights again for every micro-batch; train.shard=gradients "
        "gathers them once a step"
    )
