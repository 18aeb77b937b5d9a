"""Initialize parameters with values that do not depend on how the parameters are sharded."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.experts import reset_biases
from mtrain_cli.parallel.tensor_group import own_region


def initialize(decoder: Decoder, seed: int, device: torch.device | None = None) -> None:
    """Set every parameter to its initial value.

    - Norm weights are 1 and biases are 0, those of routers, too.
    - The elements of a matrix are drawn from a normal distribution with standard deviation
      ``init_std``.
    - For the output projection and the down projections of MLPs and experts, which add to the
      residual stream, ``init_std`` is divided by sqrt(2 num_layers) (GPT-2's report, section 2.3).

    Every worker draws one whole matrix after another, and keeps only its shard. The random
    generator of a matrix is seeded from ``seed`` and the parameter's name.

    Args:
        device: device that draws the numbers, with memory for the largest matrix. The default is
            the parameter's device. CPU and CUDA generators give different numbers. If a GPU run
            keeps its parameters in host memory, pass the GPU, so that the parameters get the
            values that they would have in GPU memory.
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
