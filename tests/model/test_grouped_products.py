"""Products of groups of rows against a loop, and against PyTorch's where it runs."""

from __future__ import annotations

import pytest
import torch

from mtrain_cli.model import grouped_products
from mtrain_cli.model.grouped_products import grouped_rows, grouped_rows_back, grouped_sums

ENDS = torch.tensor([3, 3, 10, 12], dtype=torch.int32)  # the second group is empty


def problem(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    sizes = (15, 8), (15, 16), (4, 16, 8)
    return tuple(torch.randn(s, generator=generator).to(dtype) for s in sizes)


COMPUTED = 12  # rows before the end of the last group


def by_loop(rows_SA, rows_SB, weights_EBA) -> tuple[torch.Tensor, ...]:
    forward = torch.zeros(COMPUTED, 16).to(rows_SA)
    back = torch.zeros(COMPUTED, 8).to(rows_SA)
    sums = torch.zeros_like(weights_EBA)
    for e, (begin, end) in enumerate([(0, 3), (3, 3), (3, 10), (10, 12)]):
        for s in range(begin, end):
            forward[s] = weights_EBA[e] @ rows_SA[s]
            back[s] = rows_SB[s] @ weights_EBA[e]
            sums[e] += torch.outer(rows_SB[s], rows_SA[s])
    return forward, back, sums


def found(rows_SA, rows_SB, weights_EBA) -> tuple[torch.Tensor, ...]:
    return (
        grouped_rows(rows_SA, weights_EBA, ENDS)[:COMPUTED],
        grouped_rows_back(rows_SB, weights_EBA, ENDS)[:COMPUTED],
        grouped_sums(rows_SB, rows_SA, ENDS),
    )


def test_products_are_those_of_each_row():
    given = problem(torch.float64)
    torch.testing.assert_close(found(*given), by_loop(*given))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pytorch_gives_the_same_on_a_cpu_too(dtype, monkeypatch):
    given = problem(dtype)
    expected = found(*given)
    try:
        torch._grouped_mm(given[0], given[2].transpose(1, 2), offs=ENDS)
    except RuntimeError as error:
        pytest.skip(f"this PyTorch has none on a CPU: {error}")
    monkeypatch.setattr(grouped_products, "_runs_grouped", lambda *_: True)
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found(*given), expected, **tolerance)


def test_no_rows_give_no_rows_and_zero_sums():
    """On a GPU, too, a worker that receives no row must not call PyTorch's product."""
    rows_SA, rows_SB, weights_EBA = problem(torch.float32)
    ends = torch.zeros_like(ENDS)
    assert grouped_rows(rows_SA[:0], weights_EBA, ends).shape == (0, 16)
    assert grouped_rows_back(rows_SB[:0], weights_EBA, ends).shape == (0, 8)
    sums = grouped_sums(rows_SB[:0], rows_SA[:0], ends)
    assert sums.shape == weights_EBA.shape
    assert not sums.any()
