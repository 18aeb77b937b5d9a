"""The running output keeps float32 sums, and is 0 without keys."""

from __future__ import annotations

import torch

from mtrain_cli.parallel.executor import RunningAttention


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
