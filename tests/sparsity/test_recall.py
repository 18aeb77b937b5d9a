"""Recall is the share of dense attention on an index's pairs, compared with a sum over pairs."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from attention.sparse_problems import make_index, make_problem

from mtrain_cli.sparsity.pattern import MaskedPositions
from mtrain_cli.sparsity.recall import recall


@pytest.mark.parametrize("score_bytes", [1, 4 * 60 * 2 * 4, 1 << 29])
@pytest.mark.parametrize("kind", ["slashes", "columns", "both", "none", "all", "bitmap"])
def test_recall_equals_the_sum_over_pairs(monkeypatch, kind, score_bytes):
    monkeypatch.setattr("mtrain_cli.sparsity.recall._SCORE_BYTES", score_bytes)
    p = make_problem(3, kind, seq=60, dim=8)
    rows = torch.tensor([0, 1, 17, 30, 45, 58, 59])
    actual = recall(
        p.tiles.index, p.q, p.k, MaskedPositions.make(p.masks, p.tiles.index.block), rows
    )
    assert actual.shape == (2, 4, len(rows))
    chosen = p.tiles.index.allowed(*p.tiles.positions())
    for b in range(2):
        for place, row in enumerate(rows.tolist()):
            for h in range(4):
                if row >= p.masks[b].length:
                    assert math.isnan(actual[b, h, place])
                    continue
                kept = total = 0.0
                for key in range(int(p.masks[b].first[row]), row + 1):
                    weight = math.exp(
                        float(p.q[b, row, h].double() @ p.k[b, key, h // 2].double()) / 8**0.5
                    )
                    total += weight
                    kept += weight * bool(chosen[b, h, row, key])
                assert float(actual[b, h, place]) == pytest.approx(kept / total, abs=1e-5)
    shares = actual[~actual.isnan()]
    if kind in ("all", "none"):
        assert torch.allclose(shares, torch.full_like(shares, float(kind == "all")), atol=1e-5)
    else:
        assert ((shares > 0.01) & (shares < 0.99)).any(), "some queries must keep a part"


def test_the_test_indices_differ_between_heads():
    index = make_index("both", np.random.default_rng(3), 2, 4, 60, 16)
    everywhere = torch.arange(60)
    allowed = index.allowed(everywhere, everywhere)
    assert not torch.equal(allowed[:, 0], allowed[:, 1])
