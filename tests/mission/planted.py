"""Attention of one head that is known in advance, to count how much of it an index keeps.

A query attends to a sink at the start, to near keys, and, where it asks, to the key of its answer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mtrain_cli.attention.mask import SequenceMask
from mtrain_cli.composition.compose import compose
from mtrain_cli.sparsity.pattern import MaskedPositions, make_pattern

CODE, SINK, DIM = 40, 40, 64  # dimensions of the codes, place of the sink, all dimensions
PERIODS = (48, 80, 140, 230, 400, 700, 1200, 2000, 3300, 5600, 9000)  # tokens


@dataclass(frozen=True)
class Head:
    """q, k: [1, seq, 1, DIM]. rows, columns: each position that asks, and that of its answer."""

    q: torch.Tensor
    k: torch.Tensor
    rows: list[int]
    columns: list[int]


def make_head(
    seq: int,
    places: Sequence[int],
    asked: Sequence[Sequence[int]],
    length: int,
    draw: torch.Generator,
) -> Head:
    """Plant answers of `length` tokens.

    places: first position of each answer.
    asked: first positions of the queries that ask for it.
    """
    codes = torch.randn(len(places), length, CODE, generator=draw)
    codes = torch.nn.functional.normalize(codes, dim=-1)
    q, k = torch.zeros(seq, DIM), torch.zeros(seq, DIM)
    k[:, :CODE] = 0.16 * torch.randn(seq, CODE, generator=draw)
    q[:, :CODE] = 2.5 * torch.randn(seq, CODE, generator=draw)
    k[:4, SINK] = 1.0
    q[:, SINK] = 8.5
    angle = torch.arange(seq)[:, None] * torch.tensor([2 * math.pi / period for period in PERIODS])
    near = torch.cat((angle.cos(), angle.sin()), 1)
    k[:, SINK + 1 : SINK + 1 + near.shape[1]] = near
    q[:, SINK + 1 : SINK + 1 + near.shape[1]] = 0.75 * near
    rows, columns = [], []
    for code, place, questions in zip(codes, places, asked, strict=True):
        k[place : place + length, :CODE] = code
        for row in questions:
            q[row : row + length, :CODE] = 16 * code
            rows += range(row, row + length)
            columns += range(place, place + length)
    return Head((q * DIM**0.5)[None, :, None], k[None, :, None], rows, columns)


def kept(head: Head, *settings: str) -> tuple[torch.Tensor, float]:
    """Return whether the index keeps each answer, and the density of the index.

    settings: as on a command line, such as ``sparsity.p_v=0.6``.
    """
    seq = head.q.shape[1]
    chosen = compose(["sparsity=vertical_slash", f"seq={seq}", *settings]).sparsity
    pattern = make_pattern(chosen, 0)
    assert pattern is not None
    bitmap = pattern.request().bitmap
    masked = MaskedPositions.make([SequenceMask.causal(seq, seq)], chosen.block, bitmap=bitmap)
    index = pattern.estimate(head.q, head.k, masked, 0)
    positions = torch.arange(seq)
    computed = index.allowed(positions, positions)[0, 0].tril()
    density = float(computed.sum()) / (seq * (seq + 1) / 2)
    return computed[head.rows, head.columns].float(), density
