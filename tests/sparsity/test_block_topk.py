"""`block_topk` chooses what its definition says, and loses no pair above its threshold."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from sparsity.small_batch import BLOCK, DIM, HEADS, KV_HEADS, SEQ

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.composition.compose import compose
from mtrain_cli.config.problem import ConfigError
from mtrain_cli.sparsity import block_topk
from mtrain_cli.sparsity.block_topk import BlockTopkPattern
from mtrain_cli.sparsity.pattern import MaskedPositions

GROUP = HEADS // KV_HEADS


def pattern(**changed) -> BlockTopkPattern:
    default = {
        "block": BLOCK, "density": 0.5, "threshold": 0.0, "row_cap": 100.0, "score": "exact",
        "rank": 4, "index_per": "query_head",
    }  # fmt: skip
    return BlockTopkPattern(**{**default, **changed})


def inputs(documents: bool = False, length: int = SEQ, seed: int = 0, scale: float = 1.0):
    torch.manual_seed(seed)
    q, k = torch.randn(2, SEQ, HEADS, DIM), torch.randn(2, SEQ, KV_HEADS, DIM) * scale
    ends = [np.sort(np.random.default_rng(b).integers(0, 3, length)) for b in range(2)]
    masks = [
        SequenceMask.from_documents(ends[b], SEQ) if documents else SequenceMask.causal(length, SEQ)
        for b in range(2)
    ]
    return q, k, MaskedPositions.make(masks, BLOCK, bitmap=True)


def exact_scores(q, k, mask: SequenceMask, h: int) -> tuple[np.ndarray, np.ndarray]:
    """Return each pair's rank, and the probability of attention, in float64 [queries, keys]."""
    z = (q[:, h].double() @ k[:, h // GROUP].double().T / math.sqrt(DIM)).numpy()
    i, j = np.arange(mask.length)[:, None], np.arange(mask.length)[None]
    z = np.where((j <= i) & (j >= mask.first[: mask.length, None]), z[: len(i), : len(i)], -np.inf)
    starts = range(0, mask.length, BLOCK)
    largest = np.stack([z[:, begin : begin + BLOCK].max(1) for begin in starts], 1)
    probability = np.exp(z - z.max(1, keepdims=True))
    probability /= probability.sum(1, keepdims=True)
    return z - np.log(np.exp(largest).sum(1, keepdims=True)), probability


def block_maxima(scores: np.ndarray) -> np.ndarray:
    blocks = -(-SEQ // BLOCK)
    whole = np.full((blocks * BLOCK,) * 2, -np.inf)
    whole[: len(scores), : len(scores)] = scores
    return whole.reshape(blocks, BLOCK, blocks, BLOCK).max((1, 3))


def forced_blocks(blocks: int) -> np.ndarray:
    own, key = np.arange(blocks)[:, None], np.arange(blocks)[None]
    return (key <= own) & ((own - key < 2) | (key == 0))


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("length", [SEQ, SEQ - 23])
def test_the_largest_scores_fill_the_density(documents, length):
    q, k, masked = inputs(documents, length)
    index = pattern(density=0.6).estimate(q, k, masked, 0)
    for b in range(2):
        pairs = masked.tables.per_block[b].numpy().astype(np.int64)
        maxima = np.stack(
            [block_maxima(exact_scores(q[b], k[b], masked.masks[b], h)[0]) for h in range(HEADS)]
        )
        chosen = index.bits[b].numpy()
        forced = forced_blocks(chosen.shape[-1]) & (pairs > 0)
        assert (chosen >= forced).all()
        assert not (chosen & (pairs == 0)).any()
        far = chosen & ~forced
        room = int(HEADS * (0.6 * pairs.sum() - (pairs * forced).sum()) // BLOCK**2)
        candidates = np.isfinite(maxima) & ~forced
        assert far.sum() == min(max(room, 0), candidates.sum())
        left_out = candidates & ~far
        if far.any() and left_out.any():
            assert maxima[far].min() > maxima[left_out].max()


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("index_per", ["query_head", "kv_group"])
def test_no_pair_above_the_threshold_is_lost(documents, index_per):
    q, k, masked = inputs(documents, scale=3.0)
    k[:, 32:64] *= 0.001  # blocks that no query looks at
    settings = {"density": 0.0, "threshold": 0.3, "index_per": index_per}
    index = pattern(**settings).estimate(q, k, masked, 0)
    lost = 0
    for b in range(2):
        for h in range(HEADS):
            probability = exact_scores(q[b], k[b], masked.masks[b], h)[1]
            at = torch.arange(len(probability))
            kept = index.allowed(at, at)[b, h].numpy()
            assert kept[probability > 0.3].all()
            lost += (~kept & (probability > 0)).sum()
    assert lost > 0, "the threshold must leave something out"


def test_row_cap_limits_each_row():
    q, k, masked = inputs()
    # The last rows look far, so they would take everything.
    q[:, : -2 * BLOCK] = k[:, :BLOCK] = k[:, -2 * BLOCK :] = 0
    loose, capped = (
        pattern(density=0.7, row_cap=cap).estimate(q, k, masked, 0).bits for cap in (100.0, 1.0)
    )
    blocks = torch.arange(capped.shape[-1])
    share = (0.7 * (blocks + 1)).ceil()
    most = torch.maximum(share, torch.tensor(forced_blocks(len(blocks))).sum(1) + 1)
    assert (capped.sum(-1) <= most).all()
    assert (loose.sum(-1) > most).any()


@pytest.mark.parametrize("row_cap", [1.0, 100.0])
def test_blocks_that_reach_the_level_and_those_that_the_cap_cuts_are_counted(row_cap):
    q, k, masked = inputs()
    q[:, : -2 * BLOCK] = k[:, :BLOCK] = k[:, -2 * BLOCK :] = 0
    choose, density = pattern(density=0.7, row_cap=row_cap), 0.7
    choose.estimate(q, k, masked, 0)
    assert choose.cut is None, "nobody asks"
    choose.learns = True
    choose.estimate(q, k, masked, 0)
    reached = cut = 0
    for b in range(2):
        pairs = masked.tables.per_block[b].numpy().astype(np.int64)
        forced = forced_blocks(len(pairs))
        maxima = np.stack(
            [block_maxima(exact_scores(q[b], k[b], masked.masks[b], h)[0]) for h in range(HEADS)]
        )
        maxima[:, forced] = -np.inf
        under_cap = []
        for i, row in enumerate(np.moveaxis(maxima, 1, 0)):
            most = max(1, math.ceil(row_cap * density * (i + 1)) - forced[i].sum())
            beyond = np.sort(row)[:, ::-1][:, most : most + 1]  # of equal ones none is chosen
            under_cap.append(np.where(row > beyond, row, -np.inf) if beyond.size else row)
        ranks = np.sort(np.concatenate(under_cap), axis=None)[::-1]
        ranks = ranks[np.isfinite(ranks)]
        room = int(HEADS * (density * pairs.sum() - (pairs * forced).sum()) // BLOCK**2)
        level = ranks[room] if room < len(ranks) else -np.inf
        reached += (maxima > level).sum()
        cut += (maxima > level).sum() - (ranks > level).sum()
    assert choose.cut.tolist() == [reached, cut]
    assert (cut > 0) == (row_cap == 1.0)


def test_heads_of_a_group_share_their_blocks():
    q, k, masked = inputs()
    index = pattern(index_per="kv_group", density=0.6).estimate(q, k, masked, 0)
    assert (index.sharing, index.heads, index.bits.shape[1]) == (2, (2, HEADS), HEADS // 2)
    alone = index.per_head()
    assert torch.equal(alone.bits[:, ::2], alone.bits[:, 1::2])
    blocks = torch.arange(index.blocks)
    assert torch.equal(index.chosen(blocks, blocks), alone.chosen(blocks, blocks))
    for n in (2, 4):
        parts = [index.part(i, n).chosen(blocks, blocks) for i in range(n)]
        assert torch.equal(torch.cat(parts, 1), alone.bits), n
    apart = pattern(density=0.6).estimate(q, k, masked, 0).bits
    assert not torch.equal(apart[:, ::2], apart[:, 1::2])


@pytest.mark.parametrize("dim", [16, 64])
@pytest.mark.parametrize("at_once", [1, 100])
def test_triton_kernels_rank_as_the_definition(dim, at_once, monkeypatch):
    from mtrain_cli.kernels.triton import block_scores

    torch.manual_seed(0)
    blocks, block, heads, kv_heads = 5, 32, 4, 2
    monkeypatch.setattr(block_scores, "_MOST_BYTES", at_once * 4 * heads * block * blocks)
    numbers = torch.tensor([0, 2, 4], dtype=torch.int32)
    q = torch.randn(3, block, heads, dim)
    k = torch.randn(blocks * block, kv_heads, dim)
    first = torch.zeros(blocks, block, dtype=torch.int32)
    first[4] = 40
    first[2, 3:] = 1 << 30  # padding
    chosen = torch.rand(kv_heads, 3, blocks) < 0.7
    lse, ranks = block_scores.ranks(q, k, first, numbers, 0.3, block)
    level = ranks[ranks > -math.inf].median() - 1e-3  # not a rank, for which rounding decides
    rows = block_scores.first_rows(q, k, lse, first, numbers, chosen, level, 0.3, block)
    position = torch.arange(blocks * block)
    for h in range(heads):
        for slot, number in enumerate(numbers.tolist()):
            z = 0.3 * q[slot, :, h] @ k[:, h // 2].T
            own = number * block + torch.arange(block)
            seen = (position >= first[number][:, None]) & (position <= own[:, None])
            largest = z.masked_fill(~seen, -math.inf).view(block, blocks, block).amax(2)
            sums = largest.logsumexp(1)
            sums = sums.masked_fill(sums.isneginf(), math.inf)
            torch.testing.assert_close(lse[h, slot], sums, rtol=1e-4, atol=1e-4)
            of_rows = largest - sums[:, None]
            of_rows[:, number:] = -math.inf
            torch.testing.assert_close(ranks[h, slot], of_rows.amax(0), rtol=1e-4, atol=1e-4)
            reached = ((of_rows >= level) & chosen[h // 2, slot]).int()
            wanted = torch.where(reached.any(0), reached.argmax(0), block - 1)
            assert torch.equal(rows[h, slot].long(), wanted)
    assert 0 < (rows < block - 1).float().mean() < 0.9


def test_triton_kernels_choose_and_count_as_the_definition():
    from mtrain_cli.kernels.triton import block_scores

    torch.manual_seed(0)
    for heads, rows, blocks in ((3, 5, 40), (1, 70, 700)):
        scores = -torch.randn(heads, rows, blocks).abs() * 10
        scores[:, 0] = -math.inf
        scores[:, 1] = scores[:, 1].round()  # equal ranks
        ranks = block_topk._ordered(scores.clone())
        cap = torch.randint(1, blocks, (rows, 1))
        capped = block_topk._capped(ranks, cap)
        assert torch.equal(block_scores.capped(ranks, cap), capped)
        assert ((capped > 0).sum(-1) <= cap[:, 0]).all()
        wanted = capped.flatten().sort(descending=True).values
        for room in (0, 1, 17, int((capped > 0).sum()), capped.numel()):
            level = torch.zeros((), dtype=torch.int64)
            found = block_topk._level(capped, torch.tensor(room), lambda counts: counts)
            chosen = int((capped >= found).sum())
            assert chosen <= room
            assert found == 1 or (capped >= found - 1).sum() > room
            for shift in (24, 16, 8, 0):
                counts = block_scores.digit_counts(capped, level, shift)
                assert torch.equal(counts, block_topk._digit_counts(capped, level, shift))
                level = found & (-1 << shift)
            if room < len(wanted) and 0 < found <= block_topk._HIGHEST:
                assert block_topk._ordered(block_topk._score_of(found).clone()) == found


@pytest.mark.parametrize("documents", [False, True])
def test_a_triton_kernel_counts_the_pairs_of_an_index(documents):
    from mtrain_cli.kernels.triton import block_scores

    q, k, masked = inputs(documents, SEQ - 23, scale=3.0)
    index = pattern(density=0.6).estimate(q, k, masked, 0)
    assert documents or 0 < index.starts[index.bits].float().mean() < BLOCK - 1
    pairs = block_scores.count_pairs(index.bits, index.starts, index.rows, masked.tables.first)
    assert torch.equal(pairs, index.counts(masked.tables).pairs)
    at = torch.arange(SEQ)
    for b, mask in enumerate(masked.masks):
        seen = (at <= at[:, None]) & (at >= torch.from_numpy(mask.first).long()[:, None])
        seen[mask.length :] = False
        assert torch.equal(pairs[b], (index.allowed(at, at)[b] & seen).sum((1, 2)))


def test_later_queries_change_nothing():
    q, k, masked = inputs(scale=3.0)
    choose = pattern(density=0.0, threshold=0.4)
    rows, keys, since = torch.arange(SEQ), torch.arange(SEQ), 100  # within a block
    q[:, since - 2 :] = 0  # the first queries of the block look far, and no later ones
    before = choose.estimate(q, k, masked, 0)
    forced = torch.from_numpy(forced_blocks(before.blocks))
    assert not before.starts[..., forced].any(), "every query sees its own and the near blocks"
    q[:, since:] = 3 * torch.randn_like(q[:, since:])
    after = choose.estimate(q, k, masked, 0)
    seen = [index.allowed(rows, keys)[:, :, :since, :since] for index in (before, after)]
    assert torch.equal(*seen)
    block = since // BLOCK
    assert not torch.equal(before.bits[:, :, block], after.bits[:, :, block])
    assert seen[0][:, :, since - 1, BLOCK : (block - 1) * BLOCK].any()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["sparsity.density=0.001"], "sparsity.density=0.001: a block of queries always sees"),
        (["sparsity.threshold=0.1", "sparsity.density=0.1"], "give one of the two"),
        (["sparsity.density=1.5"], "sparsity.density=1.5: must be between 0 and 1"),
        (["sparsity.score=random"], "sparsity.score=random: expected one of exact, learned"),
        (["sparsity.row_cap=0.5"], "sparsity.row_cap=0.5: must be at least 1"),
        (["sparsity.rank=0"], "sparsity.rank=0: must be at least 1"),
        (["sparsity.rank=256"], "sparsity.rank=256: must be at most model.head_dim=64"),
        (
            ["sparsity.index_per=query_head"],
            "sparsity.index_per=query_head: sparsity.score=learned",
        ),
        (["topology.tensor_parallel=2"], "topology.tensor_parallel=2: sparsity.score=learned"),
    ],
)
def test_settings_that_cannot_be(words, line):
    with pytest.raises(ConfigError, match=re.escape(line)):
        compose(["sparsity=block_topk", "seq=16384", "model.head_dim=64", *words])
