"""Run a decoder layer in less memory or time, with the same result as `DecoderLayer.forward`.

Shape suffixes are those of `decoder.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mtrain_cli.launch.temporary_folders import compiled
from mtrain_cli.model.decoder import Attend, DecoderLayer, ProjectionWeights, projected
from mtrain_cli.model.experts import MixtureOfExperts
from mtrain_cli.model.feed_forward import (
    FeedForwardOptions,
    FeedForwardWeights,
    feed_forward,
    normalized,
)
from mtrain_cli.model.rope import Rotation
from mtrain_cli.model.routing import Decision, Routing
from mtrain_cli.model.tiling import LayerExecution, shared_tile_rows
from mtrain_cli.parallel.activation_offload import ActivationOffload, Kept
from mtrain_cli.parallel.layer_groups import TensorGroup, gather_rows, own_part, scatter_rows


class ExecutedLayer(DecoderLayer):
    """A decoder layer that runs as ``execution`` describes (`parallelize.execute_layers`)."""

    execution: LayerExecution

    def forward(
        self, x_BNC: Tensor, rope: Rotation, attend: Attend, routing: Routing | None = None
    ) -> Tensor:
        if isinstance(self.mlp, MixtureOfExperts) and self.mlp.sharing is not None:
            return self.mlp.experts(self._run, x_BNC, rope, attend, routing)
        return self._run(x_BNC, rope, attend, routing)

    def _run(
        self, x_BNC: Tensor, rope: Rotation, attend: Attend, routing: Routing | None
    ) -> Tensor:
        passes = _Passes()
        compute = partial(self._stages, rope=rope, attend=attend, passes=passes, routing=routing)
        if not self.execution.recompute:
            return compute(x_BNC)
        # FSDP gathers parameters in hooks around `forward`: the second pass does not gather again.
        offload = self.execution.offload
        with nullcontext() if offload is None else _input_offloaded(offload, self.index):
            # Saving the state of the random generators would synchronize with the GPU. Layers use
            # no random numbers.
            options: Any = {"use_reentrant": False, "preserve_rng_state": False}
            return checkpoint(compute, x_BNC, context_fn=passes.contexts, **options)

    def _stages(
        self, x_BNC: Tensor, rope: Rotation, attend: Attend, passes: _Passes,
        routing: Routing | None,
    ) -> Tensor:  # fmt: skip
        execution, mlp, tensor = self.execution, self.mlp, self.execution.tensor
        before: Callable[..., tuple[Tensor, Tensor, Tensor]] = (
            staged(project, execution.compile, execution.any_length)
            if tensor is None
            else partial(project_shared, tensor=tensor, compile=execution.compile)
        )
        # No variable refers to q, k and v, so their memory is free after attention.
        out_BNHD = attend(*before(self, x_BNC, rope.cos_BN1F, rope.sin_BN1F), self.index)
        if isinstance(mlp, MixtureOfExperts):
            h_BNC, n_BNC = before_experts(self, x_BNC, out_BNHD, tensor)
            return h_BNC + mlp(n_BNC, routing, passes.decisions)
        tokens = x_BNC.shape[0] * x_BNC.shape[1]
        hidden, intermediate = mlp.down_proj.out_features, mlp.down_proj.in_features
        itemsize = x_BNC.element_size()
        workers = 1 if tensor is None else tensor.size
        sizes = hidden, intermediate, itemsize, execution.tile_bytes
        rows = shared_tile_rows(tokens, *sizes, workers, execution.tensor_chunks)
        weights = FeedForwardWeights.of(self)
        if tensor is not None:
            weights = FeedForwardWeights(*map(own_part, weights))
            out_BNHD = tensor.padded(out_BNHD.flatten(0, 1).flatten(1)).view(
                1, -1, *out_BNHD.shape[2:]
            )
        elif not execution.recompute and rows == tokens:
            after = staged(finish, execution.compile, execution.any_length)
            return after(self, x_BNC, out_BNHD)
        eps = self.post_attention_layernorm.eps
        keep = execution.keep_products and torch.is_grad_enabled()
        options = FeedForwardOptions(execution, eps, rows, passes.second, keep)
        return feed_forward(x_BNC, out_BNHD, weights, options)


def project(
    layer: DecoderLayer, x_BNC: Tensor, cos_BN1F: Tensor, sin_BN1F: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the part of a layer before attention. Return q, k and v."""
    return layer.self_attn.project(layer.input_layernorm(x_BNC), cos_BN1F, sin_BN1F)


def project_shared(
    layer: DecoderLayer,
    x_BNC: Tensor,
    cos_BN1F: Tensor,
    sin_BN1F: Tensor,
    *,
    tensor: TensorGroup,
    compile: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute q, k and v of this worker's heads for the tokens of all workers."""
    norm, attention = layer.input_layernorm, layer.self_attn
    own_RC = staged(normalized, compile)(x_BNC[0], own_part(norm.weight), norm.eps)
    batch, tokens = cos_BN1F.shape[:2]
    all_NC = gather_rows(own_RC, tensor)[: batch * tokens]
    weights = ProjectionWeights.of(attention)
    own = {name: own_part(w) for name, w in weights._asdict().items() if w is not None}
    weights = weights._replace(**own)
    gathered_BNC = all_NC.view(batch, tokens, -1)
    heads, sizes = staged(projected, compile), (attention.head_dim, attention.eps)
    return heads(gathered_BNC, weights, *sizes, cos_BN1F, sin_BN1F)


def before_experts(
    layer: DecoderLayer, x_BNC: Tensor, out_BNHD: Tensor, tensor: TensorGroup | None
) -> tuple[Tensor, Tensor]:
    """Compute a layer up to its experts. Return h = x + o(out) and norm(h) of own tokens."""
    norm, o_CA = layer.post_attention_layernorm, own_part(layer.self_attn.o_proj.weight)
    if tensor is None:
        sums_BNC = torch.nn.functional.linear(out_BNHD.flatten(-2), o_CA)
    else:
        rows_SA = tensor.padded(out_BNHD.flatten(0, 1).flatten(1))
        sums_BNC = scatter_rows(rows_SA @ o_CA.t(), tensor)
    h_BNC = x_BNC + sums_BNC
    return h_BNC, normalized(h_BNC, own_part(norm.weight), norm.eps)


def finish(layer: DecoderLayer, x_BNC: Tensor, out_BNHD: Tensor) -> Tensor:
    """Compute the part of a layer after attention, with autograd's own backward pass."""
    x_BNC = x_BNC + layer.self_attn.o_proj(out_BNHD.flatten(-2))
    return x_BNC + layer.mlp(layer.post_attention_layernorm(x_BNC))


@cache
def staged(
    stage: Callable[..., Any], compile: bool, any_length: bool = False
) -> Callable[..., Any]:
    """Return a function that all layers share, compiled once if ``compile``."""
    return compiled(stage, any_length) if compile else stage


def _input_offloaded(offload: ActivationOffload, layer: int) -> AbstractContextManager[None]:
    """Return a context in which `checkpoint` saves the layer's input to host memory."""

    def offload_input(saved: Tensor) -> Kept:
        # Some versions of `checkpoint` also save an empty tensor. Keep that on the device.
        return offload.put(layer, saved) if saved.numel() else saved

    return torch.autograd.graph.saved_tensors_hooks(
        offload_input, lambda kept: kept if isinstance(kept, Tensor) else kept.get()
    )


class _Passes:
    """The forward passes of one call of a layer.

    second: whether the forward pass that the backward pass starts is running.
    decisions: the decision of the layer's router, from the first pass.
    """

    def __init__(self) -> None:
        self.second = False
        self.decisions: list[Decision] = []

    def contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return a context for each of the two forward passes, as `checkpoint` expects."""
        return nullcontext(), self._second_pass()

    @contextmanager
    def _second_pass(self) -> Iterator[None]:
        self.second = True
        try:
            yield
        finally:
            self.second = False
