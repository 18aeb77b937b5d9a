"""Every CPU kernel equals the float64 oracle, with empty rows and uneven sizes."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

import mtrain_cli.attention.sdpa as sdpa
from mtrain_cli.attention.flash4 import block_lists
from mtrain_cli.attention.mask import KeySpans, SequenceMask
from mtrain_cli.attention.partials import merge, row_delta
from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.attention.tiles import Tiles

SCALE = 0.3


def problem(seed: int, heads: int, kv_heads: int, dtype: torch.dtype = torch.float64):
    """Make two sequences with documents and padding; the shards leave some rows without keys."""
    rng = np.random.default_rng(seed)
    padded = int(rng.integers(2, 90))
    queries, keys = (np.sort(rng.permutation(padded)[: max(1, padded // 2)]) for _ in range(2))
    spans = []
    for _ in range(2):
        length = int(rng.integers(1, padded + 1))
        ids = np.sort(rng.integers(0, rng.integers(1, 6), length))
        spans.append(SequenceMask.from_documents(ids, padded).spans(queries, keys))
    torch.manual_seed(seed)
    q, k, v, dout = (
        torch.randn(2, n, h, 16, dtype=dtype)
        for n, h in (
            (len(queries), heads),
            (len(keys), kv_heads),
            (len(keys), kv_heads),
            (len(queries), heads),
        )
    )
    return spans, q, k, v, dout


def test_the_problems_have_empty_rows():
    assert any(
        (s.low >= s.high).any() and (s.low < s.high).any()
        for seed in range(12)
        for s in problem(seed, 4, 4)[0]
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("rows_per_call", [8, 32, 512])
@pytest.mark.parametrize("seed", range(4))
def test_sdpa_equals_the_oracle(monkeypatch, heads, kv_heads, rows_per_call, seed):
    monkeypatch.setattr(sdpa, "_ROWS_PER_CALL", rows_per_call)
    spans, q, k, v, dout = problem(seed, heads, kv_heads)
    tiles = Tiles.make(spans)
    want_out, want_lse = ReferenceKernel().forward(q, k, v, tiles, SCALE)
    out, lse = SdpaKernel().forward(q, k, v, tiles, SCALE)
    torch.testing.assert_close(out, want_out, atol=1e-12, rtol=0)
    torch.testing.assert_close(lse, want_lse, atol=1e-10, rtol=0)
    want = ReferenceKernel().backward(dout, q, k, v, want_out, want_lse, None, tiles, SCALE)
    # Queries from another worker arrive with delta, without out.
    for whole_out, delta in ((out, None), (None, row_delta(out, dout))):
        got = SdpaKernel().backward(dout, q, k, v, whole_out, lse, delta, tiles, SCALE)
        for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-11, rtol=0, msg=name)


@pytest.mark.parametrize(("heads", "kv_heads", "documents"), [(4, 4, 1), (4, 1, 1), (4, 2, 4)])
def test_gradients_of_bfloat16_inputs_on_the_cpu_are_rounded_once(heads, kv_heads, documents):
    """Rounding a normal number to bfloat16 costs 1.7e-3 on average.

    Rounding every piece and every tile costs 4.7e-3.
    """
    torch.manual_seed(0)
    seq, everywhere = 1536, np.arange(1536)
    ids = np.sort(np.random.default_rng(0).integers(0, documents, seq))
    tiles = Tiles.make([SequenceMask.from_documents(ids, seq).spans(everywhere, everywhere)])
    q, k, v, dout = (
        torch.randn(1, seq, h, 64).bfloat16() for h in (heads, kv_heads, kv_heads, heads)
    )
    exact = [t.double() for t in (q, k, v)]
    want_out, want_lse = ReferenceKernel().forward(*exact, tiles, 0.125)
    want = ReferenceKernel().backward(dout.double(), *exact, want_out, want_lse, None, tiles, 0.125)
    out, lse = SdpaKernel().forward(q, k, v, tiles, 0.125)
    for whole_out, delta in ((out, None), (None, row_delta(out, dout))):
        got = SdpaKernel().backward(dout, q, k, v, whole_out, lse, delta, tiles, 0.125)
        for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
            error = ((a.bfloat16().double() - b).norm() / b.norm()).item()
            assert error < 2.2e-3, (name, error)


@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.bfloat16, 2e-7), (torch.float32, 2e-7), (torch.float64, 1e-15)]
)
@pytest.mark.parametrize("kind", ["even", "one element", "two far apart", "nearly zero", "zero"])
def test_the_surrogate_out_gives_delta(dtype, precision, kind):
    torch.manual_seed(0)
    out, dout = (torch.randn(2, 50, 3, 64, dtype=torch.float64) for _ in range(2))
    if kind in ("one element", "two far apart"):
        dout[..., 1 if kind == "one element" else 2 :] = 0
        dout[..., 1] *= 1e-30
    if kind in ("nearly zero", "zero"):
        dout *= 1e-34 if kind == "nearly zero" else 0
    out, dout = out.to(dtype), dout.to(dtype)
    delta = row_delta(out, dout)
    surrogate = sdpa._surrogate_out(dout, delta)
    assert surrogate.dtype == dtype
    assert bool(surrogate.isfinite().all())
    again = row_delta(surrogate, dout)
    assert ((again - delta).abs() <= precision * delta.abs() + torch.finfo(again.dtype).tiny).all()


@pytest.mark.parametrize("seed", range(6))
def test_merged_parts_equal_the_whole(seed):
    spans, q, k, v, _ = problem(seed, 4, 2)
    kernel, keys = ReferenceKernel(), k.shape[1]
    want_out, want_lse = kernel.forward(q, k, v, Tiles.make(spans), SCALE)
    edges = sorted({0, keys // 3, keys // 2, keys})
    out = torch.zeros_like(q)
    lse = torch.full(want_lse.shape, float("-inf"), dtype=torch.float64)
    for a, b in pairwise(edges):
        part = Tiles.make(
            [KeySpans(np.clip(s.low, a, b) - a, np.clip(s.high, a, b) - a, b - a) for s in spans]
        )
        merge(out, lse, *kernel.forward(q, k[:, a:b], v[:, a:b], part, SCALE))
    torch.testing.assert_close(out, want_out, atol=1e-12, rtol=0)
    torch.testing.assert_close(lse, want_lse, atol=1e-12, rtol=0)


def test_merging_handles_very_different_scores():
    out, lse = torch.zeros(1, 2, 1, 1), torch.tensor([[[-400.0, 400.0]]])
    merge(out, lse, torch.ones(1, 2, 1, 1), torch.tensor([[[400.0, -400.0]]]))
    assert out.flatten().tolist() == [1.0, 0.0]
    assert lse.flatten().tolist() == [400.0, 400.0]


@pytest.mark.parametrize("seed", range(12))
def test_block_lists_equal_the_mask(seed):
    spans, q, k, _, _ = problem(seed, 4, 4)
    tiles = Tiles.make(spans)
    block = 8
    by_query, by_key = block_lists(tiles.low, tiles.high, tiles.num_keys, block)
    lists = dict(by_query)
    for name in ("partial", "full"):
        lists[f"{name}_t"], lists[f"{name}_t_count"] = by_key[name], by_key[f"{name}_count"]
    slots = torch.arange(k.shape[1])
    seen = (slots >= tiles.low[..., None]) & (slots < tiles.high[..., None])
    rows, columns = -(-q.shape[1] // block), -(-k.shape[1] // block)
    listed = {
        name: {
            (b, *((j, i) if name.endswith("_t") else (i, j)))
            for b in range(2)
            for i in range(columns if name.endswith("_t") else rows)
            for j in lists[name][b, 0, i, : lists[f"{name}_count"][b, 0, i]].tolist()
        }
        for name in ("partial", "full", "partial_t", "full_t")
    }
    assert listed["partial"] == listed["partial_t"]
    assert listed["full"] == listed["full_t"]
    for b in range(2):
        for i in range(rows):
            for j in range(columns):
                part = seen[b, i * block : (i + 1) * block, j * block : (j + 1) * block]
                assert ((b, i, j) in listed["full"]) == bool(part.all())
                if part.any() and not part.all():
                    assert (b, i, j) in listed["partial"]
