"""Estimated indices equal their definitions, computed pair by pair in float64."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from attention.equal_indices import same_index

from mtrain_cli.attention.index import BlockBitmap
from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.sparsity.fixed import FixedPattern, fixed_index
from mtrain_cli.sparsity.moba import MobaPattern
from mtrain_cli.sparsity.pattern import MaskedPositions, display_name
from mtrain_cli.sparsity.probe import ProbedAttention
from mtrain_cli.sparsity.vertical_slash import VerticalSlashPattern
from mtrain_cli.sparsity.xattention import XAttentionPattern

SEQ, BLOCK, HEADS, KV_HEADS, DIM = 150, 16, 4, 2, 8


def inputs(
    seed: int = 0, documents: bool = False, length: int = SEQ
) -> tuple[torch.Tensor, torch.Tensor, MaskedPositions]:
    torch.manual_seed(seed)
    # Keys at a few positions stand out, like sinks and topics, so that budgets differ between
    # heads.
    q, k = torch.randn(2, SEQ, HEADS, DIM), torch.randn(2, SEQ, KV_HEADS, DIM)
    k[:, ::37] *= 4
    if documents:
        masks = [
            SequenceMask.from_documents(
                np.sort(np.random.default_rng(b).integers(0, 3, length)), SEQ
            )
            for b in range(2)
        ]
    else:
        masks = [SequenceMask.causal(length, SEQ)] * 2
    return q, k, MaskedPositions.make(masks, BLOCK)


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


def pattern(**changed) -> VerticalSlashPattern:
    default = {
        "block": BLOCK, "last_q": 20, "windows": 1, "p_v": 0.6, "p_s": 0.7, "joint": False,
        "sink_tokens": 2,
        "min_columns": 3, "max_columns": 60, "min_slashes": 1, "max_slashes": 0,
        "index_per": "query_head",
    }  # fmt: skip
    return VerticalSlashPattern(**{**default, **changed})


def fewest_that_reach(
    mass: list[float], share: float, forced: set[int], least: int, most: int
) -> set[int]:
    order = sorted(range(len(mass)), key=lambda line: (line not in forced, -mass[line], line))
    kept: set[int] = set()
    held, total = 0.0, sum(mass)
    for rank, line in enumerate(order[:most]):
        if held < share * total or rank < least or line in forced:
            kept.add(line)
        held += mass[line]
    return kept


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
    blocks = masked.geometry.blocks
    for b in range(2):
        length = masked.masks[b].length
        rows = expected_rows(p, length)
        probed = probabilities(q, k, masked, b)[:, rows] / len(rows)
        if p.per_group:
            group = HEADS // KV_HEADS
            probed = probed.unflatten(0, (-1, group)).mean(1).repeat_interleave(group, 0)
        for h in range(HEADS):
            diagonals, columns = [0.0] * blocks, [0.0] * (blocks * BLOCK)
            for row, position in zip(probed[h].tolist(), rows, strict=True):
                for key in range(position + 1):
                    diagonals[position // BLOCK - key // BLOCK] += row[key]
            slashes = fewest_that_reach(
                diagonals,
                p.p_s,
                {0, 1} if p.min_slashes > 1 else {0},
                p.min_slashes,
                p.max_slashes or blocks,
            )
            assert set(index.slashes[b, h].nonzero().flatten().tolist()) == slashes
            for row, position in zip(probed[h].tolist(), rows, strict=True):
                for key in range(position + 1):
                    if not (p.joint and position // BLOCK - key // BLOCK in slashes):
                        columns[key] += row[key]
            share = p.p_v if not p.joint else max(0.0, (sum(columns) - (1 - p.p_v)) / sum(columns))
            kept = fewest_that_reach(
                columns, share, set(range(p.sink_tokens)), p.min_columns, p.max_columns
            )
            chosen_columns = index.columns[b, h]
            assert chosen_columns[chosen_columns < blocks * BLOCK].tolist() == sorted(kept)


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
    assert all(mass.isfinite().all() for mass in pattern(last_q=5).mass(q, k, masked))


def test_per_group_gives_one_index_to_the_heads_of_a_group():
    q, k, masked = inputs(2)
    index = pattern(index_per="kv_group").estimate(q, k, masked, 0)
    group = HEADS // KV_HEADS
    assert index.heads == (2, HEADS)
    for tensor in (index.slashes, index.columns):
        first = tensor.unflatten(1, (KV_HEADS, group))[:, :, :1]
        assert torch.equal(tensor.unflatten(1, (KV_HEADS, group)), first.expand(-1, -1, group, -1))
    assert not same_index(pattern().estimate(q, k, masked, 0), index)


def test_chunked_scores_choose_the_same(monkeypatch):
    q, k, masked = inputs(3)
    whole = pattern().estimate(q, k, masked, 0)
    monkeypatch.setattr("mtrain_cli.sparsity.probe._SCORE_BYTES", 1)
    assert same_index(pattern().estimate(q, k, masked, 0), whole)


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


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("score_bytes", [1, 1 << 30])
def test_xattention_equals_its_definition(monkeypatch, documents, score_bytes):
    monkeypatch.setattr("mtrain_cli.sparsity.xattention._SCORE_BYTES", score_bytes)
    q, k, masked = inputs(5, documents)
    stride, threshold = 4, 0.6
    index = XAttentionPattern(BLOCK, stride, threshold).estimate(q, k, masked, 0)
    blocks = masked.geometry.blocks
    squares, per_block = blocks * BLOCK // stride, BLOCK // stride
    q64, k64 = (
        torch.nn.functional.pad(t.double(), (0, 0, 0, 0, 0, blocks * BLOCK - SEQ)) for t in (q, k)
    )
    for b in range(2):
        first = masked.masks[b].first
        for h in range(HEADS):
            scores = np.full((squares, squares), -np.inf)
            for i in range(squares):
                for j in range(i + 1):
                    if i * stride < SEQ and (j + 1) * stride > first[i * stride]:
                        pairs = (
                            (i * stride + stride - 1 - t, j * stride + t) for t in range(stride)
                        )
                        total = sum(float(q64[b, x, h] @ k64[b, y, h // 2]) for x, y in pairs)
                        scores[i, j] = total / DIM**0.5 / stride
            with np.errstate(invalid="ignore"):
                p = np.nan_to_num(np.exp(scores - scores.max(1, keepdims=True)))
                p = np.nan_to_num(p / p.sum(1, keepdims=True))
            mass = p.reshape(blocks, per_block, blocks, per_block).sum((1, 3)) / per_block
            for i in range(blocks):
                wanted = fewest_that_reach(mass[i, : i + 1].tolist(), threshold, {0, i}, 1, blocks)
                assert set(index.bits[b, h, i].nonzero().flatten().tolist()) == wanted, (b, h, i)


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


def test_fixed_has_the_configured_counts_and_depends_only_on_the_seed():
    index = fixed_index(seed=1, batch=1, heads=3, seq=1000, block=16, slashes=7, columns=20)
    assert index.slashes.sum(-1).tolist() == [[7, 7, 7]]
    assert index.max_slashes == 7
    assert bool(index.slashes[..., :2].all())
    assert (index.columns < 63 * 16).sum(-1).tolist() == [[20, 20, 20]]
    assert not torch.equal(index.columns[0, 0], index.columns[0, 1]), "every head draws its own"
    assert same_index(
        index, fixed_index(seed=1, batch=1, heads=3, seq=1000, block=16, slashes=7, columns=20)
    )
    assert not same_index(
        index, fixed_index(seed=2, batch=1, heads=3, seq=1000, block=16, slashes=7, columns=20)
    )
    assert display_name(FixedPattern(16, 7, 20, 0.0, 1)) == "fixed (SYNTHETIC)"
    assert display_name(pattern()) == "vertical_slash"


def test_fixed_diagonals_favour_the_recent_past():
    """Besides 0 and 1, every head has one more diagonal, weighted by the cube root of its place."""
    heads = 4000
    drawn = fixed_index(
        seed=3, batch=1, heads=heads, seq=256, block=16, slashes=3, columns=0
    ).slashes[0]
    assert drawn[:, :2].all()
    chance = torch.diff(torch.linspace(0, 1, 17).pow(1 / 3))[2:]
    want = chance / chance.sum() * heads
    got = drawn[:, 2:].sum(0)
    assert int(got.sum()) == heads
    assert (
        float(((got - want).square() / want).sum()) < 40
    )  # chi-square, 13 degrees of freedom: 1 in 10,000


def test_every_layer_draws_its_own_fixed_index():
    q, k, masked = inputs(0)
    made = FixedPattern(BLOCK, 3, 8, 0.0, 1)
    first, second = (made.estimate(q, k, masked, layer) for layer in (0, 1))
    assert same_index(made.estimate(q, k, masked, 0), first)
    assert not torch.equal(first.slashes, second.slashes)
    assert not torch.equal(first.columns, second.columns)


@pytest.mark.parametrize("density", [0.05, 0.3, 0.6, 0.9])
def test_fixed_draws_the_fewest_diagonals_that_fill_the_density(density):
    shape = {"seed": 3, "batch": 1, "heads": 4, "seq": 9 * BLOCK, "block": BLOCK, "columns": 0}
    index = fixed_index(**shape, slashes=None, density=density)
    slashes = index.slashes
    assert index.max_slashes == int(slashes.sum(-1).max())
    area = torch.arange(9, 0, -1)
    for h, count in enumerate(slashes[0].sum(-1).tolist()):
        assert int((slashes[0, h] * area).sum()) >= density * 45
        # The same draw with one diagonal fewer.
        fewer = fixed_index(**shape, slashes=count - 1).slashes[0, h]
        assert count == 1 or int((fewer * area).sum()) < density * 45


def test_the_description_names_every_bound_of_vertical_slash():
    assert pattern(max_columns=0).describe() == (
        "columns that hold 60% and block diagonals that hold 70% of the attention of 20 queries "
        "spread over the last 32 tokens"
    )
    assert pattern(
        windows=4, max_columns=256, max_slashes=4, joint=True, index_per="kv_group"
    ).describe() == (
        "columns that, joint with the diagonals, hold 60% and block diagonals that hold 70% of the "
        "attention of 20 queries spread over "
        "the last 32 tokens of each of 4 windows, at most 256 columns and 4 diagonals per head, "
        "one index per KV head"
    )


def test_descriptions_show_shares_as_configured():
    assert (
        "columns that hold 99.5% and block diagonals that hold 87.5% of"
        in pattern(p_v=0.995, p_s=0.875).describe()
    )
    assert (
        XAttentionPattern(BLOCK, 4, 0.995).describe()
        == "blocks that hold 99.5% of antidiagonal scores, stride 4"
    )


@pytest.mark.parametrize(
    "made",
    [
        MobaPattern(BLOCK, 64, 3, "query"), MobaPattern(BLOCK, 64, 2, "query"),
        MobaPattern(BLOCK, 64, 10**20, "query"),
        MobaPattern(BLOCK, BLOCK << 60, 1, "query"),
        XAttentionPattern(BLOCK, 4, 0.01), FixedPattern(BLOCK, 10, 0, 0.0, 0), FixedPattern(BLOCK,
        9, 0, 0.0, 0),
        FixedPattern(BLOCK, 0, 0, 1.0, 0), FixedPattern(BLOCK, 0, 0, 0.5, 0), FixedPattern(BLOCK,
        1, SEQ, 0.0, 0),
        pattern(min_slashes=10), pattern(min_slashes=9), pattern(min_columns=SEQ, max_columns=0),
        pattern(min_columns=60, max_columns=0),
    ],
)  # fmt: skip
def test_a_pattern_that_claims_to_cover_everything_does(made):
    q, k, masked = inputs(7)
    everywhere = torch.arange(SEQ)
    dense = masked.visible(0, everywhere, SEQ)
    seen = made.estimate(q, k, masked, 0).allowed(everywhere, everywhere) & dense
    assert (made.covers(SEQ) is not None) == bool((seen == dense).all())


@pytest.mark.parametrize("name", ["xattention", "vertical_slash", "fixed"])
@pytest.mark.parametrize("length", [BLOCK, 2 * BLOCK, 2 * BLOCK + 1])
def test_a_short_sequence_is_covered(name, length):
    made = {
        "xattention": XAttentionPattern(BLOCK, 4, 0.01),
        "vertical_slash": pattern(last_q=1, p_v=0.01, p_s=0.01, min_columns=0),
        "fixed": FixedPattern(BLOCK, 1, 0, 0.0, 0),
    }[name]
    assert (made.covers(length) is not None) == (
        length <= (2 * BLOCK if name == "xattention" else BLOCK)
    )


@pytest.mark.parametrize("density", [0.02, 0.1, 0.5, 1.0])
def test_fixed_fills_the_configured_density(density):
    index = fixed_index(
        seed=0, batch=1, heads=4, seq=100_000, block=128, slashes=None, columns=0, density=density
    )
    area = torch.arange(index.blocks, 0, -1)
    share = (index.slashes * area).sum(-1) / area.sum()
    assert bool(((share - density).abs() < 0.01).all()), share


@pytest.mark.parametrize(
    ("windows", "documents"),
    [(1, False), (1, True), *(pytest.param(3, d, marks=pytest.mark.slow) for d in (False, True))],
)
def test_the_fused_probe_computes_the_same_masses(monkeypatch, documents, windows):
    torch.manual_seed(0)
    q, k = torch.randn(2, SEQ, HEADS, 16), torch.randn(2, SEQ, KV_HEADS, 16)
    _, _, masked = inputs(0, documents, length=SEQ - 3)
    for last_q in (20, 70):
        p = pattern(windows=windows, last_q=last_q)
        want = p.mass(q, k, masked)
        monkeypatch.setattr("mtrain_cli.sparsity.probe.fused_probe_usable", lambda *_: True)
        got = p.mass(q, k, masked)
        monkeypatch.undo()
        for b in range(2):
            torch.testing.assert_close(got[b], want[b], atol=1e-7, rtol=1e-5)
            torch.testing.assert_close(want[b].sum((0, 2)), torch.ones(HEADS))


# Triton's interpreter runs the fused probe, slowly.
@pytest.mark.parametrize("fused", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "changed",
    [{}, {"joint": True, "p_v": 0.9}, {"index_per": "kv_group", "joint": True, "p_v": 0.9}],
)
def test_the_index_does_not_depend_on_the_memory_budget(monkeypatch, changed, fused):
    """The small budget fits one probed block and 64 rows, and a joint budget computes all twice."""
    monkeypatch.setattr("mtrain_cli.sparsity.probe.fused_probe_usable", lambda *_: fused)
    torch.manual_seed(0)
    dtype = torch.float32 if fused else torch.float64
    q, k = (
        torch.randn(2, SEQ, HEADS, 16, dtype=dtype),
        torch.randn(2, SEQ, KV_HEADS, 16, dtype=dtype),
    )
    _, _, masked = inputs(0, True, length=SEQ - 3)
    p = pattern(windows=3, last_q=40, p_s=0.4, **changed)
    assert all(len(probe.diagonals) > 3 and len(probe.rows) > 64 for probe in p.probes(masked))
    want, masses = p.estimate(q, k, masked, 0), p.mass(q, k, masked)
    monkeypatch.setattr("mtrain_cli.sparsity.probe._SCORE_BYTES", 1)
    tables = []
    whole = ProbedAttention.tables

    def counted(self):
        for table in whole(self):
            tables.append(table[2].shape[0])
            yield table

    monkeypatch.setattr(ProbedAttention, "tables", counted)
    assert same_index(p.estimate(q, k, masked, 0), want)
    assert set(tables) == {1}
    assert len(tables) == sum(len(probe.diagonals) for probe in p.probes(masked)) * (
        2 if changed else 1
    )
    for a, b in zip(p.mass(q, k, masked), masses, strict=True):
        assert torch.equal(a, b) if fused else torch.allclose(a, b, atol=1e-12)
