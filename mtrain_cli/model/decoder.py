"""The decoder: only its mathematics, without masks, layouts or workers. Attention is passed in.

Parameter names are Hugging Face's without the leading ``model.``, so checkpoints map name by name.

B batch, N local tokens, C hidden, H query heads, K KV heads, D head dim, F = D/2 rotary
frequencies, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from mtrain_cli.config.schema import ModelConfig
from mtrain_cli.model.loss import LossOptions, with_z_loss
from mtrain_cli.model.rope import Rotation, attention_factor, inverse_frequencies, rotate, rotation
from mtrain_cli.model.token_losses import token_losses

if TYPE_CHECKING:
    from mtrain_cli.model.layer_execution import LayerExecution

Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]
"""``attend(q_BNHD, k_BNKD, v_BNKD, layer) -> out_BNHD``: contiguous inputs, scores q.k / sqrt(D).
"""


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension (arXiv:1910.07467, equation 4).

    The mean square is float32 for every input dtype.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """The projections around attention, with grouped KV heads (GQA, arXiv:2305.13245)."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.head_dim = model.head_dim
        query_width, kv_width = (
            model.num_heads * model.head_dim,
            model.num_kv_heads * model.head_dim,
        )
        self.q_proj = nn.Linear(model.hidden_size, query_width, bias=model.qkv_bias)
        self.k_proj = nn.Linear(model.hidden_size, kv_width, bias=model.qkv_bias)
        self.v_proj = nn.Linear(model.hidden_size, kv_width, bias=model.qkv_bias)
        self.o_proj = nn.Linear(query_width, model.hidden_size, bias=False)
        if model.qk_norm:
            self.q_norm = RMSNorm(model.head_dim, model.rms_norm_eps)
            self.k_norm = RMSNorm(model.head_dim, model.rms_norm_eps)
        self.qk_norm = model.qk_norm

    def project(
        self, x_BNC: Tensor, cos_BN1F: Tensor, sin_BN1F: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return q ``[B, N, H, D]`` and k, v ``[B, N, K, D]``, contiguous, q and k rotated."""
        q_BNHD, k_BNKD, v_BNKD = (
            p(x_BNC).unflatten(-1, (-1, self.head_dim))
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.qk_norm:
            q_BNHD, k_BNKD = self.q_norm(q_BNHD), self.k_norm(k_BNKD)
        return rotate(q_BNHD, cos_BN1F, sin_BN1F), rotate(k_BNKD, cos_BN1F, sin_BN1F), v_BNKD

    def forward(self, x_BNC: Tensor, rope: Rotation, attend: Attend, layer: int) -> Tensor:
        out_BNHD = attend(*self.project(x_BNC, rope.cos_BN1F, rope.sin_BN1F), layer)
        return self.o_proj(out_BNHD.flatten(-2))


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv:2002.05202, equation 6)."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(model.hidden_size, model.intermediate_size, bias=False)
        self.up_proj = nn.Linear(model.hidden_size, model.intermediate_size, bias=False)
        self.down_proj = nn.Linear(model.intermediate_size, model.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    """One pre-norm layer.

    execution: computes the layer in less memory or time, if set (`parallelize.py`).
    """

    def __init__(self, model: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.input_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.mlp = SwiGLU(model)
        self.execution: LayerExecution | None = None

    def forward(self, x_BNC: Tensor, rope: Rotation, attend: Attend) -> Tensor:
        if self.execution is not None:
            return self.execution.run(self, x_BNC, rope, attend)
        x_BNC = x_BNC + self.self_attn(self.input_layernorm(x_BNC), rope, attend, self.index)
        return x_BNC + self.mlp(self.post_attention_layernorm(x_BNC))


class Decoder(nn.Module):
    """A decoder-only language model.

    Build it under ``torch.device("meta")``, shard it, ``to_empty`` it, then initialise it
    (`init.py`) or load it (`huggingface.py`). It has only float32 parameters and no buffers, so
    nothing else has to survive these steps.

    rope_factor: the resolved stretch of positions (`rope.py`).
    """

    def __init__(
        self, model: ModelConfig, rope_factor: float = 1.0, loss: LossOptions | None = None
    ) -> None:
        super().__init__()
        self.model_config = model
        self.loss = loss or LossOptions()
        self.inverse_frequencies_F = inverse_frequencies(model.rope, model.head_dim, rope_factor)
        self.attention_factor = attention_factor(model.rope, rope_factor)
        self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(model, n) for n in range(model.num_layers))
        self.norm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        if not model.tie_word_embeddings:
            self.lm_head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)

    def forward(
        self,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        labels_BN: Tensor,
        attend: Attend,
        loss_scale: float | Tensor,
    ) -> Tensor:
        """Return ``loss_scale`` times the sum of token losses, a float32 scalar.

        With ``z_loss`` the gradient includes the z-loss, but the value is the loss alone, which
        stays comparable with other runs.

        Args:
            positions_BN: places of the tokens in the whole sequence, in any order.
            labels_BN: already shifted; -100 is ignored.
            loss_scale: a tensor must arrive in float32. FSDP2's mixed precision rounds a module's
                inputs to bfloat16 unless its policy has ``cast_forward_inputs=False``.
        """
        x_NC = self.hidden(tokens_BN, positions_BN, attend).flatten(0, 1)
        total, loss = with_z_loss(
            x_NC, self._head_weight(), labels_BN.flatten(), loss_scale, self.loss
        )
        return loss + (total - total.detach()) if self.loss.z_loss else total

    def hidden(self, tokens_BN: Tensor, positions_BN: Tensor, attend: Attend) -> Tensor:
        """Return the final normalised hidden states ``[B, N, C]``."""
        if self.inverse_frequencies_F.device != positions_BN.device:
            self.inverse_frequencies_F = self.inverse_frequencies_F.to(positions_BN.device)
        rope = rotation(positions_BN, self.inverse_frequencies_F, self.attention_factor)
        x_BNC = self.embed_tokens(tokens_BN)
        for layer in self.layers:
            x_BNC = layer(x_BNC, rope, attend)
        return self.norm(x_BNC)

    def token_losses(
        self, tokens_BN: Tensor, positions_BN: Tensor, labels_BN: Tensor, attend: Attend
    ) -> Tensor:
        """Return the loss of every token, ``[B, N]``, 0 where the label is -100; no gradients."""
        with torch.no_grad():
            x_BNC = self.hidden(tokens_BN, positions_BN, attend)
            losses_N = token_losses(
                x_BNC.flatten(0, 1), self._head_weight(), labels_BN.flatten(), self.loss.chunk_bytes
            )
        return losses_N.view(labels_BN.shape)

    def logits(self, tokens_BN: Tensor, positions_BN: Tensor, attend: Attend) -> Tensor:
        """Return the logits ``[B, N, V]`` of all tokens at once, to verify small inputs."""
        return functional.linear(self.hidden(tokens_BN, positions_BN, attend), self._head_weight())

    def _head_weight(self) -> Tensor:
        return (
            self.embed_tokens.weight
            if self.model_config.tie_word_embeddings
            else self.lm_head.weight
        )
