"""FSDP2 over data and context ranks: what a worker holds whole, what it shards, and what it sends.

    shard=      weights from forward   gradients between   sent in a step of
                to backward            micro-batches       n micro-batches
    full        shards (ZeRO-3)        float32 shards      n x (weights twice + gradients)
    gradients   whole (ZeRO-2)         float32 shards      weights once + n x gradients
    optimizer   whole (ZeRO-1)         whole, float32      weights once + gradients once

FSDP2 keeps the weights outside the layers whole from forward to backward, even under ``full``.
Optimizer states and float32 weights are always sharded: all modes write the same checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from mtrain_cli.launch import progress_record
from mtrain_cli.parallel.mesh import SHARD, TENSOR


def shard_parameters(
    decoder: nn.Module,
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    *,
    shard: str = "full",
    reduce_dtype: torch.dtype = torch.float32,
    experts: Sequence[nn.Module] = (),
    expert_mesh: DeviceMesh | None = None,
) -> None:
    """Shard a decoder in place, layer by layer. Parameters keep their dtype.

    Gradients are summed over workers: the loss is already divided by the tokens of the whole step.
    Over micro-batches a worker accumulates gradients in the parameters' dtype, but in reduce_dtype
    under ``optimizer``. Quantized weights, which have no elements yet, stay whole on each worker.
    """
    for parameter in decoder.parameters():
        if not parameter.requires_grad:  # the computation needs no more precision than its own
            parameter.data = parameter.data.to(compute_dtype)
    whole = {parameter for parameter in decoder.parameters() if not parameter.numel()}
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype,
        reduce_dtype=reduce_dtype,
        cast_forward_inputs=False,
    )
    # None is FSDP2's default: free the layers' weights after forward, keep the root's.
    reshard = None if shard == "full" else False
    cut = TENSOR in (mesh.mesh_dim_names or ())
    of_layers, of_root = (mesh[SHARD], mesh._flatten()) if cut else (mesh, mesh)
    for module in experts:
        assert expert_mesh is not None
        fully_shard(
            module,
            mesh=expert_mesh,
            mp_policy=policy,
            reshard_after_forward=reshard,
            shard_placement_fn=partial(_expert_shards, workers=expert_mesh.size()),
        )
    for module in _units(decoder):
        own_mesh = of_root if module is decoder else of_layers
        options: Any = {"mp_policy": policy, "reshard_after_forward": reshard}
        fully_shard(module, mesh=own_mesh, ignored_params=whole, **options)
    for module in [*experts, *_units(decoder)]:
        assert isinstance(module, FSDPModule)
        # Without a factor, FSDP2 divides by the number of workers. With a factor of 1, a worker
        # alone would copy all gradients once more.
        alone = module in experts and expert_mesh is not None and expert_mesh.size() == 1
        if not alone:
            module.set_gradient_divide_factor(1.0)
        # Without this, NCCL would scale inside its reduction. gloo can only sum.
        module.set_force_sum_reduction_for_comms(True)
        name = next(name for name, one in decoder.named_modules() if one is module)
        module.set_custom_all_gather(_Noted(name, "weights", _GATHER))  # type: ignore[arg-type]
        noted = _Noted(name, "gradients", _SCATTER)
        module.set_custom_reduce_scatter(noted)  # type: ignore[arg-type]
    # FSDP2 prefetches the unit before the last one, which is here a layer, never its experts.
    for later, earlier in pairwise(reversed(experts)):
        assert isinstance(later, FSDPModule)
        later.set_modules_to_backward_prefetch([earlier])  # type: ignore[list-item]


# PyTorch 2.13 renamed both.
_GATHER, _SCATTER = (
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist, "all_gather_single")
    else ("all_gather_into_tensor", "reduce_scatter_tensor")
)


class _Noted:
    """A collective of FSDP2 that the activity record names. gloo waits in the call."""

    def __init__(self, name: str, what: str, collective: str) -> None:
        self._doing, self._what = f"FSDP, {name or 'embedding, norm and head'}", what
        self._collective = collective

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, **more: Any
    ) -> Any:
        waits = f"{self._doing}: waits for {self._what} among {group.size()} ranks"
        progress_record.note(waits, progress_record.SEVERAL)
        work = getattr(dist, self._collective)(output_tensor, input_tensor, group=group, **more)
        progress_record.note(self._doing)
        return work


def sharded_dimension(shape: Sequence[int], workers: int) -> int | None:
    """Return the dimension along which experts' weights, [experts, rows, columns], are sharded.

    FSDP2 shards dimensions other than the first only into equal parts.
    """
    return next((dim for dim in (1, 2) if shape[dim] % workers == 0), None)


def _expert_shards(weight: nn.Parameter, *, workers: int) -> Shard:
    dimension = sharded_dimension(weight.shape, workers)
    assert dimension is not None, (weight.shape, workers)
    return Shard(dimension)


def begin_micro_batch(
    decoder: nn.Module, shard: str, *, last: bool, layers: Iterable[int] | None = None
) -> None:
    """Set whether the next backward pass frees gathered weights and reduces gradients.

    Under ``full`` every pass does both, under ``optimizer`` only the last micro-batch's pass. Under
    ``gradients`` every pass reduces gradients, and the last one frees weights.

    layers: numbers of the layers to which this applies. None applies to the whole decoder, an empty
        iterable to the weights outside the layers.
    """
    if shard == "full" or not isinstance(decoder, FSDPModule):
        return
    units: list[nn.Module] = [decoder]
    if layers is not None:
        units = [decoder.layers.get_submodule(str(n)) for n in layers] or units  # type: ignore
    for unit in units:
        assert isinstance(unit, FSDPModule)
        whole = layers is None or unit is not decoder  # a layer includes its experts
        unit.set_reshard_after_backward(last, recurse=whole)
        if shard == "optimizer":
            unit.set_requires_gradient_sync(last, recurse=whole)


def reshard(decoder: nn.Module) -> None:
    """Free all gathered weights. The next gather reads the current shards."""
    for module in decoder.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _units(decoder: nn.Module) -> list[nn.Module]:
    """Return the modules that FSDP2 gathers and reduces as one unit: each layer, then the root."""
    return [*decoder.layers, decoder]  # type: ignore[misc]


def unit_parameters(decoder: nn.Module) -> list[list[nn.Parameter]]:
    """Return the parameters of each layer, then of the root, in FSDP2's packing order."""
    layers = [list(layer.parameters()) for layer in decoder.layers]  # type: ignore
    inside = {id(parameter) for layer in layers for parameter in layer}
    return [
        *layers,
        [parameter for parameter in decoder.parameters() if id(parameter) not in inside],
    ]


def on_reduced_gradients(decoder: nn.Module, hook: Callable[[int, Tensor], None]) -> None:
    """Call ``hook(unit, packed)`` after every reduction of gradients. Keep no ``grad``.

    packed: the unit's reduced gradients, 1-D, in the dtype of the reduction: the worker's shards
        one after the other, each padded with zeros to the size of rank 0's shard. FSDP2 writes the
        tensor on its own stream, and the hook runs on that stream.
    """
    for number, module in enumerate(_units(decoder)):
        assert isinstance(module, FSDPModule)
        module.set_all_reduce_hook(partial(hook, number))
    for parameter in decoder.parameters():
        # FSDP2 would store a rounded copy of the gradient here.
        parameter.register_post_accumulate_grad_hook(_drop)


def _drop(parameter: Tensor) -> None:
    parameter.grad = None
