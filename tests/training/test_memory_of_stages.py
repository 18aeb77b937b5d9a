"""The memory of the stages of a pipeline, and of layers of different kinds."""

import pytest
from training.test_memory import estimate, steps_of

from mtrain_cli.composition.compose import compose
from mtrain_cli.parallel.exchange_selection import ExchangeChoice
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.training.memory import COMMUNICATOR_BYTES, estimate_memory

OF_STAGES = [
    "model=qwen3b", "seq=32k", "model.num_layers=6", "topology.pipeline_parallel=2",
    "train.global_batch=4", "train.shard=gradients",
]  # fmt: skip


def of_stages(*words, exchange="ring", dense_kernel="flash4"):
    """Return the memory of the steps of two stages on four workers, and its moments."""
    kernel = "triton" if any(word.startswith("sparsity=") for word in words) else dense_kernel
    steps = steps_of(
        [*OF_STAGES, *words], 4, exchange=exchange, kernel=kernel, dense_kernel=dense_kernel
    )
    return steps, [step.moments() for step in steps]


@pytest.mark.parametrize("pattern", ["vertical_slash", "moba"])
def test_a_stage_of_one_kind_of_layers_takes_the_memory_of_a_run_of_that_kind(pattern):
    words = f"sparsity={pattern}", "topology.stage_layers=[3,3]"
    _, mixed = of_stages(*words, "sparsity.dense_layers=3")
    (_, sparse), (_, dense) = of_stages(*words), of_stages(words[1])
    assert mixed == [sparse[0], dense[1]]


def test_a_dense_virtual_stage_in_flight_keeps_no_index():
    words = ["topology.virtual_stages=2", "topology.stage_layers=[2,1,1,2]", "sparsity=moba"]
    (first, _), (mixed, _) = of_stages(*words, "sparsity.dense_layers=3")
    (alike, _), (sparse, _) = of_stages(*words)
    assert first.part.layers == (range(2), range(3, 4))
    assert first.part.in_flight == (4, 1)
    kept = first.attention.index.kept
    found, whole = (max(m.parts["index"] for m in each) for each in (mixed, sparse))
    assert whole - found == kept == alike.attention.index.kept


def test_an_index_is_counted_for_the_sparse_layers_of_a_part():
    words = ["sparsity=vertical_slash", "sparsity.dense_layers=3"]
    (first, last), _ = of_stages(*words, "topology.stage_layers=[4,2]")
    (alike, _), _ = of_stages(words[0], "topology.stage_layers=[4,2]")
    assert last.kept_index(2) == 0
    assert first.kept_index(4) == first.kept_index(3)
    index = first.attention.index
    assert index is not None
    assert alike.kept_index(3) - first.kept_index(3) == index.kept  # of the dense fourth layer
    # The dense layer has no columns of the ring to keep, and buffers of its own kernel.
    kinds = [first.memory_of(layer).attention for layer in (2, 3)]
    assert [each.kernel for each in kinds] == ["triton", "flash4"]
    assert kinds[0].gathered_columns > 0 == kinds[1].gathered_columns


def test_an_index_is_counted_for_the_sparse_layers_of_a_list():
    words = ["sparsity=vertical_slash", "sparsity.dense_layers=[0,2,4]"]
    steps, _ = of_stages(*words, "topology.stage_layers=[3,3]")
    (whole, _), _ = of_stages(words[0], "topology.stage_layers=[3,3]")
    one = whole.kept_index(3) // 3
    assert [step.kept_index(3) for step in steps] == [one, 2 * one]


def test_the_peak_may_be_at_a_dense_layer_between_sparse_ones():
    words = ["sparsity=moba", "model.num_layers=12", "model.num_kv_heads=16", FULL]
    words += ["train.tile_mib=16", "topology.stage_layers=[6,6]", "sparsity.dense_layers=[2,8]"]
    # The kernel of the dense layers takes more memory than that of the sparse ones.
    (first, _), ((backward, *_), _) = of_stages(*words, dense_kernel="sdpa")
    assert backward.name == "backward of layer 3"
    of_layers = [first.backward_of(n, 2, scatters=n < 6).allocated for n in range(1, 7)]
    assert backward.allocated == max(of_layers)


def test_layers_of_both_kinds_have_the_mask_tables_of_both_and_lists_of_their_own():
    words = "sparsity=vertical_slash", "topology.stage_layers=[4,2]"
    (both, _), (mixed, _) = of_stages(*words, "sparsity.dense_layers=3")
    _, (sparse, _) = of_stages(*words)
    tables = both.attention.dense.mask_tables
    assert tables > 0
    for one, other in zip(mixed, sparse, strict=True):
        assert one.inputs - other.inputs == tables


FEW_EXPERTS = [
    *("model=tiny_moe", "model.num_layers=8", "model.hidden_size=1024", "seq=16k"),
    *("model.moe.experts=64", "model.moe.expert_size=1024"),
]


def test_on_a_cpu_the_stage_with_the_most_memory_also_counts_that_of_checkpoints():
    """The first stage keeps two micro-batches of three layers, the last stage has four layers."""
    words = ["seq=96k", "model.num_layers=7", "topology.stage_layers=[3,4]", "model.vocab_size=264"]
    config = compose([*OF_STAGES, *words])
    layout = make_layout("zigzag", 2, config.seq, 128)
    choice = ExchangeChoice("ring", "", per_node=2)
    shared = {"workers": 4, "layout": layout, "exchange": choice, "kernel": "flash4"}
    on_gpu, on_cpu = (
        estimate_memory(config, dtype_bytes=2, cuda=cuda, **shared) for cuda in (True, False)
    )
    assert on_gpu.allocated > on_cpu.allocated
    assert on_gpu.allocated + on_gpu.host_peak < on_cpu.allocated + on_cpu.host_peak


def test_a_tensor_group_has_two_communicators():
    alone, shared = (
        estimate(*words, cp=4).reserve for words in ((), ("topology.tensor_parallel=2",))
    )
    assert shared - alone == 2 * COMMUNICATOR_BYTES


@pytest.mark.parametrize(("workers", "more"), [(2, 1), (4, 2)])
def test_an_expert_group_has_a_communicator_and_so_have_those_who_shard_its_experts(workers, more):
    alone, shared = (
        estimate(*FEW_EXPERTS, f"topology.expert_parallel={degree}", workers=workers).reserve
        for degree in (1, 2)
    )
    assert shared - alone == more * COMMUNICATOR_BYTES


FULL = "train.activation_checkpoint=full"
WIDE = ["model.intermediate_size=4096", "model.moe.experts=8"]
QWEN = ["model=qwen3b", "train.offload_activations=16"]
WIDE_MLPS = [
    *("model=tiny_moe", "model.num_layers=12", "model.hidden_size=512", "seq=2k"),
    *("model.moe.experts=16", "model.moe.expert_size=64", "model.intermediate_size=16384"),
    "train.activation_checkpoint=none",
]
MANY_COLUMNS = [
    *("model=qwen3b", "seq=32k", "model.num_layers=6", "model.intermediate_size=128"),
    *("sparsity=vertical_slash", "sparsity.max_columns=0", "sparsity.dense_layers=3"),
    *(FULL, "train.shard=gradients"),
]


@pytest.mark.parametrize(
    ("words", "workers", "peak"),
    [
        ([*FEW_EXPERTS, "model.moe.dense_layers=1"], 8, 3),
        ([*FEW_EXPERTS, "model.moe.dense_layers=3"], 8, 5),
        ([*FEW_EXPERTS, "model.moe.dense_layers=3"], 1, 4),
        ([*FEW_EXPERTS, "model.moe.dense_layers=3", "seq=256k", FULL, *WIDE], 8, 3),
        (MANY_COLUMNS, 8, 3),
        # MLPs with more weights than the experts: the layer above the peak reduces such an MLP.
        ([*WIDE_MLPS, "model.moe.dense_layers=6"], 8, 5),
        ([*QWEN, "seq=512k"], 8, 36),
        ([*QWEN, "seq=64k"], 8, 35),
        ([*QWEN, "seq=4k"], 8, 2),
    ],
)
def test_the_peak_of_backward_is_that_of_the_largest_layer(words, workers, peak):
    (step,) = steps_of(words, workers, exchange="ring", kernel="triton")
    layers = step.model.num_layers
    every = {
        layer: step.backward_of(layer, step.whole_layers, scatters=layer < layers).allocated
        for layer in range(2, layers + 1)
    }
    found = step.moments()[1]
    assert found.name == f"backward of layer {max(every, key=every.get)}"
    assert found.name == f"backward of layer {peak}"


def test_the_lowest_dense_layer_above_sparse_ones_can_be_the_peak():
    """The dense kernel needs more memory than the sparse one."""
    words = ["model=qwen3b", "seq=16k", "model.num_layers=8", "model.intermediate_size=2048", FULL]
    words += ["sparsity=moba", "sparsity.dense_layers=3"]
    (step,) = steps_of(words, 4, exchange="ring", kernel="triton", dense_kernel="sdpa")
    every = [step.backward_of(layer, 2, scatters=layer < 8).allocated for layer in range(2, 9)]
    assert step.moments()[1].allocated == max(every) == every[6 - 2]


def test_the_only_layer_of_a_stage_waits_for_no_reduction():
    """The layer above is on another stage, and has experts."""
    words = [*FEW_EXPERTS[:1], "model.num_layers=2", "model.moe.dense_layers=1", "seq=4k"]
    words += ["topology.pipeline_parallel=2", "train.global_batch=2"]
    first, _ = steps_of(words, 2, exchange="all_gather", kernel="flash4")
    names = [moment.name for moment in first.moments()]
    assert names == ["backward of layer 1", "backward of layer 1", "optimizer step"]
    without = first.backward_of(1, 1, scatters=False)
    assert [moment.allocated for moment in first.moments()[:2]] == 2 * [without.allocated]


def test_the_only_layer_of_a_stage_is_reduced():
    words = ["model=tiny", "model.num_layers=2", "seq=128", "model.intermediate_size=4096"]
    words += ["topology.pipeline_parallel=2", "train.global_batch=2", "train.tile_mib=1"]
    first, _ = steps_of(words, 2, exchange="all_gather", kernel="flash4")
    weights = first.states.weights_of([0])
    reduced = first.moments()[1]
    assert reduced.name == "reduction of layer 1"
    # Two copies in bfloat16, input and output of the reduction in float32.
    root = 2 * first.states.root_weights
    assert reduced.working_weights - root == weights * (2 + 2 + 4 + 4)


def test_a_layer_waits_for_the_reduction_of_the_layer_above():
    """The layer itself has an MLP; the layer above has experts."""
    words = [*FEW_EXPERTS, "model.moe.dense_layers=1"]
    (step,) = steps_of(words, 8, exchange="ring", kernel="triton")
    working = [
        step.backward_of(1, 1, scatters=scatters).working_weights for scatters in (False, True)
    ]
    assert working[1] - working[0] == step.states.layer_scatter(1) != step.states.layer_scatter(0)
