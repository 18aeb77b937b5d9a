"""Experts on several workers give the results of one worker."""

from __future__ import annotations

from contextlib import nullcontext

import gloo
import pytest
import torch
import torch.distributed as dist
from model.moe_models import make_module, moe_model

from mtrain_cli.model import expert_parallel as expert_journey
from mtrain_cli.model.expert_parallel import ExpertSharing
from mtrain_cli.model.expert_products import ExpertExecution, WeightGradients
from mtrain_cli.parallel.expert_group import ExpertGroup


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("fused", "tiles", "parts"), [(False, 3, 1), (True, 3, 3), (False, 1, 3), (True, 2, 1)]
)
def test_float64_experts_on_two_workers_equal_those_of_one(recompute, fused, tiles, parts):
    if fused:
        pytest.importorskip("triton")
    for found, expected in gloo.run(2, in_float64, recompute, fused, tiles, parts):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13, msg=name)


def in_float64(
    rank: int, world: int, recompute: bool, fused: bool, tiles: int, parts: int, device: str = "cpu"
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return output and gradients of a layer's experts for own tokens, shared and alone."""
    whole, part = (make_module(moe_model()).to(device) for _ in range(2))
    part.sharing = ExpertSharing(ExpertGroup(rank, world, dist.group.WORLD))
    part.execution = ExpertExecution(chunks=tiles, recompute=recompute)
    # Triton's interpreter runs the kernels.
    expert_journey.fused = lambda _: fused
    expert_journey.expert_parts = lambda *_: parts
    left_out: list[bool] = []
    part.sharing.group.observer.waiting = lambda: nullcontext(left_out.append(True))
    own = slice(3 * rank, 3 * rank + 3)
    for name, weight in list(part.experts.named_parameters()):
        part.experts.register_parameter(name, torch.nn.Parameter(weight.detach()[own].clone()))
    generator = torch.Generator().manual_seed(5)
    # Neither the input nor its gradient is contiguous, and kernels read consecutive memory.
    x = torch.randn(world, 1, 40, 11, dtype=torch.float64, generator=generator).mT
    grad = torch.randn(x.mT.shape, dtype=torch.float64, generator=generator).mT.to(device)
    x = x.to(device)
    inputs = x[rank].clone().requires_grad_()
    out = part(inputs)
    assert len(left_out) == 2, "neither counts nor experts belong to the compared time"
    out.backward(grad[rank])
    found = {"out": out.detach(), "x": inputs.grad}
    found |= {name: weight.grad for name, weight in part.experts.named_parameters()}
    found["gate"] = part.gate.weight.grad.clone()
    dist.all_reduce(found["gate"])
    every = x.clone().requires_grad_()
    outs = whole(every.flatten(0, 1)).view_as(x)
    outs.backward(grad)
    expected = {"out": outs.detach()[rank], "x": every.grad[rank], "gate": whole.gate.weight.grad}
    expected |= {name: weight.grad[own] for name, weight in whole.experts.named_parameters()}
    return found, expected


def test_workers_of_an_evaluation_may_have_different_numbers_of_tokens():
    """The chunks of 5 and of 4,500 tokens would be one and two."""
    for found, expected in gloo.run(2, of_other_lengths):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def of_other_lengths(rank: int, world: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole, part = (make_module(moe_model()) for _ in range(2))
    part.sharing = ExpertSharing(ExpertGroup(rank, world, dist.group.WORLD))
    for name, weight in list(part.experts.named_parameters()):
        own = weight.detach()[3 * rank : 3 * rank + 3].clone()
        part.experts.register_parameter(name, torch.nn.Parameter(own))
    x = torch.randn(1, (5, 4500)[rank], 40, dtype=torch.float64)
    with torch.no_grad():
        return part(x), whole(x)


def test_gradients_of_more_than_two_tiles_are_added_up_in_float32():
    """Each addition of 2**-8 to 1 would round to 1 in bfloat16."""
    left, right = torch.ones(1, 1).bfloat16(), torch.ones(1, 1).bfloat16()
    ends = torch.ones(1, dtype=torch.int32)
    sums = WeightGradients(9)
    for number in range(9):
        sums.add("down", left, right / 2**8 if number else right, ends)
    assert sums.take("down", left) == 1 + 8 / 2**8
