"""Heads are cut, dealt to ranks and joined again, and gradients of repeated heads are summed."""

from __future__ import annotations

import pytest
import torch

from mtrain_cli.parallel.wide_copy import (
    concatenate,
    part_of_heads,
    split_heads,
    sum_repeated_heads,
)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
@pytest.mark.parametrize("dim", [1, 2])
def test_parts_of_the_heads_are_views_that_join_in_order(parts, dim):
    whole = numbers(6, 6, 6)
    cut = [part_of_heads(whole, (i, parts), dim) for i in range(parts)]
    assert concatenate(cut, dim).equal(whole)
    for part in cut:
        part += 1
    assert whole.equal(numbers(6, 6, 6) + 1)


def test_a_single_part_is_not_copied():
    whole = numbers(2, 3)
    assert part_of_heads(whole, (0, 1), 1) is concatenate([whole], 1) is whole


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_gets_consecutive_heads(ranks):
    whole = numbers(2, 3, 4, 5)
    for rank, own in enumerate(split_heads(whole, ranks)):
        each = 4 // ranks
        assert own.equal(whole[:, :, rank * each : (rank + 1) * each])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_repeated_heads_are_summed_to_the_head_that_was_repeated(dtype):
    """Two heads, eight ranks: ranks 0 to 3 compute with head 0, ranks 4 to 7 with head 1."""
    whole = numbers(2, 3, 2, 5).to(dtype)
    dealt = split_heads(whole, 8)
    for rank, own in enumerate(dealt):
        assert own.equal(whole[:, :, rank // 4 : rank // 4 + 1])
    assert sum_repeated_heads(dealt.permute(1, 2, 0, 3, 4), 2).equal(4 * whole)


def test_repeated_heads_are_summed_in_float32():
    # bfloat16 rounds 1 + 2^-9 to 1, but not 1 + 3 * 2^-9.
    tiny = 2.0**-9
    gradient = torch.tensor([1.0, tiny, tiny, tiny], dtype=torch.bfloat16).view(1, 1, 4, 1, 1)
    (found,) = sum_repeated_heads(gradient, 1).flatten().tolist()
    assert found == torch.tensor(1 + 3 * tiny).bfloat16().item() > 1


def test_heads_that_no_rank_repeats_keep_their_gradients():
    gradient = numbers(2, 3, 2, 2, 5)
    assert sum_repeated_heads(gradient, 4).equal(gradient.flatten(2, 3))
