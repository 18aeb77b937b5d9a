"""The closed form of a worker's memory equals the live bytes of training steps, in its parts."""

import dataclasses
from math import prod

import allocations
import gloo
import pytest
import torch

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import CHECKPOINTS
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.training.flops import layer_shapes, parameters, root_shapes
from mtrain_cli.training.memory import GIB, estimate_memory
from mtrain_cli.training.state_memory import sharded_numbers

BF16, FP32 = torch.bfloat16, torch.float32
BASE = ["seq=2k", "model.num_layers=3", "topology.block_size=64", "train.loss_chunk_mib=1"]
# An MLP so narrow that attention sets the peak.
ATTENTION = [*BASE, "model.intermediate_size=32"]


def with_checkpointing(kind, base=BASE, *more):
    return [*base, f"train.activation_checkpoint={kind}", *more]


OFFLOADED = "train.offload_activations=true"
QUERIES = ["topology.exchange=ring", "topology.circulates=queries"]
# Many layers, so that their activations dominate; a small vocabulary, so that the loss is small.
DEEP = [*BASE, "model.num_layers=12", "model.intermediate_size=128"]
FIVE_OFFLOADED = "train.offload_activations=5"  # of twelve
QUARTER = "train.checkpoint_keep=0.25"


ONE_WORKER = [
    (with_checkpointing("selective"), "all_gather", "flash4", BF16),
    (with_checkpointing("none"), "all_gather", "flash4", FP32),
    (with_checkpointing("full"), "all_gather", "flash4", BF16),
    (with_checkpointing("selective", ATTENTION), "all_gather", "sdpa", BF16),
    (
        with_checkpointing("full", [*BASE, "model.vocab_size=8192", "train.loss_chunk_mib=32"]),
        "all_gather",
        "flash4",
        FP32,
    ),
    (
        [*BASE, "train.shard=optimizer", "train.global_batch=2", "optim.offload=true"],
        "all_gather",
        "flash4",
        BF16,
    ),
    (with_checkpointing("selective", DEEP), "all_gather", "flash4", FP32),
    (with_checkpointing("sequence_selective", DEEP, QUARTER), "all_gather", "flash4", FP32),
    (with_checkpointing("selective", DEEP, OFFLOADED), "all_gather", "flash4", FP32),
    (with_checkpointing("sequence_selective", DEEP, OFFLOADED), "all_gather", "flash4", FP32),
    (with_checkpointing("full", DEEP, FIVE_OFFLOADED), "all_gather", "flash4", FP32),
    (with_checkpointing("selective", BASE, "train.tile_mib=1"), "all_gather", "flash4", FP32),
    (with_checkpointing("none", BASE, "train.tile_mib=1"), "all_gather", "flash4", FP32),
    (with_checkpointing("selective", BASE, "train.keep_mlp=true"), "all_gather", "flash4", FP32),
    (
        with_checkpointing("selective", BASE, "train.keep_mlp=2", "train.tile_mib=1"),
        "all_gather",
        "flash4",
        FP32,
    ),
    (with_checkpointing("full", BASE, "train.keep_mlp=1"), "all_gather", "flash4", FP32),
    (
        with_checkpointing("selective", BASE, "train.loss_gradients=recompute"),
        "all_gather",
        "flash4",
        FP32,
    ),
]
# Shapes at which weights, gradients and states dominate.
STATES = ["seq=1k", *BASE[1:], "model.num_layers=6", "model.vocab_size=1024"]
TWO_WORKERS = [
    (with_checkpointing("selective"), "all_gather", "flash4", BF16),
    # float32: the CPU's loss makes float32 copies of bfloat16 operands, a GPU's does not.
    (with_checkpointing("none", [*BASE, "model.qk_norm=true"]), "all_gather", "flash4", FP32),
    (with_checkpointing("selective"), "all_gather", "sdpa", FP32),
    (with_checkpointing("selective", ATTENTION), "ring", "flash4", FP32),
    (with_checkpointing("full", ATTENTION), "ring", "flash4", BF16),
    (with_checkpointing("full", [*ATTENTION, *QUERIES]), "ring", "flash4", BF16),
    (with_checkpointing("full", [*ATTENTION, *QUERIES]), "ring", "sdpa", BF16),
    (with_checkpointing("selective", ATTENTION), "all_gather", "sdpa", BF16),
    ([*STATES, "train.shard=gradients"], "all_gather", "flash4", FP32),
    ([*STATES, "train.shard=gradients", "train.global_batch=3"], "all_gather", "flash4", BF16),
    ([*STATES, "train.shard=optimizer", "train.global_batch=3"], "all_gather", "flash4", FP32),
    (
        [*STATES, "train.reduce_dtype=bfloat16", "train.global_batch=2"],
        "all_gather",
        "flash4",
        BF16,
    ),
    ([*STATES, "optim.offload=true"], "all_gather", "flash4", BF16),
    ([*STATES, "optim.offload=true", "optim.offload_gradients=true"], "all_gather", "flash4", BF16),
    (
        [*STATES, "train.shard=gradients", "optim.offload=true", "train.global_batch=2"],
        "all_gather",
        "flash4",
        FP32,
    ),
    (with_checkpointing("selective", DEEP), "ring", "flash4", FP32),
    (with_checkpointing("sequence_selective", DEEP, OFFLOADED), "ring", "flash4", FP32),
    (with_checkpointing("full", DEEP, "train.tile_mib=1"), "all_gather", "flash4", FP32),
]
QUICK = [TWO_WORKERS[0], TWO_WORKERS[3], TWO_WORKERS[7], TWO_WORKERS[11]]


def ratios(world, cases):
    return [estimate / peak for peak, estimate in gloo.run(world, allocations.step_peaks, cases)[0]]


def test_the_estimate_is_within_3_percent_of_the_live_bytes_of_a_step():
    result = ratios(2, QUICK)
    assert all(0.97 <= ratio <= 1.03 for ratio in result), result


@pytest.mark.slow
@pytest.mark.parametrize(("world", "cases"), [(1, ONE_WORKER), (2, TWO_WORKERS)])
def test_the_estimate_is_within_3_percent_for_every_memory_option(world, cases):
    result = ratios(world, cases)
    assert all(0.97 <= ratio <= 1.03 for ratio in result), result


def estimate(
    *overrides, workers=8, exchange="all_gather", kernel="flash4", dtype_bytes=2, cp=None, heads=1
):
    config = compose(["model=qwen3b", "seq=128k", *overrides])
    layout = make_layout(config.layout, cp or workers, config.seq, config.topology.block_size)
    exchange_choice = ExchangeChoice(exchange, "", per_node=8, heads=heads)
    return estimate_memory(
        config,
        workers=workers,
        layout=layout,
        exchange=exchange_choice,
        kernel=kernel,
        dtype_bytes=dtype_bytes,
        cuda=True,
    )


def test_states_are_sharded_over_all_workers_for_any_context_group():
    total = parameters(compose(["model=qwen3b"]).model).total
    for workers, cp in [(1, 1), (8, 8), (8, 2)]:
        for moment in estimate(workers=workers, cp=cp).moments:
            assert moment.parameters == pytest.approx(4 * total / workers, rel=1e-3)
            assert moment.optimizer == 2 * moment.parameters
    assert estimate().moments[-1].gradients == pytest.approx(4 * total / 8, rel=1e-3)


def test_a_shard_is_rounded_up_in_dimension_0():
    assert sharded_numbers([(10, 3), (7,)], 4) == 3 * 3 + 2
    model = compose(["model=qwen3b"]).model
    whole = sum(
        prod(shape) for shape in [*layer_shapes(model).values(), *root_shapes(model).values()]
    )
    assert (
        sharded_numbers([*layer_shapes(model).values(), *root_shapes(model).values()], 1) == whole
    )


def test_kept_activations_follow_their_formulas():
    tokens, c, a, k, i, heads, layers = 131072 // 8, 2048, 2048, 256, 11008, 16, 36
    expected = {
        "full": 2 * c,
        "selective": 2 * (c + a) + 4 * heads,
        "sequence_selective": 2 * c + (2 * a + 4 * heads) // 2,
        "none": 2 * (4 * c + 2 * a + 2 * k + 4 * i) + 4 * heads,
    }
    for kind, per_token in expected.items():
        loss = estimate(f"train.activation_checkpoint={kind}").moments[0]
        assert (loss.name, loss.activations) == ("loss", layers * tokens * per_token)
    ring = estimate("train.activation_checkpoint=selective", exchange="ring").moments[0].activations
    assert ring == layers * tokens * (expected["selective"] + 2 * 2 * k), (
        "a ring ends with the keys of another worker"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["none"],
        ["none", "train.tile_mib=1"],
        ["selective"],
        ["sequence_selective"],
        ["sequence_selective", QUARTER],
        ["sequence_selective", "train.checkpoint_keep=1"],
        ["full"],
        ["selective", OFFLOADED],
        ["sequence_selective", QUARTER, OFFLOADED],
        ["full", OFFLOADED],
        ["full", "train.offload_activations=1"],
        ["selective", "train.offload_activations=2"],
        ["selective", "train.keep_mlp=true"],
        ["none", "train.tile_mib=1", "train.keep_mlp=true"],
        ["none", "train.keep_mlp=true"],
        ["full", OFFLOADED, "train.keep_mlp=true"],
    ],
)
def test_a_layer_keeps_exactly_the_estimated_bytes(words):
    overrides = with_checkpointing(words[0], ["seq=2k", "model.qk_norm=true"], *words[1:])
    (fewer, less), (more, result) = (
        allocations.kept(layers, overrides, BF16 if len(words) == 1 else FP32) for layers in (4, 5)
    )
    # With offloading, one more layer is on the host; without, on the device.
    expected = (result.moments[0].activations + result.host) - (
        less.moments[0].activations + less.host
    )
    # Without recomputation, norms keep one number per row, which the estimate leaves out.
    assert more - fewer == pytest.approx(expected, rel=0.015 if words[0] == "none" else 0)


def test_offloading_keeps_the_activations_of_two_layers_on_the_device():
    kept, result = (estimate(f"train.offload_activations={word}") for word in ("false", "true"))
    whole = kept.moments[0].activations
    assert result.moments[0].activations == whole * 2 // 36
    assert (kept.host, result.host) == (0, whole * 35 // 36)


def test_layers_that_are_not_offloaded_stay_on_the_device():
    layer = estimate().moments[0].activations // 36
    for number, stay in [(0, 36), (1, 35), (16, 20), (34, 2), (35, 2), (36, 2)]:
        result = estimate(f"train.offload_activations={number}")
        assert result.moments[0].activations == stay * layer, number
        assert result.host == min(number, 35) * layer
    assert estimate("train.offload_activations=36") == estimate(OFFLOADED)
    # Gradients of 34 layers exist when two are left, whose activations are still there.
    deepest = estimate(OFFLOADED, "train.activation_checkpoint=full", "seq=1k").moments[1]
    assert deepest.name == "backward of layer 2"
    middle = estimate(
        "train.offload_activations=16", "train.activation_checkpoint=full", "seq=1m"
    ).moments[1]
    assert (middle.name, middle.activations) == ("backward of layer 36", 20 * (131072 * 2048 * 2))


def test_keep_mlp_keeps_gate_and_up_of_that_many_layers():
    tokens, c, i = 131072 // 8, 2048, 11008
    plain = estimate().moments
    for number, layers in [("false", 0), ("0", 0), ("1", 1), ("7", 7), ("true", 36)]:
        result = estimate(f"train.keep_mlp={number}").moments
        assert result[0].activations - plain[0].activations == layers * tokens * 2 * (c + 2 * i)
    last, before = (
        next(
            m
            for m in estimate(f"train.keep_mlp={keep}", "seq=2m").moments
            if m.name == "backward of layer 1"
        )
        for keep in ("true", "false")
    )
    assert last.activations - before.activations == 16 * tokens * 2 * (c + 2 * i), (
        "those of the first layer, here of 16 times the tokens"
    )
    # When the first layer runs backward, all kept products exist; recomputed ones do not.
    first = estimate("train.keep_mlp=7").moments[1]
    assert first.name == "backward of layer 36"
    assert plain[1].layer - first.layer == tokens * 2 * (c + 2 * i)


@pytest.mark.parametrize(
    "words", [("train.keep_mlp=true",), ("train.activation_checkpoint=none", "train.tile_mib=0")]
)
def test_bytes_freed_with_the_mlp_were_kept(words):
    """With the keys of many workers, attention is the larger point."""
    result = estimate("seq=4m", *words, workers=64)
    backward = result.moments[1]
    assert backward.exchange == estimate("seq=4m", workers=64).moments[1].exchange > 0
    gone = result.moments[0].activations - backward.activations
    tokens, c, i = (4 << 20) // 64, 2048, 11008
    assert gone == 2 * tokens * ((c + 2 * i) if "train.keep_mlp=true" in words else (2 * c + 4 * i))
    for moment in result.moments:
        assert all(part >= 0 for part in moment.parts.values())


def test_the_mlp_takes_no_more_than_its_tiles():
    million, tiled = (estimate("seq=1m", f"train.tile_mib={mib}") for mib in (0, 512))
    assert million.peak.name == "backward of layer 36"
    assert million.total - tiled.total > 10 * GIB


def test_more_recomputation_takes_less_memory():
    totals = [estimate(f"train.activation_checkpoint={kind}").total for kind in CHECKPOINTS]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == len(CHECKPOINTS) == 4


def test_logits_do_not_grow_with_the_sequence():
    chunked = [
        estimate(f"seq={seq}").moments[0].loss - 3 * 2 * 2048 * tokens
        for seq, tokens in (("128k", 16384), ("512k", 65536))
    ]
    assert chunked[0] == chunked[1]


def test_a_ring_takes_less_than_large_gathered_keys():
    overrides = ("model.intermediate_size=128", "model.num_kv_heads=16", "seq=1m")
    gathered, ring = (
        estimate(*overrides, workers=32, exchange=exchange).peak.exchange
        for exchange in ("all_gather", "ring")
    )
    assert ring < gathered / 4


def test_accumulating_gradients_stay_for_the_whole_backward_pass():
    once, accumulated = (
        estimate(f"train.global_batch={batch}").moments[0].gradients for batch in (1, 2)
    )
    assert once == 0
    assert accumulated == pytest.approx(
        4 * parameters(compose(["model=qwen3b"]).model).total / 8, rel=1e-3
    )


def test_parts_add_up_and_the_total_includes_the_reserve():
    result = estimate()
    for moment in result.moments:
        assert moment.allocated == sum(
            value for key, value in dataclasses.asdict(moment).items() if key != "name"
        )
    assert result.allocated == max(moment.allocated for moment in result.moments)
    assert result.total == result.allocated + result.reserve
    assert 0.5 * GIB < result.reserve < 3 * GIB


def moba(*overrides, **kwargs):
    words = (
        "model=llama8b",
        "sparsity=moba",
        "sparsity.gate=block",
        "train.activation_checkpoint=full",
    )
    return estimate(*words, *overrides, **kwargs)


def test_per_query_choices_take_one_bit_per_chunk():
    layers, heads, tokens, chunks = 32, 32, 131072, 32
    for workers in (1, 8):
        block, query = (
            moba(f"sparsity.gate={gate}", workers=workers, kernel="triton").moments[0].index
            for gate in ("block", "query")
        )
        gates, starts = layers * heads * (tokens // workers) * chunks // 8, 8 * tokens
        assert query - block == gates + starts


def test_bitmaps_stay_until_backward_and_are_counted_by_pairs_of_blocks():
    layers, heads, blocks = 32, 32, 1024
    for workers in (1, 8):
        counted = 2 * blocks * blocks // workers
        at_loss = moba(workers=workers, kernel="triton").moments[0]
        assert at_loss.index == layers * heads * blocks * blocks // workers + counted
        assert moba(workers=workers, kernel="triton").moments[-1].index == counted
    four = moba("train.global_batch=4", workers=8, kernel="triton").moments[0]
    assert four.index - at_loss.index == 3 * counted
    # Ranks that compute for other ranks' queries hold all rows.
    everywhere = moba(
        "train.global_batch=1", workers=8, kernel="triton", exchange="all_gather", heads=8
    ).moments[0]
    assert everywhere.index == layers * heads * blocks * blocks + counted


@pytest.mark.parametrize(
    ("words", "most"),
    [
        ("sparsity=vertical_slash sparsity.max_slashes=64", 64),
        ("sparsity=fixed sparsity.density=0.0146", 61),
    ],
)
def test_lists_of_blocks_have_room_for_the_most_slashes_of_an_index(words, most):
    wide, narrow = (
        estimate("seq=512k", *given.split(), workers=2).peak.exchange
        for given in ("sparsity=vertical_slash", words)
    )
    blocks_of_keys, blocks_of_queries, heads, lists = 4096, 2048, 16, 2
    assert wide - narrow == 4 * lists * heads * blocks_of_keys * (blocks_of_queries - most)


def test_bitmaps_of_a_million_tokens_do_not_fit():
    dense, sparse = (
        estimate("model=llama8b", "seq=1m", setting, workers=8, kernel="triton")
        for setting in ("sparsity=dense", "sparsity=moba")
    )
    bits = 32 * 32 * 8192 * 8192 // 8
    assert bits == 8 * GIB
    assert sparse.total - dense.total > bits


def test_slashes_and_columns_take_kilobytes_but_gathered_columns_do_not():
    overrides = ("sparsity=vertical_slash", "model=llama8b")
    layers, heads, width, dim = 32, 32, 4096, 128
    lines = layers * heads * (1024 + 4 * width)
    # Kernels derive them once: the slot of each column, and the columns below each block.
    derived = layers * heads * 4 * (width + 1025)
    result = estimate(*overrides, "train.activation_checkpoint=selective").moments
    assert (result[0].index, result[-2].index) == (lines + derived, lines + derived // layers), (
        "slashes and columns stay until they are counted"
    )
    assert (
        estimate(*overrides, "train.activation_checkpoint=selective", kernel="sdpa")
        .moments[0]
        .index
        == lines
    )
    lines += derived + layers * heads * 4 * width  # among all keys, and among a rank's own
    ring = (
        estimate(
            *overrides, "train.activation_checkpoint=selective", exchange="ring", kernel="triton"
        )
        .moments[0]
        .index
    )
    assert ring == lines + layers * 2 * 2 * heads * width * dim
    # Recomputation gathers them again.
    assert (
        estimate(*overrides, "train.activation_checkpoint=full", exchange="ring", kernel="triton")
        .moments[0]
        .index
        == lines
    )
