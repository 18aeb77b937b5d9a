"""FSDP2 over the data and context ranks: parameters, gradients and optimizer states are each held once."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method


def shard_parameters(decoder: nn.Module, mesh: DeviceMesh, compute_dtype: torch.dtype) -> None:
    """Shards a decoder in place, layer by layer. Parameters stay float32; they are gathered and used in compute_dtype and reduced in
    float32.

    Gradients are summed, not averaged: the loss is already divided by the number of valid tokens of the whole step.
    """
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    layers = list(decoder.layers)  # type: ignore[arg-type]
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(decoder, mesh=mesh, mp_policy=policy)
    register_fsdp_forward_method(decoder, "token_losses")  # evaluation enters here and needs the root's parameters gathered too
    for module in (*layers, decoder):
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # NCCL would scale inside its reduction; a plain sum is what is wanted, and all that gloo has.
        module.set_force_sum_reduction_for_comms(True)
