"""The chosen blocks equal the definition: sums over antidiagonals, in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sparsity.small_batch import BLOCK, DIM, HEADS, SEQ, fewest_that_reach, inputs

from mtrain_cli.sparsity.xattention import XAttentionPattern


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
