"""The Triton kernels for masks equal the float64 oracle under every named mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention.dense_problems import SCALE, make_dense_problem
from attention.sparse_problems import as_view_among_nan
from mtrain_cli.kernels.triton import spans
from slow_cases import mostly_slow

import mtrain_cli.attention.triton_kernel as triton_kernel
from mtrain_cli.attention.kernel import Saved
from mtrain_cli.attention.kernel_registry import make_kernel
from mtrain_cli.attention.mask import KeySpans
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.attention.triton_kernel import TritonKernel, make_span_plans
from mtrain_cli.config.mask_settings import MASKS

LENGTH, PADDED = 60, 70  # neither is a multiple of the block
DOCUMENTS = np.repeat([0, 1, 2], [7, 30, 23])
KEYS = {
    "causal": {},
    "sliding_window": {"window": 13, "global_tokens": 5},
    "full": {},
    "prefix_lm": {"prefix": 20},
    "block_causal": {"block": 11},
    "block_window": {"block": 9, "back": 2},
    "chunked": {"chunk": 9},
    "video": {"frames": 3, "height": 4, "width": 5, "window": (2, 3, 3)},
    "dilated": {"block": 4, "stride": 3, "count": 4},
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(triton_kernel, "_DENSE_BLOCK_32", 16)


def check(
    tiles: Tiles,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    softcap: float = 0.0,
) -> None:
    """Compare with the oracle; q, k, v and dout are float32."""
    kernel, oracle = make_kernel("triton", softcap), make_kernel("reference", softcap)
    exact = [t.double() for t in (q, k, v)]
    want_out, want_lse = oracle.forward(*exact, tiles, SCALE)
    out, lse = kernel.forward(q, k, v, tiles, SCALE)
    assert torch.equal(lse.isneginf(), want_lse.isneginf())
    seen = ~want_lse.isneginf()
    torch.testing.assert_close(out.double(), want_out, atol=1e-5, rtol=0)
    torch.testing.assert_close(lse.double()[seen], want_lse[seen], atol=1e-5, rtol=0)
    final = want_lse + 0.5  # as in a ring, where other workers contribute to the row
    delta = (want_out * dout.double()).sum(-1).transpose(1, 2)
    want = oracle.backward(dout.double(), Saved(*exact, want_out, final, delta), tiles, SCALE)
    for whole_out, given in ((None, delta.float()), (want_out.float(), None)):
        got = kernel.backward(dout, Saved(q, k, v, whole_out, final.float(), given), tiles, SCALE)
        for name, a, b in zip(("dq", "dk", "dv"), got, want, strict=True):
            torch.testing.assert_close(a.double(), b, atol=3e-5, rtol=0, msg=name)


def draw(queries: int, keys: int, heads: int = 2, kv_heads: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads))
    return [torch.randn(1, n, h, 16) for n, h in shapes]


def test_every_named_mask_is_here():
    assert KEYS.keys() == MASKS.keys()


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("documents", [None, DOCUMENTS])
@pytest.mark.parametrize("striped", [False, True])
def test_named_masks_equal_the_oracle(kind, documents, striped):
    mask = MaskRule(True, MASKS[kind](**KEYS[kind]))(documents, LENGTH, PADDED)
    everywhere = np.arange(PADDED)
    own = everywhere[everywhere // 8 % 2 == 1] if striped else everywhere
    tiles = Tiles.make([mask.spans(own, own if striped else everywhere)])
    check(tiles, *draw(len(own), tiles.num_keys))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("slices", [0, 8])
@mostly_slow("seed", range(3), keep=(0,))
def test_sequences_with_different_masks_equal_the_oracle(heads, kv_heads, slices, seed):
    spans_, *tensors = make_dense_problem(seed, heads, kv_heads, torch.float32, slices=slices)
    check(Tiles.make(spans_), *tensors)


@mostly_slow(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)], keep=(1,))
@mostly_slow("softcap", [0.7, 50.0], keep=(0,))
def test_capped_scores_equal_the_oracle(heads, kv_heads, softcap):
    spans_, *tensors = make_dense_problem(0, heads, kv_heads, torch.float32, slices=8)
    check(Tiles.make(spans_), *tensors, softcap)
    whole = np.zeros((1, 37), np.int64), np.full((1, 37), 45)
    whole[1][:, 3:5] = 0  # queries that see no key
    check(Tiles.make([KeySpans(*whole, 45)]), *draw(37, 45, heads, kv_heads), softcap)


@pytest.mark.parametrize(("queries", "keys"), [(32, 32), (32, 37), (37, 32), (1, 1)])
def test_full_blocks_at_uneven_ends_equal_the_oracle(queries, keys):
    low, high = np.zeros((1, queries), np.int64), np.full((1, queries), keys)
    tiles = Tiles.make([KeySpans(low, high, keys)])
    of_queries, of_keys = make_span_plans(tiles, torch.float32)
    assert int(of_queries.partial_count.sum()) == int(of_keys.partial_count.sum()) == 0
    check(tiles, *draw(queries, keys))


def test_strided_inputs_and_repeated_calls_give_the_same_bits():
    spans_, q, k, v, dout = make_dense_problem(5, 4, 2, torch.float32, slices=8)
    tiles, kernel = Tiles.make(spans_), TritonKernel()
    out, lse = kernel.forward(q, k, v, tiles, SCALE)
    want = kernel.backward(dout, Saved(q, k, v, out, lse, None), tiles, SCALE)
    views = [as_view_among_nan(t) for t in (q, k, v)]
    for a, b in zip(kernel.forward(*views, tiles, SCALE), (out, lse), strict=True):
        assert torch.equal(a, b)
    again = kernel.backward(as_view_among_nan(dout), Saved(*views, out, lse, None), tiles, SCALE)
    assert all(map(torch.equal, again, want))


def test_blocks_outside_the_lists_are_skipped():
    spans_, q, k, v, _ = make_dense_problem(5, 4, 2, torch.float32, slices=8)
    plan, _ = make_span_plans(Tiles.make(spans_), torch.float32)
    nothing = [torch.zeros_like(t) for t in (plan.partial_count, plan.full_count)]
    empty = spans.SpanPlan(plan.block, plan.low, plan.high, plan.partial, plan.full, *nothing)
    out, lse = spans.forward(q, k, v, empty, SCALE)
    assert not out.any()
    assert bool(lse.isneginf().all())
