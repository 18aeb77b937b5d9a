"""The definition of attention equals PyTorch's softmax and its automatic gradients."""

from __future__ import annotations

import torch

from mtrain_cli.attention import reference

SCALE = 0.3


def problem() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q, dout = torch.randn(2, 2, 3, 6, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 3, 5, 8, dtype=torch.float64)
    seen = torch.rand(2, 1, 6, 5) < 0.6
    seen[:, :, 1] = False  # a query that sees no key
    seen[:, :, 2] = True
    return dout, q, k, v, seen


def test_output_and_gradients_equal_a_masked_softmax():
    dout, q, k, v, seen = problem()
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    scores = (leaves[0] @ leaves[1].transpose(-1, -2) * SCALE).masked_fill(~seen, float("-inf"))
    p = scores.masked_fill(~seen.any(-1, keepdim=True), 0.0).softmax(-1).masked_fill(~seen, 0.0)
    want = p @ leaves[2]
    want.backward(dout)
    out, lse = reference.forward(q, k, v, seen, SCALE)
    torch.testing.assert_close(out, want.detach())
    torch.testing.assert_close(lse, scores.detach().logsumexp(-1))
    delta = (out * dout).sum(-1)
    gradients = reference.backward(dout, q, k, v, lse, delta, seen, SCALE)
    for got, leaf in zip(gradients, leaves, strict=True):
        torch.testing.assert_close(got, leaf.grad)


def test_a_query_without_keys_has_output_0_and_lse_minus_infinity():
    dout, q, k, v, seen = problem()
    out, lse = reference.forward(q, k, v, seen, SCALE)
    assert (out[:, :, 1] == 0).all()
    assert torch.isneginf(lse[:, :, 1]).all()
    dq, dk, dv = reference.backward(dout, q, k, v, lse, (out * dout).sum(-1), seen, SCALE)
    assert (dq[:, :, 1] == 0).all()
    assert all(t.isfinite().all() for t in (dq, dk, dv))


def test_gradients_of_two_sets_of_keys_add_up_under_the_lse_of_both():
    """A worker sees some of the keys, and takes lse and delta over all of them."""
    dout, q, k, v, seen = problem()
    out, lse = reference.forward(q, k, v, seen, SCALE)
    delta = (out * dout).sum(-1)
    dq, dk, dv = reference.backward(dout, q, k, v, lse, delta, seen, SCALE)
    parts = [
        reference.backward(
            dout, q, k[:, :, keys], v[:, :, keys], lse, delta, seen[..., keys], SCALE
        )
        for keys in (slice(0, 2), slice(2, 5))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], dq)
    torch.testing.assert_close(torch.cat([parts[0][1], parts[1][1]], 2), dk)
    torch.testing.assert_close(torch.cat([parts[0][2], parts[1][2]], 2), dv)
