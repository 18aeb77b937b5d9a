"""Every part of a small model's step from constants written out here: bytes, FLOP, messages."""

from __future__ import annotations

import dataclasses

import pytest

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import Cluster, Constant, load_cluster
from mtrain_cli.parallel.lowering import Traits, lower
from mtrain_cli.parallel.operations import Merge, Order
from mtrain_cli.parallel.program import ShardSizes
from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule
from mtrain_cli.records.index_file import RecordedSetup
from mtrain_cli.simulation.calibration import (
    ALONE_COLUMNS,
    DENSE,
    DIAGONALS,
    HIGH,
    LISTS,
    LOW,
    SPARSE,
    VALUE,
    Calibration,
    Curve,
    kernels_for,
)
from mtrain_cli.simulation.costs import Costs
from mtrain_cli.simulation.non_attention_cost import ComputeCost, priced
from mtrain_cli.simulation.predicted_step import PredictedStep
from mtrain_cli.simulation.prediction import AttentionWorkload, BoundedTime, predict
from mtrain_cli.simulation.scenario import (
    PairSource,
    PredictedScenario,
    Scenario,
    SyntheticIndex,
    evaluate,
    plan_on,
    with_step,
)
from mtrain_cli.simulation.spmd_schedule import SpmdSchedule
from mtrain_cli.simulation.what_if import ReplaySetup

pytestmark = pytest.mark.usefixtures("by_constants")
FORMS = (DENSE, SPARSE, LISTS, DIAGONALS, ALONE_COLUMNS)
H200 = load_cluster("h200_1x8")
WORDS = ("model=qwen3b", "model.num_layers=2", "seq=32k", "train.activation_checkpoint=selective")
# Of the cluster file: FLOP/s of matrix products, bytes/s of memory, and latency and bandwidth of
# collectives.
GEMM, MEMORY, LATENCY, RING, SHARE = 768e12, 4200e9, 79e-6, 322e9, 0.23
# Of qwen3b: hidden, queries, keys, MLP, vocabulary; weights of a layer's products, of a layer, and
# outside of them (tied embedding, norm).
C, A, K, INNER, V = 2048, 16 * 128, 2 * 128, 11008, 151936
PRODUCTS = 2 * C * A + 2 * C * K + 3 * C * INNER


def scenario(*words: str, slow: dict[int, float] | None = None) -> Scenario:
    config = compose([*WORDS, *words])
    return Scenario(config, PairSource("dense").problem(config), slow=slow or {})


def step(
    *words: str,
    workers: int = 2,
    cluster: Cluster = H200,
    slow: dict[int, float] | None = None,
    bounds: bool = False,
) -> PredictedScenario:
    asked = scenario(*words, slow=slow)
    return evaluate(
        cluster,
        asked,
        plan_on(cluster, asked.config, workers=workers, layout="striped", exchange="ring"),
        bounds=bounds,
    )


@pytest.fixture(scope="module")
def two(by_constants) -> PredictedScenario:  # noqa: ARG001 - used for what it does
    return step()


def test_every_part_of_a_step_by_hand(two):
    """Two layers, 32K tokens on two workers: 16K tokens, and half of every state, each."""
    config, found, tokens = two.plan.config, two.step, 32768 // 2
    model = config.model
    assert (
        model.hidden_size,
        model.num_heads * model.head_dim,
        model.num_kv_heads * model.head_dim,
    ) == (C, A, K)
    assert (model.intermediate_size, model.vocab_size) == (INNER, V)
    parts = found.parts
    assert parts["matrices"] == pytest.approx(2 * 6 * PRODUCTS * tokens / GEMM)
    # Projections of queries, keys and values, of the output, and two of the MLP's three.
    assert parts["recomputed"] == pytest.approx(2 * 2 * (PRODUCTS - C * INNER) * tokens / GEMM)
    layer, root = two.plan.parameters.layer, V * C + C
    shard = (2 * layer + root) / 2
    # Gradients are read for their norm, then scaled; AdamW moves seven float32 numbers. One number
    # is summed over the workers.
    assert parts["optimizer"] == pytest.approx(shard * (4 + 8 + 28) / MEMORY + LATENCY, rel=1e-5)
    rotated = 2 * (A + K)
    # Weights are cast, gathered, copied out, twice; gradients copied in and added to the shard.
    gathered, reduced = 2 * 2 * layer + (4 + 2) * layer / 2, (4 + 2) * layer + (8 + 4) * layer / 2
    numbers = (
        (9 * C + rotated + 3 * INNER)
        + (6 * C + rotated + 3 * INNER)
        + (15 * C + rotated + 5 * INNER)
    )
    assert parts["element-wise"] == pytest.approx(
        2 * (2 * tokens * numbers + 2 * gathered + reduced) / MEMORY
    )
    gather, reduce = (LATENCY + size * layer / 2 / RING for size in (2, 4))
    outside = 2 * LATENCY + (2 + 4) * root / 2 / RING
    # Alone: outside, the first gather of each pass, the last scatter. Hidden: a gather forward, one
    # backward, one scatter.
    assert found.hidden == pytest.approx(2 * gather + reduce)
    assert parts["weights"] == pytest.approx(outside + 2 * gather + reduce + SHARE * found.hidden)
    assert found.sent == pytest.approx(4 * 2 * layer / 2 + 2 * 4 * layer / 2 + (2 + 4) * root / 2)
    logits, head = tokens * V, V * C
    chunks = -(-4 * logits // (config.train.loss_chunk_mib << 20))
    moved = (20 + 2) * logits + 8 * head * chunks + (4 + 2) * head + 2 * (3 * head + 6 * tokens * C)
    moved += 2 * 2 * root + (4 + 2) * root / 2 + (4 + 2) * root + (8 + 4) * root / 2
    assert parts["loss"] == pytest.approx(6 * head * tokens / GEMM + moved / MEMORY)
    assert sum(parts.values()) == pytest.approx(found.seconds.value)


def test_what_changes_with_settings_by_hand(two):
    plain = two.step.parts
    rotated, tokens = 2 * (A + K), 32768 // 2
    numbers = (
        (9 * C + rotated + 3 * INNER)
        + (6 * C + rotated + 3 * INNER)
        + (15 * C + rotated + 5 * INNER)
    )
    eager = step("train.compile=false").step.parts
    assert eager["element-wise"] - plain["element-wise"] == pytest.approx(
        (2.8 - 1) * 2 * 2 * tokens * numbers / MEMORY
    )
    assert eager["matrices"] == pytest.approx(plain["matrices"])
    twice = step("train.global_batch=2").step
    assert twice.hidden == pytest.approx(2 * two.step.hidden)
    assert twice.parts["weights"] == pytest.approx(2 * plain["weights"])
    slow = step(slow={1: 1.5}).step.parts
    for name in ("matrices", "recomputed", "element-wise", "loss"):
        assert slow[name] == pytest.approx(1.5 * plain[name]), name


def spent(
    two: PredictedScenario, of: str, *, bounds: bool = False, carried: float = 0.0, **ms: float
) -> PredictedStep:
    """A step with more ms in a pass of attention, and with links that are full for this long."""
    passes = {}
    for name, found in two.attention.passes.items():
        more = ms if name == of else {}
        duration = BoundedTime(
            *(
                getattr(found.duration, bound) + sum(more.values())
                for bound in ("low", "value", "high")
            )
        )
        kinds = {kind: value + more.get(kind, 0.0) for kind, value in found.spent.items()}
        passes[name] = dataclasses.replace(
            found, duration=duration, spent=kinds, carried=(carried, 0.0)
        )
    return with_step(
        H200, scenario(), two.plan, dataclasses.replace(two.attention, passes=passes), bounds=bounds
    ).step


def test_time_of_attention_appears_under_its_name(two):
    """10 ms more in a pass of a layer are 20 ms in a step of two layers, under the right name."""
    plain = spent(two, "").parts
    where = {
        "late": "late",
        "columns": "attention",
        "attention": "attention",
        "merge": "merge and copies",
        "arrange": "merge and copies",
    }
    where |= {"index": "index", "gap": "host"}
    for of in ("forward", "backward"):
        for kind, part in where.items():
            found = spent(two, of, **{kind: 10.0}).parts
            assert {name: found[name] - plain[name] for name in plain} == pytest.approx(
                {name: 0.020 if name == part else 0.0 for name in plain}, abs=1e-9
            ), (of, kind)


def test_at_worst_weights_wait_for_the_messages_of_attention():
    """0.1 ms of messages a pass count once in forward and twice in backward: gather and scatter."""
    both = step(bounds=True)
    without, found = (spent(both, "", bounds=True, carried=ms).seconds for ms in (0.0, 0.1))
    assert found.high - without.high == pytest.approx(3 * 0.1e-3)
    assert (found.low, found.value) == (pytest.approx(without.low), pytest.approx(without.value))
    # Attention that is computed again beside a backward pass sends its messages there, too.
    full = step("train.activation_checkpoint=full", bounds=True)
    without, found = (spent(full, "", bounds=True, carried=ms).seconds for ms in (0.0, 0.1))
    assert found.high - without.high == pytest.approx((1 + 2 * 2) * 0.1e-3)


def constants(part, **values: float):
    return dataclasses.replace(
        part, **{name: Constant(value, "guess", "", value, value) for name, value in values.items()}
    )


def test_weights_cross_nodes_through_all_cards_of_a_node():
    """Two nodes of eight GPUs, two GPUs a card of 1 GB/s: four cards share the ring's traffic."""
    a100 = load_cluster("a100_4x8")
    outer = constants(
        a100.outer,
        collective_latency_us=0,
        collective_bandwidth_gbps=1,
        capacity_gbps=1,
        shared_by=2,
        gpu_share=0,
    )
    inner = constants(a100.inner, collective_latency_us=0)
    cluster = dataclasses.replace(a100, inner=inner, outer=outer)
    found = step(
        "topology.context_parallel=1",
        "seq=2k",
        "train.global_batch=16",
        workers=16,
        cluster=cluster,
    ).step
    assert found.sent > 1e8
    assert found.parts["weights"] + found.hidden == pytest.approx(found.sent / 4 / 1e9, rel=1e-4)


def costs(
    exchange: str, workers: int, cluster: Cluster = H200, bound: str = VALUE, **more
) -> Costs:
    spmd = SpmdSchedule.of(
        make_schedule(exchange, ScheduleOptions(workers, min(workers, cluster.gpus_per_node)))
    )
    kernels = kernels_for(cluster.gpu.name, 989e12, "triton", SPARSE)
    return Costs(
        cluster, kernels, ShardSizes(1 << 14, 16, 2, 128, 2), spmd, 128, bound=bound, **more
    )


def test_the_gpu_waits_for_a_host_that_launches_more_slowly():
    """5.4 us a launch, as the cluster file has it."""
    mine = costs("ring", 8)
    assert sum(priced(ComputeCost(launches=100), mine)) == pytest.approx(540)
    one = priced(ComputeCost(flop=768e6 * 200, moved=4200e3 * 100, launches=100), mine)
    assert (one.matrices, one.elements, one.host) == (
        pytest.approx(200),
        pytest.approx(100),
        pytest.approx(240),
    )
    assert priced(ComputeCost(flop=768e6 * 900, launches=100), mine).host == 0
    assert [
        dataclasses.replace(mine, sparse=sparse).host("step") for sparse in (False, True)
    ] == pytest.approx([6 * 5.4, 14 * 5.4])


def test_copies_and_sums_by_hand():
    """A rank has 16K tokens: rows of 16 heads, keys and values of two, each of 128 numbers."""
    rows, kv = (1 << 14) * 16 * 128, 2 * (1 << 14) * 2 * 128

    def us(moved: float) -> float:
        return pytest.approx(max(moved / 4200e3, 2.0))

    ring, gather = costs("ring", 8), costs("all_gather", 8)

    def merges(backward: bool = False) -> list[float]:
        operations = lower(ring.spmd.schedule, 0, backward=backward).operations
        return [ring.copy_us(op.moves) for op in operations if isinstance(op, Merge)]

    # Partial outputs are float32: read, added and written, beside what a kernel wrote in bfloat16.
    first, second, third, *_ = merges()
    assert first == 0
    assert second == us((4 + 4 + 2) * rows + (4 + 2) * rows)
    assert third == us((4 + 4 + 2) * rows)
    assert merges(backward=True)[2] == us((4 + 4 + 2) * rows + (4 + 2) * kv)
    assert merges(backward=True)[2] > 20
    # Keys and values of all eight workers are put in order: read and written.
    (order,) = (
        op.moves for op in lower(gather.spmd.schedule, 0).operations if isinstance(op, Order)
    )
    assert gather.copy_us(order) == us(2 * 2 * 8 * kv)


def test_single_columns_are_summed_over_all_workers():
    """KV of 128 columns of 16 heads; a ring sends 7/8 of them twice, in bfloat16 then float32."""
    found = {}
    for direction, each in (("forward", 2), ("backward", 4)):
        mine = costs("ring", 8)
        sizes = dataclasses.replace(mine.sizes, columns=100, column_width=128)
        mine = dataclasses.replace(mine, sizes=sizes)
        program = lower(
            mine.spmd.schedule, 0, backward=direction == "backward", traits=Traits(columns=True)
        )
        (post,) = (p for p in program.posts if p.transfer.payload == "columns")
        transfer = mine.spmd.column_sum(post.transfer)
        message = mine.message(transfer, mine.bytes_of(post.sends))
        size = 2 * 16 * 128 * 128 * each
        found[direction] = float((message.latency + message.busy)[0])
        assert found[direction] == pytest.approx(79 + 2 * 7 / 8 * size / 322e3)


def test_an_index_estimate_scales_with_heads_and_memory_bandwidth():
    """0.8 ms of launches are not scaled; 7.5 ns a token hold for 16 heads and 4200 GB/s."""

    def of(heads: int, cluster: Cluster = H200, **more) -> float:
        found = costs("ring", 1, cluster, estimated=1 << 20, **more)
        return dataclasses.replace(
            found, sizes=dataclasses.replace(found.sizes, heads=heads)
        ).index_us()

    each = 7.5e-3 * (1 << 20)
    assert of(16) == pytest.approx(800 + each)
    assert of(32) == pytest.approx(800 + 2 * each)
    assert of(16, load_cluster("a100_4x8")) == pytest.approx(800 + each * 4200 / 1555)
    assert of(16, bound=HIGH) == pytest.approx(1.5 * of(16))
    assert of(16, bound=HIGH, measured=False) == pytest.approx(3 * of(16))
    assert of(16, bound=LOW, measured=False) == pytest.approx(0.7 / 1.6 * of(16))


@pytest.mark.parametrize("skips", [True, False])
def test_a_kernel_that_does_not_skip_computes_all_pairs_of_the_mask(skips):
    """Without fixed times, a tenth of the pairs takes a tenth of the time, or all of it."""
    curves = tuple(
        Curve("sdpa", form, d, 0.0, 1.5, 1.5, 0.0, 3, skips=skips)
        for form in FORMS
        for d in ("forward", "backward")
    )
    own = Calibration("NVIDIA H200", curves, ("mine.json",))
    made = RecordedSetup(
        seq=8192,
        heads=4,
        kv_heads=2,
        head_dim=64,
        dtype_bytes=2,
        workers=4,
        per_node=4,
        layout="striped",
        exchange="ring",
    )
    masks, family = (SequenceMask.causal(8192, 8192),), SyntheticIndex(density=0.1, columns=0)
    quiet = dataclasses.replace(H200, inner=constants(H200.inner, gpu_share=0))
    for name, of in (("dense", None), ("sparse", family.index(0, 8192, 4))):
        problem = AttentionWorkload(
            made, masks, (0,), lambda _layer, of=of: of, name, estimated=False
        )
        found = predict(
            quiet,
            problem,
            ReplaySetup("striped", "ring", 4, 4),
            kernel="sdpa",
            calibration=own,
            bounds=False,
        )
        share = found.facts["density"] if skips else 1.0
        assert (found.facts["density"] < 0.2) == (of is not None)
        for direction, products in (("forward", 4), ("backward", 10)):
            flop = products * 64 * 4 * 8192 * 8193 / 2 / 4
            assert found.passes[direction].spent["attention"] == pytest.approx(
                1.5 * share * flop / 1e12, rel=1e-3
            ), (name, direction)
