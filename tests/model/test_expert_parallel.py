"""Experts on several workers: rows travel as planned, and results are those of one worker."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import gloo
import numpy as np
import pytest
import torch
import torch.distributed as dist
from model.moe_models import make_module, moe_model

from mtrain_cli.model import expert_parallel, expert_rows
from mtrain_cli.model.expert_parallel import Journey, Tile, start_plan
from mtrain_cli.model.expert_products import (
    grouped_rows,
    inner_gradients,
)
from mtrain_cli.model.routing import Decision, decide_alone
from mtrain_cli.model.tiling import LayerExecution
from mtrain_cli.parallel.layer_groups import ExpertGroup, MessageObserver


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
    part.sharing = ExpertGroup(rank, world, dist.group.WORLD)
    part.execution = LayerExecution(expert_chunks=tiles, recompute=recompute)
    # Triton's interpreter runs the kernels.
    expert_parallel.rows_module = lambda _: rows_of(fused)
    expert_parallel.expert_parts = lambda *_: parts
    left_out: list[bool] = []
    part.sharing.observer.waiting = lambda: nullcontext(left_out.append(True))
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


@pytest.mark.parametrize("fewest", [5, 1])
def test_workers_of_an_evaluation_may_have_different_numbers_of_tokens(fewest):
    """A worker with one token has one chunk, and an empty one because the others have two."""
    for found, expected in gloo.run(2, of_other_lengths, fewest):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)


def of_other_lengths(rank: int, world: int, fewest: int) -> tuple[torch.Tensor, torch.Tensor]:
    whole, part = (make_module(moe_model()) for _ in range(2))
    part.sharing = ExpertGroup(rank, world, dist.group.WORLD)
    part.execution = LayerExecution(expert_chunks=2)
    for name, weight in list(part.experts.named_parameters()):
        own = weight.detach()[3 * rank : 3 * rank + 3].clone()
        part.experts.register_parameter(name, torch.nn.Parameter(own))
    x = torch.randn(1, (fewest, 4500)[rank], 40, dtype=torch.float64)
    with torch.no_grad():
        return part(x), whole(x)


TOKENS, EXPERTS, HIDDEN, WIDTH = 9, 6, 20, 12


class Message:
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def wait(self) -> torch.Tensor:
        return self.rows


class Mirror:
    """A group of two equal workers: each receives what it would send."""

    rank, size, observer = 0, 2, MessageObserver()

    def gather_counts(self, counts: torch.Tensor) -> torch.Tensor:
        own, other = counts.unflatten(1, (2, -1)).unbind(1)
        return torch.stack([counts, torch.stack([other, own], 1).flatten(1)])

    def start(
        self,
        rows: torch.Tensor,
        send: list[int],
        receive: list[int],
        into: torch.Tensor | None = None,
    ) -> Message:
        assert sum(send) == len(rows)
        assert send == receive
        return Message(rows if into is None else into.copy_(rows))


def rows_of(fused: bool) -> Any:
    """Return the kernels, which Triton's interpreter runs, or what PyTorch does instead."""
    if not fused:
        return expert_rows
    from mtrain_cli.kernels.triton import expert_rows as kernels

    return kernels


def journey(fused: bool, decision: Decision, scores: torch.Tensor) -> Journey:
    group: Any = Mirror()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_parallel, "expert_parts", lambda *_: 1)
        patch.setattr(expert_parallel, "rows_module", lambda _: rows_of(fused))
        (tile,) = start_plan(decision, group, [0, TOKENS], TOKENS)()
        return Journey(tile, group, scores)


def travelled(
    fused: bool,
    decision: Decision,
    dtype: torch.dtype,
    hidden: int = HIDDEN,
    width: int = WIDTH,
) -> list[torch.Tensor]:
    """Let rows travel, and return what each step gives."""
    generator, device = torch.Generator().manual_seed(4), decision.order_S.device

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    high = torch.promote_types(dtype, torch.float)
    scores = torch.rand(TOKENS, 2, generator=generator).to(device, high)
    own = journey(fused, decision, scores)
    (part,), x = own._tile.parts, numbers(TOKENS, hidden)
    rows, arrived = own.arrived(own.start_rows(x, part, scored=True), x, part, scored=True)
    assert arrived is not None
    again, nothing = own.arrived(own.start_rows(x, part), x, part)
    assert nothing is None
    assert torch.equal(rows, again)
    gate_up, down = numbers(len(rows), 2 * width), numbers(EXPERTS // 2, hidden, width)
    ends, later = own._tile.ends_L(part), list[torch.Tensor]()
    out = grouped_rows(own.rows.gated(gate_up, arrived), down, ends)
    found = [rows, arrived, out]
    found += inner_gradients(
        [rows], gate_up, arrived, down, ends, lambda *both: later.extend(both),
        fused=own.rows.gate_backward,
    )  # fmt: skip
    assert later.pop(0) is rows
    sums, sums_back, back = torch.empty_like(x), torch.empty_like(x), torch.empty_like(scores)
    own.start_back(out, part)
    own.add_up(sums)
    own.start_back(out, part, arrived[:, 0].contiguous())
    own.add_up(sums_back, back)
    assert torch.equal(sums, sums_back)
    return [*found, *later, sums, back]


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]
)
@pytest.mark.parametrize("computed", [2 * TOKENS, 3, 0])
def test_kernels_do_what_separate_operations_do(dtype, limit, computed):
    pytest.importorskip("triton")
    chosen = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(3)).topk(2)
    decision = decide_alone(chosen.indices, EXPERTS)
    decision = decision._replace(ends_E=decision.ends_E.clamp(max=computed))
    apart, together = (travelled(fused, decision, dtype) for fused in (False, True))
    for expected, found in zip(apart, together, strict=True):
        assert found.dtype == expected.dtype
        assert expected.isfinite().all()
        torch.testing.assert_close(found, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("fused", [False, True])
def test_each_score_returns_to_its_pair_and_rows_are_added_up(fused):
    pytest.importorskip("triton")
    chosen = torch.tensor([[0, 5], [3, 1], [4, 2]] * 3)
    scores = torch.rand(TOKENS, 2)
    own = journey(fused, decide_alone(chosen, EXPERTS), scores)
    (part,), x = own._tile.parts, torch.randn(TOKENS, HIDDEN)
    rows, arrived = own.arrived(own.start_rows(x, part, scored=True), x, part, scored=True)
    assert arrived is not None
    # The mirror sends back own rows in the order in which they left.
    place = own._tile.place_R(part)[: part.arriving]
    assert torch.equal(rows[place], x[own._tile.order_S[part.leave] // 2])
    sums, back = torch.empty_like(x), torch.empty_like(scores)
    own.start_back(rows, part, arrived[:, 0].contiguous())
    own.add_up(sums, back)
    assert torch.equal(sums, x + x)
    assert torch.equal(back, scores)
    assert expert_parallel.rows_module(scores) is expert_rows


class Alone:
    """A group whose only member plays each worker in turn: all have the same counts."""

    observer = MessageObserver()

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def gather_counts(self, counts: torch.Tensor) -> torch.Tensor:
        return torch.stack([counts] * self.size)


def planned(
    decision: Decision, rank: int, bounds: list[int], parts: int, fused: bool
) -> tuple[Tile, ...]:
    if fused:
        pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_parallel, "expert_parts", lambda *_: parts)
        patch.setattr(expert_parallel, "rows_module", lambda _: rows_of(fused))
        group: Any = Alone(rank, 2)
        return start_plan(decision, group, bounds, len(decision.chosen_TK))()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("tiles", [1, 3, 7])
@pytest.mark.parametrize("rank", [0, 1])
def test_every_pair_is_computed_once_by_the_worker_of_its_expert(tiles, parts, rank, fused):
    chosen = torch.tensor([[0, 5], [5, 1], [2, 3], [5, 4], [0, 2], [1, 0], [3, 5]])
    bounds = [len(chosen) * n // tiles for n in range(tiles + 1)]
    plan = planned(decide_alone(chosen, 6), rank, bounds, parts, fused)
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


@pytest.mark.parametrize("bounds", [[0, 4], [0, 2, 4]])
def test_parts_depend_on_the_tokens_the_own_experts_and_the_tiles(monkeypatch, bounds):
    given = []
    monkeypatch.setattr(expert_parallel, "expert_parts", lambda *sizes: given.append(sizes) or 1)
    group: Any = Alone(0, 2)
    start_plan(decide_alone(torch.tensor([[0], [3], [1], [5]]), 6), group, bounds, 4)()
    assert set(given) == {(4, 3, len(bounds) - 1)}


@pytest.mark.parametrize("fused", [False, True])
def test_padding_does_not_travel(fused):
    decision = decide_alone(torch.tensor([[0, 1], [1, 0]]), 2)
    # Only the first pair of each expert is computed; padding comes last.
    kept = decision._replace(
        order_S=torch.tensor([0, 1, 2, 3]), place_S=torch.tensor([0, 1, 2, 3]),
        ends_E=torch.tensor([1, 2], dtype=torch.int32),
    )  # fmt: skip
    (tile,) = planned(kept, 0, [0, 2], 1, fused)
    (part,) = tile.parts
    assert tile.order_S.tolist() == [1, 0], "the pair that leaves comes first"
    assert tile.place_S.tolist() == [1, 0, 4, 4]
    assert (part.send, part.receive) == ([0, 1], [0, 1])


class Uneven(Alone):
    """The other of two workers has its own counts."""

    def gather_counts(self, counts: torch.Tensor) -> torch.Tensor:
        other = torch.tensor([[3, 1, 2, 5]])
        return torch.stack([counts, other] if self.rank == 0 else [other, counts])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    ("rank", "order", "ends", "send", "receive"),
    [
        # Rows of the other worker: 3 of expert 0, 1 of expert 1. Own rows: 1 and 2 of them.
        (0, [0, 1, 2, 4, 3, 5, 6], [4, 7], [0, 1], [0, 4]),
        # Rows of the other worker: 2 of expert 2, 5 of expert 3. Own rows: none and 1 of them.
        (1, [0, 1, 2, 3, 4, 5, 6, 7], [2, 8], [3, 0], [7, 0]),
    ],
)
def test_rows_of_own_tokens_come_behind_those_that_arrive(
    monkeypatch, fused, rank, order, ends, send, receive
):
    if fused:
        pytest.importorskip("triton")
    monkeypatch.setattr(expert_parallel, "rows_module", lambda _: rows_of(fused))
    group: Any = Uneven(rank, 2)
    (tile,) = start_plan(decide_alone(torch.tensor([[1], [0], [3], [1]]), 4), group, [0, 4], 4)()
    (part,) = tile.parts
    assert tile.order_R(part).tolist() == order
    assert tile.place_R(part)[tile.order_R(part)].tolist() == list(range(len(order)))
    assert tile.ends_L(part).tolist() == ends
    assert (part.send, part.receive) == (send, receive)


@pytest.mark.parametrize("rank", [0, 1])
def test_kernels_order_more_pairs_than_one_of_their_steps(rank):
    """Experts have 1,100 to 2,900 pairs: a step of a kernel moves 1,024."""
    generator = torch.Generator().manual_seed(7)
    shares = torch.rand(4000, 4, generator=generator) + torch.tensor([0.4, 0.0, 0.2, 0.0])
    decision = decide_alone(shares.topk(2).indices, 4)
    ((expected,), (found,)) = (planned(decision, rank, [0, 4000], 2, fused) for fused in (0, 1))
    assert min(decision.ends_E.diff().tolist()) > 1024
    assert found.parts == expected.parts
    assert torch.equal(found.order_S, expected.order_S)
    assert torch.equal(found.place_S, expected.place_S)
    for one, other in zip(found.rows, expected.rows, strict=True):
        assert torch.equal(one, other)
