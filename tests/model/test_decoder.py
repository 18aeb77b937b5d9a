from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
import yaml
from tiny_models import YARN, make_decoder, tiny_model, tokens_and_labels
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from training.allocations import LiveBytes

from mtrain_cli.config.schema import CHECKPOINTS, ModelConfig, RopeConfig
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.tiling import tile_rows
from mtrain_cli.model.verify import causal_attend

CONF = Path(__file__).parents[2] / "conf" / "model"


def loss_and_gradients(
    decoder: Decoder, attend=causal_attend, scale: float = 1 / 48
) -> tuple[Tensor, dict[str, Tensor]]:
    tokens, positions, labels = tokens_and_labels(decoder.model_config)
    loss = decoder(tokens, positions, labels, attend, scale)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in decoder.named_parameters()}


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_loss_and_gradients_equal_cross_entropy_of_the_logits(family, tied):
    model = tiny_model(family, tied=tied)
    loss, gradients = loss_and_gradients(make_decoder(model))
    decoder = make_decoder(model)
    tokens, positions, labels = tokens_and_labels(model)
    logits = decoder.logits(tokens, positions, causal_attend)
    expected = (
        functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / 48
    )
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    for name, parameter in decoder.named_parameters():
        torch.testing.assert_close(
            gradients[name], parameter.grad, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize(
    ("tile_rows", "keep_mlp"), [(0, 0), (1, 0), (20, 0), (48, 0), (0, True), (20, True), (20, 2)]
)
def test_checkpoints_tiles_and_kept_products_do_not_change_loss_and_gradients(
    checkpoint, tile_rows, keep_mlp
):
    model = tiny_model("qwen3", rope=YARN)
    loss, gradients = loss_and_gradients(make_decoder(model).double())
    tile_bytes = tile_rows * 8 * (6 * model.intermediate_size + 4 * model.hidden_size)
    again, again_gradients = loss_and_gradients(
        make_decoder(
            model, checkpoint=checkpoint, tile_bytes=tile_bytes, keep_mlp=keep_mlp
        ).double()
    )
    torch.testing.assert_close(again, loss, rtol=1e-12, atol=0)
    for name in gradients:
        torch.testing.assert_close(
            again_gradients[name],
            gradients[name],
            rtol=1e-9,
            atol=1e-12,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_a_checkpointed_layer_projects_and_attends_once_more(checkpoint):
    seen: list[int] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        seen.append(layer)
        return causal_attend(q, k, v, layer)

    loss_and_gradients(make_decoder(tiny_model(), checkpoint=checkpoint), attend)
    assert seen == [0, 1, 2] + [2, 1, 0] * (checkpoint != "none")


@pytest.mark.parametrize("checkpoint", ["selective", "none"])
def test_an_mlp_that_keeps_its_products_repeats_none(checkpoint):
    """Compare FLOP counted by PyTorch for three layers, two of which keep their products.

    Tiles make sure that a layer without checkpoint has products to keep.
    """
    model = tiny_model(num_layers=3)
    tile_bytes = 20 * 4 * (6 * model.intermediate_size + 4 * model.hidden_size)
    counted = {}
    for keep in (0, 2, 3):
        decoder = make_decoder(model, checkpoint=checkpoint, tile_bytes=tile_bytes, keep_mlp=keep)
        with FlopCounterMode(display=False) as counter:
            loss_and_gradients(decoder)
        counted[keep] = counter.get_total_flops()
    tokens = tokens_and_labels(model)[0].numel()
    products = (
        2
        * tokens
        * model.hidden_size
        * (model.num_heads * model.head_dim + 2 * model.intermediate_size)
    )
    assert (counted[0] - counted[2], counted[0] - counted[3]) == (2 * products, 3 * products)
    assert [layer.keep_mlp for layer in make_decoder(model, keep_mlp=2).layers] == [
        False,
        True,
        True,
    ], "the last layers keep them, as the memory estimate assumes"


def test_products_are_kept_only_for_a_backward_pass():
    model = tiny_model(intermediate_size=4000, num_layers=1)
    tokens, positions, labels = tokens_and_labels(model)
    peaks = []
    for keep in (False, True):
        tile_bytes = 6 * 4 * (6 * model.intermediate_size + 4 * model.hidden_size)
        decoder = make_decoder(model, checkpoint="selective", tile_bytes=tile_bytes, keep_mlp=keep)
        with LiveBytes(list(decoder.parameters())) as live:
            decoder.token_losses(tokens, positions, labels, causal_attend)
        peaks.append(live.peak)
    assert peaks[0] == peaks[1]


def test_a_checkpointed_layer_keeps_only_its_input():
    model = tiny_model("qwen3", num_layers=6)
    kept = {}
    for layers in (2, 3):
        decoder = make_decoder(
            dataclasses.replace(model, num_layers=layers), checkpoint="selective"
        )
        tokens, positions, labels = tokens_and_labels(model)
        parameters = {parameter.data_ptr() for parameter in decoder.parameters()}
        storages: dict[int, Tensor] = {}

        def keep(tensor: Tensor, parameters=parameters, storages=storages) -> Tensor:
            if tensor.data_ptr() not in parameters:
                storages[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            decoder(tokens, positions, labels, causal_attend, 1.0)
        kept[layers] = sum(tensor.untyped_storage().nbytes() for tensor in storages.values())
    assert kept[3] - kept[2] == 4 * tokens.numel() * model.hidden_size


def test_tiles_fit_their_budget_and_are_equal_if_possible():
    row = 2 * (6 * 11008 + 4 * 2048)
    assert tile_rows(65536, 2048, 11008, 2, 0) == 65536
    assert tile_rows(65536, 2048, 11008, 2, 65536 * row) == 65536
    for budget, tokens in [
        (4 << 30, 65536),
        (1 << 30, 65536),
        (1 << 20, 1000),
        (1, 7),
        (3 * row, 7),
    ]:
        rows = tile_rows(tokens, 2048, 11008, 2, budget)
        assert rows * row <= max(budget, row)
        assert 2 * rows * row > budget or rows == tokens
    assert 65536 % tile_rows(65536, 2048, 11008, 2, 4 << 30) == 0
    # The budget needs 19 tiles; the next number that divides these tokens is 32.
    uneven = tile_rows(32768, 2048, 11008, 2, 256 << 20)
    assert (-(-32768 // uneven), uneven % 128) == (19, 0)


def test_the_wide_tensors_of_the_mlp_exist_for_one_tile_at_a_time():
    model = tiny_model(intermediate_size=4000, num_layers=1)
    peaks = {}
    for rows in (6, 12, 24):
        decoder = make_decoder(
            model,
            checkpoint="selective",
            tile_bytes=rows * 4 * (6 * model.intermediate_size + 4 * model.hidden_size),
        )
        with LiveBytes(list(decoder.parameters())) as live:
            loss_and_gradients(decoder)
        peaks[rows] = live.peak
    wide = 4 * model.intermediate_size
    # Six tensors per row. The sums of weight gradients take the same for any tiles.
    assert 5.5 * 6 * wide <= peaks[12] - peaks[6] <= 6.5 * 6 * wide
    assert 5.5 * 12 * wide <= peaks[24] - peaks[12] <= 6.5 * 12 * wide


def test_the_z_loss_changes_gradients_but_not_the_reported_loss():
    model = tiny_model(tied=True)
    tokens, positions, labels = tokens_and_labels(model)
    decoder, plain = (
        make_decoder(model, z_loss=0.01, loss_gradients="recompute"),
        make_decoder(model),
    )
    loss = decoder(tokens, positions, labels, causal_attend, 1 / 48)
    loss.backward()
    logits = plain.logits(tokens, positions, causal_attend).flatten(0, 1)
    entropy = functional.cross_entropy(logits, labels.flatten(), reduction="sum") / 48
    counts = (labels.flatten() != -100) / 48
    (entropy + 0.01 * (logits.logsumexp(-1).square() * counts).sum()).backward()
    torch.testing.assert_close(loss.detach(), entropy.detach())
    for (name, ours), theirs in zip(decoder.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad,
            theirs.grad,
            rtol=1e-4,
            atol=1e-5,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def test_attention_gets_contiguous_unrepeated_heads_and_its_layer():
    model = tiny_model("qwen3", num_kv_heads=1)
    shapes = []

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        assert q.is_contiguous()
        assert k.is_contiguous()
        assert v.is_contiguous()
        shapes.append((tuple(q.shape), tuple(k.shape), tuple(v.shape), layer))
        return causal_attend(q, k, v, layer)

    tokens, positions, _ = tokens_and_labels(model)
    make_decoder(model).hidden(tokens, positions, attend)
    assert shapes == [((2, 24, 4, 16), (2, 24, 1, 16), (2, 24, 1, 16), layer) for layer in range(3)]


def test_a_permuted_sequence_gives_the_permuted_result():
    model = tiny_model(rope=YARN)
    decoder = make_decoder(model)
    tokens, positions, labels = tokens_and_labels(model, batch=1)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(2))

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:  # noqa: ARG001
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        allowed = order[:, None] >= order[None, :]
        return (
            functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed, enable_gqa=True)
            .transpose(1, 2)
            .contiguous()
        )

    expected = decoder.logits(tokens, positions, causal_attend)[:, order]
    torch.testing.assert_close(
        decoder.logits(tokens[:, order], positions[:, order], attend),
        expected,
        rtol=1e-4,
        atol=1e-4,
    )
    ours = decoder(tokens[:, order], positions[:, order], labels[:, order], attend, 0.1)
    torch.testing.assert_close(ours, decoder(tokens, positions, labels, causal_attend, 0.1))


def test_normalisation_statistics_are_float32_in_bfloat16():
    decoder = make_decoder(tiny_model())
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).bfloat16() * 100
    norm = decoder.norm.bfloat16()
    exact = (
        x.float()
        * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
        * norm.weight.float()
    )
    torch.testing.assert_close(norm(x).float(), exact, rtol=2**-8, atol=0)


def test_the_decoder_has_no_buffers_and_only_float32_parameters():
    decoder = make_decoder(tiny_model())
    assert not list(decoder.buffers())
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.float32}


def published_parameters(model: ModelConfig) -> int:
    """Count parameters by hand from the shape."""
    hidden, query, kv = (
        model.hidden_size,
        model.num_heads * model.head_dim,
        model.num_kv_heads * model.head_dim,
    )
    layer = 2 * hidden * query + 2 * hidden * kv + 3 * hidden * model.intermediate_size + 2 * hidden
    layer += (query + 2 * kv) * model.qkv_bias + 2 * model.head_dim * model.qk_norm
    return (
        model.num_layers * layer
        + model.vocab_size * hidden * (1 if model.tie_word_embeddings else 2)
        + hidden
    )


@pytest.mark.parametrize(
    ("name", "billions"),
    [("qwen0.5b", 0.49), ("qwen3b", 3.09), ("qwen7b", 7.62), ("llama8b", 8.03), ("qwen3_8b", 8.19)],
)
def test_parameter_counts_are_the_published_ones(name, billions):
    raw = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    model = ModelConfig(**{**raw, "rope": RopeConfig(**raw["rope"])})
    with torch.device("meta"):
        decoder = Decoder(
            model, rope_factor=1.0, loss_chunk_bytes=1, activation_checkpoint="none", compile=False
        )
    count = sum(parameter.numel() for parameter in decoder.parameters())
    assert count == published_parameters(model)
    assert round(count / 1e9, 2) == billions


@pytest.mark.slow
def test_compiled_stages_give_the_same_gradients_and_compile_once_for_all_layers():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    model = tiny_model("qwen3", num_layers=6)
    loss, gradients = loss_and_gradients(make_decoder(model))
    for checkpoint in CHECKPOINTS:
        for scale in (1 / 48, 1 / 47):  # a new number of valid tokens must not recompile
            compiled_loss, compiled = loss_and_gradients(
                make_decoder(model, checkpoint=checkpoint, compile=True), scale=scale
            )
        torch.testing.assert_close(compiled_loss * 47, loss * 48, rtol=1e-5, atol=1e-5)
        for name in gradients:
            torch.testing.assert_close(
                compiled[name] * 47, gradients[name] * 48, rtol=1e-4, atol=1e-4
            )
    # project and finish, four functions of the feed-forward part, and the loss of a full chunk and
    # of the last one.
    assert counters["stats"]["unique_graphs"] == 8
    assert not counters["graph_break"]
