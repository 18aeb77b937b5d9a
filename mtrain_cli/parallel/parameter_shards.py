"""Which part of a parameter this worker holds."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from mtrain_cli.parallel.tensor_group import TensorGroup


def own_region(parameter: DTensor) -> tuple[slice, ...]:
    """Return the region of a whole parameter that this worker holds, one slice per dimension.

    Tensor parallelism, the last dimension of the mesh, cuts first. FSDP shards what remains, in
    chunks of equal size, except that the last chunks may be shorter or empty.
    """
    mesh, placements = parameter.device_mesh, parameter.placements
    region = [slice(0, size) for size in parameter.shape]
    for mesh_dim in reversed(range(mesh.ndim)):
        dim = getattr(placements[mesh_dim], "dim", None)
        if dim is None:
            continue  # replicated
        whole, place = region[dim], mesh.get_local_rank(mesh_dim)
        chunk = -(-(whole.stop - whole.start) // mesh.size(mesh_dim))
        begin = min(whole.start + place * chunk, whole.stop)
        region[dim] = slice(begin, min(begin + chunk, whole.stop))
    return tuple(region)


def own_part(parameter: Tensor) -> Tensor:
    """Return this worker's part of a gathered parameter. The parameter's gradient is cut alike.

    The gradient of a parameter that tensor parallelism does not cut is the sum over the worker's
    own tokens or heads (`sum_copied_gradients`).
    """
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def copies(parameter: Tensor) -> int:
    """Return the number of workers that hold the same shard of a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    placements = enumerate(parameter.placements)
    return prod(mesh.size(dim) for dim, kind in placements if isinstance(kind, Replicate))


@torch.no_grad()
def sum_copied_gradients(parameters: Iterable[Tensor], tensor: TensorGroup) -> None:
    """Add up the gradients of the parameters that all workers of a tensor group hold whole.

    Each worker has such a gradient, of a norm or of experts, only for its own tokens or heads. One
    message carries all of them, once per optimizer step.
    """
    gradients = [p.grad for p in parameters if p.grad is not None and copies(p) > 1]
    shards = [g.to_local() for g in gradients if isinstance(g, DTensor)]
    if not shards:
        return
    packed = torch.cat([shard.flatten() for shard in shards])
    tensor.sum(packed)
    for shard, summed in zip(shards, packed.split([s.numel() for s in shards]), strict=True):
        shard.copy_(summed.view_as(shard))
