"""Prepare a decoder to run on many workers. The preparation does not change the result.

The order of the steps, from the innermost to the outermost:

1. tensor parallelism: cut the matrices of the layers over a tensor group; expert parallelism: deal
   the experts over an expert group
2. compile: the operations of a layer before attention and after it
3. tiling: the part of a layer after attention, one tile of the sequence after another
4. checkpointing: run a layer's forward pass again in the backward pass
5. FSDP: gather the weights of a layer before all its operations, and shard its gradients
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method

from mtrain_cli.config.schema import Config, TrainConfig
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.expert_parallel import ExpertSharing, deal_experts
from mtrain_cli.model.experts import expert_layers
from mtrain_cli.model.layer_execution import ExecutedLayer, LayerExecution
from mtrain_cli.model.layer_parts import cut_layers
from mtrain_cli.model.loss import LossOptions
from mtrain_cli.model.stages import StageDecoder
from mtrain_cli.model.tiling import layers_with_products
from mtrain_cli.parallel.activation_offload import ActivationOffload
from mtrain_cli.parallel.expert_group import EXPERTS, SHARD_OF_EXPERTS
from mtrain_cli.parallel.fsdp import shard_parameters
from mtrain_cli.parallel.mesh import TENSOR
from mtrain_cli.parallel.tensor_group import TensorGroup


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

    The parameters stay on the meta device. The caller allocates them.

    Args:
        mesh: the workers that share the parameters (`make_parameter_mesh`).
        dtype: dtype in which the layers compute.
        compile: whether to compile the operations between communication.
        offload: host memory for the inputs of checkpointed layers. None keeps the inputs on the
            device.
        tensor: the workers that share each layer; None if this worker computes whole layers.
        experts: the workers that share the experts; None if this worker computes all of them.
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
) -> None:
    """Set up compilation, tiling and checkpointing of the layers, and the options of the loss."""
    execution = LayerExecution(
        compile=compile,
        tile_bytes=train.tile_mib << 20,
        recompute=train.activation_checkpoint != "none",
        offload=offload,
        tensor=tensor,
        tensor_chunks=tensor_chunks,
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
    """Make all layers of a decoder run as ``execution`` describes. Parameters keep their names.

    Args:
        keep_mlp: value of ``train.keep_mlp``, which selects layers, counted from the last. The
            selected layers also keep the results of their matrix products for the backward pass.
    """
    layers = decoder.model_config.num_layers
    first_kept = layers - layers_with_products(keep_mlp, layers)
    for layer in decoder.layers:
        # As FSDP2 does, change the class and not the module: parameters keep their names.
        layer.__class__ = ExecutedLayer
        keep_products = layer.index >= first_kept  # type: ignore
        layer.execution = replace(execution, keep_products=keep_products)  # type: ignore
