"""Learned maps follow their loss, and find what a group asks for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.sparsity import index_maps
from mtrain_cli.sparsity.block_topk import BlockTopkPattern
from mtrain_cli.sparsity.index_maps import IndexMaps
from mtrain_cli.sparsity.pattern import MaskedPositions

SEQ, BLOCK, HEADS, KV_HEADS, DIM, RANK = 640, 16, 4, 2, 32, 8


def batch(length: int = SEQ, documents: bool = False) -> MaskedPositions:
    numbers = np.sort(np.random.default_rng(0).integers(0, 3, length))
    mask = (
        SequenceMask.from_documents(numbers, SEQ) if documents else SequenceMask.causal(length, SEQ)
    )
    return MaskedPositions.make([mask], BLOCK, bitmap=True)


def loss(maps: IndexMaps, q, k, masked, rows) -> torch.Tensor:
    """Return the loss of the definition, in float64, one row and group at a time."""
    first, total = masked.tables.first[0].numpy(), []
    for group in range(KV_HEADS):
        terms, weights = [], []
        for row in rows:
            keys = torch.arange(int(first[row]), row + 1)
            near = (keys // BLOCK >= row // BLOCK - 1) | (keys // BLOCK == 0)
            heads = q[row].view(KV_HEADS, -1, DIM)[group]
            attention = (heads @ k[keys, group].T / math.sqrt(DIM)).softmax(-1)
            far = attention.amax(0)[~near]
            near_share = attention[:, near].sum(-1).mean()
            whole = far.sum() + near_share
            low_q, low_k = heads.flatten() @ maps.query[group], k[keys, group] @ maps.key[group]
            chosen = (low_k @ low_q).log_softmax(-1)
            of_near = near_share / whole * chosen[near].logsumexp(0)
            terms.append(-(far / whole * chosen[~near]).sum() - of_near)
            weights.append(0.02 + (float(far.max()) if len(far) else 0.0))
        weight = torch.tensor(weights, dtype=torch.float64)
        total.append((torch.stack(terms) * weight).sum() / weight.sum())
    return torch.stack(total).sum()


def test_the_first_moment_is_the_gradient_of_the_loss(monkeypatch):
    monkeypatch.setattr(index_maps, "_FIRST_ROWS", 24)
    for masked in (batch(), batch(SEQ - 21), batch(documents=True)):
        torch.manual_seed(0)
        q, k = torch.randn(SEQ, HEADS, DIM) * 2, torch.randn(SEQ, KV_HEADS, DIM)
        maps = IndexMaps.make(HEADS, KV_HEADS, DIM, RANK, 0, torch.device("cpu"))
        before = IndexMaps(
            *(t.double().requires_grad_() for t in (maps.query, maps.key)), *([torch.empty(0)] * 5)
        )
        length = masked.masks[0].length
        rows = np.sort(np.random.default_rng([5, 0]).integers(2 * BLOCK, length, 24))
        q[length:] = k[length:] = 0
        loss(before, q.double(), k.double(), masked, rows).backward()
        maps.learn(q.view(-1, BLOCK, HEADS, DIM), k.view(-1, BLOCK, KV_HEADS, DIM), masked, 0, 5)
        for mean, wanted in ((maps.query_mean, before.query), (maps.key_mean, before.key)):
            torch.testing.assert_close(mean, 0.1 * wanted.grad.float(), rtol=2e-3, atol=2e-6)
        assert int(maps.updates) == 1


def planted(seed: int):
    """Return queries and keys in which one head of each group looks for a code that a key holds."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (0.5 * torch.randn(SEQ, n, DIM, generator=generator) for n in (HEADS, KV_HEADS))
    asked = []
    for row in range(4 * BLOCK, SEQ, 7):
        key = int(torch.randint(BLOCK, row - 2 * BLOCK, (1,), generator=generator))
        code = torch.randn(KV_HEADS, RANK, generator=generator).sign()
        k[key, :, :RANK] = code * 3
        for group in range(KV_HEADS):
            q[row, group * 2, :RANK] = code[group] * 7
        asked.append((row, key))
    # A later needle overwrites a key: its earlier question has no answer any more.
    last = {key: row for row, key in asked}
    return q[None], k[None], [(row, key) for key, row in last.items()]


def test_maps_that_learn_find_what_is_asked():
    pattern = BlockTopkPattern(
        0, block=BLOCK, density=0.3, threshold=0.0, row_cap=3.0, score="learned", rank=RANK,
        index_per="kv_group",
    )  # fmt: skip
    masked, kept = batch(), {}
    for learns in (False, True):
        pattern.learns = learns
        q, k, _ = planted(1)
        pattern.estimate(q, k, masked, 0)
        pattern.learns = False
        q, k, asked = planted(2)
        index = pattern.estimate(q, k, masked, 0)
        at = torch.arange(SEQ)
        allowed = index.allowed(at, at)[0]
        rows, keys = map(list, zip(*asked, strict=True))
        kept[learns] = float(allowed[:, rows, keys].float().mean())
    assert kept[True] > 0.95 > kept[False] + 0.2


def test_only_training_changes_the_maps():
    pattern = BlockTopkPattern(
        3, block=BLOCK, density=0.3, threshold=0.0, row_cap=3.0, score="learned", rank=RANK,
        index_per="kv_group",
    )  # fmt: skip
    masked, (q, k, _) = batch(), planted(0)
    pattern.estimate(q, k, masked, 5)
    before = {name: t.clone() for name, t in pattern._maps[5].__dict__.items()}
    pattern.estimate(q, k, masked, 5)
    assert all(torch.equal(t, before[name]) for name, t in pattern._maps[5].__dict__.items())
    pattern.learns = True
    pattern.estimate(q, k, masked, 5)
    assert int(pattern._maps[5].updates) == index_maps.FIRST_UPDATES
    pattern.estimate(q, k, masked, 5)
    assert int(pattern._maps[5].updates) == index_maps.FIRST_UPDATES + index_maps.EARLY_UPDATES
    assert not torch.equal(pattern._maps[5].query, before["query"])
    pattern._maps[5].updates.fill_(index_maps._SETTLED)
    pattern.estimate(q, k, masked, 5)
    settled = index_maps._SETTLED + index_maps.LATER_UPDATES
    assert int(pattern._maps[5].updates) == settled


def test_a_sequence_does_not_choose_with_what_it_teaches():
    pattern = BlockTopkPattern(
        0, block=BLOCK, density=0.3, threshold=0.0, row_cap=3.0, score="learned", rank=RANK,
        index_per="kv_group",
    )  # fmt: skip
    masked, pattern.learns = batch(), True
    pattern.estimate(*planted(1)[:2], masked, 0)
    q, k, _ = planted(2)
    indexes = []
    for learns in (False, True, True):
        pattern.learns = learns
        indexes.append(pattern.estimate(q, k, masked, 0))
    assert torch.equal(indexes[0].starts, indexes[1].starts)
    assert not torch.equal(indexes[1].starts, indexes[2].starts), "the next one does"


@pytest.mark.parametrize("documents", [False, True])
def test_triton_finds_the_same_attention(documents, monkeypatch):
    masked = batch(SEQ - 21, documents)
    torch.manual_seed(0)
    q, k = torch.randn(24, HEADS, DIM) * 2, torch.randn(SEQ, KV_HEADS, DIM)
    k[SEQ - 21 :] = 0
    at = torch.from_numpy(np.sort(np.random.default_rng(1).integers(2 * BLOCK, SEQ - 21, 24)))
    seen = masked.visible(0, at, SEQ)
    near = torch.rand(24, SEQ // BLOCK).repeat_interleave(BLOCK, 1) < 0.2
    arguments = (q, k, at, seen, near, masked, 0)
    plain = index_maps._attention(*arguments)
    monkeypatch.setattr(index_maps, "_fused", lambda *_: True)
    fused = index_maps._attention(*arguments)
    for a, b in zip(plain, fused, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert (plain[0].amax(-1) > 0.1).any()


def test_every_sequence_of_a_batch_teaches_as_many_queries_as_any_number_of_workers(monkeypatch):
    pattern = BlockTopkPattern(
        0, block=BLOCK, density=0.3, threshold=0.0, row_cap=3.0, score="learned", rank=RANK,
        index_per="kv_group",
    )  # fmt: skip
    mask = SequenceMask.causal(SEQ, SEQ)
    masked = MaskedPositions.make([mask] * 2, BLOCK, bitmap=True)
    taught, gathered = [], []
    learn, gather = IndexMaps.learn, IndexMaps._gathered

    def noting(maps, q, k, masked, b, seed):
        taught.append(b)
        learn(maps, q, k, masked, b, seed)

    def counting(maps, tokens, rows, masked):
        gathered.append(len(rows))
        return gather(maps, tokens, rows, masked)

    monkeypatch.setattr(IndexMaps, "learn", noting)
    monkeypatch.setattr(IndexMaps, "_gathered", counting)
    monkeypatch.setattr(index_maps, "FIRST_UPDATES", 4)
    pattern.learns = True
    q, k = (torch.cat([planted(seed)[i] for seed in (1, 2)]) for i in (0, 1))
    pattern.estimate(q, k, masked, 0)
    assert taught == [0, 1, 0, 1]
    assert set(gathered) == {256}
    # A worker that holds half of the keys samples as many queries.
    halves = [np.arange(SEQ // 2), np.arange(SEQ // 2, SEQ)]
    monkeypatch.setattr(index_maps, "_SCORE_BYTES", 4 * HEADS * SEQ * 24)
    maps = IndexMaps.make(HEADS, KV_HEADS, DIM, RANK, 0, torch.device("cpu"))
    for positions in (None, halves):
        some = MaskedPositions.make([mask], BLOCK, positions, bitmap=True)
        own = len(some.host_positions) // BLOCK
        blocks = (t[0].unflatten(0, (-1, BLOCK))[:own] for t in (q, k))
        gathered.clear()
        learn(maps, *blocks, some, 0, 0)
        assert gathered == [24]
