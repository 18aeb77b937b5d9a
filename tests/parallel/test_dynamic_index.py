"""A layer's index is estimated once, serves backward and recomputation; gradients are exact."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
import pytest
import torch
from parallel.ways import make_attention
from torch.utils.checkpoint import checkpoint

from mtrain_cli.attention.index import VerticalSlash
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.attention.sdpa import SdpaKernel
from mtrain_cli.parallel import context_attention
from mtrain_cli.parallel.context_attention import ContextAttention
from mtrain_cli.parallel.exchange import make_exchange
from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.sparsity.vertical_slash import VerticalSlashPattern

SEQ, BLOCK = 90, 16


class Counting(VerticalSlashPattern):
    calls: ClassVar[list[int]] = []

    def estimate(self, q, k, masked, layer):
        self.calls.append(layer)
        assert not torch.is_grad_enabled()
        return super().estimate(q, k, masked, layer)


@pytest.fixture
def attend() -> ContextAttention:
    Counting.calls.clear()
    pattern = Counting(
        block=BLOCK,
        last_q=16,
        windows=1,
        p_v=0.4,
        p_s=0.4,
        joint=False,
        sink_tokens=2,
        min_columns=2,
        max_columns=20,
        min_slashes=1,
        max_slashes=0,
        index_per="query_head",
    )
    masks = [
        SequenceMask.from_documents(np.repeat([0, 1], [40, 50]), SEQ),
        SequenceMask.causal(SEQ, SEQ),
    ]
    layout = make_layout("striped", 1, SEQ, 1)
    return make_attention(
        make_exchange("all_gather", layout, ContextGroup()),
        SdpaKernel(),
        masks,
        "cpu",
        pattern,
    )


def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [
        torch.randn(2, SEQ, heads, 8, dtype=torch.float64, requires_grad=True)
        for heads in (4, 2, 2)
    ]


def expected(
    attend: ContextAttention, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: int
) -> list[torch.Tensor]:
    """Output and gradients by autograd from the definition, with the index that the call keeps."""
    (tiles,) = attend.plan.tiles.tiles.values()
    seen = tiles.with_index(attend.index.kept[layer]).seen()
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(2, 2)) / 8**0.5
    out = torch.einsum(
        "bhqk,bkhd->bqhd",
        scores.masked_fill(~seen, float("-inf")).softmax(-1),
        v.repeat_interleave(2, 2),
    )
    return [out.detach(), *torch.autograd.grad(out.sum(), (q, k, v))]


def test_output_and_gradients_equal_those_of_the_allowed_pairs(attend):
    q, k, v = tensors()
    out = attend(q, k, v, 3)
    want = expected(attend, q, k, v, 3)
    attend.index.count()
    assert (
        attend.index.records[0].counts.pairs.max()
        < attend.index.masked.tables.per_diagonal.sum(-1).max()
    ), "something is left out"
    for got, exact in zip((out, *torch.autograd.grad(out.sum(), (q, k, v))), want, strict=True):
        torch.testing.assert_close(got, exact, atol=1e-10, rtol=0)


def test_an_index_is_estimated_once_a_layer_and_dropped_after_backward(attend):
    q, k, v = tensors()
    for layer in (0, 1):
        out = checkpoint(
            lambda q, k, v, layer=layer: attend(q, k, v, layer), q, k, v, use_reentrant=False
        )
        kept, (work, _) = attend.index.kept[layer], attend.narrowed[layer]
        (derived,) = (tiles.index_cache for tiles in work._narrow.values())
        derived["by a kernel"] = True
        attend(q, k, v, layer)
        assert next(iter(attend.narrowed[layer][0]._narrow.values())).index_cache is derived, (
            "recomputation derives nothing"
        )
        out.sum().backward()
        assert layer not in attend.index.kept
        assert layer not in attend.narrowed
        assert kept.heads == (2, 4)
    assert Counting.calls == [0, 1], "recomputation estimates nothing"
    assert [record.layer for record in attend.index.records] == [0, 1]


def test_the_next_batch_starts_without_indices(attend):
    q, k, v = tensors()
    attend(q, k, v, 0)
    other = attend.for_next_batch()
    assert other.index.kept == {}
    assert other.index.records == []
    assert other.narrowed == {}
    assert other.plan is attend.plan
    other(q * 2, k, v, 0)
    assert Counting.calls == [0, 0]


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_time_and_work_of_several_layers_are_counted_together(attend, at_once, monkeypatch):
    q, k, v = tensors()
    for layer in range(3):
        attend(q * (layer + 1), k, v, layer)
    lines = attend.index.kept[0]
    monkeypatch.setattr(
        context_attention,
        "_COUNTED_AT_ONCE",
        at_once * (lines.slashes.numel() + lines.columns.numel()),
    )
    joined: list[int] = []
    join = VerticalSlash.joined
    monkeypatch.setattr(
        VerticalSlash, "joined", lambda indices: joined.append(len(indices)) or join(indices)
    )
    attend.index.count()
    assert joined == [at_once] * (3 // at_once) + [1] * (at_once == 2)
    (tiles,) = attend.plan.tiles.tiles.values()
    for layer, record in enumerate(attend.index.records):
        assert record.seconds > 0
        assert record.layer == layer
        assert (
            record.counts.pairs.tolist()
            == tiles.with_index(attend.index.kept[layer]).seen().sum((-1, -2)).tolist()
        )
    attend.index.count()
    assert sum(joined) == 3, "each is counted once"
