"""Experts on several workers: how rows travel, and results equal to those of one worker."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import gloo
import numpy as np
import pytest
import torch
import torch.distributed as dist
from moe_models import make_module, moe_model

from mtrain_cli.model import expert_kernels, expert_parallel
from mtrain_cli.model.expert_parallel import ExpertSharing, Tile, start_plan
from mtrain_cli.model.expert_tiles import ExpertExecution
from mtrain_cli.model.routing import Decision, decide_alone
from mtrain_cli.parallel.expert_group import ExpertGroup


class Alone:
    """A group whose only member plays each worker in turn: all have the same counts."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def gather_counts(self, counts: torch.Tensor) -> torch.Tensor:
        return torch.stack([counts] * self.size)


def planned(decision: Decision, rank: int, bounds: list[int], parts: int) -> tuple[Tile, ...]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_parallel, "expert_parts", lambda *_: parts)
        group: Any = Alone(rank, 2)
        return start_plan(decision, group, bounds, len(decision.chosen_TK))()


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("tiles", [1, 3, 7])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_pair_is_computed_once_by_the_worker_of_its_expert(tiles, parts, rank):
    chosen = torch.tensor([[0, 5], [5, 1], [2, 3], [5, 4], [0, 2], [1, 0], [3, 5]])
    bounds = [len(chosen) * n // tiles for n in range(tiles + 1)]
    plan = planned(decide_alone(chosen, 6), rank, bounds, parts)
    assert [tile.begin for tile in plan] == bounds[:-1]
    assert [tile.end for tile in plan] == bounds[1:]
    for tile in plan:
        pairs = chosen[tile.begin : tile.end].flatten()
        assert sorted(tile.order_S.tolist()) == list(range(len(pairs)))
        assert tile.order_S[tile.place_S].tolist() == list(range(len(pairs)))
        for part in tile.parts:
            of_part = range(3)[part.experts]
            there = pairs[tile.order_S[part.leave]].tolist()
            assert there == sorted(there), "ordered by expert"
            here = (pairs[tile.order_S[part.stay]] - 3 * rank).tolist()
            assert here == sorted(here)
            assert {expert - 3 * (1 - rank) for expert in there} <= set(of_part)
            assert set(here) <= set(of_part)
            assert part.send[1 - rank] == len(there)
            # The other worker has the same pairs, so as many arrive as stay.
            assert part.receive[1 - rank] == part.arriving == len(here)
            assert part.send[rank] == part.receive[rank] == 0
            rows = torch.tensor([*here, *here])  # first those that arrive
            ordered = rows[tile.order_R(part)]
            assert (ordered.diff() >= 0).all()
            assert torch.equal(ordered[tile.place_R(part)], rows)
            expected = [2 * here.count(expert) for expert in of_part]
            assert tile.ends_L(part).tolist() == np.cumsum(expected).tolist()
            assert tile.ends_L(part).dtype == torch.int32


def test_dropped_pairs_and_padding_do_not_travel():
    decision = decide_alone(torch.tensor([[0, 1], [1, 0]]), 2)
    # Pairs beyond the capacity come last: only the first pair of each expert is computed.
    kept = decision._replace(
        order_S=torch.tensor([0, 1, 2, 3]), place_S=torch.tensor([0, 1, 2, 3]),
        ends_E=torch.tensor([1, 2], dtype=torch.int32),
    )  # fmt: skip
    (tile,) = planned(kept, 0, [0, 2], 1)
    (part,) = tile.parts
    assert tile.order_S.tolist() == [1, 0], "the pair that leaves comes first"
    assert tile.place_S.tolist() == [1, 0, 2, 2]
    assert (part.send, part.receive) == ([0, 1], [0, 1])


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("compiled", "tiles", "parts"), [(False, 3, 1), (True, 3, 3), (False, 1, 3), (True, 2, 1)]
)
def test_float64_experts_on_two_workers_equal_those_of_one(recompute, compiled, tiles, parts):
    for found, expected in gloo.run(2, in_float64, recompute, compiled, tiles, parts):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13, msg=name)


def in_float64(
    rank: int, world: int, recompute: bool, compiled: bool, tiles: int, parts: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return output and gradients of a layer's experts for own tokens, shared and alone."""
    whole, part = (make_module(moe_model()) for _ in range(2))
    part.sharing = ExpertSharing(ExpertGroup(rank, world, dist.group.WORLD))
    part.execution = ExpertExecution(chunks=tiles, recompute=recompute, compile=compiled)
    expert_kernels._compiled = lambda function: function  # compiling takes seconds
    expert_parallel.expert_parts = lambda *_: parts
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
