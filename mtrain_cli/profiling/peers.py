"""Other implementations of context parallelism, which a benchmark times for comparison."""

from __future__ import annotations

from collections.abc import Callable

import torch


def torch_context_parallel(
    world: int, group: int
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return a call of PyTorch's context parallelism, with an all-gather of KV and cuDNN.

    The call takes this rank's q [1, heads, tokens, head_dim], and k and v [1, kv_heads, tokens,
    head_dim]. It uses PyTorch's own load balancing.

    Args:
        world: number of ranks.
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
