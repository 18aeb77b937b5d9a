"""PyTorch's attention gets the heads and the mask of our attention.

Without GPUs, its ring and cuDNN are replaced: one process computes the whole sequence.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.distributed import device_mesh
from torch.distributed.tensor import experimental
from torch.distributed.tensor.experimental._context_parallel import _attention
from torch.nn import attention

from mtrain_cli.profiling.imbalance_benchmark import torch_context_parallel

WORLD, HEADS, KV_HEADS, SEQ, WIDTH = 3, 6, 2, 5, 4


def test_query_heads_share_kv_heads_in_consecutive_groups_under_a_causal_mask(monkeypatch):
    inside: list[Any] = []
    seen: list[Any] = []

    @contextmanager
    def context_parallel(*arguments, **options):
        seen.append((arguments, options))
        inside.append(True)
        yield
        inside.pop()

    zeros, compute = torch.zeros, torch.nn.functional.scaled_dot_product_attention

    def parallel(*tensors, **options):
        assert inside, "the call runs in the context"
        return compute(*tensors, **options)

    monkeypatch.setattr(device_mesh, "init_device_mesh", lambda kind, shape, **_: (kind, shape))
    monkeypatch.setattr(experimental, "context_parallel", context_parallel)
    monkeypatch.setattr(_attention, "set_rotate_method", seen.append)
    monkeypatch.setattr(attention, "sdpa_kernel", lambda _: nullcontext())
    monkeypatch.setattr(torch, "zeros", lambda *shape, **_: zeros(*shape))
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", parallel)
    call = torch_context_parallel(WORLD, HEADS // KV_HEADS)
    torch.manual_seed(0)
    q = torch.randn(1, HEADS, SEQ, WIDTH)
    k, v = torch.randn(2, 1, KV_HEADS, SEQ, WIDTH)
    found = call(q, k, v)

    for head in range(HEADS):
        keys, values = (t[0, head // (HEADS // KV_HEADS)] for t in (k, v))
        for row in range(SEQ):
            weights = torch.softmax(keys[: row + 1] @ q[0, head, row] * WIDTH**-0.5, 0)
            torch.testing.assert_close(found[0, head, row], weights @ values[: row + 1])
    method, ((mesh,), options) = seen
    assert (method, mesh) == ("allgather", ("cuda", (WORLD,)))
    # PyTorch's load balancing cuts each buffer into two parts per rank.
    (buffer,), (dim,) = options["buffers"], options["buffer_seq_dims"]
    assert buffer.shape[dim] % (2 * WORLD) == 0
