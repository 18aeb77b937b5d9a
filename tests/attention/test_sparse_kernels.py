"""Every sparse kernel equals the float64 oracle under a dynamic index, gradients included."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from attention.sparse_problems import Problem, as_view_among_nan, make_problem
from slow_cases import mostly_slow

from mtrain_cli.attention.flash4 import Flash4Kernel
from mtrain_cli.attention.index import BlockBitmap, StartBitmap
from mtrain_cli.attention.kernel import Saved
from mtrain_cli.attention.kernel_registry import make_kernel
from mtrain_cli.attention.packed_columns import pack_columns
from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.attention.triton_kernel import TritonKernel, make_tile_plan

SCALE = 0.3
KINDS = ("slashes", "columns", "both", "all", "none", "bitmap", "local bitmap")


def check(kernel, problem, tolerance: float) -> None:
    p = problem
    q, k, v, dout = (t.double() for t in (p.q, p.k, p.v, p.dout))
    oracle = make_kernel("reference", kernel.softcap)
    want_out, want_lse = oracle.forward(q, k, v, p.tiles, SCALE)
    out, lse = kernel.forward(p.q, p.k, p.v, p.tiles, SCALE)
    assert torch.equal(torch.isneginf(lse), torch.isneginf(want_lse)), (
        "exactly the rows without keys have lse -inf"
    )
    torch.testing.assert_close(out.double(), want_out, atol=tolerance, rtol=0)
    seen = ~torch.isneginf(want_lse)
    torch.testing.assert_close(lse.double()[seen], want_lse[seen], atol=tolerance, rtol=0)
    # As in a ring, where other workers contribute: the final lse exceeds that of these keys.
    final = want_lse + 0.5
    delta = (want_out * dout).sum(-1).transpose(1, 2)
    want = oracle.backward(dout, Saved(q, k, v, want_out, final, delta), p.tiles, SCALE)
    # Queries from another worker arrive with delta, without out.
    got = kernel.backward(
        p.dout, Saved(p.q, p.k, p.v, None, final.float(), delta.float()), p.tiles, SCALE
    )
    for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
        torch.testing.assert_close(
            a.double(), b, atol=5 * tolerance, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


# The interpreter takes seconds per case: test every shard for the richest indices, and every kind
# and every shard with documents or without; the rest is marked slow.
SHARDS = ("whole", "striped queries", "striped", "later queries")
CASES = [
    pytest.param(
        kind,
        where,
        documents,
        marks=()
        if (where == "whole" or kind in ("both", "bitmap", "local bitmap"))
        and documents == (number + shard) % 2
        else pytest.mark.slow,
    )
    for number, kind in enumerate(KINDS)
    for shard, where in enumerate(SHARDS)
    for documents in (False, True)
]


@pytest.mark.parametrize(("kind", "where", "documents"), CASES)
def test_triton_equals_the_oracle(kind, where, documents):
    check(TritonKernel(), make_problem(1, kind, documents=documents, where=where), 1e-5)


@mostly_slow("softcap", [0.7, 30.0], keep=(0,))
@mostly_slow(
    ("kind", "where"),
    [
        ("both", "striped"), ("both", "whole"), ("bitmap", "whole"), ("local bitmap", "striped"),
        ("gated", "whole"), ("starts", "whole"),
    ], keep=(0,2,5),
)  # fmt: skip
def test_capped_scores_equal_the_oracle(kind, where, softcap):
    p = make_problem(1, kind, documents=kind != "starts", where=where)
    check(make_kernel("triton", softcap), p, 1e-5)


WINDOWS = [
    ("both", "whole", False, 23),
    ("both", "striped", True, 40),
    ("local bitmap", "striped", False, 23),
    *(
        pytest.param(*case, marks=pytest.mark.slow)
        for case in (
            ("both", "whole", True, 40),
            ("both", "striped", False, 23),
            ("local bitmap", "striped", True, 40),
            *(
                (kind, where, documents, window)
                for kind, where in (
                    ("both", "later queries"), ("columns", "whole"), ("gated", "whole")
                )
                for documents, window in ((False, 23), (True, 40))
            ),
        )
    ),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "where", "documents", "window"), WINDOWS)
def test_triton_serves_sliding_windows(kind, where, documents, window):
    p = make_problem(1, kind, documents=documents, window=window, where=where)
    check(TritonKernel(), p, 1e-5)


@mostly_slow("window", [0, 40], keep=(1,))
def test_triton_serves_columns_and_diagonals_at_every_distance(window):
    """Columns fill several words of covered bits; a window cuts diagonals behind full blocks."""
    p = make_problem(1, "both", heads=2, kv_heads=1, documents=False, window=window)
    index = p.tiles.index
    slashes = index.slashes.clone()
    slashes[0, 0] = True
    columns = torch.arange(85, dtype=torch.int32).expand(2, 2, -1).contiguous()
    many = replace(index, slashes=slashes, columns=columns, max_slashes=0)
    check(TritonKernel(), replace(p, tiles=p.tiles.with_index(many)), 1e-5)


@pytest.mark.parametrize(
    ("kind", "where"),
    [
        (where + kind, shard)
        for kind in ("gated", "starts")
        for where, shard in (("", "whole"), ("local ", "striped"), ("", "later queries"))
    ],
)
@pytest.mark.parametrize("kernel", [TritonKernel(), SdpaKernel()])
def test_query_gates_are_exact(kernel, kind, where):
    p = make_problem(6, kind, where=where, documents="starts" not in kind)
    ungated = p.tiles.with_index(without_gates(p.tiles.index))
    assert not torch.equal(p.tiles.seen(), ungated.seen()), "the gates hide pairs"
    check(kernel, p, 1e-5)


def test_first_queries_are_exact_in_blocks_of_several_tiles():
    """Programs for keys take 64 queries of a block of 128 at a time."""
    check(TritonKernel(), make_problem(6, "starts", seq=300, block=128, documents=False), 1e-5)


def without_gates(index: BlockBitmap) -> BlockBitmap:
    index = index.per_head() if isinstance(index, StartBitmap) else index
    return BlockBitmap(index.block, index.blocks, index.bits, index.rows)


def small_problem(dtype: torch.dtype = torch.float32) -> Problem:
    return make_problem(4, "both", seq=37, documents=False, dtype=dtype)


def test_triton_computes_delta_if_none_is_given():
    p = small_problem()
    q, k, v, dout = (t.double() for t in (p.q, p.k, p.v, p.dout))
    out, lse = ReferenceKernel().forward(q, k, v, p.tiles, SCALE)
    saved = Saved(p.q, p.k, p.v, out.float(), lse.float(), None)
    got = TritonKernel().backward(p.dout, saved, p.tiles, SCALE)
    want = ReferenceKernel().backward(dout, Saved(q, k, v, out, lse, None), p.tiles, SCALE)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, atol=5e-5, rtol=0)


@mostly_slow(("kind", "given"), [("both", True), ("bitmap", False)], keep=(1,))
def test_triton_accepts_strided_heads(kind, given):
    p = make_problem(4, kind, seq=37)
    kernel = TritonKernel()
    q, k, v, dout = (as_view_among_nan(t) for t in (p.q, p.k, p.v, p.dout))
    out, lse = kernel.forward(p.q, p.k, p.v, p.tiles, SCALE)
    for a, b in zip(kernel.forward(q, k, v, p.tiles, SCALE), (out, lse), strict=True):
        assert torch.equal(a, b)
    delta = (out * p.dout).sum(-1).transpose(1, 2) if given else None
    want = kernel.backward(p.dout, Saved(p.q, p.k, p.v, out, lse, delta), p.tiles, SCALE)
    got = kernel.backward(dout, Saved(q, k, v, as_view_among_nan(out), lse, delta), p.tiles, SCALE)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_triton_columns_continue_from_the_blocks():
    from mtrain_cli.kernels.triton import sparse

    p = small_problem()
    plan, columns = make_tile_plan(p.tiles), pack_columns(p.k, p.v, p.tiles)
    out, lse = sparse.forward(p.q, p.k, p.v, columns, plan, SCALE)
    delta = sparse.row_delta(out, p.dout)
    torch.testing.assert_close(delta, (out * p.dout).sum(-1).transpose(1, 2), atol=1e-5, rtol=0)
    rest = (lse, delta, plan, SCALE)
    whole = sparse.backward_queries(p.dout, p.q, p.k, p.v, columns, *rest)
    blocks = sparse.backward_queries(p.dout, p.q, p.k, p.v, None, *rest)
    assert (whole - blocks).abs().max() > 0.01, "the columns change the result"
    both = sparse.backward_queries(
        p.dout, p.q, p.k, p.v, columns, *rest, slashes=False, partial=blocks
    )
    torch.testing.assert_close(both, whole, atol=1e-5, rtol=0)


def test_the_blocks_result_reaches_the_columns_unrounded():
    from mtrain_cli.kernels.triton import sparse

    p = small_problem(torch.float16)  # Triton's interpreter cannot multiply bfloat16
    plan, columns = make_tile_plan(p.tiles), pack_columns(p.k, p.v, p.tiles)
    blocks = sparse.forward(p.q, p.k, p.v, None, plan, SCALE, dtype=torch.float32)
    both = sparse.forward(p.q, p.k, p.v, columns, plan, SCALE, slashes=False, partial=blocks)
    for a, b in zip(sparse.forward(p.q, p.k, p.v, columns, plan, SCALE), both, strict=True):
        assert torch.equal(a, b)
    rounded = sparse.forward(
        p.q, p.k, p.v, columns, plan, SCALE, slashes=False, partial=(blocks[0].half(), blocks[1])
    )
    assert not torch.equal(both[0], rounded[0]), "rounding would show"


@pytest.mark.parametrize("kind", ["both", "slashes", "bitmap"])
@mostly_slow("where", ["whole", "striped"], keep=(1,))
def test_flash4_with_exact_block_attention_equals_the_oracle(monkeypatch, kind, where):
    """The oracle stands in for FlashAttention-4 and computes only the listed blocks."""
    p = make_problem(5, kind, seq=61, documents=where == "striped", where=where)

    def blocks_of_lists(lists: dict[str, torch.Tensor], transposed: bool) -> Tiles:
        geometry = p.tiles.geometry
        rows, others = (
            (geometry.key_blocks, geometry.query_blocks)
            if transposed
            else (geometry.query_blocks, geometry.key_blocks)
        )
        bits = torch.zeros(2, 4, geometry.blocks, geometry.blocks, dtype=torch.bool)
        for b, h, row in torch.cartesian_prod(
            torch.arange(2), torch.arange(4), torch.arange(len(rows))
        ).tolist():
            for name in ("partial", "full"):
                slots = lists[name][b, h, row][: lists[name + "_count"][b, h, row]].long()
                bits[b, h, rows[row], others[slots].long()] = True
        return p.tiles.with_index(
            BlockBitmap.whole(16, bits.transpose(-1, -2) if transposed else bits)
        )

    def forward(q, k, v, spans, lists, scale):
        assert spans is not None, "this problem's mask must not be plain"
        assert all(map(torch.equal, spans, (p.tiles.low, p.tiles.high)))
        return [
            t.contiguous()
            for t in ReferenceKernel().forward(q, k, v, blocks_of_lists(lists, False), scale)
        ]

    def backward(dout, q, k, v, out, lse, delta, spans, lists, scale):
        assert all(map(torch.equal, spans, (p.tiles.low, p.tiles.high)))
        return [
            t.contiguous()
            for t in ReferenceKernel().backward(
                dout, Saved(q, k, v, out, lse, delta), blocks_of_lists(lists, True), scale
            )
        ]

    fake = ModuleType("flash4")
    fake.dense = SimpleNamespace(spans_forward=forward, spans_backward=backward)
    monkeypatch.setitem(sys.modules, "mtrain_cli.kernels.flash4", fake)
    check(Flash4Kernel(), p, 1e-5)
    check(
        Flash4Kernel(), replace(p, q=as_view_among_nan(p.q), dout=as_view_among_nan(p.dout)), 1e-5
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("where", ["whole", "striped queries", "striped", "later queries"])
@pytest.mark.parametrize("rows", [16, 64])
def test_sdpa_equals_the_oracle(monkeypatch, kind, documents, where, rows):
    monkeypatch.setattr("mtrain_cli.attention.sdpa.MASK_BYTES", 4 * 4 * 85 * rows)
    problem = make_problem(2, kind, documents=documents, where=where)
    check(SdpaKernel(), problem, 1e-5)
