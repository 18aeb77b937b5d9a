"""Attention over a context group of real processes equals the float64 oracle on one: output and all gradients."""

from __future__ import annotations

import gloo
import numpy as np
import pytest
import torch

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.reference import ReferenceKernel
from mtrain_cli.attention.registry import _KERNELS
from mtrain_cli.attention.tiles import Tiles
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.parallel.exchange import make_exchange
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import make_context_group

SEQ, BATCH, HEAD_DIM = 61, 2, 8
LAYOUTS = ("contiguous", "zigzag", "striped")
EXCHANGES = ("all_gather", "ring")
HEADS = ((4, 4), (4, 2), (4, 1))


def masks(documents: bool, padded: int) -> list[SequenceMask]:
    if not documents:
        return [SequenceMask.causal(SEQ, padded)] * BATCH
    rng = np.random.default_rng(7)
    return [SequenceMask.from_documents(np.sort(rng.integers(0, 5, SEQ)), padded) for _ in range(BATCH)]


def inputs(heads: int, kv_heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and dout of whole sequences; the same on every process."""
    generator = torch.Generator().manual_seed(heads * 10 + kv_heads)
    shapes = (heads, kv_heads, kv_heads, heads)
    return [torch.randn(BATCH, SEQ, h, HEAD_DIM, generator=generator, dtype=torch.float64).to(dtype) for h in shapes]


def oracle(heads: int, kv_heads: int, documents: bool) -> list[torch.Tensor]:
    """out, dq, dk, dv by autograd through the definition: nothing of mtrain but the mask."""
    q, k, v, dout = inputs(heads, kv_heads, torch.float64)
    for t in (q, k, v):
        t.requires_grad_()
    first = np.stack([m.first[:SEQ] for m in masks(documents, SEQ)])
    position = torch.arange(SEQ)
    seen = (position >= torch.from_numpy(first)[..., None]) & (position <= position[:, None])
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(heads // kv_heads, 2)) / HEAD_DIM**0.5
    p = scores.masked_fill(~seen[:, None], float("-inf")).softmax(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", p, v.repeat_interleave(heads // kv_heads, 2))
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), dout)]


def cells(rank: int, world: int, kernel_name: str, dtype_name: str) -> dict[str, float]:
    """The largest difference from the oracle on this rank, for every cell."""
    dtype = getattr(torch, dtype_name)
    group = make_context_group(rank, world, world, torch.device("cpu"))
    kernel = _KERNELS[kernel_name]()
    worst = {}
    for heads, kv_heads in HEADS:
        for documents in (False, True):
            expected = oracle(heads, kv_heads, documents)
            for layout_name in LAYOUTS:
                layout = make_layout(layout_name, world, SEQ, 4)
                positions = layout.positions(rank)
                real = positions < SEQ
                own = torch.from_numpy(np.minimum(positions, SEQ - 1))
                for exchange_name in EXCHANGES:
                    # What stands in the padding must not matter, so it is a large number.
                    q, k, v, dout = (t[:, own] for t in inputs(heads, kv_heads, dtype))
                    for t in (q, k, v):
                        t[:, ~real] = 50.0
                        t.requires_grad_()
                    attend = ContextAttention.make(
                        make_exchange(exchange_name, layout, group), kernel, masks(documents, layout.padded_seq), "cpu"
                    )
                    out = attend(q, k, v, 0)
                    gradients = torch.autograd.grad(out, (q, k, v), dout.clone())
                    key = f"{layout_name}/{exchange_name}/{heads}:{kv_heads}/{'docs' if documents else 'causal'}"
                    worst[key] = max(
                        (got[:, real].double() - want[:, positions[real]]).abs().max().item() if real.any() else 0.0
                        for got, want in zip((out, *gradients), expected, strict=True)
                    )
                    assert all(bool(t[:, ~real].eq(0).all()) for t in (out, gradients[0])), "padding rows give 0"
    return worst


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize(("kernel", "dtype", "tolerance"), [("reference", "float64", 1e-13), ("sdpa", "float32", 5e-6)])
def test_output_and_gradients_equal_the_oracle(world, kernel, dtype, tolerance):
    for rank, worst in enumerate(gloo.run(world, cells, kernel, dtype)):
        assert len(worst) == len(HEADS) * 2 * len(LAYOUTS) * len(EXCHANGES)
        bad = {cell: difference for cell, difference in worst.items() if not difference < tolerance}
        assert not bad, f"rank {rank}: {bad}"


def test_the_reference_kernel_is_the_derivative_of_its_forward():
    mask = SequenceMask.from_documents(np.array([0, 0, 0, 1, 1, 2, 2, 2]), 9)
    positions = np.arange(9)
    tiles = Tiles.make([mask.spans(positions, positions)])
    q, k, v = (torch.randn(1, 9, h, 4, dtype=torch.float64) for h in (4, 2, 2))

    class Call(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, lse = ReferenceKernel().forward(q, k, v, tiles, 0.5)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, dout):
            q, k, v, out, lse = ctx.saved_tensors
            return ReferenceKernel().backward(dout, q, k, v, out, lse, None, tiles, 0.5)

    assert torch.autograd.gradcheck(Call.apply, [t.requires_grad_() for t in (q, k, v)])
