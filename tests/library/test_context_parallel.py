"""`api.context_parallel` over real processes equals one process and the float64 definition."""

from __future__ import annotations

from itertools import pairwise

import gloo
import numpy as np
import pytest
import torch
import torch.distributed as dist

from mtrain_cli import api
from mtrain_cli.library.context_parallel import ContextBatch

SEQ, HEADS, KV_HEADS, DIM = 250, 4, 2, 8
DOCUMENTS = np.repeat([0, 1, 2], [70, 110, 70])
SETTINGS: dict[str, tuple[str, ...]] = {
    "dense": (),
    "vertical_slash": ("sparsity.min_columns=4", "sparsity.max_columns=8", "sparsity.p_s=0.3"),
    "block_topk": ("sparsity.score=exact", "sparsity.density=0.45"),
}
WAYS = (
    ("zigzag", "ring"),
    ("striped", "all_gather"),
    ("striped", "hierarchical_ring"),
    ("contiguous", "ulysses"),
    ("balanced", "group_cast"),
    ("balanced", "ring"),
)


def whole_tensors() -> list[torch.Tensor]:
    """q, k, v and dout, float64, equal on all processes."""
    generator = torch.Generator().manual_seed(5)
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [torch.randn(1, SEQ, n, DIM, generator=generator, dtype=torch.float64) for n in heads]


def made(sparsity: str, *words: str, **arguments) -> api.ContextParallel:
    small = ("topology.block_size=16",)
    if sparsity != "dense":
        small = (*small, "sparsity.block=16", *SETTINGS[sparsity])
    return api.context_parallel(None, *small, *words, seq=SEQ, sparsity=sparsity, **arguments)


def results(batch: ContextBatch, window: int | None = None) -> list[torch.Tensor]:
    """out, dq, dk and dv of whole sequences, through a float32 kernel."""
    *qkv, dout = batch.shard(*(tensor.float() for tensor in whole_tensors()))
    for tensor in qkv:
        tensor.requires_grad_()
    out = batch.attention(*qkv, layer=0, window=window)
    out.backward(dout)
    return [batch.gather(tensor.detach()) for tensor in (out, *(t.grad for t in qkv))]


def by_definition(seen: torch.Tensor) -> list[torch.Tensor]:
    """The same in float64 by autograd. seen: bool [1, heads or 1, SEQ, SEQ]."""
    *qkv, dout = whole_tensors()
    q, k, v = (tensor.requires_grad_() for tensor in qkv)
    k, v = (tensor.repeat_interleave(HEADS // KV_HEADS, 2) for tensor in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / DIM**0.5
    out = torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
    return [out.detach(), *torch.autograd.grad(out, qkv, dout)]


def seen_by_documents(window: int = SEQ) -> torch.Tensor:
    at, document = torch.arange(SEQ), torch.from_numpy(DOCUMENTS)
    away = at[:, None] - at
    same = document[:, None] == document
    return (same & (away >= 0) & (away < window))[None, None]


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for tensor, other in zip(found, expected, strict=True):
        assert (tensor.double() - other).abs().max() < 2e-6 * (1 + other.abs().max())


def in_all_ways(rank: int, world: int, sparsity: str) -> dict[tuple[str, str], list[torch.Tensor]]:
    virtual = ("topology.gpus_per_node=1",)
    return {
        (layout, exchange): results(
            made(
                sparsity, *(virtual if "hierarchical" in exchange else ()), layout=layout,
                exchange=exchange,
            ).batch(DOCUMENTS)
        )
        for layout, exchange in WAYS
        if exchange != "ulysses" or HEADS % world == 0
    }  # fmt: skip


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("sparsity", list(SETTINGS))
def test_processes_compute_what_one_does_and_the_definition_says(world, sparsity):
    alone = made(sparsity)
    batch = alone.batch(DOCUMENTS)
    expected = results(batch)
    seen = seen_by_documents()
    if sparsity != "dense":
        q, k, v, _ = batch.shard(*(tensor.float() for tensor in whole_tensors()))
        batch = alone.batch(DOCUMENTS)
        batch.attention(q.requires_grad_(), k, v, 0)
        (attend,) = batch._attention.values()
        (pair,) = attend.plan.tiles.tiles
        chosen = attend.narrowed[0][0].for_pair(*pair).seen()[:, :, :SEQ, :SEQ]
        assert not (chosen & ~seen).any()
        assert chosen.sum() < 0.9 * HEADS * seen.sum()
        seen = chosen
    assert_close(expected, by_definition(seen))
    for found in gloo.run(world, in_all_ways, sparsity):
        assert len(found) >= 5
        for tensors in found.values():
            assert_close(tensors, by_definition(seen))
