"""Each worker knows its part of a parameter, and gradients of copied parameters are summed."""

from __future__ import annotations

from typing import Any

import gloo
import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from mtrain_cli.launch.parallel_dims import ParallelDims
from mtrain_cli.parallel.mesh import SHARD, TENSOR, make_parameter_mesh
from mtrain_cli.parallel.tensor_group import (
    copies,
    make_tensor_group,
    own_region,
    sum_copied_gradients,
)

SHAPES = {"by_output": (10, 3), "by_input": (5, 8), "copied": (7,)}
KINDS = {"by_output": Shard(0), "by_input": Shard(1), "copied": Replicate()}


class Module(nn.Module):
    def __init__(self, mesh: Any) -> None:
        super().__init__()
        for number, (name, shape) in enumerate(SHAPES.items()):
            whole = torch.arange(float(np.prod(shape))).view(shape) + 1000 * number
            part = distribute_tensor(whole, mesh, [KINDS[name]], src_data_rank=None)
            self.register_parameter(name, nn.Parameter(part))


def regions(rank: int, world: int, tp: int) -> dict[str, Any]:
    dims = ParallelDims.of(world, cp=1, tp=tp)
    mesh = make_parameter_mesh(dims, "cpu")
    module = fully_shard(Module(mesh[TENSOR]), mesh=mesh[SHARD])
    found = {
        name: (p.to_local().detach().numpy(), own_region(p), copies(p))
        for name, p in module.named_parameters()
    }
    for parameter in module.parameters():
        parameter.grad = torch.full_like(parameter, float(rank))
    tensor = make_tensor_group(rank, dims, torch.device("cpu"))
    assert tensor is not None
    sum_copied_gradients(module.parameters(), tensor)
    gradients = {
        name: p.grad.to_local().flatten().tolist() for name, p in module.named_parameters()
    }
    return {"parts": found, "gradients": gradients}


@pytest.mark.parametrize(("world", "tp"), [(2, 2), (6, 2), (4, 2)])
def test_regions_are_the_shards_and_cover_each_parameter(world, tp):
    results = gloo.run(world, regions, tp)
    for number, (name, shape) in enumerate(SHAPES.items()):
        whole = np.arange(np.prod(shape)).reshape(shape) + 1000 * number
        count = np.zeros(shape, int)
        for result in results:
            shard, region, number_of_copies = result["parts"][name]
            np.testing.assert_array_equal(shard, whole[region])
            count[region] += 1
            assert number_of_copies == (tp if name == "copied" else 1)
        assert (count == (tp if name == "copied" else 1)).all()


def test_only_gradients_of_copied_parameters_are_summed_over_the_tensor_group():
    for rank, result in enumerate(gloo.run(4, regions, 2)):
        group = rank // 2 * 2
        for name, values in result["gradients"].items():
            assert set(values) == {float(2 * group + 1 if name == "copied" else rank)}, name


def test_a_plain_parameter_has_no_other_copy():
    assert copies(nn.Parameter(torch.ones(3))) == 1
