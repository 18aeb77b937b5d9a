"""What a layer keeps and needs in backward, by closed form and by live bytes."""

import allocations
import pytest
from slow_cases import mostly_slow
from training.test_memory import BF16, FP32, OFFLOADED, QUARTER, estimate, with_checkpointing


@mostly_slow(
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
        pytest.param(["none", "train.tile_mib=1", "train.keep_mlp=true"], marks=pytest.mark.slow),
        ["none", "train.keep_mlp=true"],
        ["full", OFFLOADED, "train.keep_mlp=true"],
        ["selective", "train.keep_mlp=true", "train.fp8=mlp"],
        ["none", "train.fp8=all"],
    ],
    keep=(2, 3, 6, 8, 10, 12, 13, 16),
)
def test_a_layer_keeps_exactly_the_estimated_bytes(words):
    in_bf16 = len(words) == 1 or "fp8" in words[-1]
    dtype = ["train.dtype=bfloat16"] * in_bf16
    overrides = with_checkpointing(words[0], ["seq=2k", "model.qk_norm=true"], *dtype, *words[1:])
    (fewer, less), (more, result) = (
        allocations.kept(layers, overrides, BF16 if in_bf16 else FP32) for layers in (4, 5)
    )
    # With offloading, one more layer is on the host; without, on the device.
    expected = (result.moments[0].activations + result.host) - (
        less.moments[0].activations + less.host
    )
    # Without recomputation, norms keep one number per row, which the estimate leaves out.
    assert more - fewer == pytest.approx(expected, rel=0.017 if words[0] == "none" else 0)


def test_only_the_sparse_layers_of_a_mixed_model_keep_an_index():
    """Three models: four layers with one and with two dense ones, and five with two."""
    words = [
        *("seq=2k", "topology.block_size=64", "model.hidden_size=64", "sparsity=moba"),
        *("sparsity.block=32", "sparsity.chunk=128", "sparsity.gate=block"),
        "train.activation_checkpoint=selective",
    ]
    (first, few), (second, more), (third, most) = (
        allocations.kept(layers, [*words, f"sparsity.dense_layers={dense}"], FP32)
        for layers, dense in ((4, 1), (4, 2), (5, 2))
    )
    of_index, of_layer = (
        sum(
            a.moments[0].parts[part] - b.moments[0].parts[part] for part in ("activations", "index")
        )
        for a, b in ((few, more), (most, more))
    )
    # The counts of an index take some hundred bytes, which the estimate leaves out.
    assert first - second == pytest.approx(of_index, rel=0.01)
    assert third - second == pytest.approx(of_layer, rel=0.01)
    assert 0 < of_index < of_layer


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


@pytest.mark.parametrize(("keep", "copies"), [("false", 2), ("true", 1)])
def test_all_products_in_fp8_take_two_weights_of_o_and_no_normed_input(keep, copies):
    """The second one is for the gradient. With tiles, both exist at the peak."""
    mlp, every = (
        estimate(f"train.fp8={kind}", f"train.keep_mlp={keep}", workers=2).moments[1]
        for kind in ("mlp", "all")
    )
    assert mlp.name == every.name == "backward of layer 36"
    normed, output = (128 << 10) // 2 * 2048 * 2, 2048 * 2048
    assert every.layer - mlp.layer == copies * output - normed
