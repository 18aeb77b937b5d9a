"""The CUDA kernels equal the float64 oracle under every layout and exchange. Needs a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtrain_cli.attention import kernel_registry
from mtrain_cli.attention.kernel import Kernel, KernelRequest, Saved
from mtrain_cli.attention.kernel_registry import _KERNELS, survey
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.attention.named_masks import NAMED
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


def make_kernel(name: str, heads: int, kv_heads: int, head_dim: int, intervals: int = 1) -> Kernel:
    """Return a kernel, or skip the test if this machine cannot run it."""
    capability = torch.cuda.get_device_capability()
    request = KernelRequest(
        "cuda", capability, "bfloat16", head_dim, heads, kv_heads, intervals=intervals
    )
    if missing := dict(survey(request))[name]:
        pytest.skip(missing)
    return _KERNELS[name]()


def check(kernel: Kernel, tiles: Tiles, heads: int, kv_heads: int, head_dim: int) -> None:
    """Compare a kernel with the oracle on random inputs."""
    batch, queries, keys = len(tiles.spans), tiles.num_queries, tiles.num_keys
    q, k, v, dout = (
        torch.randn(batch, n, h, head_dim, device="cuda", dtype=torch.bfloat16)
        for n, h in ((queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads))
    )
    scale, oracle = head_dim**-0.5, kernel_registry.make_kernel("reference", kernel.softcap)
    exact = [t.double() for t in (q, k, v)]
    want = oracle.forward(*exact, tiles, scale)
    out, lse = kernel.forward(q, k, v, tiles, scale)
    seen = ~torch.isneginf(want[1])
    assert torch.equal(torch.isneginf(lse), ~seen), "rows without keys have lse -inf"
    assert bool(out.transpose(1, 2)[~seen].eq(0).all()), "and out 0"
    assert error(out, want[0]) < 6e-3
    assert (lse[seen] - want[1][seen]).abs().max() < 2e-3
    # As in a ring, where other workers contribute: the final lse exceeds that of these keys.
    final = want[1] + 0.5
    rounded = want[0].to(q.dtype)
    delta = (rounded.double() * dout.double()).sum(-1).transpose(1, 2).contiguous()
    expected = oracle.backward(dout.double(), Saved(*exact, want[0], final, delta), tiles, scale)
    # Queries from another worker arrive with delta, without out.
    for whole_out, whole_delta in ((rounded, None), (None, delta.float())):
        grads = kernel.backward(
            dout, Saved(q, k, v, whole_out, final.float(), whole_delta), tiles, scale
        )
        for part, got, precise in zip(("dq", "dk", "dv"), grads, expected, strict=True):
            assert error(got, precise) < 8e-3, part
        assert bool(grads[0].transpose(1, 2)[~seen].eq(0).all())


@pytest.mark.parametrize("softcap", [1.0, 50.0])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 2, 128), (4, 4, 64)])
def test_triton_caps_scores(softcap, heads, kv_heads, head_dim):
    kernel = make_kernel("triton", heads, kv_heads, head_dim)
    kernel.softcap = softcap
    torch.manual_seed(0)
    everywhere = np.arange(SEQ)
    tiles = Tiles.make([mask(True, SEQ).spans(everywhere, everywhere)], "cuda")
    check(kernel, tiles, heads, kv_heads, head_dim)


@pytest.mark.parametrize("name", ["flash4", "sdpa", "triton"])
@pytest.mark.parametrize("layout_name", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 2, 128), (4, 4, 64), (4, 1, 128)])
def test_a_rank_computes_what_the_oracle_computes(
    name, layout_name, documents, heads, kv_heads, head_dim
):
    kernel = make_kernel(name, heads, kv_heads, head_dim)
    torch.manual_seed(0)
    layout = make_layout(layout_name, WORKERS, SEQ, 128)
    sequence = mask(documents, layout.padded_seq)
    everywhere = np.arange(layout.padded_seq)
    for rank in (0, WORKERS - 1):
        own = layout.positions(rank)
        for keys in (everywhere, layout.positions(0), layout.positions(1), layout.positions(rank)):
            tiles = Tiles.make([sequence.spans(own, keys)], "cuda")
            if not tiles.empty:
                check(kernel, tiles, heads, kv_heads, head_dim)


MASKS = {
    "window": NAMED["sliding_window"](window=300, global_tokens=0),
    "global tokens": NAMED["sliding_window"](window=300, global_tokens=40),
    "blocks": NAMED["block_causal"](block=150),
    "video": NAMED["video"](frames=19, height=10, width=10, window=(3, 3, 5)),
    "dilated": NAMED["dilated"](block=100, stride=3, count=4),
}


@pytest.mark.parametrize("name", ["flash4", "sdpa", "triton"])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("layout_name", ["contiguous", "striped"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(16, 2, 128), (4, 4, 64)])
def test_masks_equal_the_oracle(name, kind, layout_name, heads, kv_heads, head_dim):
    config = MASKS[kind]
    kernel = make_kernel(name, heads, kv_heads, head_dim, config.intervals(SEQ))
    torch.manual_seed(0)
    layout = make_layout(layout_name, WORKERS, SEQ, 128)
    documents = np.sort(np.random.default_rng(3).integers(0, 3, SEQ))
    rule, own = MaskRule(document_mask=True, mask=config), layout.positions(1)
    masks = [rule(ids, SEQ, layout.padded_seq) for ids in (None, documents)]
    for keys in (np.arange(layout.padded_seq), own):
        tiles = Tiles.make([m.spans(own, keys) for m in masks], "cuda")
        check(kernel, tiles, heads, kv_heads, head_dim)


def test_triton_repeats_the_bits_under_a_mask():
    kernel = make_kernel("triton", 16, 2, 128, 9)
    sequence = MaskRule(document_mask=False, mask=MASKS["video"])(None, SEQ, SEQ)
    tiles = Tiles.make([sequence.spans(np.arange(SEQ), np.arange(SEQ))], "cuda")
    torch.manual_seed(0)
    q, k, v, dout = (
        torch.randn(1, SEQ, h, 128, device="cuda", dtype=torch.bfloat16) for h in (16, 2, 2, 16)
    )
    out, lse = kernel.forward(q, k, v, tiles, 0.1)
    first, second = (
        kernel.backward(dout, Saved(q, k, v, out, lse, None), tiles, 0.1) for _ in range(2)
    )
    assert all(map(torch.equal, first, second))
