"""Initialize parameters with values that do not depend on how the parameters are sharded."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.experts import reset_biases
from mtrain_cli.parallel.layer_groups import own_region


def initialize(decoder: Decoder, seed: int, device: torch.device | None = None) -> None:
    """Set norms to 1, biases to 0, and matrices to normal numbers.

    Their standard deviation is ``init_std``, divided by sqrt(2 num_layers) for projections that add
    to the residual stream (GPT-2's report, section 2.3). Every worker draws whole matrices, seeded
    from ``seed`` and the parameter's name, and keeps its shard.

    Args:
        device: device that draws the numbers; by default the parameter's. CPU and CUDA generators
            differ, so a GPU run with parameters in host memory passes the GPU.
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
        parameter.to_local().copy_(matrix[own_region(parameter)])
    else:
        parameter.copy_(matrix)


def _parameter_seed(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little") >> 1
