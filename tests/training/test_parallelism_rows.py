"""Plans and banners say what each dimension of parallelism does and costs."""

from __future__ import annotations

import re

from mtrain_cli.composition.compose import compose
from mtrain_cli.training.dry_run import expert_rows, pipeline_rows, tensor_rows
from mtrain_cli.training.planning import make_plan

WORDS = [
    "model=qwen3b", "seq=32k", "topology=h200_1x8", "train.global_batch=16",
    "topology.exchange=all_gather",
]  # fmt: skip


def test_runs_without_them_have_no_rows():
    plan = make_plan(compose(WORDS))
    assert (tensor_rows(plan), pipeline_rows(plan)) == ([], [])


def test_a_tensor_group_says_what_a_worker_computes():
    rows = tensor_rows(make_plan(compose([*WORDS, "topology.tensor_parallel=2"])))
    what = "a worker computes 8 of 16 heads and 5,504 of 11,008 columns of the MLP"
    assert rows == [("tensor", what)]


def test_auto_shows_the_predicted_time_of_each_degree_of_experts():
    words = "model=tiny_moe", "topology=h200_1x8", "train.global_batch=8", "seq=8k"
    shown = expert_rows(make_plan(compose([*words, "topology.expert_parallel=auto"])))
    (_, chosen), (_, costs) = shown
    head, _, degrees = costs.partition(": ")
    assert head.endswith("per layer and step by degree, predicted for h200_1x8")
    times = {n: float(ms) for n, ms in re.findall(r"(\d): ([\d.]+) ms, [\d.]+ [MG]iB", degrees)}
    assert list(times) == ["1", "2", "4", "8"]
    assert f"; degree {min(times, key=times.get)} was chosen by auto" in chosen
    given = expert_rows(make_plan(compose([*words, "topology.expert_parallel=2"])))
    assert given == [("experts", "a worker computes 4 of 8"), ("", costs)]


def test_times_of_experts_on_a_cpu_are_those_of_gpus():
    words = "model=tiny_moe", "topology.device=cpu", "topology.workers=2"
    for degree in ("auto", "2"):
        rows = expert_rows(make_plan(compose([*words, f"topology.expert_parallel={degree}"])))
        text = "predicted for H200s (topology.cluster=auto), not for CPU processes: "
        assert text in rows[1][1]


def test_a_pipeline_says_its_stages_idle_time_and_messages():
    words = [*WORDS, "topology.pipeline_parallel=4", "train.shard=gradients"]
    (name, text), (_, cost) = pipeline_rows(make_plan(compose(words)))
    assert name == "pipeline"
    assert text == (
        "4 stages of [10,9,10,7] layers; 1f1b, 16 micro-batches per step: stages idle 19% of the "
        "time"
    )
    assert cost == (
        "a message has 64.0 MiB of hidden states; a stage between others receives 2.00 GiB per step"
    )
