"""The decoder computes what its reference computes, and stages hold its parameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from tiny_models import YARN, loss_and_gradients, make_decoder, tiny_model, tokens_and_labels
from torch import Tensor
from torch.nn import functional

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ModelConfig, RopeConfig
from mtrain_cli.model.decoder import Decoder, virtual_stages
from mtrain_cli.model.parallelize import initialize
from mtrain_cli.model.verify import causal_attend

CONF = Path(__file__).parents[2] / "conf" / "model"


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


def test_the_z_loss_changes_gradients_but_not_the_reported_loss():
    model = tiny_model(tied=True)
    tokens, positions, labels = tokens_and_labels(model)
    decoder, plain = (make_decoder(model, z_loss=0.01, recompute=True), make_decoder(model))
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
        decoder = Decoder(model)
    count = sum(parameter.numel() for parameter in decoder.parameters())
    assert count == published_parameters(model)
    assert round(count / 1e9, 2) == billions


WORDS = ["model.num_layers=5", "model.hidden_size=32", "model.num_heads=4", "model.num_kv_heads=2"]


def parts(counts: tuple[int, ...], stages: int, *words: str) -> tuple[Decoder, list[Decoder]]:
    """Return the whole decoder and that of each stage, with the same weights."""
    model = compose([*WORDS, *words]).model
    every = virtual_stages(counts)
    whole = Decoder(model)
    own = [Decoder(model, stages=every[stage::stages]) for stage in range(stages)]
    for decoder in (whole, *own):
        initialize(decoder, 3)
    return whole, own


def test_virtual_stages_number_the_layers_of_the_whole_model():
    first, second, third = virtual_stages((2, 2, 1))
    assert [list(stage.layers) for stage in (first, second, third)] == [[0, 1], [2, 3], [4]]
    assert [(s.first, s.last) for s in (first, second, third)] == [
        (True, False),
        (False, False),
        (False, True),
    ]


@pytest.mark.parametrize("tied", ["true", "false"])
def test_the_stages_together_hold_each_parameter_once_except_a_tied_embedding(tied):
    whole, own = parts((2, 2, 1), 3, f"model.tie_word_embeddings={tied}")
    names = [name for decoder in own for name, _ in decoder.named_parameters()]
    expected = dict(whole.named_parameters())
    assert set(names) == set(expected)
    twice = {name for name in names if names.count(name) > 1}
    assert twice == ({"embed_tokens.weight"} if tied == "true" else set())
    for decoder in own:
        for name, parameter in decoder.named_parameters():
            assert torch.equal(parameter, expected[name]), name
    # Layers keep their numbers: attention and indices are found by them.
    assert [layer.index for layer in own[1].layers] == [2, 3]


def attend(q, k, v, layer):
    """Stand-in for attention that depends on the layer."""
    return q * (layer + 1) + torch.cat([k, v], 2)


@pytest.mark.parametrize("counts", [(5,), (2, 3), (1, 1, 2, 1)])
def test_virtual_stages_in_turn_compute_the_loss_of_the_whole_decoder(counts):
    stages = 2 if len(counts) % 2 == 0 else 1
    whole, own = parts(counts, stages)
    draw = torch.Generator().manual_seed(0)
    tokens, labels = (torch.randint(0, 264, (1, 12), generator=draw) for _ in range(2))
    positions = torch.arange(12)[None]
    for scale in (0.1, None):
        x = None
        for number in range(len(counts)):
            decoder = own[number % stages]
            x = decoder.run_stage(number, x, tokens, positions, labels, attend, scale)
        if scale is None:
            expected = whole.token_losses(tokens, positions, labels, attend)
        else:
            expected = whole(tokens, positions, labels, attend, scale)
        assert torch.equal(x, expected)
        assert x.requires_grad == (scale is not None)
