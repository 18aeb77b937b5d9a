"""The mathematics of a decoder-only language model. The caller passes attention in as a function.

Parameters have the names of Hugging Face without the leading ``model.``. Shape suffixes: B batch, N
local tokens, C hidden size, H query heads, K KV heads, D head dimension, F = D/2 rotary
frequencies, V vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from mtrain_cli.config.schema import ModelConfig
from mtrain_cli.model.experts import MixtureOfExperts
from mtrain_cli.model.loss import LossOptions, chunked_losses, token_losses
from mtrain_cli.model.rope import Rotation, attention_factor, inverse_frequencies, rotate, rotation
from mtrain_cli.model.routing import Routing

# attend(q_BNHD, k_BNKD, v_BNKD, layer) -> out_BNHD. The inputs are contiguous. The function divides
# the scores q.k by sqrt(D). Models of transformers with learnable sinks give them, [H], as a fifth.
Attend = Callable[..., Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight (arXiv:1910.07467, equation 4), with the mean square in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class ProjectionWeights(NamedTuple):
    """Weights before attention; None for what a model lacks. A: width of the query or KV heads."""

    q_AC: Tensor
    k_AC: Tensor
    v_AC: Tensor
    q_bias_A: Tensor | None
    k_bias_A: Tensor | None
    v_bias_A: Tensor | None
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None

    @staticmethod
    def of(attention: Attention) -> ProjectionWeights:
        projections = attention.q_proj, attention.k_proj, attention.v_proj
        norms = (attention.q_norm, attention.k_norm) if attention.qk_norm else ()
        return ProjectionWeights(
            *(p.weight for p in projections),
            *(p.bias for p in projections),
            *([norm.weight for norm in norms] or (None, None)),
        )


def projected(
    x_BNC: Tensor,
    weights: ProjectionWeights,
    head_dim: int,
    eps: float,
    cos_BN1F: Tensor,
    sin_BN1F: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return rotated q ``[B, N, H, D]`` and k, and v ``[B, N, K, D]``, all contiguous."""
    products = (
        functional.linear(x_BNC, weight_AC, bias_A)
        for weight_AC, bias_A in zip(weights[:3], weights[3:6], strict=True)
    )
    return _rotated(products, weights, head_dim, eps, cos_BN1F, sin_BN1F)


def of_products(
    qkv_BNA: Tensor,
    weights: ProjectionWeights,
    head_dim: int,
    eps: float,
    cos_BN1F: Tensor,
    sin_BN1F: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result of `projected`. qkv: products with q, k and v side by side."""
    parts = qkv_BNA.split([len(weight_AC) for weight_AC in weights[:3]], -1)
    products = (
        part_BNA.contiguous() if bias_A is None else part_BNA + bias_A
        for part_BNA, bias_A in zip(parts, weights[3:6], strict=True)
    )
    return _rotated(products, weights, head_dim, eps, cos_BN1F, sin_BN1F)


def _rotated(
    products: Iterable[Tensor],
    weights: ProjectionWeights,
    head_dim: int,
    eps: float,
    cos_BN1F: Tensor,
    sin_BN1F: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    q_BNHD, k_BNKD, v_BNKD = (each.unflatten(-1, (-1, head_dim)) for each in products)
    if weights.q_norm_D is not None:
        q_BNHD, k_BNKD = (
            functional.rms_norm(heads, (head_dim,), norm_D, eps)
            for heads, norm_D in ((q_BNHD, weights.q_norm_D), (k_BNKD, weights.k_norm_D))
        )
    return rotate(q_BNHD, cos_BN1F, sin_BN1F), rotate(k_BNKD, cos_BN1F, sin_BN1F), v_BNKD


class Attention(nn.Module):
    """The linear projections before and after attention (grouped-query, arXiv:2305.13245)."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        query_width = model.num_heads * model.head_dim
        kv_width = model.num_kv_heads * model.head_dim
        self.q_proj = nn.Linear(model.hidden_size, query_width, bias=model.qkv_bias)
        self.k_proj = nn.Linear(model.hidden_size, kv_width, bias=model.qkv_bias)
        self.v_proj = nn.Linear(model.hidden_size, kv_width, bias=model.qkv_bias)
        self.o_proj = nn.Linear(query_width, model.hidden_size, bias=False)
        if model.qk_norm:
            self.q_norm = RMSNorm(model.head_dim, model.rms_norm_eps)
            self.k_norm = RMSNorm(model.head_dim, model.rms_norm_eps)
        self.qk_norm, self.eps = model.qk_norm, model.rms_norm_eps

    def project(
        self, x_BNC: Tensor, cos_BN1F: Tensor, sin_BN1F: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = ProjectionWeights.of(self)
        return projected(x_BNC, weights, self.head_dim, self.eps, cos_BN1F, sin_BN1F)

    def forward(self, x_BNC: Tensor, rope: Rotation, attend: Attend, layer: int) -> Tensor:
        out_BNHD = attend(*self.project(x_BNC, rope.cos_BN1F, rope.sin_BN1F), layer)
        return self.o_proj(out_BNHD.flatten(-2))


class SwiGLU(nn.Module):
    """The MLP of a layer: down(silu(gate(x)) * up(x)) (arXiv:2002.05202, equation 6)."""

    def __init__(self, hidden_size: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, width, bias=False)
        self.up_proj = nn.Linear(hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """Attention, then the MLP or experts, each with a norm before it."""

    def __init__(self, model: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.input_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.mlp = _mlp(model, index)

    def forward(
        self, x_BNC: Tensor, rope: Rotation, attend: Attend, routing: Routing | None = None
    ) -> Tensor:
        h_BNC = x_BNC + self.self_attn(self.input_layernorm(x_BNC), rope, attend, self.index)
        n_BNC = self.post_attention_layernorm(h_BNC)
        if isinstance(self.mlp, MixtureOfExperts):
            return h_BNC + self.mlp(n_BNC, routing)
        return h_BNC + self.mlp(n_BNC)


def _mlp(model: ModelConfig, layer: int) -> SwiGLU | MixtureOfExperts:
    if not model.has_experts(layer):
        return SwiGLU(model.hidden_size, model.intermediate_size)
    shared = SwiGLU(model.hidden_size, model.moe.shared_size) if model.moe.shared_size else None
    return MixtureOfExperts(model, layer, shared)


@dataclass(frozen=True)
class VirtualStage:
    """Consecutive layers that one worker computes without a message of the pipeline.

    first, last: whether the embedding, or the final norm and the LM head, belong to it.
    """

    number: int
    layers: range
    first: bool
    last: bool


def virtual_stages(layer_counts: Sequence[int]) -> tuple[VirtualStage, ...]:
    """Return all virtual stages. layer_counts: number of layers of each."""
    ends = [sum(layer_counts[: n + 1]) for n in range(len(layer_counts))]
    return tuple(
        VirtualStage(n, range(end - count, end), n == 0, n == len(ends) - 1)
        for n, (end, count) in enumerate(zip(ends, layer_counts, strict=True))
    )


class Decoder(nn.Module):
    """A decoder-only language model.

    Construct it under ``torch.device("meta")``, prepare it for many workers (`parallelize`),
    allocate with ``to_empty(device=...)``, then `initialize` it or load weights (`load_into`).

    rope_factor: factor by which positions are stretched.
    stages: the virtual stages of one worker of a pipeline; all layers by default. Parameters keep
        their names, and tied embeddings are on the first and on the last stage.
    """

    def __init__(
        self,
        model: ModelConfig,
        rope_factor: float = 1.0,
        loss: LossOptions | None = None,
        stages: Sequence[VirtualStage] = (),
    ) -> None:
        super().__init__()
        model.require_own()
        self.model_config = model
        self.loss = loss or LossOptions()
        self.inverse_frequencies_F = inverse_frequencies(model.rope, model.head_dim, rope_factor)
        self.attention_factor = attention_factor(model.rope, rope_factor)
        stages = stages or virtual_stages((model.num_layers,))
        self.stages = {stage.number: stage for stage in stages}
        first, last = (any(getattr(s, end) for s in stages) for end in ("first", "last"))
        if first or (last and model.tie_word_embeddings):
            self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleList()
        for number in sorted(n for stage in stages for n in stage.layers):
            self.layers.add_module(str(number), DecoderLayer(model, number))
        if last:
            self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        if last and not model.tie_word_embeddings:
            self.lm_head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)

    def forward(
        self,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        labels_BN: Tensor,
        attend: Attend,
        loss_scale: float | Tensor,
        routing: Routing | None = None,
    ) -> Tensor:
        """Return ``loss_scale`` times the sum of the token losses, a float32 scalar.

        The gradient includes the z-loss and the losses of ``routing``, but the value does not: it
        stays comparable with runs without them.

        positions_BN: index of each token in the whole sequence, in any order.
        labels_BN: the token that follows each token; -100 does not count.
        loss_scale: FSDP2 rounds a tensor to bfloat16, unless its mixed-precision policy has
            ``cast_forward_inputs=False``.
        """
        x_BNC = self.hidden(tokens_BN, positions_BN, attend, routing)
        return self.loss_of(x_BNC, labels_BN, loss_scale)

    def loss_of(self, x_BNC: Tensor, labels_BN: Tensor, loss_scale: float | Tensor) -> Tensor:
        """Return the result of `forward` from hidden states."""
        total, loss = chunked_losses(
            x_BNC.flatten(0, 1), self._head_weight(), labels_BN.flatten(), loss_scale, self.loss
        )
        return loss + (total - total.detach()) if self.loss.z_loss else total

    def run_stage(
        self,
        number: int,
        x_BNC: Tensor | None,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        labels_BN: Tensor,
        attend: Attend,
        loss_scale: float | None,
        routing: Routing | None = None,
    ) -> Tensor:
        """Return the hidden states after a virtual stage, or the loss after the last one.

        x_BNC: hidden states after the previous virtual stage; None for the first.
        loss_scale: None returns the loss of every token, as `Decoder.token_losses` does.
        """
        stage = self.stages[number]
        with torch.set_grad_enabled(loss_scale is not None):
            rope = self.rotation(positions_BN)
            if x_BNC is None:
                x_BNC = self.embed_tokens(tokens_BN)
            for layer in stage.layers:
                x_BNC = self.layers.get_submodule(str(layer))(x_BNC, rope, attend, routing)
            assert x_BNC is not None
            if not stage.last:
                return x_BNC
            normed_BNC = self.norm(x_BNC)
            if loss_scale is None:
                return self.token_losses_of(normed_BNC, labels_BN)
            return self.loss_of(normed_BNC, labels_BN, loss_scale)

    def hidden(
        self,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        attend: Attend,
        routing: Routing | None = None,
    ) -> Tensor:
        """Return the hidden states after the last layer and the final norm, ``[B, N, C]``."""
        rope = self.rotation(positions_BN)
        x_BNC = self.embed_tokens(tokens_BN)
        for layer in self.layers:
            x_BNC = layer(x_BNC, rope, attend, routing)
        return self.norm(x_BNC)

    def rotation(self, positions_BN: Tensor) -> Rotation:
        if self.inverse_frequencies_F.device != positions_BN.device:
            self.inverse_frequencies_F = self.inverse_frequencies_F.to(positions_BN.device)
        return rotation(positions_BN, self.inverse_frequencies_F, self.attention_factor)

    def token_losses(
        self,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        labels_BN: Tensor,
        attend: Attend,
        is_greedy_BN: Tensor | None = None,
    ) -> Tensor:
        """Return the loss of every token, ``[B, N]``, without gradients; 0 for label -100.

        is_greedy_BN: receives whether each label is the most likely token, bool ``[B, N]``.
        """
        with torch.no_grad():
            x_BNC = self.hidden(tokens_BN, positions_BN, attend)
            return self.token_losses_of(x_BNC, labels_BN, is_greedy_BN)

    def token_losses_of(
        self, x_BNC: Tensor, labels_BN: Tensor, is_greedy_BN: Tensor | None = None
    ) -> Tensor:
        """Return the result of `token_losses` from hidden states."""
        losses_N = token_losses(
            x_BNC.flatten(0, 1),
            self._head_weight(),
            labels_BN.flatten(),
            self.loss.chunk_bytes,
            None if is_greedy_BN is None else is_greedy_BN.view(-1),
        )
        return losses_N.view(labels_BN.shape)

    def logits(self, tokens_BN: Tensor, positions_BN: Tensor, attend: Attend) -> Tensor:
        """Return the logits ``[B, N, V]``. All logits are in memory at once, so use few tokens."""
        return self.head(self.hidden(tokens_BN, positions_BN, attend))

    def head(self, x_BNC: Tensor) -> Tensor:
        """Return the logits ``[B, N, V]`` of hidden states."""
        return functional.linear(x_BNC, self._head_weight())

    def _head_weight(self) -> Tensor:
        tied = self.model_config.tie_word_embeddings
        return (self.embed_tokens if tied else self.lm_head).weight
