"""Sharded gradients of bfloat16 runs are summed, not averaged, and summed in float32."""

from __future__ import annotations

import gloo
import torch
from torch import nn

from mtrain_cli.launch.environment import ParallelDims
from mtrain_cli.parallel.fsdp import shard_parameters
from mtrain_cli.parallel.mesh import make_parameter_mesh

TINY = 2.0**-9  # bfloat16 rounds 1 + TINY to 1, but not 1 + 3 TINY


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, bias=False)])
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) + self.head(x)


def gradients(rank: int, world: int) -> dict[str, tuple[float, str]]:
    """Rank 0 contributes 1 to every gradient, the others TINY: all of them exact in bfloat16."""
    module = OneLayer()
    shard_parameters(module, make_parameter_mesh(ParallelDims.of(world), "cpu"), torch.bfloat16)
    x = torch.full((1, 8), 1.0 if rank == 0 else TINY, dtype=torch.bfloat16)
    module(x).sum().backward()
    return {
        name: (parameter.grad.full_tensor().unique().item(), str(parameter.grad.dtype))
        for name, parameter in module.named_parameters()
    }


def test_gradients_are_summed_in_float32():
    for found in gloo.run(4, gradients):
        assert found == dict.fromkeys(
            ("layers.0.weight", "head.weight"), (1 + 3 * TINY, "torch.float32")
        )
