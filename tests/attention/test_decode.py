"""Attention of one query over a cache equals the float64 oracle, for every kernel."""

from __future__ import annotations

import pytest
import torch

from mtrain_cli.attention.kernel import Kernel, by_definition, per_query_head
from mtrain_cli.attention.kernel_registry import make_kernel
from mtrain_cli.attention.partials import merge_parts, pack_part

SCALE = 0.3
USED = (0, 1, 63, 64, 65, 200)


def problem(heads: int, kv_heads: int, dim: int = 16, dtype: torch.dtype = torch.float32):
    """Return q, a cache of 200 slots, and how many slots of each sequence are used.

    The slots that are not used hold NaN, so that reading them shows.
    """
    torch.manual_seed(heads + kv_heads + dim)
    batch, capacity = len(USED), 200
    q = torch.randn(batch, 1, heads, dim, dtype=dtype)
    k, v = (torch.randn(batch, capacity, kv_heads, dim, dtype=dtype) for _ in range(2))
    used = torch.tensor(USED, dtype=torch.int32)
    for b, keys in enumerate(USED):
        k[b, keys:] = v[b, keys:] = float("nan")
    return q, k, v, used


def oracle(q, k, v, used, first: int = 0):
    """Attend in float64 to the used keys from ``first`` on, one sequence after another."""
    outs, lses = [], []
    for b, keys in enumerate(used.tolist()):
        shard = slice(first, max(first, keys))
        per_head = per_query_head(q[b : b + 1], k[b : b + 1, shard], v[b : b + 1, shard])
        seen = torch.ones(1, 1, 1, max(0, keys - first), dtype=torch.bool)
        out, lse = by_definition(*per_head, seen, SCALE)
        outs.append(out.transpose(1, 2))
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


@pytest.mark.parametrize("name", ["reference", "sdpa", "triton"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 4, 16), (6, 2, 24), (4, 1, 16)])
def test_decode_equals_the_oracle(name, heads, kv_heads, dim):
    if name == "triton":
        pytest.importorskip("triton")
    q, k, v, used = problem(heads, kv_heads, dim)
    if name == "reference":  # by definition, NaN times 0 is NaN
        k, v = k.nan_to_num(), v.nan_to_num()
    kernel: Kernel = make_kernel(name)
    out, lse = kernel.decode(q, k, v, used, SCALE)
    want_out, want_lse = oracle(q, k, v, used)
    assert (out.shape, lse.shape) == (q.shape, (len(USED), heads, 1))
    torch.testing.assert_close(out.double(), want_out, atol=2e-6, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=2e-6, rtol=1e-6)
    assert lse[0].isneginf().all()
    assert not out[0].any()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("sdpa", torch.bfloat16),
        ("triton", torch.float16),  # Triton's interpreter cannot multiply bfloat16
    ],
)
def test_decode_in_16_bits_is_as_exact_as_the_inputs(name, dtype):
    q, k, v, used = problem(4, 2, dtype=dtype)
    out, lse = make_kernel(name).decode(q, k, v, used, SCALE)
    want_out, want_lse = oracle(q, k, v, used)
    torch.testing.assert_close(out.double(), want_out, atol=2e-2, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=2e-3, rtol=0)
    assert lse.dtype == torch.float32


@pytest.mark.parametrize("interpreted", [False, True])
def test_the_parts_of_several_workers_merge_to_the_whole(interpreted):
    q, k, v, used = problem(4, 2)
    kernel, cut = make_kernel("sdpa"), 64
    first = kernel.decode(q, k, v, used.clamp(max=cut), SCALE)
    last = kernel.decode(q, k[:, cut:], v[:, cut:], (used - cut).clamp(min=0), SCALE)
    parts = torch.stack([pack_part(*part) for part in (first, last)])
    assert parts.shape == (2, len(USED), 4, 17)
    if interpreted:
        pytest.importorskip("triton")
        from mtrain_cli.kernels.triton import decode as triton_decode

        out, lse = triton_decode.merge_parts(parts)
    else:
        out, lse = merge_parts(parts)
    want_out, want_lse = oracle(q, k, v, used)
    torch.testing.assert_close(out.double(), want_out, atol=2e-6, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=2e-6, rtol=1e-6)
