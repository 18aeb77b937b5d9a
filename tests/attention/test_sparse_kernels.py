"""Every sparse kernel equals the float64 oracle under a dynamic index: output, lse and all gradients."""

from __future__ import annotations

import pytest
import torch
from attention.sparse_problems import make_problem

from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.attention.registry import make_kernel
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


@pytest.mark.parametrize("kind", ["both", "bitmap"])
@pytest.mark.parametrize("of", ["q", "k", "v"])
@pytest.mark.parametrize("name", ["triton", "sdpa"])
def test_what_is_not_a_number_is_seen_by_all_who_attend_to_it(name, of, kind):
    p = make_problem(5, kind, seq=90, block=16, heads=4, kv_heads=2, dim=16, documents=True, where="whole")
    head, at = (1, 70) if of == "q" else (0, 33)
    getattr(p, of)[0, at, head, 3] = float("nan")
    seen = p.tiles.seen()[0]
    touched = torch.zeros(seen.shape[:2], dtype=torch.bool)
    if of == "q":
        touched[head, at] = seen[head, at].any()
    else:
        touched[:2] = seen[:2, :, at]  # the two query heads of the first key-value head
    assert touched.any()
    assert not touched.all()
    out, lse = make_kernel(name).forward(p.q, p.k, p.v, p.tiles, SCALE)
    shown = out[0].isnan().any(-1).T
    assert shown[touched].all()
    assert not out[1].isnan().any()
    if of == "v":
        # A product of 0 and NaN is NaN: a value may reach rows of its tile that do not see it, and nobody's lse.
        assert not lse.isnan().any()
        return
    assert lse[0].isnan()[touched].all()
    if name == "sdpa":
        return  # adds -inf to what is hidden, which leaves NaN what it was
    assert shown.equal(touched)
    assert lse[0].isnan().equal(touched)
