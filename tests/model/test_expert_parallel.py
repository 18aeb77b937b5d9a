"""Experts on several workers: rows travel as planned, and results are those of one worker."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

import gloo
import numpy as np
import pytest
import torch
import torch.distributed as dist
from model.moe_models import make_module, moe_model

from mtrain_cli.model import expert_parallel, expert_rows
from mtrain_cli.model.expert_parallel import Journey, Tile, start_plan
from mtrain_cli.model.expert_products import inner_gradients
from mtrain_cli.model.expert_rows import ABSENT, numbers_of
from mtrain_cli.model.routing import decide_alone
from mtrain_cli.model.tiling import LayerExecution, scored_row
from mtrain_cli.parallel.layer_groups import ExpertGroup, MessageObserver


class Case(NamedTuple):
    """Sizes of a layer. avoided: experts that no token chooses."""

    recompute: bool = False
    fused: bool = False
    tiles: int = 1
    top_k: int = 2
    avoided: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float64
    tokens: int = 11
    experts: int = 8


OF_TWO = [Case(again, False, tiles) for again in (False, True) for tiles in (3, 1)]
# Triton's interpreter is slow.
OF_TWO += [Case(False, True, 2, tokens=3), Case(True, True, 1, tokens=5)]
MORE = [Case(recompute=True, top_k=1), Case(top_k=1, fused=True), Case(top_k=8, tiles=2)]
# No expert of worker 0; a few of those of the others.
MORE += [Case(n % 2 > 0, n > 1, 2, 2, (0, 1, 2, 3, 6)) for n in range(4)]
MORE += [Case(top_k=1, tokens=1), Case(dtype=torch.float32), Case(tiles=3, dtype=torch.float32)]
OF_FOUR = [
    Case(tiles=2), Case(recompute=True, fused=True), Case(top_k=8, recompute=True), Case(top_k=1),
    Case(True, False, 3, 2, (2, 3, 4, 5, 7)), Case(recompute=True, top_k=3, dtype=torch.float32),
]  # fmt: skip


@pytest.mark.parametrize(("world", "cases"), [(2, OF_TWO), (2, MORE), (4, OF_FOUR)])
def test_experts_on_several_workers_equal_those_of_one(world, cases):
    if any(case.fused for case in cases):
        pytest.importorskip("triton")
    ranks = gloo.run(world, of_cases, cases)
    for case, *results in zip(cases, *ranks, strict=True):
        limit = 1e-12 if case.dtype == torch.float64 else 1e-5
        for found, expected in results:
            for name, value in expected.items():
                error = (found[name] - value).abs().max() / value.abs().max().clamp(min=1)
                assert error < limit, f"{case}: {name} {error:.1e}"


def of_cases(rank: int, world: int, cases: list[Case]) -> list[Any]:
    return [both_ways(rank, world, case) for case in cases]


def both_ways(
    rank: int, world: int, case: Case, device: str = "cpu"
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return output and gradients of a layer's experts for own tokens, shared and alone."""
    model = moe_model(moe={"top_k": case.top_k, "experts": case.experts})
    whole, part = (make_module(model).to(device, case.dtype) for _ in range(2))
    for module in (whole, part):
        module.selection_bias = torch.zeros(case.experts, device=device)
        module.selection_bias[list(case.avoided)] = -10.0
    part.sharing = ExpertGroup(rank, world, dist.group.WORLD)
    part.execution = LayerExecution(expert_chunks=case.tiles, recompute=case.recompute)
    # Triton's interpreter runs the kernels.
    expert_parallel.rows_module = lambda _: rows_of(case.fused)
    left_out: list[bool] = []
    part.sharing.observer.waiting = lambda: nullcontext(left_out.append(True))
    own = slice(case.experts // world * rank, case.experts // world * (rank + 1))
    for name, weight in list(part.experts.named_parameters()):
        part.experts.register_parameter(name, torch.nn.Parameter(weight.detach()[own].clone()))
    generator = torch.Generator().manual_seed(5)
    # Neither the input nor its gradient is contiguous, and kernels read consecutive memory.
    sizes = world, 1, 40, case.tokens
    x = torch.randn(sizes, dtype=torch.float64, generator=generator).to(device, case.dtype).mT
    grad = torch.randn(sizes, dtype=torch.float64, generator=generator).to(device, case.dtype).mT
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


@pytest.mark.parametrize("fewest", [5, 1, 0])
def test_workers_of_an_evaluation_may_have_different_numbers_of_tokens(fewest):
    """A worker with one token or none also has an empty chunk because the other one has two."""
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


def rows_of(fused: bool) -> Any:
    """Return the kernels, which Triton's interpreter runs, or what PyTorch does instead."""
    if not fused:
        return expert_rows
    from mtrain_cli.kernels.triton import expert_rows as kernels

    return kernels


CHOSEN = torch.tensor([[0, 5], [5, 1], [2, 3], [5, 4], [0, 2], [1, 0], [3, 5]])


class Alone:
    """A group whose only member plays one of two workers. The other has other numbers of rows."""

    size, observer = 2, MessageObserver()

    def __init__(self, rank: int, other: torch.Tensor) -> None:
        self.rank, self.other = rank, other

    def gather_counts(self, counts: torch.Tensor) -> torch.Tensor:
        both = [counts, self.other.expand_as(counts)]
        return torch.stack(both if self.rank == 0 else both[::-1])


def planned(
    chosen: torch.Tensor, rank: int, tiles: int, experts: int = 6
) -> tuple[tuple[Tile, ...], torch.Tensor]:
    """Return the plan of a worker of two, and the numbers of rows of the other."""
    other = torch.arange(1, experts + 3, device=chosen.device)
    group: Any = Alone(rank, other)
    bounds = [len(chosen) * n // tiles for n in range(tiles + 1)]
    return start_plan(decide_alone(chosen, experts), group, bounds)(), other


@pytest.mark.parametrize("tiles", [1, 3, 7])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_token_leaves_once_and_each_pair_has_its_place_behind_those_of_lower_ranks(rank, tiles):
    plan, other = planned(CHOSEN, rank, tiles)
    for tile in plan:
        own, chosen = tile.end - tile.begin, CHOSEN[tile.begin : tile.end]
        leaving = [n for n, both in enumerate(chosen // 3 == 1 - rank) if both.any()]
        assert tile.send[1 - rank] == len(leaving)
        assert tile.slot_TP[:, rank].tolist() == list(range(own))
        slots = [ABSENT] * own
        for place, token in enumerate(leaving):
            slots[token] = own + place
        assert tile.slot_TP[:, 1 - rank].tolist() == slots
        assert tile.receive[1 - rank] == other[6 + rank]
        counts = np.bincount(chosen.flatten(), minlength=6)
        totals = counts + other[:6].numpy()
        assert tile.ends_L.tolist() == np.cumsum(totals[3 * rank : 3 * rank + 3]).tolist()
        assert tile.ends_L.dtype == tile.place_TK.dtype == torch.int32
        assert tile.rows == tile.ends_L[-1]
        next_place = [totals[e // 3 * 3 : e].sum() for e in range(6)]
        next_place += other[:6].numpy() * (rank == 1)
        for place, expert in zip(tile.place_TK.flatten(), chosen.flatten(), strict=True):
            assert place == next_place[expert]
            next_place[expert] += 1


def test_padding_does_not_travel():
    # Only the first pair of each expert is computed; padding comes last.
    decision = decide_alone(torch.tensor([[0, 1], [1, 0]]), 2)._replace(
        order_S=torch.tensor([0, 1, 2, 3]), place_S=torch.tensor([0, 1, 2, 3]),
        ends_E=torch.tensor([1, 2], dtype=torch.int32),
    )  # fmt: skip
    group: Any = Alone(0, torch.tensor([0, 0, 0, 0]))
    (tile,) = start_plan(decision, group, [0, 2])()
    assert (tile.send, tile.rows) == ([0, 1], 1)
    assert tile.slot_TP.tolist() == [[0, 2], [1, ABSENT]]
    assert tile.place_TK.tolist() == [[0, 0], [ABSENT, ABSENT]]


def moved(
    fused: bool, dtype: torch.dtype, hidden: int, width: int, rank: int, device: str = "cpu"
) -> list[torch.Tensor]:
    """Return what each step of a worker of two gives for random rows."""
    generator = torch.Generator().manual_seed(4)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    (tile,), _ = planned(CHOSEN.to(device), rank, 1)
    rows, (tokens, top_k) = rows_of(fused), CHOSEN.shape
    high = torch.promote_types(dtype, torch.float)
    scores, x = numbers(tokens, top_k).to(high).sigmoid(), numbers(tokens, hidden)
    itemsize = x.element_size()
    plain = x.new_empty(sum(tile.send), hidden)
    rows.leaving(x, tile.slot_TP, plain)
    scored = x.new_zeros(sum(tile.send), scored_row(hidden, itemsize, 2 * top_k))
    rows.leaving(x, tile.slot_TP, scored, (scores, tile.chosen_TK, tile.place_TK), tile.each)
    found = [plain, scored[:, :hidden], *(n[:, -2 * top_k :] for n in numbers_of(scored, high))]
    found[2] = found[2][:, :top_k]
    found[3] = found[3][:, top_k:]
    # Places in any order; one pair in four is absent.
    arrived, computed = numbers(5, hidden), 18
    places = torch.full((tokens + 5, top_k), ABSENT, dtype=torch.int32)
    places.view(-1)[torch.randperm(places.numel(), generator=generator)[:computed]] = torch.arange(
        computed, dtype=torch.int32
    )
    places, all_scores = places.to(device), numbers(tokens + 5, top_k).to(high).sigmoid()
    (x_RC, arrived_R1), (again, none) = (
        rows.spread(x, arrived, places, computed, given) for given in (all_scores, None)
    )
    assert none is None
    assert torch.equal(x_RC, again)
    wide = x.new_zeros(tokens + 5, scored_row(hidden, itemsize, top_k))
    rows.summed(x_RC, places, wide, hidden, high)
    gate_up, down = numbers(computed, 2 * width), numbers(3, hidden, width)
    ends = torch.tensor([4, 4, computed], dtype=torch.int32, device=device)
    gated, later = rows.gated(gate_up, arrived_R1), list[torch.Tensor]()
    found += [x_RC, arrived_R1, wide, gated]
    found += inner_gradients(
        [x_RC], gate_up, arrived_R1, down, ends, lambda *both: later.extend(both),
        fused=rows.gate_backward,
    )  # fmt: skip
    nothing = rows.spread(x[:0], arrived[:0], places[:0], 0, all_scores[:0])
    assert [len(each) for each in nothing] == [0, 0]
    rows.summed(x_RC[:0], places, wide, hidden, high)
    return [*found, *later, wide]


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.02)]
)
@pytest.mark.parametrize("rank", [0, 1])
def test_kernels_do_what_separate_operations_do(dtype, limit, rank):
    pytest.importorskip("triton")
    apart, together = (moved(fused, dtype, 20, 12, rank) for fused in (False, True))
    for expected, found in zip(apart, together, strict=True):
        assert found.dtype == expected.dtype
        assert expected.isfinite().all()
        torch.testing.assert_close(found, expected, rtol=limit, atol=limit)
    assert expert_parallel.rows_module(apart[0]) is expert_rows


@pytest.mark.parametrize("fused", [False, True])
def test_a_token_is_summed_on_each_worker_then_over_the_workers_by_rank(fused):
    """Numbers of many sizes, whose sum in float32 depends on the order."""
    if fused:
        pytest.importorskip("triton")
    generator = torch.Generator().manual_seed(8)
    chosen = torch.rand(3, 30, 12, generator=generator).topk(6).indices
    # The same tokens on each worker
    chosen, size = chosen[:1].expand(3, -1, -1), torch.rand(30, 6, generator=generator)
    values = (torch.randn(30, 6, generator=generator) * 10 ** (6 * size)).float()
    expected, by_choice = torch.zeros(30), torch.zeros(30)
    for worker in range(3):
        of_worker = torch.zeros(30)
        for choice in range(6):
            there = chosen[0, :, choice] // 4 == worker
            of_worker += torch.where(there, values[:, choice], 0.0)
        expected += of_worker
    for choice in range(6):
        by_choice += values[:, choice]
    assert not torch.equal(by_choice, expected)
    for sums, numbers in gloo.run(3, summed_up, fused, chosen, values):
        assert torch.equal(sums, expected[:, None].expand(-1, 4))
        assert torch.equal(numbers, values), "each number returns to its pair"


def summed_up(
    rank: int, world: int, fused: bool, chosen: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let each pair's expert return the value of the pair. Return sums, and values that return."""
    expert_parallel.rows_module = lambda _: rows_of(fused)
    group = ExpertGroup(rank, world, dist.group.WORLD)
    (tile,) = start_plan(decide_alone(chosen[rank], 12), group, [0, 30])()
    journey = Journey(tile, group, values)
    x = torch.arange(30.0)[:, None].expand(-1, 4).contiguous()
    rows, of_pairs = journey.arrived(journey.start_rows(x, scored=True), x, scored=True)
    assert of_pairs is not None
    tokens = (values.flatten()[None] == of_pairs).nonzero()[:, 1] // 6
    assert torch.equal(rows, x[tokens])
    sums, numbers = torch.empty(30, 4), torch.empty(30, 6)
    journey.start_back(of_pairs.expand(-1, 4).contiguous(), of_pairs[:, 0].contiguous()).wait()
    journey.add_up(sums, numbers)
    return sums, numbers
