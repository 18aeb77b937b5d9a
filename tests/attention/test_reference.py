"""The oracle computes exactly the pairs that mask and index allow, in float64 inside."""

from __future__ import annotations

import pytest
import torch
from attention.dense_problems import SCALE, make_dense_problem
from attention.sparse_problems import make_problem

from mtrain_cli.attention.kernel import Saved, by_definition, gradients_by_definition
from mtrain_cli.attention.kernel_registry import make_kernel
from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.attention.tiles import Tiles


def by_softmax(q, k, v, seen: torch.Tensor, softcap: float = 0.0) -> torch.Tensor:
    """Return attention by PyTorch's softmax, which autograd differentiates."""
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * SCALE
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -1e300)
    p = scores.softmax(-1).masked_fill(~seen, 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", p, v)


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.double().requires_grad_() for t in tensors]


@pytest.mark.parametrize(("seed", "softcap"), [(0, 0.0), (1, 0.0), (2, 0.0), (0, 0.5), (1, 50.0)])
def test_dense_attention_equals_softmax_and_its_gradients(seed, softcap):
    spans, q, k, v, dout = make_dense_problem(seed, 4, 2)
    tiles, inputs = Tiles.make(spans), leaves(q, k, v)
    want = by_softmax(*inputs, tiles.seen(), softcap)
    want.backward(dout)
    kernel = make_kernel("reference", softcap)
    out, lse = kernel.forward(q, k, v, tiles, SCALE)
    torch.testing.assert_close(out, want.detach())
    # delta may be given instead of out.
    delta = (out * dout).sum(-1).transpose(1, 2)
    for arguments in ((out, lse, None), (None, lse, delta)):
        gradients = kernel.backward(dout, Saved(q, k, v, *arguments), tiles, SCALE)
        for got, leaf in zip(gradients, inputs, strict=True):
            torch.testing.assert_close(got, leaf.grad)


@pytest.mark.parametrize("kind", ["both", "bitmap", "gated"])
def test_a_pair_that_the_index_leaves_out_does_not_count(kind):
    p = make_problem(2, kind, seq=60, dim=8)
    inputs = leaves(p.q, p.k, p.v)
    seen = p.tiles.seen()
    dense = Tiles.make(p.tiles.spans).seen()
    assert (dense & ~seen).any()
    want = by_softmax(*inputs, seen)
    want.backward(p.dout.double())
    out, lse = ReferenceKernel().forward(p.q, p.k, p.v, p.tiles, SCALE)
    torch.testing.assert_close(out, want.detach().float())
    gradients = ReferenceKernel().backward(
        p.dout, Saved(p.q, p.k, p.v, out, lse, None), p.tiles, SCALE
    )
    for got, leaf in zip(gradients, inputs, strict=True):
        torch.testing.assert_close(got, leaf.grad.float(), atol=1e-5, rtol=1e-4)


def test_results_are_rounded_once_to_the_dtype_of_the_inputs():
    spans, q, k, v, dout = make_dense_problem(0, 4, 2, torch.bfloat16)
    kernel, tiles = ReferenceKernel(), Tiles.make(spans)
    exact = [t.double() for t in (q, k, v)]
    want, want_lse = kernel.forward(*exact, tiles, SCALE)
    out, lse = kernel.forward(q, k, v, tiles, SCALE)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(out, want.bfloat16())
    assert torch.equal(lse, want_lse.float())
    got = kernel.backward(dout, Saved(q, k, v, want, want_lse, None), tiles, SCALE)
    expected = kernel.backward(dout.double(), Saved(*exact, want, want_lse, None), tiles, SCALE)
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b.bfloat16())


SCALE_OF_DEFINITION = 0.3


def problem() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    q, dout = torch.randn(2, 2, 3, 6, 8, dtype=torch.float64)
    k, v = torch.randn(2, 2, 3, 5, 8, dtype=torch.float64)
    seen = torch.rand(2, 1, 6, 5) < 0.6
    seen[:, :, 1] = False  # a query that sees no key
    seen[:, :, 2] = True
    return dout, q, k, v, seen


def test_a_query_without_keys_has_output_0_and_lse_minus_infinity():
    dout, q, k, v, seen = problem()
    out, lse = by_definition(q, k, v, seen, SCALE_OF_DEFINITION)
    assert (out[:, :, 1] == 0).all()
    assert torch.isneginf(lse[:, :, 1]).all()
    dq, dk, dv = gradients_by_definition(
        dout, q, k, v, lse, (out * dout).sum(-1), seen, SCALE_OF_DEFINITION
    )
    assert (dq[:, :, 1] == 0).all()
    assert all(t.isfinite().all() for t in (dq, dk, dv))


def test_gradients_of_two_sets_of_keys_add_up_under_the_lse_of_both():
    """A worker sees some of the keys, and takes lse and delta over all of them."""
    dout, q, k, v, seen = problem()
    out, lse = by_definition(q, k, v, seen, SCALE_OF_DEFINITION)
    delta = (out * dout).sum(-1)
    dq, dk, dv = gradients_by_definition(dout, q, k, v, lse, delta, seen, SCALE_OF_DEFINITION)
    parts = [
        gradients_by_definition(
            dout, q, k[:, :, keys], v[:, :, keys], lse, delta, seen[..., keys], SCALE_OF_DEFINITION
        )
        for keys in (slice(0, 2), slice(2, 5))
    ]
    torch.testing.assert_close(parts[0][0] + parts[1][0], dq)
    torch.testing.assert_close(torch.cat([parts[0][1], parts[1][1]], 2), dk)
    torch.testing.assert_close(torch.cat([parts[0][2], parts[1][2]], 2), dv)
