"""Partial gradients of bfloat16 runs are summed in float32, on every worker and on the wire."""

from __future__ import annotations

import gloo
import pytest
import torch

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.launch.parallel_dims import ParallelDims
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.parallel.exchange_registry import make_exchange
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.lowering import lower
from mtrain_cli.parallel.mesh import make_context_group
from mtrain_cli.parallel.program import ShardSizes
from mtrain_cli.parallel.running_attention import RunningAttention
from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule

TINY = 2.0**-9  # bfloat16 rounds 1 + TINY to 1, but not 1 + 3 TINY


class OnePartEach:
    """A kernel whose gradients reveal rounding.

    Key gradients: 1 on rank 0 and TINY on the others. Query gradients: 1 or TINY per call.
    """

    name = "test"
    needs_out = False

    def __init__(self, rank: int) -> None:
        self.part = TINY if rank else 1.0
        self.calls = 0

    def unsupported_reason(self, request):  # noqa: ARG002
        return None

    def forward(self, q, k, v, tiles, scale):  # noqa: ARG002
        return torch.zeros_like(q), torch.zeros(q.shape[0], q.shape[2], q.shape[1])

    def backward(self, dout, q, k, v, out, lse, delta, tiles, scale):  # noqa: ARG002
        self.calls += 1
        return (
            torch.full_like(q, TINY if self.calls > 1 else 1.0),
            torch.full_like(k, self.part),
            torch.full_like(v, self.part),
        )


def gradients(rank: int, world: int, exchange: str) -> list[float]:
    group = make_context_group(rank, ParallelDims.of(world, cp=world), torch.device("cpu"))
    layout = make_layout("striped", world, 32 * world, 1)
    mask = SequenceMask.causal(layout.seq, layout.padded_seq)
    attend = ContextAttention.make(
        make_exchange(exchange, layout, group), OnePartEach(rank), [mask], "cpu"
    )
    q, k, v = (
        torch.zeros(1, 32, h, 4, dtype=torch.bfloat16, requires_grad=True) for h in (2, 1, 1)
    )
    found = torch.autograd.grad(
        attend(q, k, v, 0), (q, k, v), torch.zeros(1, 32, 2, 4, dtype=torch.bfloat16)
    )
    return [t.float().unique().item() for t in found]


@pytest.mark.parametrize("exchange", ["all_gather", "ring"])
def test_small_parts_are_not_rounded_away(exchange):
    whole = torch.tensor(1 + 3 * TINY).bfloat16().item()
    assert whole > 1
    for dq, dk, dv in gloo.run(4, gradients, exchange):
        assert (dk, dv) == (whole, whole)
        assert dq == (whole if exchange == "ring" else 1.0)


def test_partial_outputs_in_bfloat16_are_merged_in_float32():
    """Seven keys with equal scores, one a step; values 1 and six 0. bfloat16 merges would round."""
    total = RunningAttention(torch.zeros(1, 1, 1, 4, dtype=torch.bfloat16))
    for step in range(7):
        out = torch.full((1, 1, 1, 4), 1.0 if step == 0 else 0.0, dtype=torch.bfloat16)
        total.add(out, torch.zeros(1, 1, 1))
    partial = total.partial()
    assert partial is not None
    torch.testing.assert_close(partial[0], torch.full((1, 1, 1, 4), 1 / 7), atol=1e-7, rtol=0)
    out, lse = total.result()
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(lse, torch.full((1, 1, 1), 7.0).log())


def test_a_part_of_the_heads_has_at_least_one_head():
    """With two key-value heads and four ranks, each rank has one, for the tokens of all four."""
    sizes = ShardSizes(tokens=10, heads=8, kv_heads=2, head_dim=16, dtype_bytes=2)
    for heads, kept in ((4, 1), (2, 1), (1, 2)):
        schedule = make_schedule("ring", ScheduleOptions(2 * heads, 2 * heads, heads=heads))
        for backward, numbers in ((False, {"kv": 2}), (True, {"kv": 2, "dkv": 4})):
            program = lower(schedule, 0, backward=backward)
            assert {
                p.transfer.payload: p.sends.of(sizes, heads)
                for p in program.posts
                if p.transfer.payload != "heads"
            } == {name: 2 * heads * 10 * kept * 16 * each for name, each in numbers.items()}
    queries = make_schedule("ring", ScheduleOptions(8, 8, circulates="queries", heads=4))
    (dq,) = (p for p in lower(queries, 0, backward=True).posts if p.transfer.payload == "dq")
    assert dq.sends.of(sizes, 4) == 4 * 4 * 10 * 16 * 2
