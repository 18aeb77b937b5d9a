"""Prepare a decoder to run on many workers, which does not change the result; initialize it.

From the innermost to the outermost: tensor and expert parallelism, compilation, tiling after
attention, checkpointing, FSDP.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from mtrain_cli.config.schema import Config
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.experts import Experts, expert_layers, reset_biases
from mtrain_cli.model.layer_execution import ExecutedLayer
from mtrain_cli.model.loss import LossOptions
from mtrain_cli.model.tiling import LayerExecution, layers_with_products
from mtrain_cli.parallel.activation_offload import ActivationOffload
from mtrain_cli.parallel.fsdp import shard_parameters
from mtrain_cli.parallel.layer_groups import (
    EXPERTS,
    SHARD_OF_EXPERTS,
    ExpertGroup,
    TensorGroup,
    own_region,
)
from mtrain_cli.parallel.mesh import TENSOR

# Modules whose output or input features tensor parallelism cuts.
_BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUT = ("o_proj", "down_proj")


def parallelize(
    decoder: Decoder,
    config: Config,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    *,
    compile: bool,
    offload: ActivationOffload | None,
    tensor: TensorGroup | None = None,
    experts: ExpertGroup | None = None,
    expert_mesh: DeviceMesh | None = None,
) -> Decoder:
    """Prepare a decoder on the meta device for training, in place, and return it.

    mesh: the workers that share the parameters (`make_parameter_mesh`).
    dtype: dtype in which the layers compute.
    offload: host memory for the inputs of checkpointed layers.
    tensor, experts: the workers that share each layer, and the experts; None for this one.
    expert_mesh: with ``experts``, the mesh that holds them (`make_expert_mesh`).
    """
    if tensor is not None:
        cut_layers(decoder, mesh[TENSOR], experts=experts is None)
    if experts is not None:
        assert expert_mesh is not None
        for mlp in expert_layers(decoder.layers):
            _cut(mlp.experts, expert_mesh[EXPERTS], Shard(0))
            mlp.sharing = experts
    set_execution(decoder, config, compile=compile, offload=offload, tensor=tensor)
    if config.optim.offload:
        decoder.to(dtype)  # the float32 weights are in host memory
    shard_parameters(
        decoder,
        mesh,
        dtype,
        shard=config.train.shard,
        reduce_dtype=getattr(torch, config.train.reduce_dtype),
        experts=[] if experts is None else [m.experts for m in expert_layers(decoder.layers)],
        expert_mesh=None if expert_mesh is None else expert_mesh[SHARD_OF_EXPERTS],
    )
    # Evaluation and pipelines call these methods. FSDP must gather weights for them, too.
    register_fsdp_forward_method(decoder, "token_losses")
    register_fsdp_forward_method(decoder, "run_stage")
    return decoder


def set_execution(
    decoder: Decoder,
    config: Config,
    *,
    compile: bool,
    offload: ActivationOffload | None = None,
    tensor: TensorGroup | None = None,
) -> None:
    """Set up compilation, tiling and checkpointing of the layers, and the options of the loss."""
    train = config.train
    execution = LayerExecution(
        compile=compile,
        tile_bytes=train.tile_mib << 20,
        recompute=train.activation_checkpoint != "none",
        offload=offload,
        tensor=tensor,
        tensor_chunks=config.topology.tensor_chunks,
        expert_chunks=config.topology.expert_chunks,
    )
    execute_layers(decoder, execution, keep_mlp=train.keep_mlp)
    decoder.loss = LossOptions(
        chunk_bytes=train.loss_chunk_mib << 20,
        z_loss=train.z_loss,
        recompute=train.loss_gradients == "recompute",
        compile=compile,
    )


def execute_layers(
    decoder: Decoder, execution: LayerExecution, *, keep_mlp: bool | int = False
) -> None:
    """Make all layers of a decoder run as ``execution`` describes.

    keep_mlp: value of ``train.keep_mlp``, which selects layers that keep their matrix products.
    """
    layers = decoder.model_config.num_layers
    first_kept = layers - layers_with_products(keep_mlp, layers)
    for layer in decoder.layers:
        # As FSDP2 does, change the class and not the module: parameters keep their names.
        layer.__class__ = ExecutedLayer
        keep_products = layer.index >= first_kept  # type: ignore
        layer.execution = replace(execution, keep_products=keep_products)  # type: ignore
    for mlp in expert_layers(decoder.layers):
        mlp.execution = execution


def cut_layers(decoder: Decoder, mesh: DeviceMesh, *, experts: bool = True) -> None:
    """Cut the parameters of all layers on the meta device over a tensor group, in place.

    Every worker has the whole norms, routers and experts. A cut parameter is a DTensor with its
    name and whole shape. mesh: the tensor group, one-dimensional. experts: False leaves experts
    alone.
    """
    for layer in decoder.layers:
        for name, module in layer.named_modules():
            if isinstance(module, Experts) and not experts:
                continue
            _cut(module, mesh, _placement(name))


def _cut(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Keep this worker's part of a module's own parameters on the meta device."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        part = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(part))


def _placement(module: str) -> Placement:
    name = module.rpartition(".")[2]
    if module.startswith("mlp.shared."):  # it computes own tokens, as the experts do
        return Replicate()
    if name in _BY_OUTPUT:
        return Shard(0)
    return Shard(1) if name in _BY_INPUT else Replicate()


def initialize(decoder: Decoder, seed: int, device: torch.device | None = None) -> None:
    """Set norms to 1, biases to 0, and matrices to normal numbers, however they are sharded.

    Their standard deviation is ``init_std``, divided by sqrt(2 num_layers) for projections that add
    to the residual stream (GPT-2's report, section 2.3). Every worker draws whole matrices, seeded
    from ``seed`` and the parameter's name, and keeps its shard.

    device: draws the numbers, on which CPU and CUDA differ; by default the parameter's.
    """
    reset_biases(decoder)
    residual_std = decoder.model_config.init_std / math.sqrt(2 * decoder.model_config.num_layers)
    for name, parameter in decoder.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.ones_(parameter)
        elif name.endswith(".bias"):
            nn.init.zeros_(parameter)
        else:
            residual = name.endswith(("o_proj.weight", "down_proj.weight", "experts.down"))
            std = residual_std if residual else decoder.model_config.init_std
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            of_name = int.from_bytes(digest[:8], "little") >> 1
            _fill_normal(parameter, std, of_name, device or parameter.device)


@torch.no_grad()
def _fill_normal(parameter: Tensor, std: float, seed: int, device: torch.device) -> None:
    assert not parameter.is_meta, "call to_empty(device=...) before initialize"
    generator = torch.Generator(device).manual_seed(seed)
    matrix = (
        torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        .normal_(0.0, std, generator=generator)
        .to(parameter.device)
    )
    if isinstance(parameter, DTensor):
        parameter.to_local().copy_(matrix[own_region(parameter)])
    else:
        parameter.copy_(matrix)
