"""Columns as key blocks in front of the keys: one call gives what the oracle gives.

A stand-in for FlashAttention-4 walks the lists of blocks and reads the words of bits as the kernel
does: partial blocks with the mask, full blocks without.
"""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType

import numpy as np
import pytest
import torch
from attention.sparse_problems import column_problem, make_problem

from mtrain_cli.attention import column_blocks
from mtrain_cli.attention.block_lists import BLOCK, index_lists, word_and_bit
from mtrain_cli.attention.column_blocks import Front
from mtrain_cli.attention.flash4 import Flash4Kernel
from mtrain_cli.attention.kernel import Saved
from mtrain_cli.attention.partials import row_delta
from mtrain_cli.attention.reference import ReferenceKernel

SCALE = 0.3
WORD, BIT = map(torch.from_numpy, word_and_bit(np.arange(BLOCK)))
CAUSAL = torch.ones(BLOCK, BLOCK, dtype=torch.bool).tril()


def seen_by_kernel(lists, words, sizes, queries: int, keys: int, transposed: bool) -> torch.Tensor:
    """Return how often the kernel computes each pair, [batch, heads, queries, front + keys]."""
    front, heads = sizes.tolist()
    counts = lists["partial_count"]
    batch = counts.shape[0]
    assert counts.shape[1] == heads
    tiles = words.shape[2] // 4
    pad = [-n % BLOCK for n in (queries, keys)]
    found = torch.zeros(batch, heads, queries + pad[0], keys + pad[1], dtype=torch.int64)
    for b, h, row in np.ndindex(*counts.shape):
        for name in ("partial", "full"):
            assert lists[name].shape[-1] > 1, "FlashAttention-4 refuses lists of width 1"
            listed = lists[name][b, h, row, : lists[f"{name}_count"][b, h, row]].tolist()
            assert listed == sorted(set(listed))
            for other in listed:
                q, k = (other, row) if transposed else (row, other)
                at = (b, h, slice(q * BLOCK, (q + 1) * BLOCK), slice(k * BLOCK, (k + 1) * BLOCK))
                if name == "full":
                    assert k >= front
                    found[at] += 1
                elif k >= front:
                    found[at] += CAUSAL
                else:
                    of_tile = words[b * heads + h, q, k % tiles * 4 : k % tiles * 4 + 4]
                    found[at] += (of_tile[WORD] >> BIT) & 1
    return found[:, :, :queries, :keys]


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Put the stand-in where `flash4` expects FlashAttention-4, and return the calls it gets."""
    names: list[str] = []
    fake = ModuleType("dense")

    def mask_of(q, k, lists, columns, transposed):
        seen = seen_by_kernel(lists, *columns, q.shape[1], k.shape[1], transposed)
        assert int(seen.max()) <= 1, "no pair counts twice"
        return seen.bool()

    def attend(q, k, v, seen, scale):
        group = q.shape[2] // k.shape[2]
        k, v = (t.repeat_interleave(group, 2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
        scores = scores.masked_fill(~seen, float("-inf"))
        lse = scores.logsumexp(-1)
        return torch.einsum("bhqk,bkhd->bqhd", (scores - lse[..., None]).exp(), v), lse

    def spans_forward(q, k, v, spans, lists, scale, words=None, columns=None):
        assert spans is None
        assert words is None
        names.append("forward")
        return attend(q, k, v, mask_of(q, k, lists, columns, False), scale)

    def spans_backward(
        dout, q, k, v, out, lse, delta, spans, lists, scale, words=None, columns=None
    ):
        assert spans is None
        assert words is None
        names.append("backward")
        seen = mask_of(q, k, lists, columns, True)
        group = q.shape[2] // k.shape[2]
        delta = row_delta(out, dout) if delta is None else delta
        wide_k, wide_v = (t.repeat_interleave(group, 2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, wide_k) * scale
        p = (scores - lse[..., None]).exp() * seen
        ds = p * (torch.einsum("bqhd,bkhd->bhqk", dout, wide_v) - delta[..., None]) * scale
        dk = torch.einsum("bhqk,bqhd->bkhd", ds, q).unflatten(2, (-1, group)).sum(3)
        dv = torch.einsum("bhqk,bqhd->bkhd", p, dout).unflatten(2, (-1, group)).sum(3)
        return torch.einsum("bhqk,bkhd->bqhd", ds, wide_k), dk.float(), dv.float()

    fake.spans_forward, fake.spans_backward = spans_forward, spans_backward
    fake.takes_columns = lambda device: True  # noqa: ARG005
    monkeypatch.setitem(sys.modules, "mtrain_cli.kernels.flash4", ModuleType("flash4"))
    monkeypatch.setattr(sys.modules["mtrain_cli.kernels.flash4"], "dense", fake, raising=False)
    monkeypatch.setattr("mtrain_cli.attention.flash4._load_dense", lambda: fake)
    return names


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"width": 128, "batch": 1, "kv_heads": 1},
        {"width": 500, "where": "striped queries", "blocks": 8},
        {"heads": 3, "kv_heads": 3, "width": 77, "tail": 50},
        {"blocks": 1, "width": 20, "batch": 1},
    ],
)
def test_one_call_equals_the_oracle(calls, shape):
    p = column_problem(1, **shape)
    kernel, oracle = Flash4Kernel(), ReferenceKernel()
    out, lse = kernel.forward(p.q, p.k, p.v, p.tiles, SCALE)
    want, want_lse = oracle.forward(p.q, p.k, p.v, p.tiles, SCALE)
    torch.testing.assert_close(out, want, atol=1e-12, rtol=0)
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=0)
    final = want_lse + 0.5  # as in a ring, where other workers contribute to the row
    expected = oracle.backward(p.dout, Saved(p.q, p.k, p.v, want, final, None), p.tiles, SCALE)
    for whole, delta in ((want, None), (None, row_delta(want, p.dout))):
        saved = Saved(p.q, p.k, p.v, whole, final, delta)
        got = kernel.backward(p.dout, saved, p.tiles, SCALE)
        for part, a, b in zip(("dq", "dk", "dv"), got, expected, strict=True):
            # The gradients of columns are float32.
            torch.testing.assert_close(a.double(), b, atol=1e-5, rtol=1e-5, msg=part)
    assert calls == ["forward", "backward", "backward"]


@pytest.mark.parametrize(("most", "parts"), [(3000, 2), (2200, 4), (1000, None)])
def test_long_lists_are_divided_among_more_copies(monkeypatch, most, parts):
    monkeypatch.setattr(column_blocks, "_MOST_LIST_BYTES", most)
    p = column_problem(2)
    front = Front.of(p.tiles, 2, backward=True)
    assert (front and front.parts) == parts
    if front:
        assert 4 * index_lists(p.tiles, True, front)["partial"].numel() <= most


@pytest.mark.parametrize(
    "why", ["documents", "a part of the keys", "a head without diagonal 0", "other blocks"]
)
def test_other_calls_have_no_front(why):
    block = 64 if why == "other blocks" else BLOCK
    shape = {"seq": 512, "block": block, "documents": True if why == "documents" else None}
    where = "striped" if why == "a part of the keys" else "whole"
    p = make_problem(0, "both", where=where, **shape)
    index = dataclasses.replace(p.tiles.index, has_own_blocks=True)
    if why == "a head without diagonal 0":
        assert Front.of(p.tiles.with_index(index), 2, backward=False) is not None
        index = p.tiles.index
    assert Front.of(p.tiles.with_index(index), 2, backward=False) is None
