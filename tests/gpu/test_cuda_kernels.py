"""The CUDA kernels equal the float64 oracle under every layout and exchange. Needs a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtrain_cli.attention.kernel import KernelRequest
from mtrain_cli.attention.kernel_registry import _KERNELS, survey
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.parallel.layout import make_layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

SEQ, WORKERS = 1900, 4


def mask(documents: bool, padded: int) -> SequenceMask:
    if not documents:
        return SequenceMask.causal(SEQ, padded)
    return SequenceMask.from_documents(
        np.sort(np.random.default_rng(3).integers(0, 6, SEQ)), padded
    )


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize("name", ["flash4", "sdpa"])
@pytest.mark.parametrize("layout_name", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 2, 128), (4, 4, 64), (4, 1, 128)])
def test_a_rank_computes_what_the_oracle_computes(
    name, layout_name, documents, heads, kv_heads, head_dim
):
    kernel = _KERNELS[name]()
    request = KernelRequest(
        "cuda", torch.cuda.get_device_capability(), "bfloat16", head_dim, heads, kv_heads
    )
    missing = dict(survey(request))[name]
    if missing:
        pytest.skip(missing)
    torch.manual_seed(0)
    layout = make_layout(layout_name, WORKERS, SEQ, 128)
    sequence = mask(documents, layout.padded_seq)
    everywhere = np.arange(layout.padded_seq)
    for rank in (0, WORKERS - 1):
        own = layout.positions(rank)
        for keys in (everywhere, layout.positions(0), layout.positions(1), layout.positions(rank)):
            tiles = Tiles.make([sequence.spans(own, keys)], "cuda")
            if tiles.empty:
                continue
            q, k, v, dout = (
                torch.randn(1, n, h, head_dim, device="cuda", dtype=torch.bfloat16)
                for n, h in (
                    (len(own), heads),
                    (len(keys), kv_heads),
                    (len(keys), kv_heads),
                    (len(own), heads),
                )
            )
            scale = head_dim**-0.5
            want = ReferenceKernel().forward(q.double(), k.double(), v.double(), tiles, scale)
            out, lse = kernel.forward(q, k, v, tiles, scale)
            seen = ~torch.isneginf(want[1])
            assert torch.equal(torch.isneginf(lse), ~seen), "rows without keys have lse -inf"
            assert bool(out.transpose(1, 2)[~seen].eq(0).all()), "and out 0"
            assert error(out, want[0]) < 6e-3
            assert (lse[seen] - want[1][seen]).abs().max() < 2e-3
            # As in a ring, where other workers contribute: the final lse exceeds that of these
            # keys.
            final = want[1] + 0.5
            rounded = want[0].to(q.dtype)
            delta = (rounded.double() * dout.double()).sum(-1).transpose(1, 2).contiguous()
            expected = ReferenceKernel().backward(
                dout.double(),
                q.double(),
                k.double(),
                v.double(),
                want[0],
                final,
                delta,
                tiles,
                scale,
            )
            # Queries from another worker arrive with delta, without out.
            for whole_out, whole_delta in ((rounded, None), (None, delta.float())):
                grads = kernel.backward(
                    dout, q, k, v, whole_out, final.float(), whole_delta, tiles, scale
                )
                for part, got, exact in zip(("dq", "dk", "dv"), grads, expected, strict=True):
                    assert error(got, exact) < 8e-3, part
                assert bool(grads[0].transpose(1, 2)[~seen].eq(0).all())
