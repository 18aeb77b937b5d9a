from __future__ import annotations

import dataclasses

import pytest
import torch
from tiny_models import LLAMA3, PLAIN, YARN

from mtrain_cli.config.schema import ConfigError, RopeConfig
from mtrain_cli.model.huggingface_config import RAMP
from mtrain_cli.model.rope import (
    attention_factor,
    inverse_frequencies,
    rope_factor,
    rotate,
    rotation,
)

QWEN = dataclasses.replace(
    PLAIN, theta=1e6, scaling="yarn", factor="auto", original_max_position=32768
)


def transformers_parameters(
    rope: RopeConfig, head_dim: int, factor: float
) -> tuple[torch.Tensor, float]:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_type": rope.scaling, "rope_theta": rope.theta, "factor": factor}
    parameters["original_max_position_embeddings"] = rope.original_max_position
    parameters |= {name: getattr(rope, name) for name in RAMP[rope.scaling]}
    config = transformers.LlamaConfig(
        head_dim=head_dim,
        max_position_embeddings=int(factor * rope.original_max_position),
        rope_parameters=parameters,
    )
    return ROPE_INIT_FUNCTIONS[rope.scaling](config, torch.device("cpu"))


@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("factor", [1.0, 4.0, 16.0])
@pytest.mark.parametrize(
    "rope",
    [
        YARN,
        QWEN,
        LLAMA3,
        dataclasses.replace(LLAMA3, theta=5e5, original_max_position=8192),
        dataclasses.replace(QWEN, beta_fast=20.0, beta_slow=2.0),
    ],
)
def test_stretched_frequencies_equal_transformers(rope, factor, head_dim):
    theirs, their_attention_factor = transformers_parameters(rope, head_dim, factor)
    torch.testing.assert_close(
        inverse_frequencies(rope, head_dim, factor), theirs, rtol=1e-6, atol=0
    )
    assert attention_factor(rope, factor) == pytest.approx(their_attention_factor)


@pytest.mark.parametrize(
    ("factor", "seq", "expected"),
    [("auto", 524288, 16.0), ("auto", 4096, 1.0), (8.0, 524288, 8.0), ("2", 100, 2.0)],
)
def test_auto_factor_is_the_ratio_of_lengths_and_at_least_one(factor, seq, expected):
    assert rope_factor(dataclasses.replace(QWEN, factor=factor), seq) == expected


@pytest.mark.parametrize("factor", ["automatic", 0.5, float("nan"), float("inf")])
def test_an_invalid_factor_is_named(factor):
    with pytest.raises(
        ConfigError, match=f"model.rope.factor={factor}: must be auto or a number of at least 1"
    ):
        rope_factor(dataclasses.replace(QWEN, factor=factor), 4096)


def test_rotation_uses_the_given_positions_in_any_order():
    frequencies = inverse_frequencies(PLAIN, 16, 1.0)
    x = torch.randn(1, 6, 2, 16, generator=torch.Generator().manual_seed(0))
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    ordered = rotation(torch.arange(6)[None], frequencies, 1.0)
    shuffled = rotation(order[None], frequencies, 1.0)
    expected = rotate(x, ordered.cos_BN1F, ordered.sin_BN1F)[:, order]
    assert torch.equal(rotate(x[:, order], shuffled.cos_BN1F, shuffled.sin_BN1F), expected)


def test_scores_depend_only_on_distance_at_four_million_tokens():
    frequencies = inverse_frequencies(PLAIN, 64, 1.0)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 64, generator=generator) for _ in range(2))

    def score(q_position: int, k_position: int) -> float:
        turned = []
        for x, position in ((q, q_position), (k, k_position)):
            rope = rotation(torch.tensor([[position]]), frequencies, 1.0)
            turned.append(rotate(x, rope.cos_BN1F, rope.sin_BN1F))
        return (turned[0] * turned[1]).sum().item()

    # With float32 angles this differs by more than 0.1.
    assert score(4_194_301, 4_194_234) == pytest.approx(score(67, 0), abs=1e-4)


def test_frequencies_are_real_numbers_under_the_meta_device():
    with torch.device("meta"):
        frequencies = inverse_frequencies(YARN, 32, 4.0)
    assert frequencies.device.type == "cpu"
    assert torch.equal(frequencies, inverse_frequencies(YARN, 32, 4.0))


def test_bfloat16_heads_are_rotated_in_float32_and_returned_contiguous():
    rope = rotation(torch.arange(100, 107)[None], inverse_frequencies(PLAIN, 16, 1.0), 1.0)
    x = torch.randn(1, 7, 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
    turned = rotate(x, rope.cos_BN1F, rope.sin_BN1F)
    assert turned.dtype == torch.bfloat16
    assert turned.is_contiguous()
    assert torch.equal(turned, rotate(x.float(), rope.cos_BN1F, rope.sin_BN1F).bfloat16())
