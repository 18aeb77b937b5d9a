"""Parts of a tensor's heads: cut them out, join them, and deal them to ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from mtrain_cli.attention.partials import accumulation_dtype


def part_of_heads(tensor: torch.Tensor, piece: tuple[int, int], dim: int) -> torch.Tensor:
    """Return a view of one of n equal parts of dimension ``dim``. piece: (i, n), for the i-th."""
    i, n = piece
    return tensor if n == 1 else tensor.unflatten(dim, (n, -1)).select(dim, i)


def concatenate(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), dim)


def split_heads(tensor: torch.Tensor, ranks: int) -> torch.Tensor:
    """Split [batch, tokens, heads, head_dim] into [ranks, batch, tokens, heads per rank, head_dim].

    If the tensor has fewer heads than there are ranks, repeat each head.
    """
    heads = tensor.shape[2]
    if heads < ranks:
        tensor = tensor.repeat_interleave(ranks // heads, 2)
    return tensor.unflatten(2, (ranks, -1)).permute(2, 0, 1, 3, 4)


def sum_repeated_heads(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    """Turn [batch, tokens, ranks, heads per rank, head_dim] into [batch, tokens, heads, head_dim].

    If `split_heads` repeated each head, sum the gradients of the copies of a head.
    """
    flat = gradient.flatten(2, 3)
    repeats = flat.shape[2] // heads
    if repeats == 1:
        return flat
    parts = flat.unflatten(2, (heads, repeats)).to(accumulation_dtype(flat.dtype))
    return parts.sum(3).to(flat.dtype)
