"""Parameters and FLOP computed from the shape equal the decoder's and published numbers."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.attention.named_masks import CAUSAL, SlidingWindow
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.mask_settings import MASKS
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.parallelize import initialize, set_execution
from mtrain_cli.model.routing import RouterOptions, Routing
from mtrain_cli.parallel.exchange import Plan, make_exchange
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.training.flops import (
    ASSUMED_DENSITY,
    allowed_pairs,
    assumed_density,
    flops_per_token,
    layer_kinds,
    layer_matmul,
    layer_shapes,
    parameters,
    peak_flops,
    recomputed_pair_share,
    root_shapes,
    training_flops,
)

MODELS = ("tiny", "qwen0.5b", "qwen3b", "qwen7b", "llama8b", "qwen3_8b", "tiny_moe")


def config(name, *overrides):
    return compose([f"model={name}", *overrides]).model


def build(model):
    return Decoder(model)


@pytest.mark.parametrize("name", MODELS)
def test_shapes_and_counts_equal_those_of_the_decoder(name):
    model = config(name)
    with torch.device("meta"):
        decoder = build(model)
    assert parameters(model).total == sum(p.numel() for p in decoder.parameters())
    assert parameters(model).layer == sum(p.numel() for p in decoder.layers[-1].parameters())
    assert sorted(layer_shapes(model).values()) == sorted(
        tuple(p.shape) for p in decoder.layers[-1].parameters()
    )
    outside = [
        tuple(p.shape) for key, p in decoder.named_parameters() if not key.startswith("layers.")
    ]
    assert sorted(root_shapes(model).values()) == sorted(outside)


@pytest.mark.parametrize(
    ("name", "total"),
    [
        # Sum of the tensor sizes in each release's safetensors files.
        ("qwen0.5b", 494_032_768),
        ("qwen3b", 3_085_938_688),
        ("qwen7b", 7_615_616_512),
        ("llama8b", 8_030_261_248),
        ("qwen3_8b", 8_190_735_360),
        ("qwen3_30b_a3b", 30_532_122_624),
        ("mixtral_8x7b", 46_702_792_704),
    ],
)
def test_counts_equal_those_of_the_published_weights(name, total):
    assert parameters(config(name)).total == total


def test_a_tied_head_counts_in_matmul_but_is_stored_once():
    tied, separate = (
        parameters(config("tiny", f"model.tie_word_embeddings={tied}"))
        for tied in ("true", "false")
    )
    assert tied.matmul == separate.matmul
    assert separate.total - tied.total == tied.embedding == 264 * 128


@pytest.mark.parametrize(
    ("checkpoint", "tile_mib", "gradients"),
    [
        ("none", 0, "forward"),
        ("none", 1, "forward"),
        ("selective", 0, "recompute"),
        ("sequence_selective", 1, "forward"),
        ("full", 0, "forward"),
    ],
)
@pytest.mark.parametrize(
    "overrides",
    [(), ("model.qk_norm=true", "model.tie_word_embeddings=false"), ("train.keep_mlp=1",)],
)
def test_executed_matmul_flops_equal_those_of_a_training_step(
    checkpoint, tile_mib, gradients, overrides
):
    options = [
        f"train.activation_checkpoint={checkpoint}",
        f"train.tile_mib={tile_mib}",
        f"train.loss_gradients={gradients}",
    ]
    whole = compose(["model=tiny", "seq=256", *overrides, *options])
    model, seq = whole.model, whole.seq
    with torch.device("cpu"):
        decoder = Decoder(model)
    set_execution(decoder, whole, compile=False)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tokens, positions = torch.zeros(1, seq, dtype=torch.long), torch.arange(seq)[None]
    with FlopCounterMode(display=False) as counter:
        decoder(tokens, positions, tokens, lambda q, k, v, _: q * k.sum() * v.sum(), 1.0).backward()
    # The counter misses addmm_, which computes the LM head's gradient, and with tiles those of o
    # and the MLP.
    hidden = 2 * model.hidden_size * seq
    seen = counter.get_total_flops() + hidden * model.vocab_size
    if tile_mib:
        seen += (
            model.num_layers
            * hidden
            * (model.num_heads * model.head_dim + 3 * model.intermediate_size)
        )
    assert (
        training_flops(
            whole, make_layout("striped", 1, seq, 128), sharing=1, dtype_bytes=4, pairs=0
        ).executed
        == seen / seq
    )


EXPERTS = ("model.moe.dense_layers=1", "model.moe.shared_size=64")


def test_parameters_with_experts_are_counted_in_layers_of_both_kinds():
    model = config("tiny_moe", *EXPERTS)
    with torch.device("meta"):
        decoder = build(model)
    found = parameters(model)
    assert found.total == sum(p.numel() for p in decoder.parameters())
    for layer in (0, 1):
        shapes = layer_shapes(model, experts=model.has_experts(layer)).values()
        assert sorted(shapes) == sorted(tuple(p.shape) for p in decoder.layers[layer].parameters())
    assert layer_kinds(model) == {False: 1, True: 3}
    assert found.total - found.active == 3 * 6 * 3 * 192 * 128  # 3 layers, 6 idle experts
    assert layer_matmul(model, experts=True) - layer_matmul(model, experts=False) == 128 * (
        8 + 3 * (2 * 192 + 64) - 3 * 384
    )


@pytest.mark.parametrize(("checkpoint", "tile_mib"), [("none", 0), ("none", 1), ("selective", 0)])
@pytest.mark.parametrize("overrides", [(), EXPERTS])
def test_executed_flops_with_experts_are_those_of_the_chosen_ones(checkpoint, tile_mib, overrides):
    words = [f"train.activation_checkpoint={checkpoint}", f"train.tile_mib={tile_mib}"]
    whole = compose(["model=tiny_moe", "seq=256", *overrides, *words])
    decoder = Decoder(whole.model)
    set_execution(decoder, whole, compile=False)
    initialize(decoder, 0)
    model, seq, numbers = whole.model, whole.seq, torch.arange(whole.seq)[None]
    with FlopCounterMode(display=False) as counter:
        attend = lambda q, k, v, _: q * k.sum() * v.sum()  # noqa: E731
        routing = Routing(numbers, [seq], seq, model.moe, model.num_layers, RouterOptions(1))
        decoder(numbers, numbers, numbers % 264, attend, 1.0, routing).backward()
    hidden = 2 * model.hidden_size * seq  # of addmm_, as above
    # The mean scores of the balance loss are matrix products, which do not count as such.
    means = 2 * model.moe.experts * seq * model.expert_layers * (3 if checkpoint != "none" else 2)
    seen = counter.get_total_flops() + hidden * model.vocab_size - means
    if tile_mib:
        width = model.num_heads * model.head_dim + 3 * model.intermediate_size
        seen += model.moe.dense_layers * hidden * width
    layout = make_layout("striped", 1, seq, 128)
    found = training_flops(whole, layout, sharing=1, dtype_bytes=4, pairs=0)
    assert found.executed == seen / seq
    assert found.model == 6 * parameters(model).matmul


def test_attention_adds_two_products_forward_and_five_backward_per_pair():
    model, seq = config("tiny"), 64
    width = model.num_layers * model.num_heads * model.head_dim

    def attention(again, pairs):
        with_pairs, without = (
            flops_per_token(model, seq, recomputed=True, pairs=p, pairs_again=again).executed
            for p in (pairs, 0)
        )
        return (with_pairs - without) * seq

    assert attention(0, 100) == pytest.approx((2 + 5) * 2 * width * 100)
    assert attention(0.25, 100) == pytest.approx((2 + 0.5 + 5) * 2 * width * 100)


@pytest.mark.parametrize("layout", ["striped", "zigzag", "contiguous"])
def test_the_early_half_of_a_sequence_has_a_quarter_of_its_pairs(layout):
    def again(checkpoint, keep=0.5):
        train = compose(
            [f"train.activation_checkpoint={checkpoint}", f"train.checkpoint_keep={keep}"]
        ).train
        return recomputed_pair_share(train, make_layout(layout, 4, 16384, 64), 1)

    assert again("none") == again("selective") == again("sequence_selective", 1) == 0
    assert again("full") == again("sequence_selective", 0) == 1
    # With contiguous parts, every worker recomputes the early half of its own part.
    expected = {"striped": 0.25, "zigzag": 0.25, "contiguous": (1 + 5 + 9 + 13) / 64}[layout]
    assert again("sequence_selective") == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("sharing", [1, 2, 4])
@pytest.mark.parametrize("keep", [0.25, 0.5, 0.75])
@pytest.mark.parametrize(
    ("layout", "seq"), [("contiguous", 256), ("zigzag", 250), ("striped", 250)]
)
@pytest.mark.parametrize("mask", [CAUSAL, SlidingWindow(50), MASKS["block_causal"](block=60)])
def test_the_recomputed_pairs_are_those_of_the_early_tiles_of_all_workers(
    layout, seq, keep, sharing, mask
):
    """Under Ulysses, the early queries are the first ones of all workers that share heads."""
    workers, again, whole = 4, 0.0, 0.0
    parts = make_layout(layout, workers, seq, 8)
    rule = MaskRule(document_mask=True, mask=mask)
    masks = [rule.undivided(seq, parts.padded_seq)]
    for rank in range(workers):
        group = ContextGroup(rank, tuple(range(workers)), heads=sharing)
        plan = Plan.make(make_exchange("ring", parts, group), masks, keep=keep)
        early, computes = plan.early_tiles.tiles, list(plan.forward.computes)
        again += sum(early[op.queries, op.keys].pairs / op.part[1] for op in computes)
        whole += plan.pairs
    train = compose(
        ["train.activation_checkpoint=sequence_selective", f"train.checkpoint_keep={keep}"]
    ).train
    found = recomputed_pair_share(train, parts, sharing, [(rule, 3)])
    assert found == pytest.approx(again / whole)


@pytest.mark.parametrize(
    ("words", "pairs"),
    [
        (["mask=sliding_window", "mask.window=10"], [10 * 64 - 45] * 4),
        (
            ["mask=sliding_window", "mask.window=10", "mask.full_every=4"],
            [*([10 * 64 - 45] * 3), 64 * 65 // 2],
        ),
        (["mask=block_causal", "mask.block=32"], [32 * 32 * 3] * 4),
    ],
)
def test_a_plan_counts_the_pairs_of_the_mask_of_each_layer(words, pairs):
    planned = compose([*words, "seq=64", "train.activation_checkpoint=full"])
    layout = make_layout("contiguous", 1, 64, 16)
    found = training_flops(planned, layout, sharing=1, dtype_bytes=4)
    mean = sum(pairs) / len(pairs)
    assert allowed_pairs(planned) == mean
    model = planned.model
    of_attention = model.num_layers * model.num_heads * model.head_dim * mean / 64
    assert found.model == 6 * parameters(model).matmul + 12 * of_attention
    causal = compose(["seq=64", "train.activation_checkpoint=full"])
    base = training_flops(causal, layout, sharing=1, dtype_bytes=4, pairs=0)
    assert found.executed == pytest.approx(base.executed + 18 * of_attention)


def test_layers_with_different_masks_recompute_the_pairs_of_both():
    train = compose(["train.activation_checkpoint=sequence_selective"]).train
    layout = make_layout("contiguous", 1, 64, 16)
    kept = MaskRule(document_mask=False, mask=SlidingWindow(8))
    both = recomputed_pair_share(train, layout, 1, [(kept, 3), (MaskRule(False), 1)])
    early = [32 * 8 - 28, 32 * 33 // 2]
    assert both == (3 * early[0] + early[1]) / (3 * (64 * 8 - 28) + 64 * 65 // 2)


def test_model_flops_follow_the_formula_of_the_papers():
    # 6 P + 6 L d N with d = heads * head_dim and causal attention, for Llama-3.1-8B at 256K:
    # P = 7.505e9 without the embedding.
    assert flops_per_token(config("llama8b"), 262144).model == pytest.approx(
        6 * 7.505e9 + 6 * 32 * 4096 * 262144, rel=1e-4
    )


@pytest.mark.parametrize(
    ("name", "teraflops"),
    [
        ("NVIDIA H200", 989),
        ("NVIDIA H200 NVL", 835),
        ("NVIDIA GH200 480GB", 989),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H800", 989),
        ("NVIDIA H20", 148),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A800-SXM4-80GB", 312),
        ("NVIDIA B200", 2250),
        ("NVIDIA GB200", 2500),
        ("NVIDIA L40S", 362),
        ("NVIDIA L4", 121),
    ],
)
def test_the_peak_follows_from_the_gpus_name(name, teraflops):
    assert peak_flops(name) == teraflops * 1e12


@pytest.mark.parametrize("name", ["cpu", "NVIDIA GeForce GTX 1080", "", "Tesla T4", "NVIDIA A1000"])
def test_an_unknown_device_has_no_peak(name):
    assert peak_flops(name) is None


def test_the_assumed_density_is_the_mean_over_layers_of_what_mask_and_pattern_allow():
    assert assumed_density(compose(["mask=full", "seq=1k"])) == 1024 / (1025 / 2)
    window = ["mask=sliding_window", "mask.window=1", "seq=1k"]
    assert assumed_density(compose(window)) == 2 / 1025
    sparse = ["sparsity=vertical_slash", "model.num_layers=4"]
    assert assumed_density(compose([*window, *sparse])) == 2 / 1025
    assert assumed_density(compose(["seq=1k"])) == 1
    assert assumed_density(compose(sparse)) == ASSUMED_DENSITY
    dense = assumed_density(compose([*sparse, "sparsity.dense_layers=1"]))
    assert dense == pytest.approx((3 * ASSUMED_DENSITY + 1) / 4)
