"""What a layer keeps and needs in backward, by closed form and by live bytes."""

import allocations
import pytest
from training.test_memory import BF16, FP32, OFFLOADED, QUARTER, estimate, with_checkpointing
from training.test_memory_of_stages import of_stages

from mtrain_cli.training.memory import GIB


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
        pytest.param(["none", "train.tile_mib=1", "train.keep_mlp=true"], marks=pytest.mark.slow),
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


def test_stages_keep_the_mlp_products_of_their_own_layers_in_all_micro_batches():
    for number, with_products in (("true", (3, 3)), ("4", (1, 3)), ("2", (0, 2))):
        steps, _ = of_stages("topology.stage_layers=[3,3]", f"train.keep_mlp={number}")
        for step, layers in zip(steps, with_products, strict=True):
            found = step.kept(3) + sum(map(step._kept_by, step.part.others))
            each = 3 * step.layer.kept + layers * step.layer.products
            assert found == each * sum(step.part.in_flight), number


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
