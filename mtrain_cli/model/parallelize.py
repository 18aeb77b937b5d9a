"""Set how a decoder runs on many workers, without a change to what it computes."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import register_fsdp_forward_method

from mtrain_cli.config.schema import Config, TrainConfig
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.layer_execution import LayerExecution
from mtrain_cli.model.loss import LossOptions
from mtrain_cli.model.tiling import layers_with_products
from mtrain_cli.parallel.activation_offload import ActivationOffload
from mtrain_cli.parallel.fsdp import shard_parameters


def parallelize(
    decoder: Decoder,
    config: Config,
    mesh: DeviceMesh,
    dtype: torch.dtype,
    *,
    compile: bool,
    offload: ActivationOffload | None,
) -> Decoder:
    """Prepare a decoder on the meta device for training, in place. Return it, still empty.

    FSDP comes last. Its hooks gather weights around the whole layer, so recomputation, tiles and
    compiled code inside the layer see whole weights.

    Args:
        dtype: layers compute in it.
        compile: compile what lies between communication.
        offload: where recomputed layers keep their inputs; None: on the device.
    """
    set_execution(decoder, config.train, compile=compile, offload=offload)
    if config.optim.offload:
        decoder.to(dtype)  # the host keeps the float32 weights
    shard_parameters(
        decoder,
        mesh,
        dtype,
        shard=config.train.shard,
        reduce_dtype=getattr(torch, config.train.reduce_dtype),
    )
    # Evaluation calls this method, for which FSDP must gather the root's parameters, too.
    register_fsdp_forward_method(decoder, "token_losses")
    return decoder


def set_execution(
    decoder: Decoder,
    train: TrainConfig,
    *,
    compile: bool = False,
    offload: ActivationOffload | None = None,
) -> None:
    """Set how the layers and the loss compute: checkpoints, tiles, kept products, compilation."""
    execution = LayerExecution(
        recompute=train.activation_checkpoint != "none",
        compile=compile,
        tile_bytes=train.tile_mib << 20,
        offload=offload,
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
    """Run all layers in one way. The last layers also keep their products (``train.keep_mlp``)."""
    layers = len(decoder.layers)
    first_kept = layers - layers_with_products(keep_mlp, layers)
    for index, layer in enumerate(decoder.layers):
        layer.execution = replace(execution, keep_products=index >= first_kept)  # type: ignore
