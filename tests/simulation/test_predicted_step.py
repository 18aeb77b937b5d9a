"""Whole steps: FLOP as in training, memory as in the dry run, weights hidden as by FSDP2."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import Cluster, Constant, load_cluster
from mtrain_cli.parallel.program import Recompute
from mtrain_cli.simulation import calibration
from mtrain_cli.simulation.calibration import HIGH, LOSS, LOW, VALUE
from mtrain_cli.simulation.expert_cost import ComputeCost
from mtrain_cli.simulation.non_attention_cost import DEVICE_ROWS, NonAttentionCost, priced
from mtrain_cli.simulation.predicted_step import copies, overlapped_us
from mtrain_cli.simulation.scenario import (
    PairSource,
    PredictedScenario,
    Scenario,
    evaluate,
    plan_on,
    with_step,
)
from mtrain_cli.step.program import Message, MessageCost
from mtrain_cli.training.flops import causal_pairs, training_flops
from mtrain_cli.training.state_memory import StateMemory

H200 = load_cluster("h200_1x8")
SPARSE = PairSource("clustered", 0.05, 2048)
DENSE = PairSource("dense")


def step(
    *words: str,
    cluster: Cluster = H200,
    workers: int = 8,
    pairs: PairSource = DENSE,
    slow: dict[int, float] | None = None,
    **more,
) -> PredictedScenario:
    layout, exchange = more.pop("layout", "striped"), more.pop("exchange", "all_gather")
    config = compose([*words, *pairs.sparsity()])
    scenario = Scenario(config, pairs.problem(config), slow=slow or {})
    return evaluate(
        cluster,
        scenario,
        plan_on(cluster, config, workers=workers, layout=layout, exchange=exchange),
        **more,
    )


WAYS = [
    "train.activation_checkpoint=none",
    "train.activation_checkpoint=none train.tile_mib=64",
    "train.activation_checkpoint=selective train.tile_mib=256",
    "train.activation_checkpoint=full train.offload_activations=true",
    "train.activation_checkpoint=full train.offload_activations=16 train.shard=gradients",
    "train.activation_checkpoint=sequence_selective train.checkpoint_keep=0.25",
    "train.activation_checkpoint=sequence_selective topology.layout=contiguous "
    "train.reduce_dtype=bfloat16",
    "train.loss_gradients=recompute train.shard=optimizer",
    "optim.offload=true train.shard=gradients train.reduce_dtype=bfloat16",
    "optim.offload=true train.shard=optimizer train.global_batch=2",
]


@pytest.mark.parametrize("pairs", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_flop_equal_training_and_bytes_equal_the_dry_run(pairs):
    play: dict[str, PredictedScenario] = {}
    for way in WAYS:
        words = [
            "model=qwen3b",
            "seq=50k",
            "train.global_batch=6",
            "topology.context_parallel=4",
            *way.split(),
            *pairs.sparsity(),
        ]
        config = compose(words)
        found = plan_on(H200, config, workers=8, exchange="all_gather", layout=config.layout)
        scenario = Scenario(config, pairs.problem(config))
        if found.layout.name not in play:
            play[found.layout.name] = evaluate(
                H200, scenario, found, bounds=False, recompute=Recompute.EVERYTHING
            )
        one = with_step(H200, scenario, found, play[found.layout.name].attention, bounds=False).step
        density = play[found.layout.name].attention.facts["density"]
        flops = training_flops(
            config, found.layout, sharing=1, dtype_bytes=2, pairs=density * causal_pairs(config.seq)
        ).executed
        assert one.flop * 8 == pytest.approx(flops * found.tokens_per_step, rel=1e-9), way
        assert one.hfu == pytest.approx(one.flop / one.seconds.value / 989e12)
        assert one.sent == pytest.approx(found.received.weights, rel=1e-6), way
        states = StateMemory(config, 8, found.micro_batches, 2)
        activations = 2 * found.micro_batches * (found.memory.host - states.host)
        assert (activations > 0) == ("offload_activations" in way)
        assert one.over_host == pytest.approx(found.received.host + activations), way
        assert sum(one.parts.values()) == pytest.approx(one.seconds.value), way
        assert min(one.parts.values()) >= 0, way


def test_with_ulysses_selective_recomputation_repeats_the_all_to_alls_only():
    config = compose(["model=llama8b", "seq=64k"])
    scenario = Scenario(config, DENSE.problem(config))

    def predicted(kind: str) -> PredictedScenario:
        train = dataclasses.replace(config.train, activation_checkpoint=kind)
        plan = plan_on(
            H200, dataclasses.replace(config, train=train), workers=8, exchange="ulysses"
        )
        return evaluate(H200, scenario, plan, bounds=False)

    none, selective, full = map(predicted, ("none", "selective", "full"))
    passes = selective.attention.passes
    again, forward = passes["recompute"], passes["forward"]
    assert "recompute" not in none.attention.passes
    assert again.exposed == pytest.approx(forward.exposed)
    assert 0 < again.spent["arrange"] < forward.spent["arrange"]
    assert again.spent["attention"] == 0
    assert again.work.total == 1
    more = selective.step.parts["links"] / none.step.parts["links"]
    assert more == pytest.approx(full.step.parts["links"] / none.step.parts["links"])
    assert more == pytest.approx(1.5, rel=0.01)  # six all-to-alls instead of four
    sent = [outcome.plan.received for outcome in (none, selective, full)]
    assert sent[1].backward == sent[2].backward == 2 * sent[0].backward


def test_mfu_of_recorded_documents_counts_pairs_as_training_does():
    config = compose(["model=qwen3b", "seq=8k", "topology.context_parallel=4"])
    found = plan_on(H200, config, workers=4, exchange="all_gather", layout="striped")
    problem = DENSE.problem(config)
    mask = SequenceMask.from_documents(np.arange(8192) // 1024, 8192)
    packed = evaluate(
        H200, Scenario(config, dataclasses.replace(problem, masks=(mask,))), found, bounds=False
    )
    flops = training_flops(config, found.layout, sharing=1, dtype_bytes=2, pairs=mask.pairs)
    per_second = 8192 / packed.step.seconds.value / 4 / 989e12
    assert packed.dense
    assert packed.step.mfu == pytest.approx(per_second * flops.model)
    assert packed.step.hfu == pytest.approx(per_second * flops.executed)


@pytest.mark.parametrize("workers", [1, 8])
def test_parts_add_up_and_lie_within_bounds(workers):
    for pairs in (DENSE, SPARSE):
        found = step("model=qwen3b", "seq=64k", workers=workers, pairs=pairs, exchange="ring").step
        assert sum(found.parts.values()) == pytest.approx(found.seconds.value, rel=1e-9)
        assert found.seconds.low < found.seconds.value < found.seconds.high
        assert min(found.parts.values()) >= 0
        assert (found.parts["weights"] > 0) == (workers > 1)
        tokens = 65536 / found.seconds.value / workers
        assert found.tokens_per_second_per_gpu.value == pytest.approx(tokens)
        assert found.mfu == pytest.approx(tokens * found.plan.flops.model / 989e12)
        assert 0.1 < found.hfu < 0.75


def test_attention_reports_how_long_it_fills_links():
    found = step("model=qwen3b", "seq=64k", exchange="ring", bounds=False).attention
    hop = 8192 * 2 * 2 * 128 * 2  # bytes: tokens, key and value, heads, head_dim, bfloat16
    inner, outer = found.passes["forward"].carried
    assert (inner, outer) == (pytest.approx(7 * hop / 450e9 * 1e3), 0)


def with_inner(**constants: float) -> Cluster:
    changed = {
        name: Constant(value, "guess", "", value, value) for name, value in constants.items()
    }
    return dataclasses.replace(H200, inner=dataclasses.replace(H200.inner, **changed))


def _played(
    forward: float,
    backward: float,
    gather: float,
    reduce: float,
    root: tuple[float, float],
    layers: int,
) -> float:
    """us of all layers, event by event: one queue of collectives, one stream that computes; the
    next layer's weights are asked for when a layer begins, gradients are sent when it has ended.
    """
    queue = root[0] + gather
    now = queue
    for layer in range(layers):
        asked = queue = max(queue, now) + gather if layer + 1 < layers else queue
        now = max(now + forward, asked)
    now = queue = max(queue, now) + gather
    for layer in range(layers):
        asked = queue = max(queue, now) + gather if layer + 1 < layers else queue
        ended = now + backward
        # The gradients of the layer before are in the queue in front of these weights.
        now = max(ended, asked) if layer + 1 < layers else ended
        queue = max(queue, ended) + reduce
    return max(now, queue) + root[1]


@pytest.mark.parametrize("bandwidth", [400.0, 60.0, 20.0, 2.0])
def test_weights_hide_behind_computation_like_in_an_event_queue(bandwidth, monkeypatch):
    """Links from fast to far too slow. Eight replicas, so attention sends nothing."""
    monkeypatch.setattr(
        calibration, "_non_attention_of", lambda *_: None
    )  # not from what was measured, which copies are no part of
    cluster = with_inner(
        collective_bandwidth_gbps=bandwidth,
        capacity_gbps=bandwidth,
        bandwidth_gbps=bandwidth,
        gpu_share=0.0,
    )
    found = step(
        "model=qwen3b",
        "seq=8k",
        "topology.context_parallel=1",
        "train.global_batch=8",
        cluster=cluster,
    )
    costs, non_attention, layers = found.attention.costs[VALUE], NonAttentionCost.of(found.plan), 36
    passes = found.attention.passes
    gather, reduce = Message.GATHER, Message.REDUCE
    of_layer, of_root = non_attention.of_layer, non_attention.of_root
    forward = passes["forward"].duration.value * 1e3 + sum(
        priced(non_attention.forward + copies(of_layer, {gather}), costs)
    )
    backward = passes["backward"].duration.value * 1e3 + sum(
        priced(non_attention.backward + copies(of_layer, {gather, reduce}), costs)
    )
    backward += sum(priced(non_attention.recomputed, costs))
    us = [
        costs.collective(False, 8, 8, int(collectives[message].received))[0]
        for collectives in (of_layer, of_root)
        for message in (gather, reduce)
    ]
    expected = _played(forward, backward, us[0], us[1], (us[2], us[3]), layers) - layers * (
        forward + backward
    )
    assert found.step.parts["weights"] * 1e6 == pytest.approx(expected, rel=1e-6)
    assert (found.step.parts["weights"] > 0.5 * found.step.seconds.value) == (bandwidth < 50)


def test_steps_accumulate_and_slow_ranks_delay_everybody():
    words = ("model=qwen3b", "seq=32k", "topology.context_parallel=4")
    one, four = (step(*words, f"train.global_batch={n}").step for n in (2, 8))
    once = one.parts["optimizer"] + 0.010
    assert four.seconds.value - once == pytest.approx(4 * (one.seconds.value - once), rel=1e-6)
    assert four.plan.micro_batches == 4
    slow = step(*words, "train.global_batch=2", slow={1: 1.5}).step
    assert slow.parts["matrices"] == pytest.approx(1.5 * one.parts["matrices"])
    assert slow.seconds.value > 1.3 * one.seconds.value


@pytest.mark.parametrize(("workers", "ratio"), [(1, 1.20), (2, 1.16)])
def test_fp8_is_as_much_faster_as_measured_and_computes_as_much(workers, ratio):
    """Sparse steps of 128K on H200s (docs/benchmarks.md)."""
    words = ("model=qwen3b", "seq=128k", f"topology.workers={workers}", "train.keep_mlp=8")
    bf16, fp8, every = (
        step(*words, f"train.fp8={kind}", workers=workers, pairs=SPARSE).step
        for kind in ("none", "mlp", "all")
    )
    assert bf16.seconds.value / fp8.seconds.value == pytest.approx(ratio, rel=0.03)
    # q, k, v and o are a tenth of a layer's products.
    assert 1.01 < fp8.seconds.value / every.seconds.value < 1.05
    assert every.flop == fp8.flop == bf16.flop


def test_spared_flop_take_no_time():
    costs = step("model=qwen3b", "seq=8k").attention.costs[VALUE]
    spared = priced(ComputeCost(flop=8e12, spared=2e12).scaled(0.5), costs)
    assert spared.matrices == priced(ComputeCost(flop=3e12), costs).matrices > 0


# Whole steps measured on one host of H200s (README.md): none of them, nor any other whole step, is
# in a constant or a calibration.
MEASURED = [
    (["seq=32k"], 1, "striped", "all_gather", DENSE, 2.18),
    (["seq=128k"], 4, "zigzag", "all_gather", DENSE, 5.12),
    (["seq=128k"], 4, "striped", "all_gather", DENSE, 5.28),
    (["seq=128k"], 4, "striped", "ring", DENSE, 5.30),
    (["seq=256k"], 4, "striped", "all_gather", DENSE, 18.06),
    (["seq=256k"], 4, "zigzag", "all_gather", DENSE, 17.1),
    (["seq=256k"], 4, "striped", "all_gather", SPARSE, 3.95),
    (["seq=256k", "topology.gpus_per_node=2"], 4, "striped", "hierarchical_ring", SPARSE, 4.02),
    (["seq=512k", "train.activation_checkpoint=full"], 4, "striped", "all_gather", SPARSE, 10.93),
]


@pytest.mark.parametrize(("words", "workers", "layout", "exchange", "pairs", "seconds"), MEASURED)
def test_measured_steps_lie_within_the_bounds(words, workers, layout, exchange, pairs, seconds):
    found = step(
        "model=qwen3b", *words, workers=workers, layout=layout, exchange=exchange, pairs=pairs
    ).step.seconds
    assert found.low < seconds < found.high
    assert found.value == pytest.approx(seconds, rel=0.105)


def test_weights_get_the_bandwidth_that_attention_leaves():
    outer, inner = (
        MessageCost(us=30.0, busy=20.0, outer=True),
        MessageCost(us=30.0, busy=20.0, outer=False),
    )
    assert overlapped_us([outer], 100.0, (0.0, 0.0), VALUE) == 30
    assert overlapped_us([outer], 100.0, (90.0, 0.0), VALUE) == 30, "another link"
    assert overlapped_us([outer], 100.0, (0.0, 60.0), VALUE) == pytest.approx(50)
    assert overlapped_us([outer], 100.0, (0.0, 60.0), LOW) == 30
    assert overlapped_us([inner], 100.0, (60.0, 0.0), HIGH) == pytest.approx(50)
    # Half of the link for 40 us does 20 of the 30 us; the others come after it.
    assert overlapped_us([MessageCost(30.0, 30.0)], 40.0, (20.0, 0.0), VALUE) == pytest.approx(50)
    assert overlapped_us([outer, outer], 10.0, (0.0, 10.0), VALUE) == pytest.approx(70), (
        "nothing is left"
    )
    assert overlapped_us([MessageCost(0.0, 0.0)], 10.0, (0.0, 0.0), VALUE) == 0


def test_a_tiled_layer_is_measured_at_its_tile_unless_a_tile_is_launch_bound():
    config = compose(["model=qwen3b", "seq=128k", "train.tile_mib=0"])
    cost = NonAttentionCost.of(plan_on(load_cluster("h200_1x8"), config, workers=4))
    layer, tokens = "forward", 32768
    assert cost.tokens == tokens
    for rows, size in ((tokens, tokens), (8192, 8192), (512, DEVICE_ROWS)):
        tiled = dataclasses.replace(cost, rows=rows)
        assert tiled.size(layer) == size
        assert tiled.size(LOSS) == tokens


def test_casts_move_what_they_read_and_write():
    """In elements: 1.5 per cast of an activation, and 2.5 per weight, whose scale comes first."""
    tokens, c, i, heads, keys = 32768, 2048, 11008, 2048, 512
    none, mlp, every = (
        NonAttentionCost.of(
            plan_on(
                load_cluster("h200_1x8"),
                compose(["model=qwen3b", "seq=128k", f"train.fp8={kind}", "train.keep_mlp=36"]),
                workers=4,
            )
        )
        for kind in ("none", "mlp", "all")
    )

    def more(part: str, fewer: NonAttentionCost, many: NonAttentionCost) -> float:
        return (getattr(many, part).moved - getattr(fewer, part).moved) / 2

    # Gate and up are kept in half an element each, and the input of down spares half of one.
    assert more("forward", none, mlp) == tokens * (0.5 * i - 0.5 * c) + 2.5 * 3 * c * i
    assert more("recomputed", none, mlp) == 0
    assert more("backward", none, mlp) == 1.5 * tokens * c + 2.5 * 3 * c * i
    weights = 2.5 * c * (2 * heads + keys)
    assert more("forward", mlp, every) == tokens * (1.5 * heads - 0.5 * c) + weights
    assert more("recomputed", mlp, every) == -0.5 * tokens * c + 2.5 * c * (heads + keys)
    casts = tokens * (1.5 * (c + heads + keys) + 2 * c)
    assert more("backward", mlp, every) == casts + weights
