"""Prices of messages by hand: latency + bytes / bandwidth, and the network cards of a node."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import yaml
from slow_cases import mostly_slow

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import Cluster, Constant, Link, load_cluster, shipped
from mtrain_cli.parallel.lowering import Traits, lower
from mtrain_cli.parallel.program import ShardSizes
from mtrain_cli.parallel.schedule import KV, UNSCHEDULED, ScheduleOptions, make_schedule
from mtrain_cli.simulation.calibration import HIGH, VALUE, Curve, KernelCurves
from mtrain_cli.simulation.costs import Costs, LayerPrices
from mtrain_cli.simulation.prediction import predict
from mtrain_cli.simulation.scenario import PairSource
from mtrain_cli.simulation.spmd_schedule import SpmdSchedule
from mtrain_cli.simulation.what_if import ReplaySetup
from mtrain_cli.simulation.work_counts import StepWork
from mtrain_extras.bench.link_fit import (
    GATHER,
    HOP,
    INNER,
    OUTER,
    SCATTER,
    LinkTime,
    MeasuredMachine,
    cluster_document,
)

MACHINE = MeasuredMachine(
    "NVIDIA H200", 989.0, "datasheet", 760.0, 139.8, 4200.0, 3600.0, (3.9, 4.2, 5.5)
)


# Kernel, form, direction, fixed ms, ms per TFLOP, ms per TFLOP of columns, error and points.
CURVE = ("flash4", "sparse", "forward", 0.1, 2.0, 4.0, 0.0, 9)


def costs(cluster, bound: str = VALUE) -> Costs:
    spmd = SpmdSchedule.of(make_schedule("ring", ScheduleOptions(2, 2)))
    return Costs(cluster, KernelCurves({}, ()), ShardSizes(128, 4, 2, 64, 2), spmd, 64, bound=bound)


def measured(ranks: int, tmp_path):
    """A cluster file whose collectives took 60 us over this many ranks."""
    times = [
        LinkTime(link, what, size, ranks if what != HOP else 2, us, us, us)
        for link in (INNER, OUTER)
        for what in (HOP, GATHER, SCATTER)
        for size in (1 << 12, 1 << 20, 1 << 26)
        for us in [60 + size / 2e5]
    ]
    path = tmp_path / "mine.yaml"
    path.write_text(
        yaml.safe_dump(
            cluster_document("mine", 8, 8, MACHINE, times, measured_ranks=64, virtual=False)
        )
    )
    return load_cluster(str(path))


def test_the_measured_ranks_take_the_measured_time(tmp_path):
    for ranks, used, expected in ((16, 16, 60), (16, 31, 120), (16, 9, 60), (2, 16, 15 * 60)):
        cluster = measured(ranks, tmp_path)
        assert cluster.outer.collective_ranks.value == cluster.inner.collective_ranks.value == ranks
        us, _ = costs(cluster).collective(False, used, 8, 0)
        assert us == pytest.approx(expected, rel=1e-3), (ranks, used)
    inner = measured(2, tmp_path)
    assert costs(inner).collective(False, 8, 8, 0)[0] == pytest.approx(60, rel=1e-3), "launches"
    assert costs(inner, HIGH).collective(False, 8, 8, 0)[0] == pytest.approx(7 * 60, rel=1e-2)
    assert costs(inner, HIGH).collective(True, 8, 8, 0)[0] == pytest.approx(60, rel=1e-2), (
        "an all-to-all is no ring"
    )


def test_files_without_collective_ranks_mean_eight():
    for name in shipped():
        assert load_cluster(name).inner.collective_ranks.value == 8
    a100 = load_cluster("a100_4x8")
    assert a100.outer.collective_ranks.source == "guess"
    latency = a100.outer.collective_latency_us.value
    assert costs(a100).collective(False, 15, 8, 0)[0] == pytest.approx(2 * latency)
    alone = replace(a100, outer=replace(a100.outer, collective_ranks=Constant.of(1, "measured")))
    assert costs(alone).collective(False, 3, 2, 0)[0] == pytest.approx(2 * latency), (
        "one rank is no ring"
    )


def link(shared_by: int = 1, **constants: float) -> Link:
    exact = {name: Constant.of(value, "measured") for name, value in constants.items()}
    one = Constant.of(shared_by, "measured", low=shared_by, high=shared_by)
    return Link(collective_ranks=Constant.of(8, "measured"), shared_by=one, **exact)


def two_nodes(per_node: int, shared_by: int = 1) -> Cluster:
    """Links inside a node move 1e5 bytes/us, links between nodes 1e4; a collective half of each."""
    inner = link(
        latency_us=2,
        bandwidth_gbps=100,
        capacity_gbps=200,
        collective_latency_us=20,
        collective_bandwidth_gbps=50,
        gpu_share=0.1,
    )
    outer = link(
        shared_by,
        latency_us=5,
        bandwidth_gbps=10,
        capacity_gbps=20,
        collective_latency_us=30,
        collective_bandwidth_gbps=5,
        gpu_share=0.3,
    )
    made = load_cluster("a100_4x8")
    return replace(made, nodes=2, gpus_per_node=per_node, inner=inner, outer=outer)


def hop(cluster: Cluster, **options: int):
    """Return the price of 1e6 bytes in the first hop of a ring on all GPUs."""
    workers = cluster.nodes * cluster.gpus_per_node
    ring = make_schedule("ring", ScheduleOptions(workers, cluster.gpus_per_node, **options))
    priced = replace(costs(cluster), spmd=SpmdSchedule.of(ring))
    moves = priced.spmd.transfers("forward").values()
    return priced.message(next(m for m in moves if m.first.payload == KV), 10**6)


def test_a_hop_takes_its_latency_and_its_bytes_over_the_bandwidth():
    """Ranks 0 and 3 receive from the other node."""
    found = hop(two_nodes(3))
    assert found.outer.tolist() == [True, False, False] * 2
    # On the link: 1e6 bytes / 2e5 per us inside a node, / 2e4 per us between nodes.
    assert found.busy.tolist() == [50, 5, 5] * 2
    # All: latency + bytes / bandwidth.
    assert (found.latency + found.busy).tolist() == [5 + 100, 2 + 10, 2 + 10] * 2


def test_a_rank_loses_the_larger_share_of_what_it_sends_and_receives():
    """Ranks 2 and 5 receive inside their node, and send to the other node."""
    assert hop(two_nodes(3)).share.tolist() == [0.3, 0.1, 0.3] * 2


def test_messages_of_a_network_card_divide_its_capacity_at_both_ends():
    """Local ranks 3, 4 and 5 of six send to ranks 0, 1 and 2 of the other node.

    Two GPUs share a card: 4 and 5 send with one, and 0 and 1 receive with one.
    """
    shared = hop(two_nodes(6, shared_by=2), heads=3)
    assert shared.outer.tolist() == ([True] * 3 + [False] * 3) * 2
    # Two messages of 1e6 bytes pass the card, at 2e4 bytes/us.
    assert shared.busy[:3].tolist() == [100] * 3
    alone = hop(two_nodes(6), heads=3)
    assert alone.busy[:3].tolist() == [50] * 3


def test_an_all_to_all_sends_over_the_network_what_other_nodes_receive():
    """Each of 8 ranks sends 7e6 bytes to 7 others: 4e6 to the other node, 3e6 inside its own."""
    priced = costs(two_nodes(4))
    assert priced.collective(True, 8, 4, 7 * 10**6) == pytest.approx((30 + 4e6 / 5e3, 4e6 / 20e3))
    # Two GPUs share a card.
    shared = costs(two_nodes(4, shared_by=2))
    assert shared.collective(True, 8, 4, 7 * 10**6) == pytest.approx(
        (30 + 2 * 4e6 / 5e3, 2 * 4e6 / 20e3)
    )
    assert priced.collective(True, 4, 4, 3 * 10**6) == pytest.approx((20 + 3e6 / 5e4, 3e6 / 2e5))


@pytest.mark.parametrize("factor", [1.2, 0.1])
def test_the_bytes_of_an_all_to_all_take_longer_by_the_factor_of_their_link(factor):
    """Each of 8 ranks sends 4e6 bytes to the other node and 3e6 inside its own."""
    cluster, times = two_nodes(4), Constant.of(factor, "measured")
    across, inside = factor * 4e6 / 5e3, factor * 3e6 / 5e4
    outer = costs(replace(cluster, outer=replace(cluster.outer, all_to_all_factor=times)))
    us, busy = outer.collective(True, 8, 4, 7 * 10**6)
    # The messages cannot keep a card busy for longer than they take.
    assert (us, busy) == pytest.approx((30 + across, min(across, 4e6 / 20e3)))
    inner = costs(replace(cluster, inner=replace(cluster.inner, all_to_all_factor=times)))
    us, busy = inner.collective(True, 4, 4, 3 * 10**6)
    assert (us, busy) == pytest.approx((20 + inside, min(inside, 3e6 / 2e5)))
    assert outer.collective(False, 8, 4, 10**6) == costs(cluster).collective(False, 8, 4, 10**6)


def test_the_busiest_network_card_carries_its_rows_of_a_cast_that_cross():
    """Of 4 + 4 ranks, each sends 1e6 bytes; 2e6 pass the busiest card."""
    schedule = make_schedule("group_cast", ScheduleOptions(8, 4))
    priced = replace(costs(two_nodes(4)), spmd=SpmdSchedule.of(schedule))
    (moves,) = priced.spmd.transfers("forward").values()
    found = priced.message(moves, 10**6, crossing=2e6)
    assert found.busy.tolist() == [2e6 / 20e3] * 8
    assert (found.latency + found.busy).tolist() == [5 + 2e6 / 20e3] * 8
    # If few rows cross, the links inside a node decide.
    few = priced.message(moves, 10**6, crossing=4.0)
    assert (few.latency + few.busy).tolist() == [5 + 1e6 / 200e3] * 8


@pytest.mark.parametrize("shared_by", [1, 2])
def test_each_cast_has_rows_that_cross_for_each_number_of_gpus_that_share_a_card(shared_by):
    """Two casts in forward, and one in backward because of other stages."""
    options = ScheduleOptions(8, 4, stages=2, stages_backward=0)
    schedule = make_schedule("group_cast", options)
    shares = (Fraction(3), Fraction(3)), (Fraction(4), Fraction(4)), (Fraction(7), Fraction(7))
    base = replace(costs(two_nodes(4, shared_by)), spmd=SpmdSchedule.of(schedule))
    crossing = tuple(tuple(Fraction(each * n) for n in (1, 3, 4, 6)) for each in (1, 2, 21))
    sizes = replace(base.sizes, casts=shares, crossing=crossing)
    prices = object.__new__(LayerPrices)  # of messages only
    prices.costs = replace(base, sizes=sizes)
    shard = 2 * 128 * 2 * 64
    for backward, way, expected in ((False, "forward", [2, 4]), (True, "backward", [42, 84])):
        moves = prices.costs.spmd.transfers(way)
        posts = lower(schedule, 0, backward=backward).posts
        found = [prices.message(moves[post.transfer.number], post).busy[0] for post in posts]
        card = {1: 1, 2: 3}[shared_by] * shard / 20e3
        assert found == pytest.approx([n * card for n in expected]), way


def test_a_sum_takes_longer_by_the_factor_of_its_links():
    schedule = make_schedule("all_gather", ScheduleOptions(8, 4))
    cluster = two_nodes(4)
    slow = replace(cluster.outer, reduce_factor=Constant.of(2, "measured"))
    sums, gathers = (
        next(m for m in SpmdSchedule.of(schedule).transfers(way).values() if m.first.kind == kind)
        for way, kind in (("backward", "reduce_scatter"), ("forward", "all_gather"))
    )
    for message, factor in ((sums, 2), (gathers, 1)):
        each = [
            replace(costs(replace(cluster, outer=link)), spmd=SpmdSchedule.of(schedule))
            for link in (cluster.outer, slow)
        ]
        plain, slower = (one.message(message, 10**6) for one in each)
        np.testing.assert_allclose(
            slower.latency + slower.busy, factor * (plain.latency + plain.busy)
        )


@pytest.mark.parametrize(
    ("workers", "tokens_each", "us"),
    [
        (1, 20_000, 800 + 7.5e-3 * 20_000),  # 950
        (2, 20_000, 1050),  # several GPUs take at least this long
        (4, 20_000, 1050),
        (2, 40_000, 800 + 7.5e-3 * 40_000),  # 1100
    ],
)
def test_an_index_takes_launches_and_time_per_token(workers, tokens_each, us):
    cluster = load_cluster("h200_1x8")
    spmd = SpmdSchedule.of(make_schedule("ring", ScheduleOptions(workers, 8)))
    priced = replace(
        costs(cluster),
        spmd=spmd,
        sizes=ShardSizes(128, 16, 2, 64, 2),
        estimated=workers * tokens_each,
    )
    assert priced.index_us() == pytest.approx(us)
    assert replace(priced, estimated=0).index_us() == 0


def test_the_scores_of_block_lists_take_their_time_on_each_worker():
    """The measured size: 16 heads of 128 dimensions and 128K tokens on one H200."""
    scores = 2 * 16 * (1 << 17) ** 2 / 2
    spmd = [SpmdSchedule.of(make_schedule("ring", ScheduleOptions(n, 8))) for n in (1, 4)]
    alone, together = (
        replace(costs(load_cluster("h200_1x8")), spmd=one, estimated=4096) for one in spmd
    )
    added = [replace(one, scores=scores).index_us() - one.index_us() for one in (alone, together)]
    assert added == pytest.approx([140_000, 140_000 / 4], rel=0.01)
    on_a100 = replace(alone, cluster=load_cluster("a100_4x8"))
    slower = replace(on_a100, scores=scores).index_us() - on_a100.index_us()
    assert slower == pytest.approx(140_000 * 989 / 312, rel=0.01)


# Tokens and workers; milliseconds of attention on all workers, and of the index with one update on
# one worker (docs/sparse-attention.md, 16 heads and 2 KV heads of 128).
BLOCK_LISTS = [
    ("block_topk", "128k", 1, 130, 7.7 + 2.9),
    ("block_topk", "512k", 2, 2089, 122 + 9.1),
    ("fixed", "128k", 1, 102, 0),
    ("fixed", "512k", 2, 1696, 0),
]


@mostly_slow("pattern, seq, workers, attention, index", BLOCK_LISTS, keep=(0, 2, 3))
def test_attention_and_index_of_block_lists_take_what_was_measured(
    pattern, seq, workers, attention, index
):
    words = ["model=qwen3b", f"seq={seq}", f"sparsity={pattern}", "sparsity.density=0.15"]
    words += ["sparsity.columns=0"] if pattern == "fixed" else []
    config = compose([*words, "sparsity.block=64"])
    found = predict(
        load_cluster("h200_1x8"),
        PairSource.of(config).problem(config),
        ReplaySetup("striped", "all_gather", workers, workers),
        kernel="triton",
        bounds=False,
    )
    spent = [one.spent for one in found.passes.values()]
    assert workers * sum(ms["attention"] for ms in spent) == pytest.approx(attention, rel=0.05)
    assert workers * sum(ms["index"] for ms in spent) == pytest.approx(index, rel=0.1)


def test_kernels_compute_the_pairs_that_gates_hide():
    ring = make_schedule("ring", ScheduleOptions(2, 2))
    priced = replace(
        costs(two_nodes(4)),
        kernels=KernelCurves({"forward": Curve(*CURVE)}, ()),
        spmd=SpmdSchedule.of(ring),
    )
    seen, hidden, none = np.full((2, 2), 10**9), np.full((2, 2), 10**8), np.zeros(2, np.int64)

    def attention(pairs, hidden=None):
        work = StepWork("forward", pairs, pairs, none, none, None, hidden)
        return LayerPrices(priced, {"forward": work}, "forward").attention(0).tolist()

    assert attention(seen, hidden) == attention(seen + hidden)
    assert attention(seen, hidden) > attention(seen)


def test_a_profile_records_the_payload_of_an_all_reduce():
    """Four ranks sum 128 columns of keys and values of 4 heads; each sends 2 * 3 / 4 of them."""
    ring = make_schedule("ring", ScheduleOptions(4, 4))
    priced = replace(
        costs(two_nodes(4)),
        kernels=KernelCurves({"forward": Curve(*CURVE)}, ()),
        spmd=SpmdSchedule.of(ring),
        sizes=ShardSizes(100, 4, 2, 64, 2, columns=100, column_width=128),
    )
    none, few = np.zeros((4, 4), np.int64), np.zeros(4, np.int64)
    prices = LayerPrices(priced, {"forward": StepWork("forward", none, none, few, few)}, "forward")
    posts = list(lower(ring, 0, traits=Traits(columns=True)).posts)
    (whole,) = (post for post in posts if post.transfer.number == UNSCHEDULED)
    found = prices.message(priced.spmd.column_sum(whole.transfer), whole)
    payload = 2 * 4 * 128 * 64 * 2
    assert found.size == payload
    assert (found.latency + found.busy).tolist() == pytest.approx([20 + 1.5 * payload / 5e4] * 4)
    # A hop sends what it records: 100 tokens of two heads.
    kv = next(post for post in posts if post.transfer.payload == KV)
    transfer = priced.spmd.transfers("forward")[kv.transfer.number]
    assert prices.message(transfer, kv).size == 2 * 100 * 2 * 64 * 2


def test_each_stripe_costs_its_launches_and_the_sum_of_its_gradients():
    """What `attention.sdpa` does beside its calls, by hand: 128 tokens in stripes of 32."""
    cluster = load_cluster("a100_4x8")
    pairs = np.array([[0, 4000], [64, 0]])
    assert not costs(cluster).stripes_us(pairs, "backward").any(), "one call computes a step"
    one = replace(costs(cluster), stripe=32)
    forward, backward = (one.stripes_us(pairs, name) for name in ("forward", "backward"))
    launch, memory = cluster.gpu.launch_us.value, cluster.gpu.hbm_gbps.value * 1e3
    assert forward.tolist() == [[0, 4 * 3 * launch], [4 * 3 * launch, 0]]
    # 4,000 pairs in stripes of 32: 125 keys over calls and heads, of 64 numbers for k and for v.
    # The kernel writes 2 bytes each; adding reads 2 and 4 bytes and writes 4.
    moved = 125 * 64 * 2 * (2 + 2 + 4 + 4)
    assert backward[0, 1] == pytest.approx(4 * 8 * launch + moved / memory)


def test_the_price_of_stripes_agrees_with_the_one_measured_layout():
    """One H200 took 77 ms longer for 128 stripes than for whole intervals (worker-calls-h200)."""
    one = replace(costs(load_cluster("h200_1x8")), stripe=128, head_dim=128)
    us = one.stripes_us(np.array([[17_074_218_750]]), "backward")
    assert float(us[0, 0]) / 1e3 == pytest.approx(77.3, rel=0.3)
