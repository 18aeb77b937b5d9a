"""Maps equal the whole float64 matrices, from autograd, averaged over cells."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mtrain_cli.attention.mask import SequenceMask
from mtrain_extras.studies.attention import attention_map as subject
from mtrain_extras.studies.attention.attention_map import attention_map

TOKENS, DIM = 90, 8


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(TOKENS, DIM, dtype=dtype, generator=generator) for _ in range(4)]


def first_keys(lengths: list[int]) -> torch.Tensor:
    documents = np.repeat(np.arange(len(lengths)), lengths)
    return torch.from_numpy(SequenceMask.from_documents(documents, TOKENS).first)


def oracle(q, k, v, dout, first):
    """The probabilities and |dL/dS| by autograd, [tokens, tokens], and which pairs count."""
    at = torch.arange(TOKENS)
    seen = (at <= at[:, None]) & (at >= first[:, None])
    scores = (q @ k.T * DIM**-0.5).requires_grad_()
    p = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    (p @ v * dout).sum().backward()
    return p.detach(), scores.grad.abs(), seen


@pytest.mark.parametrize("lengths", [[90], [30, 41, 19]])
@pytest.mark.parametrize("cells", [2, 7, 90])
@pytest.mark.parametrize("rows", [7, 90])
def test_cells_are_means_of_the_oracle(lengths, cells, rows, monkeypatch):
    monkeypatch.setattr(subject, "_SCORE_BYTES", 8 * TOKENS * rows)
    given, first = inputs(), first_keys(lengths)
    found = attention_map(*given, first, cells)
    width = -(-TOKENS // cells)
    assert found.width == width
    side = -(-TOKENS // width)
    p, ds, seen = oracle(*given, first)
    for name, whole in (("attention", p), ("gradient", ds)):
        values = getattr(found, name)
        assert values.shape == (side, side)
        for row in range(side):
            for column in range(side):
                cell = (slice(row * width, (row + 1) * width),
                        slice(column * width, (column + 1) * width))  # fmt: skip
                pairs = whole[cell][seen[cell]]
                if len(pairs):
                    assert values[row, column] == pytest.approx(float(pairs.mean()), rel=1e-12)
                else:
                    assert values[row, column].isnan()


def test_low_precision_inputs_are_computed_in_float32():
    given, first = inputs(torch.bfloat16), first_keys([90])
    found = attention_map(*given, first, 6)
    exact = attention_map(*(t.double() for t in given), first, 6)
    for name in ("attention", "gradient"):
        torch.testing.assert_close(
            getattr(found, name), getattr(exact, name), rtol=1e-4, atol=1e-9, equal_nan=True
        )


def test_a_column_and_a_slash_stand_out():
    """Queries that prefer key 20, and queries that prefer the key 32 positions earlier."""
    _, _, v, dout = inputs()
    first, eye = first_keys([90]), torch.eye(TOKENS, dtype=torch.float64) * 40
    column = attention_map(
        torch.ones(TOKENS, TOKENS).double(), eye[20].expand(TOKENS, -1) * eye.bool(),
        v, dout, first, 45,
    )  # fmt: skip
    assert int(column.attention[30].nan_to_num().argmax()) == 10
    slash = attention_map(eye.roll(32, 0), eye, v, dout, first, 45)
    for row in range(0, 45):
        if row >= 16:
            assert int(slash.attention[row].nan_to_num().argmax()) == row - 16
