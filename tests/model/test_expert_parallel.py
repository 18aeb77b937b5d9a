"""Experts on several workers: how rows travel, and results equal to those of one worker."""

from __future__ import annotations

from contextlib import nullcontext

import gloo
import pytest
import torch
import torch.distributed as dist
from moe_models import make_module, moe_model

from mtrain_cli.model import expert_kernels
from mtrain_cli.model.expert_parallel import ExpertSharing, plan_chunks
from mtrain_cli.model.expert_tiles import ExpertExecution
from mtrain_cli.model.routing import decide_alone
from mtrain_cli.parallel.expert_group import ExpertGroup


class Alone:
    """A group whose only member plays each worker in turn: all have the same counts."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def gather_counts(self, counts: torch.Tensor) -> torch.Tensor:
        return torch.stack([counts] * self.size)


@pytest.mark.parametrize("chunks", [1, 3, 7])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_pair_travels_once_to_the_worker_of_its_expert(chunks, rank):
    chosen = torch.tensor([[0, 5], [5, 1], [2, 3], [5, 4], [0, 2], [1, 0], [3, 5]])
    bounds = [len(chosen) * n // chunks for n in range(chunks + 1)]
    plan = plan_chunks(decide_alone(chosen, 6), Alone(rank, 2), bounds)  # type: ignore[arg-type]
    assert [c.begin for c in plan] == bounds[:-1]
    assert [c.end for c in plan] == bounds[1:]
    for chunk in plan:
        pairs = chosen[chunk.begin : chunk.end].flatten()
        experts = pairs[chunk.order_S]
        assert sorted(chunk.order_S.tolist()) == list(range(len(pairs)))
        assert experts.tolist() == sorted(experts.tolist())
        assert chunk.send == [int((experts < 3).sum()), int((experts >= 3).sum())]
        own = [int((experts == 3 * rank + n).sum()) for n in range(3)]
        assert chunk.receive == [sum(own)] * 2
        assert chunk.ends_L.tolist() == torch.tensor(own).mul(2).cumsum(0).tolist()
        # Arriving rows are those of worker 0, then those of worker 1, each ordered by expert.
        arriving = torch.tensor([n for n in range(3) for _ in range(own[n])] * 2)
        assert (arriving[chunk.order_R].diff() >= 0).all()
        assert torch.equal(arriving[chunk.order_R][chunk.place_R], arriving)


def test_dropped_pairs_and_padding_do_not_travel():
    decision = decide_alone(torch.tensor([[0, 1], [1, 0]]), 2)
    # Pairs beyond the capacity come last: only the first pair of each expert is computed.
    kept = decision._replace(
        order_S=torch.tensor([0, 1, 2, 3]), place_S=torch.tensor([0, 1, 2, 3]),
        ends_E=torch.tensor([1, 2], dtype=torch.int32),
    )  # fmt: skip
    (chunk,) = plan_chunks(kept, Alone(0, 2), [0, 2])  # type: ignore[arg-type]
    assert chunk.order_S.tolist() == [0, 1]
    assert chunk.place.tolist() == [0, 1, 2, 2]
    assert (chunk.send, chunk.receive) == ([1, 1], [1, 1])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_float64_experts_on_two_workers_equal_those_of_one(recompute, compiled):
    for found, expected in gloo.run(2, in_float64, recompute, compiled):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13, msg=name)


def in_float64(
    rank: int, world: int, recompute: bool, compiled: bool
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return output and gradients of a layer's experts for own tokens, shared and alone."""
    whole, part = (make_module(moe_model()) for _ in range(2))
    part.sharing = ExpertSharing(ExpertGroup(rank, world, dist.group.WORLD))
    part.execution = ExpertExecution(chunks=3, recompute=recompute, compile=compiled)
    expert_kernels._compiled = lambda function: function  # compiling takes seconds
    left_out: list[bool] = []
    part.sharing.group.observer.waiting = lambda: nullcontext(left_out.append(True))
    own = slice(3 * rank, 3 * rank + 3)
    for name, weight in list(part.experts.named_parameters()):
        part.experts.register_parameter(name, torch.nn.Parameter(weight.detach()[own].clone()))
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(world, 1, 11, 40, dtype=torch.float64, generator=generator)
    grad = torch.randn(x.shape, dtype=torch.float64, generator=generator)
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
