"""A NaN in queries, keys or values reaches every row that depends on it."""

from __future__ import annotations

import pytest
import torch
from attention.sparse_problems import Problem, make_problem
from slow_cases import mostly_slow

from mtrain_cli.attention.kernel import Saved
from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.attention.triton_kernel import TritonKernel

SCALE = 0.3
BATCH, HEAD, AT = 0, 1, 35  # sequence, head (of queries or keys) and position of the NaN


def problem(kind: str, documents: bool, place: str) -> Problem:
    p = make_problem(1, kind, seq=61, documents=documents)
    {"q": p.q, "k": p.k, "v": p.v}[place][BATCH, AT, HEAD, 3] = float("nan")
    return p


def affected_rows(p: Problem, place: str, sequence: int = BATCH) -> torch.Tensor:
    """Return bool [batch, heads, queries]: the row itself, or the rows that see the key."""
    rows = torch.zeros(p.q.shape[0], p.q.shape[2], p.q.shape[1], dtype=torch.bool)
    if place == "q":
        rows[sequence, HEAD, AT] = True
        return rows
    group = p.q.shape[2] // p.k.shape[2]
    heads = slice(HEAD * group, (HEAD + 1) * group)
    rows[sequence, heads] = p.tiles.seen()[sequence].expand(p.q.shape[2], -1, -1)[heads, :, AT]
    return rows


INDICES = [("both", False), ("both", True), ("columns", False), ("bitmap", False), ("bitmap", True)]
CASES = [(*index, place) for index in INDICES for place in "qkv"]


@mostly_slow(("kind", "documents"), INDICES, keep=(0,))
def test_triton_is_nan_where_the_oracle_is(kind, documents):
    """The first sequence has the NaN in a query, the second in a key, and the third in a value."""
    p = make_problem(5, kind, seq=61, documents=documents, batch=3)
    for sequence, tensor in enumerate((p.q, p.k, p.v)):
        tensor[sequence, AT, HEAD, 3] = float("nan")
    want, want_lse = ReferenceKernel().forward(
        p.q.double(), p.k.double(), p.v.double(), p.tiles, SCALE
    )
    out, lse = TritonKernel().forward(p.q, p.k, p.v, p.tiles, SCALE)
    has_nan, expected = (t.isnan().any(-1).transpose(1, 2) for t in (out, want))
    assert torch.equal(lse.isnan(), want_lse.isnan())
    assert torch.equal(torch.isneginf(lse), torch.isneginf(want_lse))
    rows = torch.stack([affected_rows(p, place, at)[at] for at, place in enumerate("qkv")])
    assert rows.flatten(1).any(1).all(), "some row sees each NaN"
    assert torch.equal(has_nan[:2], expected[:2])
    # A tile multiplies hidden values by 0: more rows than those that see the value may be NaN,
    # but not fewer.
    assert bool(has_nan[rows].all())
    assert not (has_nan & ~expected).any()
    dq, dk, dv = TritonKernel().backward(
        p.dout, Saved(p.q, p.k, p.v, out, lse, None), p.tiles, SCALE
    )
    assert bool(dq.isnan().any(-1).transpose(1, 2)[rows].all())
    assert dk.isnan().flatten(1).any(1).tolist() == [True, True, True]
    assert dv.isnan().flatten(1).any(1).tolist() == [True, True, False]


@pytest.mark.parametrize("place", "qk")
def test_a_nan_from_the_blocks_survives_the_columns(place):
    """Blocks and columns are two launches; the second continues from the first one's NaN."""
    p = problem("both", False, place)
    without = p.tiles.with_index(p.tiles.index.without_columns())
    blocks = TritonKernel().forward(p.q, p.k, p.v, without, SCALE)[1].isnan()
    assert blocks.any()
    assert bool(TritonKernel().forward(p.q, p.k, p.v, p.tiles, SCALE)[1].isnan()[blocks].all())


@pytest.mark.parametrize(("kind", "documents", "place"), CASES)
def test_sdpa_loses_no_nan(kind, documents, place):
    """PyTorch's CPU kernel adds its mask, and NaN - inf is NaN: other rows may be NaN, too."""
    p = problem(kind, documents, place)
    rows = affected_rows(p, place)
    out, lse = SdpaKernel().forward(p.q, p.k, p.v, p.tiles, SCALE)
    assert bool(out.isnan().any(-1).transpose(1, 2)[rows].all())
    if place == "q":
        assert torch.equal(out.isnan().any(-1).transpose(1, 2), rows)
    if place != "v":
        assert bool(lse.isnan()[rows].all())
    else:
        assert not lse.isnan().any()
