"""Run a decoder layer in less memory or time, with the result of `DecoderLayer.forward`.

Shapes are named as in `decoder.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mtrain_cli.model.feed_forward import FeedForwardOptions, FeedForwardWeights, feed_forward
from mtrain_cli.model.rope import Rotation
from mtrain_cli.model.tiling import tile_rows
from mtrain_cli.parallel.activation_offload import ActivationOffload, Kept

if TYPE_CHECKING:
    from mtrain_cli.model.decoder import Attend, DecoderLayer


@dataclass(frozen=True)
class LayerExecution:
    """Run a layer in three stages: `project`, attention, `finish` or `feed_forward`.

    recompute: keep only the layer's input. Backward starts with a second forward pass, which
        repeats `project`, reuses the tensors that attention kept, and computes only the inputs of
        `feed_forward`. The checkpoint modes differ in the tensors that attention keeps.
    compile: compile the first and the last stage.
    tile_bytes: maximum bytes of temporaries after attention; 0 = no bound.
    keep_products: `feed_forward` keeps the results of its products for backward. Without
        ``recompute`` and tiles, autograd keeps everything anyway.
    offload: where the layer's input stays until backward; None = on the device.
    """

    recompute: bool = False
    compile: bool = False
    tile_bytes: int = 0
    keep_products: bool = False
    offload: ActivationOffload | None = None

    def __post_init__(self) -> None:
        assert self.offload is None or self.recompute, (
            "only the input of a second forward pass can be offloaded"
        )

    def run(self, layer: DecoderLayer, x_BNC: Tensor, rope: Rotation, attend: Attend) -> Tensor:
        passes = _Passes()
        compute = partial(self._stages, layer, rope=rope, attend=attend, passes=passes)
        if not self.recompute:
            return compute(x_BNC)
        # Checkpoint inside forward: FSDP's hooks, which gather parameters around forward, are then
        # neither rerun nor compiled.
        with nullcontext() if self.offload is None else _input_offloaded(self.offload, layer.index):
            # Nothing in a layer is random. Preserving the random state would synchronise with the
            # GPU.
            return checkpoint(
                compute,
                x_BNC,
                use_reentrant=False,
                preserve_rng_state=False,
                context_fn=passes.contexts,
            )

    def _stages(
        self, layer: DecoderLayer, x_BNC: Tensor, rope: Rotation, attend: Attend, passes: _Passes
    ) -> Tensor:
        project, finish = stage_functions(self.compile)
        # No name holds q, k and v, so they are freed after attention.
        out_BNHD = attend(*project(layer, x_BNC, rope.cos_BN1F, rope.sin_BN1F), layer.index)
        tokens = x_BNC.shape[0] * x_BNC.shape[1]
        rows = tile_rows(
            tokens,
            layer.mlp.down_proj.out_features,
            layer.mlp.down_proj.in_features,
            x_BNC.element_size(),
            self.tile_bytes,
        )
        if not self.recompute and rows == tokens:
            return finish(layer, x_BNC, out_BNHD)
        options = FeedForwardOptions(
            eps=layer.post_attention_layernorm.eps,
            rows=rows,
            layer=layer.index,
            compile=self.compile,
            inputs_only=passes.second,
            keep_products=self.keep_products and torch.is_grad_enabled(),
        )
        return feed_forward(x_BNC, out_BNHD, FeedForwardWeights.of(layer), options)


def project(
    layer: DecoderLayer, x_BNC: Tensor, cos_BN1F: Tensor, sin_BN1F: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute everything before attention."""
    return layer.self_attn.project(layer.input_layernorm(x_BNC), cos_BN1F, sin_BN1F)


def finish(layer: DecoderLayer, x_BNC: Tensor, out_BNHD: Tensor) -> Tensor:
    """Compute everything after attention, as autograd does."""
    x_BNC = x_BNC + layer.self_attn.o_proj(out_BNHD.flatten(-2))
    return x_BNC + layer.mlp(layer.post_attention_layernorm(x_BNC))


@cache
def stage_functions(
    compile: bool,
) -> tuple[Callable[..., tuple[Tensor, Tensor, Tensor]], Callable[..., Tensor]]:
    """Return `project` and `finish`. All layers share one pair, so each is compiled only once."""
    if not compile:
        return project, finish
    return torch.compile(project, dynamic=False), torch.compile(finish, dynamic=False)


def _input_offloaded(offload: ActivationOffload, layer: int) -> AbstractContextManager[None]:
    """Return a context in which the checkpointed layer's input is saved to host memory."""

    def offload_input(saved: Tensor) -> Kept:
        # Some versions of `checkpoint` also save an empty tensor of their own.
        return offload.put(layer, saved) if saved.numel() else saved

    return torch.autograd.graph.saved_tensors_hooks(
        offload_input, lambda kept: kept if isinstance(kept, Tensor) else kept.get()
    )


class _Passes:
    """Which forward pass of a layer call is running.

    second: the pass that recomputes what backward needs.
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
