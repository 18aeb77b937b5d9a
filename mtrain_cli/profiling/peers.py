"""Other implementations of context parallelism, to time in the same run."""

from __future__ import annotations

from collections.abc import Callable

import torch


def torch_context_parallel(
    world: int, group: int
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return PyTorch's own context parallelism: all-gather of KV, cuDNN, its load balancing.

    The call takes q [1, heads, tokens of this rank, head_dim], k and v with kv_heads.

    Args:
        world: ranks.
        group: query heads per KV head; this PyTorch release needs KV repeated.
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
