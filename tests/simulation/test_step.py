"""Whole steps: what they compute is what training counts, what they hold is what the dry run says, and weights hide as FSDP2's do."""

from __future__ import annotations

import dataclasses

import pytest

from mtrain_cli.config.compose import compose
from mtrain_cli.simulation.calibration import HIGH, LOW, VALUE
from mtrain_cli.simulation.cluster import Cluster, Constant, load_cluster
from mtrain_cli.simulation.rest import Rest, priced
from mtrain_cli.simulation.scenario import Outcome, Pairs, Scenario, capability, evaluate, plan_on
from mtrain_cli.simulation.step import Transfer, beside
from mtrain_cli.simulation.timeline import Conditions
from mtrain_cli.training.dry_run import plan
from mtrain_cli.training.flops import causal_pairs, flops_per_token

H200 = load_cluster("h200_1x8")
SPARSE = Pairs("uniform", 0.05, 2048)
DENSE = Pairs("dense")


def step(
    *words: str, cluster: Cluster = H200, workers: int = 8, pairs: Pairs = DENSE, conditions: Conditions | None = None, **more
) -> Outcome:
    layout, exchange = more.pop("layout", "striped"), more.pop("exchange", "all_gather")
    config = compose([*words, *pairs.sparsity()])
    scenario = Scenario(config, pairs.problem(config), conditions=conditions or Conditions())
    return evaluate(cluster, scenario, plan_on(cluster, config, workers=workers, layout=layout, exchange=exchange), **more)


@pytest.mark.parametrize(
    "words",
    [
        ["model=qwen3b", "seq=256k", "topology.exchange=ring"],
        ["model=llama8b", "seq=128k", "topology.exchange=all_gather", "train.activation_checkpoint=full", "topology.layout=zigzag"],
        ["model=qwen3b", "seq=64k", "topology.context_parallel=4", "train.global_batch=4", "train.activation_checkpoint=none"],
        ["model=qwen3b", "seq=512k", "sparsity=vertical_slash", "sparsity.max_bars=2048", "topology.gpus_per_node=4"],
        ["model=qwen3b", "seq=256k", "sparsity=moba", "topology.exchange=hierarchical_ring", "topology.gpus_per_node=2"],
    ],
)
def test_memory_is_that_of_the_dry_run(words):
    config = compose(words)
    dry = plan(compose([*words, "topology.workers=8", "topology.device=cuda"]))
    mine = plan_on(H200, config, workers=8)
    assert mine.kernel == dry.kernel == "flash4"
    assert mine.memory == dry.memory
    assert (mine.exchange.label, mine.moved, mine.micro_batches) == (dry.exchange.label, dry.moved, dry.micro_batches)


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_products_are_those_that_training_counts(kind):
    words = ["model=qwen3b", "seq=100k", f"train.activation_checkpoint={kind}", "train.global_batch=4", "topology.context_parallel=4"]
    found = plan_on(H200, compose(words), workers=8)
    rest, model = Rest.of(found), found.config.model
    layer = rest.forward.flop + rest.recomputed.flop + rest.backward.flop
    mine = (layer * model.num_layers + rest.loss.flop) * found.environment.cp
    padded = found.layout.padded_seq
    both = flops_per_token(model, found.config.seq, recomputed=kind != "none", padded_seq=padded).executed * found.config.seq
    attention = 14 * model.num_layers * model.num_heads * model.head_dim * causal_pairs(found.config.seq)
    assert mine == pytest.approx(both - attention, rel=1e-9)
    arriving = model.num_layers * (2 * rest.gather + rest.reduce) + rest.root_gather + rest.root_reduce
    assert arriving * found.micro_batches == pytest.approx(found.moved.weights, rel=1e-6)


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
    assert found.days(1e9).value * 86400 == pytest.approx(1e9 / tokens / workers)
    assert found.dollars(1e9, 2.0).value == pytest.approx(found.days(1e9).value * 24 * workers * 2)
    assert found.dollars(1e9, 2.0).low < found.dollars(1e9, 2.0).value < found.dollars(1e9, 2.0).high


def test_attention_says_for_how_long_it_fills_links():
    found = step("model=qwen3b", "seq=64k", exchange="ring", bounds=False).attention
    hop = 8192 * 2 * 2 * 128 * 2  # bytes: tokens, key and value, heads, head_dim, bfloat16
    inner, outer = found.passes["forward"].carried
    assert (inner, outer) == (pytest.approx(7 * hop / 450e9 * 1e3), 0)


def test_every_setting_of_the_topology_counts():
    found = step("model=qwen3b", "seq=8k", "topology.prefetch=2", "topology.circulates=queries", exchange="ring", bounds=False)
    assert found.attention.exchange == found.plan.exchange.label == "ring (2 hops ahead, queries circulate in backward)"


def with_inner(**constants: float) -> Cluster:
    changed = {name: Constant(value, "guess", "", value, value) for name, value in constants.items()}
    return dataclasses.replace(H200, inner=dataclasses.replace(H200.inner, **changed))


def _played(forward: float, backward: float, gather: float, reduce: float, root: tuple[float, float], layers: int) -> float:
    """us of all layers, event by event: one queue of collectives, one stream that computes; the next layer's weights are asked for when a
    layer begins, gradients are sent when it has ended.
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
def test_weights_hide_behind_computation(bandwidth):
    """Against events of a queue, with links from fast to far too slow. Eight replicas: attention sends nothing."""
    cluster = with_inner(collective_bandwidth_gbps=bandwidth, capacity_gbps=bandwidth, bandwidth_gbps=bandwidth, gpu_share=0.0)
    found = step("model=qwen3b", "seq=8k", "topology.context_parallel=1", "train.global_batch=8", cluster=cluster)
    costs, rest, layers = found.attention.costs[VALUE], Rest.of(found.plan), 36
    passes = found.attention.passes
    forward = passes["forward"].duration.value * 1e3 + priced(rest.forward, costs).us
    backward = passes["backward"].duration.value * 1e3 + priced(rest.backward, costs).us + priced(rest.recomputed, costs).us
    us = [costs.collective(False, 8, 8, int(size))[0] for size in (rest.gather, rest.reduce, rest.root_gather, rest.root_reduce)]
    expected = _played(forward, backward, us[0], us[1], (us[2], us[3]), layers) - layers * (forward + backward)
    assert found.step.parts["weights"] * 1e6 == pytest.approx(expected, rel=1e-6)
    assert (found.step.parts["weights"] > 0.5 * found.step.seconds.value) == (bandwidth < 50)


def test_weights_get_what_attention_leaves_of_a_link():
    outer, inner = Transfer(us=30.0, busy=20.0, outer=True), Transfer(us=30.0, busy=20.0, outer=False)
    assert beside([outer], 100.0, (0.0, 0.0), VALUE) == 30
    assert beside([outer], 100.0, (90.0, 0.0), VALUE) == 30, "another link"
    assert beside([outer], 100.0, (0.0, 60.0), VALUE) == pytest.approx(50)
    assert beside([outer], 100.0, (0.0, 60.0), LOW) == 30
    assert beside([inner], 100.0, (60.0, 0.0), HIGH) == pytest.approx(50)
    # Half of the link for 40 us does 20 of the 30 us; the others come after it.
    assert beside([Transfer(30.0, 30.0, outer=False)], 40.0, (20.0, 0.0), VALUE) == pytest.approx(50)
    assert beside([outer, outer], 10.0, (0.0, 10.0), VALUE) == pytest.approx(70), "nothing is left"
    assert beside([Transfer(0.0, 0.0, outer=False)], 10.0, (0.0, 0.0), VALUE) == 0


def test_steps_accumulate_and_slow_ranks_hold_everybody():
    words = ("model=qwen3b", "seq=32k", "topology.context_parallel=4")
    one, four = (step(*words, f"train.global_batch={n}").step for n in (2, 8))
    once = one.parts["optimizer"] + 0.010
    assert four.seconds.value - once == pytest.approx(4 * (one.seconds.value - once), rel=1e-6)
    assert four.plan.micro_batches == 4
    slow = step(*words, "train.global_batch=2", conditions=Conditions(slow={1: 1.5})).step
    assert slow.parts["matrices"] == pytest.approx(1.5 * one.parts["matrices"])
    assert slow.seconds.value > 1.3 * one.seconds.value


def test_recomputation_trades_time_for_memory():
    none, selective, full = (
        step("model=qwen3b", "seq=128k", f"train.activation_checkpoint={k}").step for k in ("none", "selective", "full")
    )
    assert none.seconds.value < selective.seconds.value < full.seconds.value
    assert none.gib > selective.gib > full.gib
    assert full.parts["attention"] > 1.2 * selective.parts["attention"] == pytest.approx(1.2 * none.parts["attention"])
    assert none.parts["recomputed"] == 0


# Whole steps measured on one host of H200s (README.md): none of them, nor any other whole step, is in a constant or a calibration.
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
    found = step("model=qwen3b", *words, workers=workers, layout=layout, exchange=exchange, pairs=pairs).step.seconds
    assert found.low < seconds < found.high
    assert found.value == pytest.approx(seconds, rel=0.105)


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB", (8, 0)), ("NVIDIA H100 80GB HBM3", (9, 0)), ("NVIDIA GH200 480GB", (9, 0)), ("NVIDIA H20", (9, 0)),
        ("NVIDIA B200", (10, 0)), ("NVIDIA GB200", (10, 0)), ("NVIDIA A800-SXM4-80GB", (8, 0)), ("unheard of", (8, 0)),
    ],
)  # fmt: skip
def test_capability_by_name(gpu, expected):
    assert capability(gpu) == expected
