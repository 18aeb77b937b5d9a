"""Queries and blocks choose the chunks that score highest by the definition."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from attention.equal_indices import same_index
from sparsity.small_batch import BLOCK, HEADS, SEQ, inputs

from mtrain_cli.attention.index import BlockBitmap
from mtrain_cli.sparsity.moba import MobaPattern


def test_moba_picks_the_best_chunks_and_its_own():
    q, k, masked = inputs(6)
    chunk, top_k = 32, 2
    index = MobaPattern(BLOCK, chunk, top_k, "block").estimate(q, k, masked, 0)
    assert type(index) is BlockBitmap
    for b in range(2):
        for h in range(HEADS):
            for i in range(masked.geometry.blocks):
                mean_q = q[b, i * BLOCK : (i + 1) * BLOCK, h].double().mean(0)
                own = i * BLOCK // chunk
                scores = [
                    float(mean_q @ k[b, c * chunk : (c + 1) * chunk, h // 2].double().mean(0))
                    for c in range(own)
                ]
                chunks = {own, *sorted(range(own), key=lambda c: -scores[c])[: top_k - 1]}
                wanted = {j for j in range(i + 1) if j * BLOCK // chunk in chunks}
                assert set(index.bits[b, h, i].nonzero().flatten().tolist()) == wanted


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("score_bytes", [1, 1 << 28])
def test_every_moba_query_picks_its_best_chunks_and_its_own(monkeypatch, documents, score_bytes):
    monkeypatch.setattr("mtrain_cli.sparsity.moba._SCORE_BYTES", score_bytes)
    length, chunk, top_k = SEQ - 3, BLOCK, 2
    q, k, masked = inputs(6, documents, length)
    q[:, length:], k[:, length:] = float("nan"), 70.0
    k[1, :chunk] = k[1, chunk : 2 * chunk]  # ties: the earlier chunk goes first
    index = MobaPattern(BLOCK, chunk, top_k, "query").estimate(q, k, masked, 0)
    everywhere = torch.arange(SEQ)
    allowed = index.allowed(everywhere, everywhere)
    chosen = []
    for b in range(2):
        means = [k[b, c : min(c + chunk, length)].double().mean(0) for c in range(0, length, chunk)]
        for h in range(HEADS):
            for i in range(length):
                own, first = i // chunk, int(masked.masks[b].first[i]) // chunk
                scores = {
                    c: float(q[b, i, h].double() @ means[c][h // 2]) for c in range(first, own)
                }
                chunks = {own, *sorted(scores, key=lambda c: (-scores[c], c))[: top_k - 1]}
                wanted = [j for j in range(i + 1) if j // chunk in chunks]
                assert allowed[b, h, i, : i + 1].nonzero().flatten().tolist() == wanted, (b, h, i)
                chosen.append(chunks)
    assert len({frozenset(c) for c in chosen[128:144]}) > 1, "queries of a block must differ"
    assert not bool(index.bits.triu(1).any()), "no future block is set"
    assert not same_index(index, replace(index, chunk=2 * index.chunk))
