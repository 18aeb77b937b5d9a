"""The slashes and columns equal their definition, computed pair by pair in float64."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from attention.equal_indices import same_index
from sparsity.small_batch import (
    BLOCK,
    DIM,
    HEADS,
    KV_HEADS,
    SEQ,
    fewest_that_reach,
    inputs,
    mass,
    pattern,
)

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.sparsity.pattern import MaskedPositions
from mtrain_cli.sparsity.vertical_slash import VerticalSlashPattern


def probabilities(
    q: torch.Tensor, k: torch.Tensor, masked: MaskedPositions, b: int
) -> torch.Tensor:
    """Return float64 [heads, seq, seq] of one sequence, by the definition."""
    first, length = torch.from_numpy(masked.masks[b].first), masked.masks[b].length
    position = torch.arange(SEQ)
    seen = (
        (position >= first[:, None])
        & (position <= position[:, None])
        & (position[:, None] < length)
    )
    keys = k[b].double().repeat_interleave(HEADS // KV_HEADS, 1)
    scores = torch.einsum("qhd,khd->hqk", q[b].double(), keys) / DIM**0.5
    return scores.masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num(0.0)


def expected_rows(p: VerticalSlashPattern, length: int) -> list[int]:
    """Return the middles of equal parts of each window, which spans whole blocks.

    The windows of these tests have room for that.
    """
    rows = []
    for w in range(p.windows):
        end, span = length * (w + 1) // p.windows, math.ceil(p.last_q / p.block) * p.block
        rows += [end - span + math.floor((i + 0.5) * span / p.last_q) for i in range(p.last_q)]
    return rows


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    "changed",
    [
        {}, {"windows": 3}, {"last_q": 40}, {"min_slashes": 2, "p_s": 0.1},
        {"min_slashes": 4, "p_s": 0.1},
        {"p_of": "rest"}, {"p_of": "rest", "min_slashes": 2, "index_per": "kv_group"},
        {"p_of": "rest", "min_slashes": 2, "joint": True, "p_v": 0.9, "p_s": 0.3},
        {"joint": True}, {"joint": True, "p_v": 0.9, "p_s": 0.3, "min_columns": 0},
        {"index_per": "kv_group"},
        {"max_columns": 10, "max_slashes": 2}, {"min_columns": 50},
        {"max_slashes": 2, "index_per": "kv_group"},
    ],
)  # fmt: skip
def test_vertical_slash_equals_its_definition(documents, changed):
    q, k, masked = inputs(1, documents, length=SEQ - 3)
    p = pattern(**changed)
    index = p.estimate(q, k, masked, 0)
    assert index.max_slashes == p.max_slashes
    assert not index.max_slashes or int(index.slashes.sum(-1).max()) <= index.max_slashes, (
        "the host must know a bound"
    )
    assert index.has_own_blocks
    blocks = masked.geometry.blocks
    for b in range(2):
        length = masked.masks[b].length
        rows = expected_rows(p, length)
        probed = probabilities(q, k, masked, b)[:, rows] / len(rows)
        if p.per_group:
            group = HEADS // KV_HEADS
            probed = probed.unflatten(0, (-1, group)).mean(1).repeat_interleave(group, 0)
        forced = {0, 1} if p.min_slashes > 1 else {0}
        if p.p_of == "rest":
            keys = torch.arange(SEQ)
            distance = torch.tensor(rows)[:, None] // BLOCK - keys // BLOCK
            near = torch.isin(distance, torch.tensor(sorted(forced)))
            probed = probed.masked_fill(near | (keys < p.sink_tokens), 0.0)
        for h in range(HEADS):
            diagonals, columns = [0.0] * blocks, [0.0] * (blocks * BLOCK)
            for row, position in zip(probed[h].tolist(), rows, strict=True):
                for key in range(position + 1):
                    diagonals[position // BLOCK - key // BLOCK] += row[key]
            slashes = fewest_that_reach(
                diagonals,
                p.p_s,
                forced,
                p.min_slashes,
                p.max_slashes or blocks,
            )
            assert set(index.slashes[b, h].nonzero().flatten().tolist()) == slashes
            for row, position in zip(probed[h].tolist(), rows, strict=True):
                for key in range(position + 1):
                    if not (p.joint and position // BLOCK - key // BLOCK in slashes):
                        columns[key] += row[key]
            share = p.p_v
            if p.joint:
                share = max(0.0, 1 - (1 - p.p_v) * sum(diagonals) / sum(columns))
            kept = fewest_that_reach(
                columns, share, set(range(p.sink_tokens)), p.min_columns, p.max_columns
            )
            chosen_columns = index.columns[b, h]
            assert chosen_columns[chosen_columns < blocks * BLOCK].tolist() == sorted(kept)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize(("p_of", "found"), [("all", False), ("rest", True)])
def test_a_sink_leaves_no_budget_for_retrieval_unless_p_is_of_the_rest(joint, p_of, found):
    """The sink has 70 % of the attention, two keys have 10 % each, and noise has the rest."""
    length = 9 * BLOCK
    _, _, masked = inputs(length=length)
    asked = torch.tensor([37, 70])
    share = torch.full((SEQ,), 0.1 / SEQ)
    share[0], share[asked] = 0.7, 0.1
    q, k = torch.zeros(2, SEQ, HEADS, DIM), torch.zeros(2, SEQ, KV_HEADS, DIM)
    q[..., 0], k[..., 0] = DIM**0.5, share.log()[:, None]
    p = pattern(p_of=p_of, p_v=0.6, p_s=0.6, joint=joint, min_columns=0, last_q=BLOCK)
    index = p.estimate(q, k, masked, 0)
    rows = p.probed_rows(length)
    kept = index.allowed(rows, asked)
    assert bool(kept.all()) == found
    assert found or not kept.any()
    assert index.allowed(rows, torch.tensor([0])).all()


def released_choice(mass: list[float], share: float, most: int) -> list[int]:
    """Return the largest lines whose running sum stays below the share, at most ``most``."""
    order = sorted(range(len(mass)), key=lambda line: (-mass[line], line))[:most]
    sums = list(itertools.accumulate(mass[line] for line in order))
    return [line for line, held in zip(order, sums, strict=True) if held < share]


@pytest.mark.parametrize(
    ("seq", "heads", "kv_heads", "documents"),
    [(150, 4, 2, False), (147, 4, 2, True), (160, 2, 2, False), (33, 3, 1, False)],
)
@pytest.mark.parametrize(
    "changed",
    [{}, {"last_q": 33}, {"p_s": 0.3, "max_slashes": 5, "max_columns": 4}, {"p_s": 0.1, "p_v": 0.1},
     {"min_slashes": 2, "p_s": 0.1}],
)  # fmt: skip
def test_token_diagonals_equal_a_loop_over_last_queries(seq, heads, kv_heads, documents, changed):
    """Token diagonals, each with the block diagonals that it touches in the last row of blocks."""
    torch.manual_seed(seq)
    q, k = torch.randn(1, seq, heads, DIM), torch.randn(1, seq, kv_heads, DIM)
    k[:, ::37] *= 4
    q[:, 7:] += k[:, :-7].repeat_interleave(heads // kv_heads, 2)  # a diagonal that stands out
    document = seq // 3 if documents else seq
    mask = SequenceMask.from_documents(np.arange(seq) // document, seq)
    p = pattern(slash_unit="token", **{"last_q": 20, "sink_tokens": 0, "min_columns": 0, **changed})
    masked = MaskedPositions.make([mask], BLOCK)
    index = p.estimate(q, k, masked, 0)
    blocks, rows = masked.geometry.blocks, range(seq - p.last_q, seq)
    for h in range(heads):
        vertical, distances = [0.0] * seq, [0.0] * seq
        for row in rows:
            first = int(mask.first[row])
            scores = k[0, first : row + 1, h * kv_heads // heads].double() @ q[0, row, h].double()
            for key, share in enumerate((scores / DIM**0.5).softmax(0).tolist(), first):
                vertical[key] += share / len(rows)
                distances[row - key] += share / len(rows)
        lit = {0, 1} if p.min_slashes > 1 else {0}
        for distance in released_choice(distances, p.p_s, p.max_slashes or seq):
            # Distance d joins the last row of blocks, of queries N - 16 to N - 1, to these blocks.
            end = blocks * BLOCK
            for query in range(end - BLOCK, end):
                if query >= distance:
                    lit.add((end - 1) // BLOCK - (query - distance) // BLOCK)
        assert set(index.slashes[0, h].nonzero().flatten().tolist()) == lit
        columns = released_choice(vertical, p.p_v, p.max_columns)
        own = index.columns[0, h]
        assert own[own < blocks * BLOCK].tolist() == sorted(columns)
    assert not index.max_slashes or int(index.slashes.sum(-1).max()) <= index.max_slashes
    assert index.has_own_blocks
    assert p.p_s > 0.1 or blocks < 4 or not index.slashes.all(-1).any(), "a choice must remain"


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("at", [0, SEQ - 20, None])
def test_one_key_may_get_all_attention_or_none(at, joint):
    """The largest and smallest mass that a candidate can have, also a forced one."""
    _, _, masked = inputs()
    q, k = torch.ones(2, SEQ, HEADS, DIM), torch.zeros(2, SEQ, KV_HEADS, DIM)
    if at is None:
        q[:] = float("nan")
    else:
        k[:, at] = 100.0
    index = pattern(last_q=5, joint=joint, min_columns=0, min_slashes=0).estimate(q, k, masked, 0)
    slashes, columns = {0}, {0, 1}
    if at is not None:
        slashes |= {row // BLOCK - at // BLOCK for row in expected_rows(pattern(last_q=5), SEQ)}
        assert len(slashes) == (3 if at == 0 else 2), "the queries must lie in two blocks"
        # If diagonals hold all the mass, nothing is left for columns.
        columns |= set() if joint else {at}
    for b in range(2):
        for h in range(HEADS):
            assert set(index.slashes[b, h].nonzero().flatten().tolist()) == slashes
            assert {
                key for key in index.columns[b, h].tolist() if key < index.blocks * BLOCK
            } == columns
    q[:, -1] = float("nan")
    assert all(m.isfinite().all() for m in mass(pattern(last_q=5), q, k, masked))


def test_per_group_gives_one_index_to_the_heads_of_a_group():
    q, k, masked = inputs(2)
    index = pattern(index_per="kv_group").estimate(q, k, masked, 0)
    group = HEADS // KV_HEADS
    assert index.heads == (2, HEADS)
    for tensor in (index.slashes, index.columns):
        first = tensor.unflatten(1, (KV_HEADS, group))[:, :, :1]
        assert torch.equal(tensor.unflatten(1, (KV_HEADS, group)), first.expand(-1, -1, group, -1))
    assert not same_index(pattern().estimate(q, k, masked, 0), index)


@pytest.mark.parametrize(
    "bounds",
    [
        {"min_columns": 145, "max_columns": 0},
        {"sink_tokens": 148, "max_columns": 0},
        {"min_columns": 155, "max_columns": 160},
    ],
)
@pytest.mark.parametrize("joint", [False, True])
def test_columns_lie_within_the_tokens_however_many_are_required(bounds, joint):
    q, k, masked = inputs(length=140)
    index = pattern(joint=joint, **bounds).estimate(q, k, masked, 0)
    beyond = masked.geometry.blocks * BLOCK
    assert index.columns[..., :140].tolist() == [[list(range(140))] * HEADS] * 2
    assert (index.columns[..., 140:] == beyond).all()


def test_unbounded_columns_are_cut_to_the_width_in_use():
    torch.manual_seed(0)
    seq = 1000
    q, k = torch.randn(1, seq, HEADS, DIM), torch.randn(1, seq, KV_HEADS, DIM)
    masked = MaskedPositions.make([SequenceMask.causal(seq, seq)], BLOCK)
    unbounded = pattern(p_v=0.3, max_columns=0).estimate(q, k, masked, 0)
    bounded = pattern(p_v=0.3, max_columns=seq).estimate(q, k, masked, 0)
    most = int((bounded.columns < seq).sum(-1).max())
    assert 128 < most < 256, "the width must exceed one step"
    assert unbounded.columns.shape[-1] == 256
    assert unbounded.columns.equal(bounded.columns[..., :256])


def test_nan_inputs_give_a_valid_index():
    q, k, masked = inputs(4)
    q[0, -1, 0] = float("nan")
    index = pattern().estimate(q, k, masked, 0)
    assert bool(index.slashes[..., 0].all())
    assert index.columns.min() >= 0
    assert index.columns.max() <= masked.geometry.blocks * BLOCK
    assert bool((index.columns[..., 1:] >= index.columns[..., :-1]).all())


def test_the_description_names_every_bound_of_vertical_slash():
    assert pattern(max_columns=0).describe() == (
        "columns that hold 60% and block diagonals that hold 70% of the attention of 20 queries "
        "spread over the last 32 tokens"
    )
    assert (
        pattern(p_of="rest", max_columns=0)
        .describe()
        .endswith("tokens outside the lines that are always kept")
    )
    assert pattern(
        windows=4, max_columns=256, max_slashes=4, joint=True, index_per="kv_group"
    ).describe() == (
        "columns that, joint with the diagonals, hold 60% and block diagonals that hold 70% of the "
        "attention of 20 queries spread over "
        "the last 32 tokens of each of 4 windows, at most 256 columns and 4 diagonals per head, "
        "one index per KV head"
    )
