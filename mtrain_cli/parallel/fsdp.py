"""FSDP2 over the data and context ranks: what a worker holds whole, what it holds a shard of, and when either is sent.

    shard=        weights between forward and backward   gradients between micro-batches   sent in a step of n micro-batches
    full          shards (ZeRO-3)                        float32 shards                    n x (weights twice + gradients)
    gradients     whole, for the step (ZeRO-2)           float32 shards                    weights once + n x gradients
    optimizer     whole, for the step (ZeRO-1)           whole, float32                    weights once + gradients once

Weights outside the layers are gathered once a micro-batch under ``full``, too: FSDP2 keeps the root whole from forward to backward.
Optimizer states and the float32 weights are shards in all three, so that checkpoints are the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


def shard_parameters(
    decoder: nn.Module,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    *,
    shard: str = "full",
    reduce_dtype: torch.dtype = torch.float32,
) -> None:
    """Shards a decoder in place, layer by layer. Parameters keep their dtype; they are gathered and used in compute_dtype.

    Gradients are summed, not averaged: the loss is already divided by the number of valid tokens of the whole step. They travel and are
    added up over workers in reduce_dtype; what a worker adds up over micro-batches stays in the parameters' dtype, except under
    ``optimizer``, where it is reduce_dtype (or the compute dtype if that is the same).
    """
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype,
        reduce_dtype=reduce_dtype,
        cast_forward_inputs=False,
    )
    # None: layers are given back after forward, the root is not.
    reshard = None if shard == "full" else False
    for module in _units(decoder):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    for module in _units(decoder):
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        # NCCL would scale inside its reduction; a plain sum is what is wanted, and all that gloo has.
        module.set_force_sum_reduction_for_comms(True)


def begin_micro_batch(decoder: nn.Module, shard: str, *, last: bool) -> None:
    """Says what happens to weights and gradients at the end of the next backward pass. last: of the optimizer step."""
    if shard == "full" or not isinstance(decoder, FSDPModule):
        return
    decoder.set_reshard_after_backward(last)
    if shard == "optimizer":
        decoder.set_requires_gradient_sync(last)


def reshard(decoder: nn.Module) -> None:
    """Gives back all that is whole: what is gathered next has the shards as they are then."""
    for module in _units(decoder):
        if isinstance(module, FSDPModule):
            module.reshard()


def _units(decoder: nn.Module) -> list[nn.Module]:
    """What is gathered and reduced together: each layer, and last the rest."""
    return [*decoder.layers, decoder]  # type: ignore[misc]


def unit_parameters(decoder: nn.Module) -> list[list[nn.Parameter]]:
    """The parameters of each layer, and last those of the rest, in the order in which FSDP2 packs their gradients."""
    layers = [list(layer.parameters()) for layer in decoder.layers]  # type: ignore[union-attr, arg-type]
    inside = {id(parameter) for layer in layers for parameter in layer}
    return [
        *layers,
        [parameter for parameter in decoder.parameters() if id(parameter) not in inside],
    ]


def on_reduced_gradients(decoder: nn.Module, hook: Callable[[int, Tensor], None]) -> None:
    """Has ``hook(unit, packed)`` called with each unit's reduced gradients in the dtype of the reduction, once for every reduction; the
    parameters themselves get none.

    packed: 1-dim, this worker's shards one after the other (`unit_parameters`), each filled up with zeros to the size of rank 0's. It is
    allocated and written on streams of FSDP2; the hook runs on that which writes it.
    """
    for number, module in enumerate(_units(decoder)):
        assert isinstance(module, FSDPModule)

        def call(packed: Tensor, number: int = number) -> None:
            hook(number, packed)

        module.set_all_reduce_hook(call)
    for parameter in decoder.parameters():
        # FSDP2 would store a rounded copy.
        parameter.register_post_accumulate_grad_hook(_drop)


def _drop(parameter: Tensor) -> None:
    parameter.grad = None
