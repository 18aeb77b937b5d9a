"""PyTorch's attention equals the float64 oracle, with empty rows and uneven sizes."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from attention.dense_problems import SCALE, make_dense_problem
from attention.mask_definitions import cells
from slow_cases import mostly_slow

import mtrain_cli.attention.sdpa as sdpa
from mtrain_cli.attention.kernel import Saved
from mtrain_cli.attention.mask import KeySlice, KeySpans, SequenceMask, SliceKind
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


@pytest.mark.parametrize("slices", [0, 6])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("rows_per_call", [8, 32, 512])
@pytest.mark.parametrize("seed", range(4))
def test_sdpa_equals_the_oracle(monkeypatch, heads, kv_heads, rows_per_call, seed, slices):
    monkeypatch.setattr(sdpa, "ROWS_PER_CALL", rows_per_call)
    spans, q, k, v, dout = make_dense_problem(seed, heads, kv_heads, slices=slices)
    tiles = Tiles.make(spans)
    want_out, want_lse = ReferenceKernel().forward(q, k, v, tiles, SCALE)
    out, lse = SdpaKernel().forward(q, k, v, tiles, SCALE)
    torch.testing.assert_close(out, want_out, atol=1e-12, rtol=0)
    torch.testing.assert_close(lse, want_lse, atol=1e-10, rtol=0)
    want = ReferenceKernel().backward(dout, Saved(q, k, v, want_out, want_lse, None), tiles, SCALE)
    # Queries from another worker arrive with delta, without out.
    for whole_out, delta in ((out, None), (None, row_delta(out, dout))):
        got = SdpaKernel().backward(dout, Saved(q, k, v, whole_out, lse, delta), tiles, SCALE)
        for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-11, rtol=0, msg=name)


def test_rows_after_many_rows_without_keys_are_computed(monkeypatch):
    """A worker may hold keys of a sequence's first and last document only."""
    monkeypatch.setattr(sdpa, "ROWS_PER_CALL", 8)
    ids = np.repeat([0, 1, 2], [10, 40, 30])
    keys = np.concatenate([np.arange(5), np.arange(60, 70)])
    tiles = Tiles.between([SequenceMask.from_documents(ids, 80)], np.arange(80), keys)
    q, k = torch.randn(1, 80, 4, 8), torch.randn(1, 15, 2, 8)
    got, want = (
        kernel.forward(q, k, k, tiles, SCALE) for kernel in (SdpaKernel(), ReferenceKernel())
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


@mostly_slow(("heads", "kv_heads", "documents"), [(4, 4, 1), (4, 1, 1), (4, 2, 4)], keep=(1,))
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
    want = ReferenceKernel().backward(
        dout.double(), Saved(*exact, want_out, want_lse, None), tiles, 0.125
    )
    out, lse = SdpaKernel().forward(q, k, v, tiles, 0.125)
    for whole_out, delta in ((out, None), (None, row_delta(out, dout))):
        got = SdpaKernel().backward(dout, Saved(q, k, v, whole_out, lse, delta), tiles, 0.125)
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


@pytest.mark.parametrize("slices", [0, 6])
def test_masks_that_are_large_together_are_made_one_by_one(monkeypatch, slices):
    monkeypatch.setattr(sdpa, "ROWS_PER_CALL", 2)
    spans, q, *_ = make_dense_problem(1, 4, 2, slices=slices)
    for most, alive_at_most in ((1 << 20, 10**6), (0, 1)):
        monkeypatch.setattr(sdpa, "CACHED_MASK_BYTES", most)
        tiles, masks, alive = Tiles.make(spans), [], []
        for _, _, mask in sdpa._calls(tiles, 0, q):
            if isinstance(mask, torch.Tensor):
                alive.append(1 + sum(earlier() is not None for earlier in masks))
                masks.append(weakref.ref(mask))
            del mask
        assert len(alive) > 5
        assert max(alive) <= alive_at_most
        assert bool(tiles.cache) == (most > 0) == (max(alive) > 1)


def test_masks_are_reused_by_other_layers_unless_they_are_large(monkeypatch):
    spans, q, k, v, _ = make_dense_problem(1, 4, 2)
    tiles = Tiles.make(spans)
    want = SdpaKernel().forward(q, k, v, tiles, SCALE)
    assert len(tiles.cache) == len(spans)
    monkeypatch.setattr(sdpa, "CACHED_MASK_BYTES", 0)
    again = Tiles.make(spans)
    got = SdpaKernel().forward(q, k, v, again, SCALE)
    assert not any(
        isinstance(mask, torch.Tensor) for calls in again.cache.values() for _, _, mask in calls
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("rows", [1, 16, 17, 40])
@pytest.mark.parametrize("seed", range(4))
def test_a_call_under_several_intervals_takes_few_rows_and_only_keys_that_some_row_sees(
    monkeypatch, seed, rows
):
    """A call has at most as many rows as fit into a mask, but at least 16."""
    spans, q, k, v, _ = make_dense_problem(seed, 4, 2, slices=6)
    tiles = Tiles.make(spans)
    assert tiles.intervals > 1
    monkeypatch.setattr(sdpa, "MASK_BYTES", 4 * tiles.num_keys * rows)
    for b in range(2):
        seen = tiles.seen()[b, 0]
        computed = torch.zeros_like(seen)
        for at, keys, mask in sdpa._cpu_interval_calls(tiles, b, torch.float64):
            slots = torch.arange(tiles.num_keys)[keys]
            some = seen[at].any(0).nonzero().flatten()
            assert torch.equal(slots, some)
            assert isinstance(keys, slice) == (len(some) == int(some[-1] - some[0]) + 1)
            assert (mask is False) == bool(seen[at][:, slots].all())
            most = max(16, 4 * tiles.num_keys * rows // (4 * len(slots)))
            first = range(at.start, min(at.start + most, tiles.num_queries))
            assert at.stop - at.start <= len(first)
            allowed = torch.ones(at.stop - at.start, len(slots), dtype=torch.bool)
            if mask is not False:
                assert set(mask.unique().tolist()) == {0.0, -torch.inf}
                allowed = mask == 0
            assert not computed[at].any(), "each row is in one call"
            computed[at.start : at.stop, slots] = allowed
        assert torch.equal(computed, seen)
    got, want = (
        kernel.forward(q, k, v, tiles, SCALE) for kernel in (SdpaKernel(), ReferenceKernel())
    )
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


def test_calls_under_several_intervals_have_a_mask_only_if_rows_differ(monkeypatch):
    first, second = np.repeat([[0], [9]], 16, 1), np.repeat([[20], [30]], 4, 1)
    low = np.concatenate([first, second], 1)
    spans = KeySpans(low, low + 3, 40)
    tiles = Tiles.make([spans])
    monkeypatch.setattr(sdpa, "MASK_BYTES", 0)  # as few rows per call as possible
    calls = list(sdpa._cpu_interval_calls(tiles, 0, torch.float64))
    assert [(rows, keys.tolist(), mask) for rows, keys, mask in calls] == [
        (slice(0, 16), [0, 1, 2, 9, 10, 11], False),
        (slice(16, 20), [20, 21, 22, 30, 31, 32], False),
    ]


def seen_by_flash_attention(queries: int, keys: int, causal: bool, window: dict) -> np.ndarray:
    """Which pairs FlashAttention-2 computes, by the text of its window sizes."""
    i, j = np.indices((queries, keys))
    left = window.get("window_size_left", queries + keys)
    right = window.get("window_size_right", 0 if causal else queries + keys)
    at = i + keys - queries
    return (j >= at - left) & (j <= at + right)


@pytest.mark.parametrize("kind", SliceKind)
def test_each_kind_of_slice_is_a_window_of_flash_attention(kind):
    shapes = (1, 1), (3, 3), (1, 5), (4, 9)
    for queries, keys in (*shapes, (9, 4)) if kind == SliceKind.FULL else shapes:
        seen = seen_by_flash_attention(queries, keys, *sdpa.flash_window(queries, keys, kind))
        assert (seen == cells([KeySlice(0, queries, 0, keys, kind)], queries, keys)).all()


@pytest.fixture
def gpu(monkeypatch):
    """Take the code path of GPUs, with FlashAttention-2 replaced by the oracle."""

    def tiles_of(q, k, kind):
        window = sdpa.flash_window(len(q), len(k), kind)
        seen = seen_by_flash_attention(len(q), len(k), *window)
        low, stop = seen.argmax(1), seen.shape[1] - seen[:, ::-1].argmax(1)
        return Tiles.make([KeySpans(low[None], stop[None], len(k))])

    def forward(q, k, v, kind, scale):
        out, lse = ReferenceKernel().forward(q[None], k[None], v[None], tiles_of(q, k, kind), scale)
        return out[0], lse[0]

    def backward(dout, q, k, v, out, lse, kind, scale):
        saved = Saved(*(t[None] for t in (q, k, v, out, lse)), None)
        found = ReferenceKernel().backward(dout[None], saved, tiles_of(q, k, kind), scale)
        return tuple(t[0] for t in found)

    monkeypatch.setattr(sdpa, "_on_gpu", lambda _: True)
    monkeypatch.setattr(sdpa, "_cuda_forward", forward)
    monkeypatch.setattr(sdpa, "_cuda_backward", backward)


@pytest.mark.parametrize("slices", [0, 1, 3, 8])
@pytest.mark.parametrize("seed", range(6))
def test_on_gpus_the_slices_of_a_query_are_merged(gpu, seed, slices):  # noqa: ARG001
    spans, q, k, v, dout = make_dense_problem(seed, 4, 2, slices=slices)
    tiles = Tiles.make(spans)
    want_out, want_lse = ReferenceKernel().forward(q, k, v, tiles, SCALE)
    out, lse = SdpaKernel().forward(q, k, v, tiles, SCALE)
    torch.testing.assert_close(out, want_out, atol=1e-12, rtol=0)
    torch.testing.assert_close(lse, want_lse, atol=1e-12, rtol=0)
    want = ReferenceKernel().backward(dout, Saved(q, k, v, want_out, want_lse, None), tiles, SCALE)
    got = SdpaKernel().backward(dout, Saved(q, k, v, out, lse, None), tiles, SCALE)
    for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0, msg=name)
