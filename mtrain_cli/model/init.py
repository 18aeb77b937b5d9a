"""Random initialisation that does not depend on how parameters are sharded."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from mtrain_cli.model.decoder import Decoder


def initialize(decoder: Decoder, seed: int, device: torch.device | None = None) -> None:
    """Give every parameter its starting value, the same for any number of workers and any sharding.

    Matrices are normal(0, init_std); those that write to the residual stream are divided by sqrt(2
    num_layers) (GPT-2's report, section 2.3). Norms are 1, biases 0. Each parameter has its own
    generator, seeded from (seed, name): every worker draws the whole matrix, one at a time, and
    keeps its shard.

    Args:
        device: where numbers are drawn, by default where the parameters are; needs room for the
            largest matrix. CPU and CUDA generators differ. If a GPU run keeps its
            parameters in host memory, pass the GPU: this is faster, and a seed gives the same
            weights as with parameters on the GPU.
    """
    residual_std = decoder.model_config.init_std / math.sqrt(2 * decoder.model_config.num_layers)
    for name, parameter in decoder.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.ones_(parameter)
        elif name.endswith(".bias"):
            nn.init.zeros_(parameter)
        else:
            std = (
                residual_std
                if name.endswith(("o_proj.weight", "down_proj.weight"))
                else decoder.model_config.init_std
            )
            _fill_normal(parameter, std, _parameter_seed(seed, name), device or parameter.device)


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
        # src_data_rank=None: send nothing; each worker cuts its shard from the matrix that it drew.
        matrix = distribute_tensor(
            matrix, parameter.device_mesh, parameter.placements, src_data_rank=None
        )
    parameter.copy_(matrix)


def _parameter_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little") >> 1
