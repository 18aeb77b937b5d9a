"""`block_topk` keeps what planted queries look for, wherever and in whichever row they ask."""

from __future__ import annotations

import torch
from mission.planted import DIM, Head, make_head
from slow_cases import mostly_slow

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.sparsity.block_topk import BlockTopkPattern
from mtrain_cli.sparsity.pattern import MaskedPositions

SEQ, SLOT = 8192, 16


def planted(needles: int, length: int, asked: int, seed: int) -> Head:
    """Return a head whose needles are asked at drawn places, in any rows of their blocks."""
    draw = torch.Generator().manual_seed(seed)
    slots = torch.randperm(SEQ // SLOT - 10, generator=draw)[: needles * (asked + 1)] + 8
    shifts = torch.randint(0, SLOT - length + 1, slots.shape, generator=draw)
    places = (slots * SLOT + shifts).view(needles, -1).sort(1).values.tolist()
    return make_head(
        SEQ, [place for place, *_ in places], [rows for _, *rows in places], length, draw
    )


def pairs_above_half(head: Head) -> torch.Tensor:
    """Return (query, key) of all pairs that hold at least half of the query's attention."""
    q, k = head.q[0, :, 0], head.k[0, :, 0]
    key, found = torch.arange(SEQ), []
    for begin in range(0, SEQ, 1024):
        scores = q[begin : begin + 1024] @ k.T * DIM**-0.5
        seen = key <= begin + torch.arange(1024)[:, None]
        at = (scores.masked_fill(~seen, -torch.inf).softmax(-1) >= 0.5).nonzero()
        found.append(at + torch.tensor([begin, 0]))
    return torch.cat(found)


def kept(head: Head, pairs: torch.Tensor, block: int, **settings: float) -> tuple[float, float]:
    """Return which share of the pairs the index keeps, and its density."""
    given = {"density": 0.0, "threshold": 0.0, **settings}
    pattern = BlockTopkPattern(
        block=block, row_cap=3.0, score="exact", rank=32, index_per="kv_group", **given
    )
    masked = MaskedPositions.make([SequenceMask.causal(SEQ, SEQ)], block, bitmap=True)
    index = pattern.estimate(head.q, head.k, masked, 0)
    hits = [
        index.allowed(part[:, 0], torch.arange(SEQ))[0, 0].gather(1, part[:, 1:])
        for part in pairs.split(512)
    ]
    density = float(index.counts(masked.tables).pairs.sum()) / (SEQ * (SEQ + 1) / 2)
    return float(torch.cat(hits).float().mean()), density


@mostly_slow(("needles", "length", "asked"), [(96, 1, 3), (28, 6, 4), (60, 16, 3)], keep=(0, 1))
@mostly_slow("block", [32, 64], keep=(1,))
def test_exact_scores_keep_what_planted_queries_look_for(needles, length, asked, block):
    head = planted(needles, length, asked, seed=needles)
    pairs = pairs_above_half(head)
    assert len(pairs) > 0.5 * needles * length * asked
    share, density = kept(head, pairs, block, density=0.15)
    assert share >= 0.98
    assert density <= 0.15
    share, density = kept(head, pairs, block, threshold=0.5)
    assert share == 1.0, "a threshold loses no pair above it"
    assert density < 0.5
