"""Every sparse kernel equals the float64 oracle under a dynamic index: output, lse and all gradients."""

from __future__ import annotations

import pytest
import torch
from attention.sparse_problems import make_problem

from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.attention.sdpa import SdpaKernel

SCALE = 0.3
KINDS = ("slashes", "bars", "both", "all", "none", "bitmap", "local bitmap")


def check(kernel, problem, tolerance: float) -> None:
    p = problem
    q, k, v, dout = (t.double() for t in (p.q, p.k, p.v, p.dout))
    want_out, want_lse = ReferenceKernel().forward(q, k, v, p.tiles, SCALE)
    out, lse = kernel.forward(p.q, p.k, p.v, p.tiles, SCALE)
    assert torch.equal(torch.isneginf(lse), torch.isneginf(want_lse)), "rows that see nothing, and only they, have lse -inf"
    torch.testing.assert_close(out.double(), want_out, atol=tolerance, rtol=0)
    seen = ~torch.isneginf(want_lse)
    torch.testing.assert_close(lse.double()[seen], want_lse[seen], atol=tolerance, rtol=0)
    # As under a ring, where other workers contribute to the row: its final lse is larger than what these keys give.
    final = want_lse + 0.5
    delta = (want_out * dout).sum(-1).transpose(1, 2)
    want = ReferenceKernel().backward(dout, q, k, v, want_out, final, delta, p.tiles, SCALE)
    got = kernel.backward(p.dout, p.q, p.k, p.v, want_out.to(p.q.dtype), final.float(), delta.float(), p.tiles, SCALE)
    for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
        torch.testing.assert_close(a.double(), b, atol=5 * tolerance, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


# The interpreter takes seconds a case: shards of every sort for the indices that have everything, the rest is slow.
SHARDS = [
    pytest.param(kind, where, marks=() if where == "whole" or kind in ("both", "bitmap", "local bitmap") else pytest.mark.slow)
    for kind in KINDS
    for where in ("whole", "striped queries", "striped", "later queries")
]


@pytest.mark.parametrize(("kind", "where"), SHARDS)
@pytest.mark.parametrize("documents", [False, True])
def test_triton_equals_the_oracle(kind, documents, where):
    from mtrain_cli.attention.triton_kernel import TritonKernel

    check(TritonKernel(), make_problem(1, kind, seq=117, block=16, heads=4, kv_heads=2, dim=16, documents=documents, where=where), 1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("where", ["whole", "striped queries", "striped", "later queries"])
@pytest.mark.parametrize("rows", [16, 64])
def test_sdpa_equals_the_oracle(monkeypatch, kind, documents, where, rows):
    monkeypatch.setattr("mtrain_cli.attention.sdpa._MASK_BYTES", 4 * 4 * 117 * rows)
    problem = make_problem(2, kind, seq=117, block=16, heads=4, kv_heads=2, dim=16, documents=documents, where=where)
    check(SdpaKernel(), problem, 1e-5)
