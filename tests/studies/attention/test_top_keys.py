"""The largest keys and their mass equal a float64 oracle; planted keys are found."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.sparsity import recall as rows_subject
from mtrain_cli.sparsity.pattern import MaskedPositions
from mtrain_extras.studies.attention.top_keys import top_keys

SEQ, HEADS, DIM, BLOCK = 96, 4, 8, 16
COUNTS = (1, 5, 96)


def positions(lengths: list[int]) -> MaskedPositions:
    documents = np.repeat(np.arange(len(lengths)), lengths)
    return MaskedPositions.make([SequenceMask.from_documents(documents, SEQ)], BLOCK)


@pytest.mark.parametrize("lengths", [[96], [50, 46]])
@pytest.mark.parametrize("at_once", [1, 96])
def test_mass_and_keys_equal_the_oracle(lengths, at_once, monkeypatch):
    monkeypatch.setattr(rows_subject, "_SCORE_BYTES", 4 * SEQ * 2 * at_once)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, SEQ, HEADS, DIM, dtype=torch.float64, generator=generator)
    k = torch.randn(1, SEQ, 2, DIM, dtype=torch.float64, generator=generator)
    masked, rows = positions(lengths), torch.tensor([0, 3, 49, 50, 70, 95])
    found = top_keys(q, k, masked, rows, COUNTS)
    assert found.mass.shape == (3, HEADS, 6)
    assert found.keys.shape == (HEADS, 6, 96)
    starts = [0, 0, 0, *([50] * 3 if len(lengths) == 2 else [0] * 3)]
    assert found.seen.tolist() == [
        row - start + 1 for row, start in zip(rows.tolist(), starts, strict=True)
    ]
    for head in range(HEADS):
        for at, (row, start) in enumerate(zip(rows.tolist(), starts, strict=True)):
            scores = k[0, start : row + 1, head // 2] @ q[0, row, head] * DIM**-0.5
            p = scores.softmax(0)
            order = p.argsort(descending=True)
            for number, count in enumerate(COUNTS):
                expected = float(p[order[:count]].sum())
                assert float(found.mass[number, head, at]) == pytest.approx(expected, abs=1e-6)
            real = min(5, len(p))
            assert found.keys[head, at, :real].tolist() == (order[:real] + start).tolist()


def test_planted_keys_hold_all_attention():
    """Each query scores the keys 7 and row - 9 far above all others."""
    masked, rows = positions([96]), torch.arange(20, SEQ)
    eye = torch.eye(SEQ) * 60
    q = torch.zeros(1, SEQ, 1, SEQ)
    q[0, 9:, 0] = eye[: SEQ - 9]
    q[0, :, 0, 7] = 60
    found = top_keys(q, eye[None, :, None], masked, rows, (1, 2))
    assert set(map(tuple, found.keys[0].sort(-1).values.tolist())) == {
        (7, row - 9) for row in rows.tolist()
    }
    torch.testing.assert_close(found.mass[1], torch.ones(1, len(rows)))
    assert found.mass[0].max() < 0.6
