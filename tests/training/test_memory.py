"""The closed form of a worker's memory equals the live bytes of training steps, in its parts."""

import dataclasses
import threading
from math import prod

import allocations
import gloo
import pytest
import torch
from slow_cases import mostly_slow

from mtrain_cli.composition.compose import compose
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.training.attention_memory import AttentionMemory
from mtrain_cli.training.flops import layer_shapes, root_shapes
from mtrain_cli.training.memory import GIB, _StepMemory, estimate_memory
from mtrain_cli.training.pipeline_plan import model_parts
from mtrain_cli.training.state_memory import sharded_numbers

BF16, FP32 = torch.bfloat16, torch.float32
BASE = ["seq=2k", "model.num_layers=3", "topology.block_size=64", "train.loss_chunk_mib=1"]
# An MLP so narrow that attention sets the peak.
ATTENTION = [*BASE, "model.intermediate_size=32"]
OFFLOADED = "train.offload_activations=true"
QUERIES = ["topology.exchange=ring", "topology.circulates=queries"]
# Many layers, so that their activations dominate; a small vocabulary, so that the loss is small.
DEEP = [*BASE, "model.num_layers=12", "model.intermediate_size=128"]
QUARTER = "train.checkpoint_keep=0.25"
# Shapes at which weights, gradients and states dominate.
STATES = ["seq=1k", *BASE[1:], "model.num_layers=6", "model.vocab_size=1024"]
TWO, THREE = "train.global_batch=2", "train.global_batch=3"
GRADIENTS, OPTIMIZER = "train.shard=gradients", "train.shard=optimizer"


def with_checkpointing(kind, base=BASE, *more):
    return [*base, f"train.activation_checkpoint={kind}", *more]


def case(kind, base=BASE, *more, exchange="all_gather", kernel="flash4", dtype=FP32):
    """Return a run: overrides with a kind of checkpointing (None: the default), and its ways."""
    words = [*base, *more] if kind is None else with_checkpointing(kind, base, *more)
    return words, exchange, kernel, dtype


# float32 where the CPU's loss makes float32 copies of bfloat16 operands; a GPU's does not.
ONE_WORKER = [
    case("none"),
    case("full", dtype=BF16),
    case("full", BASE, "model.vocab_size=8192", "train.loss_chunk_mib=32"),
    case(None, BASE, OPTIMIZER, TWO, "optim.offload=true", dtype=BF16),
    case("selective", DEEP),
    case("sequence_selective", DEEP, QUARTER),
    case("selective", DEEP, OFFLOADED),
    case("full", DEEP, "train.offload_activations=5"),
    case("none", BASE, "train.tile_mib=1"),
    case("selective", BASE, "train.keep_mlp=2", "train.tile_mib=1"),
    case("full", BASE, "train.keep_mlp=1"),
    case("selective", BASE, "train.loss_gradients=recompute"),
]
WIDE, KEPT, MANY_HEADS = "model.intermediate_size=4096", "train.keep_mlp=true", "model.num_heads=32"
FP8 = [*BASE, "train.fp8=mlp", "train.dtype=bfloat16"]
IN_FP8 = [
    case("full", FP8, dtype=BF16),
    case("full", FP8, "train.tile_mib=1", dtype=BF16),
    case("none", FP8, "train.keep_mlp=2", dtype=BF16),
    case("selective", FP8, "train.tile_mib=1", "train.keep_mlp=true", dtype=BF16),
    # Wide weights and few tokens, so that the weights in fp8 count.
    case("full", [*FP8, "seq=512", "model.num_layers=2"], WIDE, dtype=BF16),
    case("full", [*FP8, "seq=1k", "model.num_layers=2"], WIDE, "train.tile_mib=1", dtype=BF16),
    case("selective", [*FP8, "seq=512", "model.num_layers=2"], WIDE, KEPT, dtype=BF16),
]
ALL_FP8 = [*BASE, "train.fp8=all", "train.dtype=bfloat16"]
ALL_IN_FP8 = [
    case("full", ALL_FP8, dtype=BF16),
    case("none", ALL_FP8, dtype=BF16),
    case("none", ALL_FP8, "model.qk_norm=true", "train.keep_mlp=2", dtype=BF16),
    case("selective", ALL_FP8, "train.tile_mib=3", "train.keep_mlp=2", dtype=BF16),
    case("full", [*ALL_FP8, "seq=512", "model.num_layers=2"], WIDE, dtype=BF16),
    case("full", [*ALL_FP8, "seq=1k", "model.num_layers=2"], MANY_HEADS, dtype=BF16),
]
TWO_WORKERS = [
    case("selective", dtype=BF16),
    case("none", BASE, "model.qk_norm=true"),
    case("selective", kernel="sdpa"),
    case("selective", ATTENTION, exchange="ring"),
    case("full", ATTENTION, *QUERIES, exchange="ring", dtype=BF16),
    case("full", ATTENTION, *QUERIES, exchange="ring", kernel="sdpa", dtype=BF16),
    case("selective", ATTENTION, kernel="sdpa", dtype=BF16),
    case(None, STATES, GRADIENTS),
    case(None, STATES, GRADIENTS, THREE, dtype=BF16),
    case(None, STATES, OPTIMIZER, THREE),
    case(None, STATES, "train.reduce_dtype=bfloat16", TWO, dtype=BF16),
    case(None, STATES, "optim.offload=true", "optim.offload_gradients=true", dtype=BF16),
    case(None, STATES, GRADIENTS, "optim.offload=true", TWO),
    case("sequence_selective", DEEP, OFFLOADED, exchange="ring"),
    case("full", DEEP, "train.tile_mib=1"),
]
IN_TWO = ["topology.tensor_parallel=2", "topology.layout=contiguous"]
TENSOR, EIGHTH = [*BASE, *IN_TWO], "topology.tensor_chunks=8"
SHARED_LAYERS = [
    case("selective", TENSOR),
    case("full", TENSOR, EIGHTH, "model.intermediate_size=4096"),
    case(None, STATES, *IN_TWO, dtype=BF16),
    case("full", TENSOR, "train.tile_mib=1"),
    case("none", TENSOR),
    case("selective", TENSOR, EIGHTH, "train.keep_mlp=true"),
    case("selective", DEEP, *IN_TWO),
    case(None, STATES, *IN_TWO, GRADIENTS, TWO),
]
SPARSE = ["sparsity=moba", "sparsity.gate=block", "sparsity.chunk=128", "sparsity.block=32"]
TWO_DENSE = [*SPARSE, "model.num_layers=4", "sparsity.dense_layers=2"]
MIXED_LAYERS = [
    case("selective", ATTENTION, *TWO_DENSE, exchange="ring", kernel="sdpa"),
    case("selective", ATTENTION, *TWO_DENSE, kernel="sdpa"),
    case("full", BASE, *TWO_DENSE, exchange="ring", kernel="sdpa"),
    case("selective", ATTENTION, *TWO_DENSE, "sparsity.dense_layers=[0,2]", kernel="sdpa"),
]
PIPELINE = [*BASE, "model.num_layers=4", "topology.pipeline_parallel=2", "train.global_batch=4"]
VOCABULARY = ["model.vocab_size=4096", "train.loss_chunk_mib=8"]
ONE_LAYER_PER_STAGE = [
    *(*PIPELINE, "seq=512", "model.intermediate_size=4096", "model.num_layers=2"),
]
GPIPE, VIRTUAL = "topology.schedule=gpipe", "topology.virtual_stages=2"
STAGES = [
    case("full", PIPELINE, VIRTUAL),
    case("selective", PIPELINE, *VOCABULARY, GPIPE, "train.keep_mlp=3"),
    case(None, ONE_LAYER_PER_STAGE),
    case("none", PIPELINE, GPIPE),
    case("selective", PIPELINE, *VOCABULARY, "topology.stage_layers=[2,2]"),
    case(None, PIPELINE, *STATES, GRADIENTS, dtype=BF16),
    case(None, PIPELINE, *STATES, VIRTUAL, "model.num_layers=8"),
    case(None, ONE_LAYER_PER_STAGE, "train.tile_mib=1", GRADIENTS, dtype=BF16),
]
MOE = ["model=tiny_moe", "seq=1k", "model.num_layers=3", *BASE[2:]]
MIXED = ["model.moe.dense_layers=1", "model.moe.shared_size=128"]
OTHER_SCORES = ["model.moe.score=sigmoid", "model.moe.normalize=false", "model.moe.top_k=4"]
# Experts whose weights, gradients and states dominate.
MANY = ["model=tiny_moe", *STATES, "model.moe.experts=32", "model.moe.expert_size=64"]
NARROW = ["model.num_layers=12", "model.moe.expert_size=32"]
# Every token chooses all experts, so that both workers receive as many rows.
DEALT = [*MOE, "topology.expert_parallel=2", "model.moe.top_k=8", "model.moe.expert_size=64"]
CHUNKS, TWO_CHUNKS = "topology.expert_chunks=3", "topology.expert_chunks=2"
EXPERTS = [
    case("selective", MOE, *MIXED, exchange="ring", dtype=BF16),
    case("selective", DEALT, CHUNKS, dtype=BF16),
]
EXPERTS_OF_TWO = [
    case("none", MOE, "seq=2k", *IN_TWO),
    case(None, MANY, dtype=BF16),
    case("selective", DEALT, dtype=BF16),
    case("none", DEALT, CHUNKS),
    case("full", DEALT, CHUNKS, "seq=2k"),
    case("none", DEALT),
    case("full", DEALT, TWO_CHUNKS),
    case(None, MANY, "topology.expert_parallel=2", dtype=BF16),
]
EXPERTS_ALONE = [
    case("none", MOE, CHUNKS),
    case(None, MANY, TWO_CHUNKS, dtype=BF16),
    case("full", MOE, CHUNKS, *MIXED),
    case("none", MOE, *MIXED, dtype=BF16),
    case("none", MOE, *OTHER_SCORES),
    case("sequence_selective", MOE, *NARROW),
    case("selective", MOE, *NARROW, OFFLOADED),
    case(None, MANY, OPTIMIZER, TWO, dtype=BF16),
    case("selective", MOE, "train.micro_batch=2", TWO),
]


def ratios(world, cases):
    """Return the estimate divided by the largest peak of a rank, for each case."""
    by_rank = gloo.run(world, allocations.step_peaks, cases)
    largest = [max(peak for peak, _ in of_ranks) for of_ranks in zip(*by_rank, strict=True)]
    return [estimate / peak for peak, (_, estimate) in zip(largest, by_rank[0], strict=True)]


@mostly_slow(
    ("world", "cases", "error"),
    [
        pytest.param(2, [*TWO_WORKERS[::4], *MIXED_LAYERS[::3]], 0.03, id="two workers"),
        pytest.param(2, SHARED_LAYERS[:3], 0.05, id="tensor parallel"),
        pytest.param(1, IN_FP8, 0.0125, id="fp8"),
        pytest.param(1, ALL_IN_FP8, 0.0125, id="all in fp8"),
        pytest.param(2, STAGES[:3], 0.05, id="stages"),
        pytest.param(2, EXPERTS, 0.05, id="experts"),
        pytest.param(1, ONE_WORKER, 0.03, marks=pytest.mark.slow, id="all of one worker"),
        pytest.param(2, TWO_WORKERS, 0.03, marks=pytest.mark.slow, id="all of two workers"),
        pytest.param(2, MIXED_LAYERS, 0.03, marks=pytest.mark.slow, id="dense and sparse layers"),
        pytest.param(2, SHARED_LAYERS[3:], 0.05, marks=pytest.mark.slow, id="all tensor parallel"),
        pytest.param(2, STAGES[3:], 0.05, marks=pytest.mark.slow, id="all stages"),
        pytest.param(2, EXPERTS_OF_TWO, 0.05, marks=pytest.mark.slow, id="all dealt experts"),
        pytest.param(1, EXPERTS_ALONE, 0.05, marks=pytest.mark.slow, id="all experts alone"),
    ],
    keep=(1, 2, 3, 5),
)
def test_the_estimate_equals_the_live_bytes_of_a_step(world, cases, error):
    result = ratios(world, cases)
    assert all(abs(ratio - 1) <= error for ratio in result), result


def test_buffers_that_another_thread_frees_late_do_not_count():
    """Like a thread of gloo, which holds the buffers of a finished collective a moment longer."""
    with allocations.LiveBytes([]):
        torch.zeros(1)  # the first operator takes longer than the buffer is held
    held = [torch.empty(1 << 20)]
    with allocations.LiveBytes(held) as live:
        timer = threading.Timer(0.006, held.clear)
        timer.start()
        kept = torch.zeros(1 << 10)
        timer.join()
        assert live.peak == live.now() == 4 * kept.numel()


def steps_of(words, workers, *, exchange, kernel, dense_kernel="flash4"):
    """Return the memory of a step on each stage, of `estimate_memory` in bfloat16."""
    config = compose(words)
    sharing = workers // config.topology.pipeline_parallel
    layout = make_layout(config.layout, sharing, config.seq, config.topology.block_size)
    choice = ExchangeChoice(exchange, "", per_node=sharing)
    attention = AttentionMemory(config, layout, choice, kernel, 2, dense_kernel)
    parts = model_parts(config, config.train.global_batch)
    return [_StepMemory(config, workers, layout, attention, 2, part) for part in parts]


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


def test_a_shard_is_rounded_up_in_dimension_0():
    assert sharded_numbers([(10, 3), (7,)], 4) == 3 * 3 + 2
    model = compose(["model=qwen3b"]).model
    whole = sum(
        prod(shape) for shape in [*layer_shapes(model).values(), *root_shapes(model).values()]
    )
    assert (
        sharded_numbers([*layer_shapes(model).values(), *root_shapes(model).values()], 1) == whole
    )


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


def test_the_embedding_and_the_lm_head_each_have_a_gradient_at_the_end():
    """Gradients that stay whole over several micro-batches are not reduced at that time."""
    config = compose(["model=qwen3b", "seq=1k", "train.shard=optimizer", "train.global_batch=2"])
    layout = make_layout(config.layout, 8, config.seq, config.topology.block_size)
    choice = ExchangeChoice("all_gather", "", per_node=8)
    attention = AttentionMemory(config, layout, choice, "flash4", 2)
    step = _StepMemory(config, 8, layout, attention, 2)
    lm_head = config.model.vocab_size * config.model.hidden_size
    states = step.states
    assert states.root_scatter == 0
    working = 2 * states.root_weights + 2 * 2 * lm_head
    assert working > 4 * states.root_shard
    assert step.at_root().working_weights == working + states.weights(0, 0)


def test_parts_add_up_and_the_total_includes_the_reserve():
    result = estimate()
    for moment in result.moments:
        assert moment.allocated == sum(
            value for key, value in dataclasses.asdict(moment).items() if key != "name"
        )
    assert result.allocated == max(moment.allocated for moment in result.moments)
    assert result.total == result.allocated + result.reserve
    assert 0.5 * GIB < result.reserve < 3 * GIB
