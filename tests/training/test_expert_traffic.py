"""Bytes of experts, by hand, and degrees that do not fit."""

from __future__ import annotations

from math import comb

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch.environment import ParallelDims
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.training.expert_traffic import (
    allowed_degrees,
    degrees_in_a_node,
    expert_traffic,
    require_experts_fit,
)
from mtrain_cli.training.state_memory import StateMemory

QWEN = ("model=qwen3_30b_a3b", "topology.workers=8")


def traffic(degree: int, *words: str, dp: int = 1, seq: str = "64k"):
    config = compose([*QWEN, f"seq={seq}", f"train.global_batch={dp}", *words])
    dims = ParallelDims.of(8, cp=8 // dp)
    return expert_traffic(config, dims, make_layout("striped", 8 // dp, config.seq, 128), 2, degree)


def leaving(degree: int) -> float:
    """Return how many other workers have one of 8 experts that are chosen at random from 128."""
    return (degree - 1) * (1 - comb(128 - 128 // degree, 8) / comb(128, 8))


def test_rows_and_weights_by_hand():
    tokens, top_k, hidden, size, experts = 65_536 // 8, 8, 2048, 768, 128
    whole = 3 * experts * size * hidden
    alone = traffic(1)
    assert alone.rows == 0
    # Two gathers in bfloat16, one reduction in float32, of seven workers' shards.
    assert alone.weights == whole * (2 * 2 + 4) * 7 // 8
    shared = traffic(8)
    assert shared.weights == 0
    # Row and scores there, the row back; the row again; its gradient there and back, with the
    # gradients of the scores. With a score, the place of its pair travels.
    numbers = top_k * (4 + 4) + top_k * 4
    assert shared.rows == round(tokens * leaving(8) * (5 * hidden * 2 + numbers))
    without = traffic(8, "train.activation_checkpoint=none")
    assert without.rows == round(tokens * leaving(8) * (4 * hidden * 2 + numbers))
    half = traffic(2)
    assert half.weights == whole // 2 * (2 * 2 + 4) * 3 // 4
    assert half.total == half.rows + half.weights


def test_weights_by_kind_of_shard_and_number_of_micro_batches():
    once = traffic(1).weights
    words = ("train.shard=gradients", "train.global_batch=4")
    assert traffic(1, *words).weights == once * (2 + 4 * 4) // 8
    assert traffic(1, "train.shard=optimizer", "train.global_batch=4").weights == once * 6 // 8


def test_with_tensor_parallelism_and_one_degree_gradients_are_summed_once_a_step():
    config = compose([*QWEN, "seq=64k", "topology.tensor_parallel=4", "train.global_batch=3"])
    dims = ParallelDims.of(8, cp=2, tp=4)
    layout = make_layout("striped", 2, config.seq, 128)
    whole = 3 * 128 * 768 * 2048
    found = expert_traffic(config, dims, layout, 2, 1)
    # Two workers share a copy. Each all-reduces its half with three others.
    assert found.weights == whole // 2 * 3 * (2 * 2 + 4) + 2 * whole // 2 * 4 * 3 // 4
    shared = expert_traffic(config, dims, layout, 2, 8)
    assert (shared.weights, shared.rows > 0) == (0, True)


def test_all_dimensions_and_sizes_of_a_batch_by_hand():
    words = ["topology.tensor_parallel=2", "train.global_batch=8", "train.micro_batch=2"]
    config = compose([*QWEN, "seq=64k", *words, "train.reduce_dtype=bfloat16"])
    dims = ParallelDims(dp=2, cp=2, tp=2)
    layout = make_layout("striped", 2, config.seq, 128)
    alone, half, whole = (expert_traffic(config, dims, layout, 2, n) for n in (1, 2, 8))
    # Two micro-batches of two sequences, of which a worker has a quarter each.
    tokens, weights = 2 * 2 * 65_536 // 4, 3 * 128 * 768 * 2048
    assert whole.rows == round(tokens * leaving(8) * (5 * 2048 * 2 + 96))
    assert half.rows == round(tokens * leaving(2) * (5 * 2048 * 2 + 96))
    # Four gathers and two reductions, all in bfloat16.
    assert half.weights == weights // 2 * (4 * 2 + 2 * 2) * 3 // 4
    # The two workers of a tensor group add up their quarter in float32.
    assert alone.weights == weights * (4 * 2 + 2 * 2) * 3 // 4 + weights // 4 * 4
    assert allowed_degrees(compose(["model=tiny_moe"]), dims) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("words", "workers", "device", "message"),
    [
        (
            ["topology.expert_parallel=4"], 2, "cpu",
            "topology.expert_parallel=4: does not divide the 2 workers; allowed: "
            "auto, 1, 2",
        ),
        (
            ["topology.expert_parallel=2", "model.hidden_size=122", "model.moe.expert_size=61"],
            8, "cpu",
            "topology.expert_parallel=2: leaves 4 workers to share an expert's weight of 122 x "
            "122, and neither size is a multiple of 4; allowed: auto, 1, 4, 8",
        ),
        (
            ["topology.expert_parallel=2", "model.hidden_size=122", "model.moe.expert_size=62"],
            8, "cpu",
            "topology.expert_parallel=2: leaves 4 workers to share an expert's weight of 122 x "
            "62, and neither size is a multiple of 4; allowed: auto, 1, 4, 8",
        ),
        (
            ["model.moe.expert_size=50"], 8, "cuda",
            "model.moe.expert_size=50: grouped products need a multiple of 8",
        ),
        (
            ["model.hidden_size=124"], 8, "cuda",
            "model.hidden_size=124: grouped products need a multiple of 8",
        ),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(words, workers, device, message):
    config = compose(["model=tiny_moe", *words])
    with pytest.raises(ConfigError) as refused:
        require_experts_fit(config, ParallelDims.of(workers, cp=workers), 2, device)
    assert refused.value.problems == (message,) or list(refused.value.problems) == [message]


def test_a_gpu_takes_sizes_of_whole_16_bytes():
    config = compose(["model=tiny_moe", "model.moe.expert_size=56"])
    require_experts_fit(config, ParallelDims.of(8, cp=8), 2, "cuda")


def test_a_cpu_takes_all_sizes_and_a_dense_model_has_no_experts_to_fit():
    dims = ParallelDims.of(8, cp=8)
    sizes = "model.moe.expert_size=50", "topology.expert_parallel=auto"
    require_experts_fit(compose(["model=tiny_moe", *sizes]), dims, 2, "cpu")
    require_experts_fit(compose(["model=tiny", "model.hidden_size=124"]), dims, 2, "cuda")


def test_allowed_degrees_divide_experts_and_workers():
    config = compose(["model=tiny_moe"])
    assert allowed_degrees(config, ParallelDims.of(12, cp=12)) == [1, 2, 4]
    assert degrees_in_a_node(config, ParallelDims.of(12, cp=12), 6) == [1, 2]


@pytest.mark.parametrize("words", [(), ("train.shard=gradients", "train.global_batch=4")])
@pytest.mark.parametrize("degree", [2, 8])
def test_the_states_of_a_worker_move_the_same_weights(degree, words):
    sent = {}
    micro_batches = 4 if words else 1
    for each in (1, degree):
        config = compose([*QWEN, *words, f"topology.expert_parallel={each}"])
        states = StateMemory(config, 8, micro_batches, 2)
        sent[each] = states.sent(), states.shard
    saved = traffic(1, *words).weights - traffic(degree, *words).weights
    assert sent[1][0] - sent[degree][0] == config.model.num_layers * saved
    assert sent[1][1] == sent[degree][1], "a worker holds as many weights of other experts"
