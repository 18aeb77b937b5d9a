"""Prepare a decoder to run on many workers. The preparation does not change the result.

From the innermost to the outermost: tensor and expert parallelism, compilation, tiling after
attention, checkpointing, FSDP.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

from mtrain_cli.config.schema import Config, TrainConfig
from mtrain_cli.model.decoder import Decoder, StageDecoder
from mtrain_cli.model.expert_parallel import ExpertSharing, deal_experts
from mtrain_cli.model.experts import Experts, expert_layers
from mtrain_cli.model.layer_execution import ExecutedLayer, LayerExecution
from mtrain_cli.model.loss import LossOptions
from mtrain_cli.model.tiling import layers_with_products
from mtrain_cli.parallel.activation_offload import ActivationOffload
from mtrain_cli.parallel.fsdp import shard_parameters
from mtrain_cli.parallel.layer_groups import EXPERTS, SHARD_OF_EXPERTS, TensorGroup
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
    experts: ExpertSharing | None = None,
    expert_mesh: DeviceMesh | None = None,
) -> Decoder:
    """Prepare a decoder on the meta device for training, in place, and return it.

    Args:
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
        deal_experts(decoder, expert_mesh[EXPERTS])
        for mlp in expert_layers(decoder.layers):
            mlp.sharing = experts
    set_execution(
        decoder,
        config.train,
        compile=compile,
        offload=offload,
        tensor=tensor,
        tensor_chunks=config.topology.tensor_chunks,
        expert_chunks=config.topology.expert_chunks,
    )
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
    # Evaluation calls this method instead of `forward`. FSDP must gather weights for it, too.
    register_fsdp_forward_method(decoder, "token_losses")
    if isinstance(decoder, StageDecoder):
        register_fsdp_forward_method(decoder, "run_stage")
    return decoder


def set_execution(
    decoder: Decoder,
    train: TrainConfig,
    *,
    compile: bool = False,
    offload: ActivationOffload | None = None,
    tensor: TensorGroup | None = None,
    tensor_chunks: int | str = "auto",
    expert_chunks: int | str = "auto",
) -> None:
    """Set up compilation, tiling and checkpointing of the layers, and the options of the loss."""
    execution = LayerExecution(
        compile=compile,
        tile_bytes=train.tile_mib << 20,
        recompute=train.activation_checkpoint != "none",
        offload=offload,
        tensor=tensor,
        tensor_chunks=tensor_chunks,
        expert_chunks=expert_chunks,
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
        mlp.execution = execution.of_experts


def cut_layers(decoder: Decoder, mesh: DeviceMesh, *, experts: bool = True) -> None:
    """Cut the parameters of all layers over a tensor group, in place.

    Every worker has the whole norms, routers and experts. A cut parameter is a DTensor, with its
    name and whole shape.

    Args:
        decoder: a decoder on the meta device.
        mesh: the tensor group, one-dimensional.
        experts: whether experts belong to the tensor group; False leaves them as they are.
    """
    for layer in decoder.layers:
        for name, module in layer.named_modules():
            if isinstance(module, Experts) and not experts:
                continue
            placement = _placement(name)
            for key, parameter in module.named_parameters(recurse=False):
                part = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
                module.register_parameter(key, nn.Parameter(part))


def _placement(module: str) -> Placement:
    name = module.rpartition(".")[2]
    if module.startswith("mlp.shared."):  # it computes own tokens, as the experts do
        return Replicate()
    if name in _BY_OUTPUT:
        return Shard(0)
    return Shard(1) if name in _BY_INPUT else Replicate()
