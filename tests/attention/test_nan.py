"""A NaN in queries, keys or values reaches every row that it concerns: no kernel answers with plausible numbers instead."""

from __future__ import annotations

import pytest
import torch
from attention.sparse_problems import Problem, make_problem

from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.attention.triton_kernel import TritonKernel

SCALE = 0.3
BATCH, HEAD, AT = 0, 1, 35  # which sequence, head (of queries or of keys) and position holds it


def problem(kind: str, documents: bool, what: str) -> Problem:
    p = make_problem(
        1, kind, seq=61, block=16, heads=4, kv_heads=2, dim=16, documents=documents, where="whole"
    )
    {"q": p.q, "k": p.k, "v": p.v}[what][BATCH, AT, HEAD, 3] = float("nan")
    return p


def concerned(p: Problem, what: str) -> torch.Tensor:
    """bool [batch, heads, queries]: the row itself, or the rows that see the key."""
    rows = torch.zeros(p.q.shape[0], p.q.shape[2], p.q.shape[1], dtype=torch.bool)
    if what == "q":
        rows[BATCH, HEAD, AT] = True
        return rows
    group = p.q.shape[2] // p.k.shape[2]
    heads = slice(HEAD * group, (HEAD + 1) * group)
    rows[BATCH, heads] = p.tiles.seen()[BATCH].expand(p.q.shape[2], -1, -1)[heads, :, AT]
    return rows


INDICES = [("both", False), ("both", True), ("columns", False), ("bitmap", False), ("bitmap", True)]
CASES = [(*index, what) for index in INDICES for what in "qkv"]


@pytest.mark.parametrize(("kind", "documents", "what"), CASES)
def test_the_oracle_has_it_where_it_is_seen(kind, documents, what):
    p = problem(kind, documents, what)
    out, lse = ReferenceKernel().forward(p.q.double(), p.k.double(), p.v.double(), p.tiles, SCALE)
    rows = concerned(p, what)
    assert rows.any()
    assert torch.equal(lse.isnan(), rows if what != "v" else torch.zeros_like(rows))
    # From its definition the oracle multiplies all values with their weights, and 0 x NaN is NaN, too.
    found = out.isnan().any(-1).transpose(1, 2)
    assert torch.equal(found, rows) if what != "v" else bool(found[rows].all())


@pytest.mark.parametrize(("kind", "documents", "what"), CASES)
def test_triton_has_it_exactly_where_the_oracle_has(kind, documents, what):
    p = problem(kind, documents, what)
    want, want_lse = ReferenceKernel().forward(
        p.q.double(), p.k.double(), p.v.double(), p.tiles, SCALE
    )
    out, lse = TritonKernel().forward(p.q, p.k, p.v, p.tiles, SCALE)
    found, wanted = (t.isnan().any(-1).transpose(1, 2) for t in (out, want))
    assert torch.equal(lse.isnan(), want_lse.isnan())
    assert torch.equal(torch.isneginf(lse), torch.isneginf(want_lse))
    rows = concerned(p, what)
    if what != "v":
        assert torch.equal(found, wanted)
    else:
        # A tile multiplies hidden values with 0: rows beside those that see the value may have it, none of them may be without.
        assert bool(found[rows].all())
        assert not (found & ~wanted).any()
    dq, dk, dv = TritonKernel().backward(p.dout, p.q, p.k, p.v, out, lse, None, p.tiles, SCALE)
    assert bool(dq.isnan().any(-1).transpose(1, 2)[rows].all())
    assert dk.isnan().any()
    assert dv.isnan().any() == (what != "v")


@pytest.mark.parametrize("what", "qk")
def test_columns_continue_what_the_blocks_have_found(what):
    """Blocks and columns are two launches: the second may not begin anew where the first has found NaN."""
    p = problem("both", False, what)
    without = p.tiles.with_index(p.tiles.index.without_columns())
    blocks = TritonKernel().forward(p.q, p.k, p.v, without, SCALE)[1].isnan()
    assert blocks.any()
    assert bool(TritonKernel().forward(p.q, p.k, p.v, p.tiles, SCALE)[1].isnan()[blocks].all())


@pytest.mark.parametrize(("kind", "documents", "what"), CASES)
def test_sdpa_loses_none(kind, documents, what):
    """PyTorch's CPU kernel adds its mask, and NaN - inf is NaN: rows that do not see a key may have it, too."""
    p = problem(kind, documents, what)
    rows = concerned(p, what)
    out, lse = SdpaKernel().forward(p.q, p.k, p.v, p.tiles, SCALE)
    assert bool(out.isnan().any(-1).transpose(1, 2)[rows].all())
    if what == "q":
        assert torch.equal(out.isnan().any(-1).transpose(1, 2), rows)
    if what != "v":
        assert bool(lse.isnan()[rows].all())
    else:
        assert not lse.isnan().any()
