"""Rows travel to their experts and back; kernels of a GPU do what separate operations do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mtrain_cli.model import expert_journey, expert_plan
from mtrain_cli.model.expert_journey import FusedJourney, Journey
from mtrain_cli.model.routing import Decision, decide_alone

TOKENS, EXPERTS, HIDDEN, WIDTH = 9, 6, 20, 12


class Message:
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def wait(self) -> torch.Tensor:
        return self.rows


class Mirror:
    """A group of two equal workers: each receives what it would send."""

    rank, size = 0, 2

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


def journey(kind: type[Journey], decision: Decision, scores: torch.Tensor) -> Journey:
    group: Any = Mirror()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(expert_plan, "expert_parts", lambda *_: 1)
        (tile,) = expert_plan.start_plan(decision, group, [0, TOKENS], TOKENS)()
    return kind(tile, group, scores)


def travelled(
    kind: type[Journey],
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
    own = journey(kind, decision, scores)
    (part,), x = own._tile.parts, numbers(TOKENS, hidden)
    rows, arrived = own.arrived(own.start_rows(x, part, scored=True), x, part, scored=True)
    assert arrived is not None
    again, nothing = own.arrived(own.start_rows(x, part), x, part)
    assert nothing is None
    assert torch.equal(rows, again)
    gate_up, down = numbers(len(rows), 2 * width), numbers(EXPERTS // 2, hidden, width)
    ends, later = own._tile.ends_L(part), list[torch.Tensor]()
    out = own.outputs(gate_up, arrived, down, ends)
    found = [rows, arrived, out]
    found += own.inner_gradients([rows], gate_up, arrived, down, ends, later)
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
    apart, fused = (travelled(kind, decision, dtype) for kind in (Journey, FusedJourney))
    for expected, found in zip(apart, fused, strict=True):
        assert found.dtype == expected.dtype
        assert expected.isfinite().all()
        torch.testing.assert_close(found, expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("kind", [Journey, FusedJourney])
def test_each_score_returns_to_its_pair_and_rows_are_added_up(kind):
    pytest.importorskip("triton")
    chosen = torch.tensor([[0, 5], [3, 1], [4, 2]] * 3)
    scores = torch.rand(TOKENS, 2)
    own = journey(kind, decide_alone(chosen, EXPERTS), scores)
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
    assert expert_journey.make_journey(own._tile, own._group, scores).__class__ is Journey
