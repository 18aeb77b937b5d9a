"""Other implementations of attention, which a benchmark times for comparison."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mtrain_cli.model.compilation import compiled

# Whether a query sees a key: a function of batch, head, query position and key position.
Predicate = Callable[[Any, Any, Any, Any], torch.Tensor]


@dataclass(frozen=True)
class FlexAttention:
    """PyTorch's FlexAttention, compiled, under one mask.

    block_mask: FlexAttention's lists of blocks, which are made once and not timed.
    """

    attend: Callable[..., torch.Tensor]
    block_mask: Any

    @staticmethod
    def make(predicate: Predicate, seq: int, device: str) -> FlexAttention:
        """Build the lists of blocks, and prepare to compile for this mask and shape."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        # Every mask and length compiles anew. Past a limit, Dynamo would stop to compile and
        # compute all pairs.
        torch._dynamo.reset()
        # Uncompiled, the lists of blocks take memory for every pair.
        make_lists = compiled(create_block_mask, False) if device == "cuda" else None
        block_mask = (make_lists or create_block_mask)(predicate, None, None, seq, seq, device)
        return FlexAttention(compiled(flex_attention, False), block_mask)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Return the output for q [1, heads, tokens, head_dim], and k and v with kv_heads."""
        return self.attend(q, k, v, block_mask=self.block_mask, enable_gqa=True)


def torch_context_parallel(
    world: int, group: int
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a call of PyTorch's context parallelism, with an all-gather of KV and cuDNN.

    The call takes this rank's q [1, heads, tokens, head_dim], and k and v [1, kv_heads, tokens,
    head_dim]. It uses PyTorch's own load balancing.

    Args:
        group: number of query heads per KV head. The call repeats each KV head this many times,
            because PyTorch's context parallelism needs as many KV heads as query heads.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._context_parallel._attention import set_rotate_method
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("cp",))
    set_rotate_method("allgather")
    buffer = torch.zeros(2 * world, device="cuda")

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (t.repeat_interleave(group, 1) for t in (k, v))
        with (
            sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
            context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]),
        ):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return call
