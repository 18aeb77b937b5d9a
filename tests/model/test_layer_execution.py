"""Checkpoints, tiles, kept products and compilation change memory and time, not the result."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny_models import YARN, loss_and_gradients, make_decoder, tiny_model, tokens_and_labels
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from training.allocations import LiveBytes

from mtrain_cli.config.schema import CHECKPOINTS
from mtrain_cli.model.decoder import DecoderLayer
from mtrain_cli.model.verify import causal_attend


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
@pytest.mark.parametrize(
    ("tile_rows", "keep_mlp"), [(0, 0), (1, 0), (20, 0), (48, 0), (0, True), (20, True), (20, 2)]
)
def test_checkpoints_tiles_and_kept_products_do_not_change_loss_and_gradients(
    checkpoint, tile_rows, keep_mlp
):
    model = tiny_model("qwen3", rope=YARN)
    plain = make_decoder(model).double()
    for layer in plain.layers:
        layer.__class__ = DecoderLayer
    loss, gradients = loss_and_gradients(plain)
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
    assert [layer.execution.keep_products for layer in make_decoder(model, keep_mlp=2).layers] == [
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
