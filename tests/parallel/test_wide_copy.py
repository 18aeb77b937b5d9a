"""Wide copies equal PyTorch's copies, for every dtype and for shapes that do not divide."""

from __future__ import annotations

import pytest
import torch

from mtrain_cli.parallel.layout import make_layout
from mtrain_cli.parallel.wide_copy import (
    as_wide,
    concatenate,
    contiguous,
    copy,
    part_of_heads,
    split_heads,
    sum_repeated_heads,
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def numbers(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape).to(dtype)


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (numbers(3, 4, 16), torch.complex128),
        (numbers(3, 4, 12), torch.int64),  # 24 bytes
        (numbers(3, 4, 6), torch.bfloat16),
        (numbers(3, 4, 4, dtype=torch.float32), torch.complex128),
        (numbers(3, 4, 2, dtype=torch.float32), torch.int64),
        (numbers(3, 4, 3, dtype=torch.float64), torch.float64),
        (numbers(3, 4, 2, dtype=torch.float64), torch.complex128),
        (numbers(3, 4, 32)[..., 8:24], torch.complex128),
        (numbers(3, 4, 32)[..., 4:20], torch.int64),  # begins at 8 bytes
        (numbers(3, 4, 32)[..., 2:18], torch.bfloat16),
        (numbers(3, 4, 20)[..., :16], torch.int64),  # rows of 40 bytes
        (numbers(3, 16, 4).transpose(1, 2), torch.bfloat16),  # last dimension not contiguous
        (numbers(3, 0, 16), torch.bfloat16),
        (torch.tensor(1.0), torch.float32),
        (numbers(3, 16, dtype=torch.float32).requires_grad_(), torch.float32),
    ],
)
def test_elements_are_as_wide_as_the_memory_layout_allows(tensor, word):
    words = as_wide(tensor)
    assert words.dtype == word
    assert words.data_ptr() == tensor.data_ptr()
    assert torch.equal(words.view(tensor.dtype), tensor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 6, 1])
def test_copies_are_exact(dtype, dim):
    source = numbers(3, 5, 4, dim, dtype=dtype)
    source[0, 0, 0, 0] = float("nan")
    turned = source.transpose(0, 2)
    made = contiguous(turned)
    assert made.is_contiguous()
    assert made.dtype == dtype
    assert made.view(torch.uint8).equal(turned.contiguous().view(torch.uint8)), (
        "bit for bit, also what is no number"
    )
    assert contiguous(source) is source
    for into in DTYPES:
        target = torch.zeros(4, 2, 5, 3, dim, dtype=into)[:, 1]
        copy(turned, target)
        torch.testing.assert_close(target, turned.to(into), equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize(
    ("dim", "dtype", "into"),
    [
        (16, torch.bfloat16, torch.float32),
        (6, torch.float32, torch.float32),
        (8, torch.float64, torch.float64),
    ],
)
def test_layouts_put_tokens_where_their_positions_say(name, dim, dtype, into):
    layout = make_layout(name, 3, 48, 4, unit=4)
    sequence = torch.randn(2, layout.padded_seq, 5, dim).to(dtype)
    want = torch.stack([sequence[:, torch.from_numpy(layout.positions(rank))] for rank in range(3)])
    assert torch.equal(layout.to_shards(sequence), want)
    assert torch.equal(layout.to_sequence(want), sequence)
    shards = torch.full((3, 2, *want.shape[1:]), float("nan"), dtype=into)
    layout.copy_to_shards(sequence, shards[:, 1])
    assert torch.equal(shards[:, 1], want.to(into))
    assert shards[:, 0].isnan().all()
    # Without a dimension after the tokens, tokens cannot be widened.
    flat = sequence[:, :, 0, 0].contiguous()
    assert torch.equal(layout.to_sequence(layout.to_shards(flat)), flat)
    assert torch.equal(layout.to_shards(flat), want[..., 0, 0])


def numbers_of_head_parts(*shape: int) -> torch.Tensor:
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


@pytest.mark.parametrize("parts", [1, 2, 3, 6])
@pytest.mark.parametrize("dim", [1, 2])
def test_parts_of_the_heads_are_views_that_join_in_order(parts, dim):
    whole = numbers_of_head_parts(6, 6, 6)
    cut = [part_of_heads(whole, (i, parts), dim) for i in range(parts)]
    assert concatenate(cut, dim).equal(whole)
    for part in cut:
        part += 1
    assert whole.equal(numbers_of_head_parts(6, 6, 6) + 1)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_rank_gets_consecutive_heads(ranks):
    whole = numbers_of_head_parts(2, 3, 4, 5)
    for rank, own in enumerate(split_heads(whole, ranks)):
        each = 4 // ranks
        assert own.equal(whole[:, :, rank * each : (rank + 1) * each])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_repeated_heads_are_summed_to_the_head_that_was_repeated(dtype):
    """Two heads, eight ranks: ranks 0 to 3 compute with head 0, ranks 4 to 7 with head 1."""
    whole = numbers_of_head_parts(2, 3, 2, 5).to(dtype)
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
