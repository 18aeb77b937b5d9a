"""The decoder: only its mathematics, without masks, layouts or workers. Attention is passed in.

Parameter names are Hugging Face's without the leading ``model.``, so checkpoints map name by name.

B batch, N local tokens, C hidden, H query heads, K KV heads, D head dim, F = D/2 rotary
frequencies, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mtrain_cli.config.schema import CHECKPOINTS, LOSS_GRADIENTS, ModelConfig
from mtrain_cli.model.feed_forward import feed_forward
from mtrain_cli.model.loss import with_z_loss
from mtrain_cli.model.rope import Rotation, attention_factor, inverse_frequencies, rotate, rotation
from mtrain_cli.model.tiling import layers_with_products, tile_rows
from mtrain_cli.model.token_losses import token_losses
from mtrain_cli.parallel.activation_offload import ActivationOffload, Kept

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
    """One pre-norm layer: `project`, attention, `finish`.

    With any ``activation_checkpoint`` but none, a layer keeps only its input, and backward starts
    with a second forward pass. That pass repeats `project`, takes attention from what attention
    kept for itself, and computes only the inputs of `finish` (`feed_forward.py`). The checkpoint
    modes differ in what attention keeps.

    offload: where the layer's input is kept until backward; None: on the device.
    tile_bytes: most bytes of temporaries in `finish`; 0: no bound.
    keep_mlp: `finish` keeps the results of its products for backward (`feed_forward`). Without a
        checkpoint and tiles, autograd keeps everything anyway.
    """

    def __init__(
        self,
        model: ModelConfig,
        index: int,
        *,
        activation_checkpoint: str,
        compile: bool,
        tile_bytes: int = 0,
        offload: ActivationOffload | None = None,
        keep_mlp: bool = False,
    ) -> None:
        super().__init__()
        assert activation_checkpoint in CHECKPOINTS, activation_checkpoint
        assert offload is None or activation_checkpoint != "none", (
            "only the input of a second forward pass can be offloaded"
        )
        self.index = index
        self.recomputed = activation_checkpoint != "none"
        self.offload = offload
        self.compiled = compile
        self.tile_bytes = tile_bytes
        self.keep_mlp = keep_mlp
        self.model = model
        self.input_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = RMSNorm(model.hidden_size, model.rms_norm_eps)
        self.mlp = SwiGLU(model)

    def project(
        self, x_BNC: Tensor, cos_BN1F: Tensor, sin_BN1F: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn.project(self.input_layernorm(x_BNC), cos_BN1F, sin_BN1F)

    def finish(self, x_BNC: Tensor, out_BNHD: Tensor) -> Tensor:
        x_BNC = x_BNC + self.self_attn.o_proj(out_BNHD.flatten(-2))
        return x_BNC + self.mlp(self.post_attention_layernorm(x_BNC))

    def forward(self, x_BNC: Tensor, rope: Rotation, attend: Attend) -> Tensor:
        passes = _Passes()
        layer: Callable[[Tensor], Tensor] = partial(
            self._layer, rope=rope, attend=attend, passes=passes
        )
        if not self.recomputed:
            return layer(x_BNC)
        # Recomputation starts inside forward, so FSDP's hooks, which gather parameters around
        # forward, are neither rerun nor compiled.
        with nullcontext() if self.offload is None else self._input_offloaded(self.offload):
            return _checkpointed(passes, layer, x_BNC)

    def _layer(self, x_BNC: Tensor, rope: Rotation, attend: Attend, passes: _Passes) -> Tensor:
        project, finish = _stages(self.compiled)
        q_BNHD, k_BNKD, v_BNKD = project(self, x_BNC, rope.cos_BN1F, rope.sin_BN1F)
        out_BNHD = attend(q_BNHD, k_BNKD, v_BNKD, self.index)
        del q_BNHD, k_BNKD, v_BNKD
        tokens, model = x_BNC.shape[0] * x_BNC.shape[1], self.model
        rows = tile_rows(
            tokens,
            model.hidden_size,
            model.intermediate_size,
            x_BNC.element_size(),
            self.tile_bytes,
        )
        if not self.recomputed and rows == tokens:
            return finish(self, x_BNC, out_BNHD)
        norm, mlp = self.post_attention_layernorm, self.mlp
        weights = (
            self.self_attn.o_proj.weight,
            norm.weight,
            mlp.gate_proj.weight,
            mlp.up_proj.weight,
            mlp.down_proj.weight,
        )
        keep = self.keep_mlp and torch.is_grad_enabled()
        return feed_forward(
            x_BNC,
            out_BNHD,
            weights,
            norm.eps,
            rows,
            self.index,
            compile=self.compiled,
            inputs_only=passes.second,
            keep=keep,
        )

    def _input_offloaded(self, offload: ActivationOffload) -> AbstractContextManager[None]:
        """Return a context in which the checkpointed layer's input is saved to host memory."""

        def offload_input(saved: Tensor) -> Kept:
            # Some versions of `checkpoint` also save an empty tensor of their own.
            return offload.put(self.index, saved) if saved.numel() else saved

        return torch.autograd.graph.saved_tensors_hooks(
            offload_input, lambda kept: kept if isinstance(kept, Tensor) else kept.get()
        )


def _checkpointed(passes: _Passes, function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Return function(*args), keeping only the arguments until backward."""
    # Nothing in the decoder is random. Preserving the random state would synchronise with the GPU.
    return checkpoint(
        function, *args, use_reentrant=False, preserve_rng_state=False, context_fn=passes.contexts
    )


class _Passes:
    """Which forward pass of a layer call is running.

    second: the one that recomputes what backward needs.
    """

    def __init__(self) -> None:
        self.second = False

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of the first and the second pass, as `checkpoint` expects them."""
        return nullcontext(), self._second_pass()

    @contextmanager
    def _second_pass(self) -> Iterator[None]:
        self.second = True
        try:
            yield
        finally:
            self.second = False


@cache
def _stages(compile: bool) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return `project` and `finish` as functions of a layer.

    All layers share one pair, so each is compiled once and not once per layer.
    """
    stages = (DecoderLayer.project, DecoderLayer.finish)
    return (
        (torch.compile(stages[0], dynamic=False), torch.compile(stages[1], dynamic=False))
        if compile
        else stages
    )


class Decoder(nn.Module):
    """A decoder-only language model.

    Build it under ``torch.device("meta")``, shard it, ``to_empty`` it, then initialise it
    (`init.py`) or load it (`huggingface.py`). It has only float32 parameters and no buffers, so
    nothing else has to survive these steps.

    rope_factor: the resolved stretch of positions (`rope.py`).
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        rope_factor: float,
        loss_chunk_bytes: int,
        activation_checkpoint: str,
        compile: bool,
        tile_bytes: int = 0,
        offload: ActivationOffload | None = None,
        loss_gradients: str = "forward",
        z_loss: float = 0.0,
        keep_mlp: bool | int = False,
    ) -> None:
        super().__init__()
        assert loss_gradients in LOSS_GRADIENTS, loss_gradients
        self.model_config = model
        self.loss_chunk_bytes = loss_chunk_bytes
        self.compile_loss = compile
        self.recompute_logits = loss_gradients == "recompute"
        self.z_loss = z_loss
        self.inverse_frequencies_F = inverse_frequencies(model.rope, model.head_dim, rope_factor)
        self.attention_factor = attention_factor(model.rope, rope_factor)
        self.embed_tokens = nn.Embedding(model.vocab_size, model.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(
                model,
                index,
                activation_checkpoint=activation_checkpoint,
                compile=compile,
                tile_bytes=tile_bytes,
                offload=offload,
                keep_mlp=index
                >= model.num_layers - layers_with_products(keep_mlp, model.num_layers),
            )
            for index in range(model.num_layers)
        )
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
            x_NC, self._head_weight(), labels_BN.flatten(), self.loss_chunk_bytes, loss_scale,
            self.z_loss, recompute=self.recompute_logits, compile=self.compile_loss,
        )  # fmt: skip
        return loss + (total - total.detach()) if self.z_loss else total

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
                x_BNC.flatten(0, 1), self._head_weight(), labels_BN.flatten(), self.loss_chunk_bytes
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
