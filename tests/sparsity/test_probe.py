"""The index of vertical_slash also serves unprobed queries, for slashes at any offset."""

from __future__ import annotations

import pytest
import torch
from attention.equal_indices import same_index
from sparsity import small_batch
from sparsity.small_batch import HEADS, KV_HEADS, SEQ, inputs

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.sparsity.pattern import MaskedPositions
from mtrain_cli.sparsity.recall import recall
from mtrain_cli.sparsity.vertical_slash import ProbedAttention, VerticalSlashPattern

DIM = 64


def pattern(**changed) -> VerticalSlashPattern:
    default = {
        "block": 128, "last_q": 64, "windows": 1, "p_v": 0.9, "p_s": 0.9, "joint": False,
        "sink_tokens": 4,
        "min_columns": 0, "max_columns": 64, "min_slashes": 2, "max_slashes": 0,
        "index_per": "query_head",
    }  # fmt: skip
    return VerticalSlashPattern(**{**default, **changed})


def random_vectors(seq: int, dim: int, seed: int = 0) -> torch.Tensor:
    """Return a random vector of length sqrt(dim) for every position, [seq, dim]."""
    drawn = torch.randn(seq, dim, generator=torch.Generator().manual_seed(seed))
    return drawn / drawn.norm(dim=-1, keepdim=True) * dim**0.5


def slashes(seq: int, offsets: range) -> tuple[torch.Tensor, torch.Tensor]:
    """Make one head per offset.

    Nearly all attention of a query falls on the key at that distance, the rest anywhere.
    """
    k = random_vectors(seq, DIM)
    return torch.stack([torch.roll(k, offset, 0) for offset in offsets], 1)[None] * 1.4, k[
        None, :, None
    ]


def local(seq: int, widths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Make one head per width.

    Attention falls on the latest keys up to that distance, bell-shaped with noise.
    """
    turn = 2 * torch.pi / (4 * seq)
    angle = torch.arange(seq) * turn
    heads = []
    for width in widths:
        behind = angle - turn * width / 2
        heads.append(
            torch.stack([behind.cos(), behind.sin()], -1).double()
            / (turn * width / 4) ** 2
            * DIM**0.5
        )
    mine, theirs = (random_vectors(seq, DIM - 2, seed).double() for seed in (1, 2))
    queries = torch.stack([torch.cat([head, mine], -1) for head in heads], 1)
    return queries[None], torch.cat(
        [torch.stack([angle.cos(), angle.sin()], -1).double(), theirs], -1
    )[None, :, None]


def unprobed_rows(p: VerticalSlashPattern, seq: int) -> torch.Tensor:
    """Return rows of the last half that are not probed, neither here nor as one run per window."""
    free = torch.ones(seq, dtype=torch.bool)
    free[: seq // 2] = False
    free[p.probed_rows(seq)] = False
    for window in range(p.windows):
        end = seq * (window + 1) // p.windows
        free[end - p.last_q : end] = False
    return free.nonzero().flatten()[::3]  # 3 and the block size are coprime


def kept(
    p: VerticalSlashPattern, q: torch.Tensor, k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention kept by unprobed rows, [heads, rows], and their offsets in a block."""
    seq = q.shape[1]
    masked = MaskedPositions.make([SequenceMask.causal(seq, seq)], p.block)
    rows = unprobed_rows(p, seq)
    return recall(p.estimate(q, k, masked, 0), q, k, masked, rows)[0], rows % p.block


@pytest.mark.parametrize(
    ("block", "windows", "seq"),
    [(128, 1, 1152), (128, 4, 1152), (128, 1, 1075), (64, 1, 1152), (64, 2, 999)],
)
def test_a_slash_at_any_offset_is_kept(block, windows, seq):
    shares, _ = kept(
        pattern(block=block, windows=windows), *slashes(seq, range(2 * block, 3 * block))
    )
    assert float(shares.mean(-1).min()) > 0.85, shares.mean(-1)


@pytest.mark.parametrize(
    ("block", "last_q"), [(128, 20), (128, 100), (128, 200), (64, 128), (64, 40)]
)
def test_any_number_of_probed_queries_works(block, last_q):
    """Fewer than a block, more, and no multiple of it."""
    shares, _ = kept(
        pattern(block=block, last_q=last_q), *slashes(1152, range(2 * block, 3 * block, 4))
    )
    assert float(shares.mean(-1).min()) > 0.85, shares.mean(-1)


@pytest.mark.parametrize(
    ("block", "windows", "seq"), [(128, 1, 1152), (128, 4, 1152), (128, 1, 1075), (64, 1, 1152)]
)
def test_the_first_rows_of_a_block_keep_local_attention_too(block, windows, seq):
    widths = [16, 32, 64, 128, 256]
    shares, place = kept(pattern(block=block, windows=windows), *local(seq, widths))
    assert float(shares.mean(-1).min()) > 0.85, shares.mean(-1)
    first = shares[:, place < block // 8].mean(-1)
    assert float(first.min()) > 0.75, first


@pytest.mark.parametrize("block", [16, 64, 128])
@pytest.mark.parametrize("last_q", [1, 7, 16, 64, 100, 200])
@pytest.mark.parametrize(("windows", "length"), [(1, 1), (1, 130), (3, 40), (3, 1000), (3, 1024)])
def test_rows_of_a_block_are_probed_equally(block, last_q, windows, length):
    p = pattern(block=block, last_q=last_q, windows=windows)
    rows = p.probed_rows(length)
    assert rows.dtype == torch.int64
    assert bool((rows[1:] > rows[:-1]).all()), "rows must ascend and be distinct"
    assert rows.min() >= 0
    assert rows.max() < length
    assert len(rows) == min(last_q * windows, length)
    span = -(-last_q // block) * block
    if windows * span > length:
        return
    # The first rows of a block are probed in proportion, within one row per piece of a window.
    pieces = windows * (span // block + 1)
    for first in range(0, block + 1, 4):
        assert abs(int((rows % block < first).sum()) - len(rows) * first / block) <= pieces, first


def test_diagonal_1_takes_precedence_over_noise():
    """All attention falls on the query itself, except for a trace on distant slashes."""
    seq, block = 512, 16
    k = random_vectors(seq, DIM)
    q = (k + 0.1 * torch.roll(k, 100, 0))[None, :, None] * 3
    masked = MaskedPositions.make([SequenceMask.causal(seq, seq)], block)

    def chosen_diagonals(**bounds) -> list[int]:
        return (
            pattern(block=block, **bounds)
            .estimate(q, k[None, :, None], masked, 0)
            .slashes[0, 0]
            .nonzero()
            .flatten()
            .tolist()
        )

    assert chosen_diagonals(min_slashes=1) == [0]
    assert chosen_diagonals(min_slashes=2) == [0, 1]
    assert chosen_diagonals(min_slashes=2, max_slashes=2) == [0, 1]
    assert len(chosen_diagonals(min_slashes=3)) == 3
    assert chosen_diagonals(min_slashes=3)[:2] == [0, 1]
    assert chosen_diagonals(min_slashes=1, max_slashes=1) == [0]


def test_chunked_scores_choose_the_same(monkeypatch):
    q, k, masked = inputs(3)
    whole = small_batch.pattern().estimate(q, k, masked, 0)
    monkeypatch.setattr("mtrain_cli.sparsity.vertical_slash._SCORE_BYTES", 1)
    assert same_index(small_batch.pattern().estimate(q, k, masked, 0), whole)


@pytest.mark.parametrize(
    ("windows", "documents"),
    [(1, False), (1, True), *(pytest.param(3, d, marks=pytest.mark.slow) for d in (False, True))],
)
def test_the_fused_probe_computes_the_same_masses(monkeypatch, documents, windows):
    torch.manual_seed(0)
    q, k = torch.randn(2, SEQ, HEADS, 16), torch.randn(2, SEQ, KV_HEADS, 16)
    _, _, masked = inputs(0, documents, length=SEQ - 3)
    p = small_batch.pattern(windows=windows, last_q=70)
    want = small_batch.mass(p, q, k, masked)
    monkeypatch.setattr("mtrain_cli.sparsity.vertical_slash.fused_probe_usable", lambda *_: True)
    got = small_batch.mass(p, q, k, masked)
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
    monkeypatch.setattr("mtrain_cli.sparsity.vertical_slash.fused_probe_usable", lambda *_: fused)
    torch.manual_seed(0)
    dtype = torch.float32 if fused else torch.float64
    q, k = (
        torch.randn(2, SEQ, HEADS, 16, dtype=dtype),
        torch.randn(2, SEQ, KV_HEADS, 16, dtype=dtype),
    )
    _, _, masked = inputs(0, True, length=SEQ - 3)
    p = small_batch.pattern(windows=3, last_q=40, p_s=0.4, **changed)
    assert all(len(probe.diagonals) > 3 and len(probe.rows) > 64 for probe in p.probes(masked))
    want, masses = p.estimate(q, k, masked, 0), small_batch.mass(p, q, k, masked)
    monkeypatch.setattr("mtrain_cli.sparsity.vertical_slash._SCORE_BYTES", 1)
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
    for a, b in zip(small_batch.mass(p, q, k, masked), masses, strict=True):
        assert torch.equal(a, b) if fused else torch.allclose(a, b, atol=1e-12)
