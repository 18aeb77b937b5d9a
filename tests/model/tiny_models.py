"""Small decoders and the same models in transformers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtrain_cli.config.schema import DENSE, ModelConfig, MoeConfig, RopeConfig
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.huggingface import write_folder
from mtrain_cli.model.loss import LossOptions
from mtrain_cli.model.parallelize import execute_layers, initialize
from mtrain_cli.model.rope import rope_factor
from mtrain_cli.model.tiling import LayerExecution
from mtrain_cli.model.verify import causal_attend

SEQ = 256  # tokens per sequence that an exported model was trained on

PLAIN = RopeConfig(
    theta=10000.0,
    scaling="none",
    factor=1.0,
    original_max_position=64,
    beta_fast=32.0,
    beta_slow=1.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
YARN = dataclasses.replace(PLAIN, scaling="yarn", factor=4.0)
# 6 experts, and a first layer without experts where a family has such layers.
EXPERTS = {
    "qwen3_moe": MoeConfig(experts=6, top_k=2, expert_size=24, normalize=False, dense_layers=1),
    "mixtral": MoeConfig(experts=6, top_k=2, expert_size=56),
}
LLAMA3 = dataclasses.replace(PLAIN, scaling="llama3", factor=8.0)


def tiny_model(
    family: str = "qwen2",
    *,
    num_kv_heads: int = 2,
    tied: bool = True,
    rope: RopeConfig = PLAIN,
    **changes: Any,
) -> ModelConfig:
    """Return a small model of a family, with its biases and norms.

    head_dim differs from hidden / heads, so that mixing them up shows.
    """
    model = ModelConfig(
        name="tiny", family=family, vocab_size=97, hidden_size=40, num_layers=3, num_heads=4,
        num_kv_heads=num_kv_heads, head_dim=16,
        intermediate_size=56, qkv_bias=family == "qwen2",
        qk_norm=family in ("qwen3", "qwen3_moe"),
        tie_word_embeddings=tied, rms_norm_eps=1e-6,
        init_std=0.2, rope=rope, moe=EXPERTS.get(family, DENSE),
    )  # fmt: skip
    return dataclasses.replace(model, **changes)


def make_decoder(
    model: ModelConfig,
    *,
    seed: int = 0,
    checkpoint: str = "none",
    compile: bool = False,
    tile_bytes: int = 0,
    keep_mlp: bool | int = False,
    **loss_options: Any,
) -> Decoder:
    """Return an initialised decoder with random biases and norms, so that mistakes in them show."""
    with torch.device("meta"):
        decoder = Decoder(
            model,
            rope_factor=rope_factor(model.rope, 4 * model.rope.original_max_position),
            loss=LossOptions(4 * model.vocab_size * 7, compile=compile, **loss_options),
        )
    execution = LayerExecution(
        recompute=checkpoint != "none", compile=compile, tile_bytes=tile_bytes
    )
    execute_layers(decoder, execution, keep_mlp=keep_mlp)
    decoder.to_empty(device="cpu")
    initialize(decoder, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith(("bias", "norm.weight")):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return decoder


def tokens_and_labels(
    model: ModelConfig, batch: int = 2, length: int = 24
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random tokens, ordered positions and labels (some ignored), ``[batch, length]``."""
    generator = torch.Generator().manual_seed(5)
    tokens, labels = (
        torch.randint(model.vocab_size, (batch, length), generator=generator) for _ in range(2)
    )
    labels[:, ::5] = -100
    return tokens, torch.arange(length).expand(batch, length).contiguous(), labels


def loss_and_gradients(
    decoder: Decoder, attend=causal_attend, scale: float = 1 / 48
) -> tuple[Tensor, dict[str, Tensor]]:
    tokens, positions, labels = tokens_and_labels(decoder.model_config)
    loss = decoder(tokens, positions, labels, attend, scale)
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in decoder.named_parameters()}


def export(
    path: Path, model: ModelConfig, dtype: torch.dtype = torch.float32, **options: Any
) -> dict[str, Tensor]:
    """Write a random model; return its parameters, rounded to dtype."""
    weights = {
        name: value.detach().to(dtype) for name, value in make_decoder(model).named_parameters()
    }
    write_folder(
        path,
        model,
        lambda names: {name: weights[name] for name in names},
        rope_factor=rope_factor(model.rope, SEQ),
        seq=SEQ,
        dtype=dtype,
        **options,
    )
    return weights


def edit_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config |= changes
    config = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
