"""Partial gradients of bfloat16 runs are summed in float32, on every worker and on the wire."""

from __future__ import annotations

import gloo
import pytest
import torch
from parallel.ways import group_of, make_attention

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.parallel.exchange import make_exchange
from mtrain_cli.parallel.layout import make_layout

TINY = 2.0**-9  # bfloat16 rounds 1 + TINY to 1, but not 1 + 3 TINY


class OnePartEach:
    """A kernel whose gradients reveal rounding.

    Key gradients: 1 on rank 0 and TINY on the others. Query gradients: 1 or TINY per call.
    """

    name = "test"

    def __init__(self, rank: int) -> None:
        self.part = TINY if rank else 1.0
        self.calls = 0

    def unsupported_reason(self, request):  # noqa: ARG002
        return None

    def forward(self, q, k, v, tiles, scale):  # noqa: ARG002
        return torch.zeros_like(q), torch.zeros(q.shape[0], q.shape[2], q.shape[1])

    def backward(self, dout, saved, tiles, scale):  # noqa: ARG002
        q, k, v = saved[:3]
        self.calls += 1
        return (
            torch.full_like(q, TINY if self.calls > 1 else 1.0),
            torch.full_like(k, self.part),
            torch.full_like(v, self.part),
        )


def gradients(rank: int, world: int, exchange: str) -> list[float]:
    group = group_of(rank, world)
    layout = make_layout("striped", world, 32 * world, 1)
    mask = SequenceMask.causal(layout.seq, layout.padded_seq)
    attend = make_attention(
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
