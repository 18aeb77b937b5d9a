"""PyTorch's attention equals the float64 oracle, with empty rows and uneven sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention.dense_problems import SCALE, make_dense_problem

import mtrain_cli.attention.sdpa as sdpa
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.partials import row_delta
from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.attention.tiles import Tiles


def test_the_problems_have_empty_rows():
    assert any(
        (s.low >= s.high).any() and (s.low < s.high).any()
        for seed in range(12)
        for s in make_dense_problem(seed, 4, 4)[0]
    )


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("rows_per_call", [8, 32, 512])
@pytest.mark.parametrize("seed", range(4))
def test_sdpa_equals_the_oracle(monkeypatch, heads, kv_heads, rows_per_call, seed):
    monkeypatch.setattr(sdpa, "_ROWS_PER_CALL", rows_per_call)
    spans, q, k, v, dout = make_dense_problem(seed, heads, kv_heads)
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


def test_masks_are_reused_by_other_layers_unless_they_are_large(monkeypatch):
    spans, q, k, v, _ = make_dense_problem(1, 4, 2)
    tiles = Tiles.make(spans)
    want = SdpaKernel().forward(q, k, v, tiles, SCALE)
    assert len(tiles.cache) == len(spans)
    monkeypatch.setattr(sdpa, "_CACHED_MASK_BYTES", 0)
    again = Tiles.make(spans)
    got = SdpaKernel().forward(q, k, v, again, SCALE)
    assert not any(
        isinstance(mask, torch.Tensor) for calls in again.cache.values() for _, _, mask in calls
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
