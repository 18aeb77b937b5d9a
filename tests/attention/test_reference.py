"""The oracle computes exactly the pairs that mask and index allow, in float64 inside."""

from __future__ import annotations

import pytest
import torch
from attention.dense_problems import SCALE, make_dense_problem
from attention.sparse_problems import make_problem

from mtrain_cli.attention.kernel import Saved
from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.attention.tiles import Tiles


def by_softmax(q, k, v, seen: torch.Tensor) -> torch.Tensor:
    """Return attention by PyTorch's softmax, which autograd differentiates."""
    group = q.shape[2] // k.shape[2]
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * SCALE
    scores = scores.masked_fill(~seen, -1e300)
    p = scores.softmax(-1).masked_fill(~seen, 0.0)
    return torch.einsum("bhqk,bkhd->bqhd", p, v)


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.double().requires_grad_() for t in tensors]


@pytest.mark.parametrize("seed", range(3))
def test_dense_attention_equals_softmax_and_its_gradients(seed):
    spans, q, k, v, dout = make_dense_problem(seed, 4, 2)
    tiles, inputs = Tiles.make(spans), leaves(q, k, v)
    want = by_softmax(*inputs, tiles.seen())
    want.backward(dout)
    out, lse = ReferenceKernel().forward(q, k, v, tiles, SCALE)
    torch.testing.assert_close(out, want.detach())
    # delta may be given instead of out.
    delta = (out * dout).sum(-1).transpose(1, 2)
    for arguments in ((out, lse, None), (None, lse, delta)):
        gradients = ReferenceKernel().backward(dout, Saved(q, k, v, *arguments), tiles, SCALE)
        for got, leaf in zip(gradients, inputs, strict=True):
            torch.testing.assert_close(got, leaf.grad)


@pytest.mark.parametrize("kind", ["both", "bitmap", "gated"])
def test_a_pair_that_the_index_leaves_out_does_not_count(kind):
    p = make_problem(
        2, kind, seq=60, block=16, heads=4, kv_heads=2, dim=8, documents=True, where="whole"
    )
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
