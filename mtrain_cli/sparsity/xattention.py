"""Blocks chosen by antidiagonal sums of scores (XAttention, arXiv:2503.16428)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mtrain_cli.attention.index import BlockBitmap
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.sparsity.pattern import Masked, kept_lines

_SCORE_BYTES = 1 << 30


@dataclass(frozen=True)
class XAttentionPattern:
    """For every block of queries the fewest key blocks whose antidiagonal scores hold a share of the row's softmax.

    stride: antidiagonals are sampled in squares of this size: query r of a square meets key stride - 1 - r. threshold: share of the mass.
    The block on the diagonal and the first block are always kept. Costs seq^2 / stride products, so it grows with the square.
    """

    block: int
    stride: int
    threshold: float
    name: ClassVar[str] = "xattention"
    synthetic: ClassVar[bool] = False

    def request(self) -> IndexRequest:
        return IndexRequest(self.block, bitmap=True)

    def describe(self) -> str:
        return f"blocks that hold {self.threshold:.0%} of antidiagonal scores, stride {self.stride}"

    def covers(self, seq: int) -> str | None:
        return f"2 blocks of {self.block} tokens, the own and the first, cover" if seq <= 2 * self.block else None

    def estimate(self, q: torch.Tensor, k: torch.Tensor, masked: Masked, layer: int) -> BlockBitmap:  # noqa: ARG002
        return BlockBitmap(self.block, masked.geometry.blocks, torch.stack([self._choose(q[b], k[b], masked, b) for b in range(len(q))]))

    def _choose(self, q: torch.Tensor, k: torch.Tensor, masked: Masked, sequence: int) -> torch.Tensor:
        """One sequence -> bool [heads, blocks, blocks]."""
        heads, dim = q.shape[1:]
        kv_heads, blocks, stride = k.shape[1], masked.geometry.blocks, self.stride
        pad = blocks * self.block - len(q)
        q, k = (torch.nn.functional.pad(t, (0, 0, 0, 0, 0, pad)) for t in (q, k))
        # A square's queries in reverse order and its keys, side by side: one product sums an antidiagonal.
        queries = q.unflatten(0, (-1, stride)).flip(1).permute(2, 0, 1, 3).flatten(2).unflatten(0, (kv_heads, -1))
        keys = k.unflatten(0, (-1, stride)).permute(2, 0, 1, 3).flatten(2)
        squares, per_block = keys.shape[1], self.block // stride
        first = masked.geometry.first[sequence].view(-1, stride).amin(-1)
        square = torch.arange(squares, device=q.device)
        at_once = max(1, _SCORE_BYTES // (4 * heads * per_block * squares))
        chosen = torch.zeros(heads, blocks, blocks, dtype=torch.bool, device=q.device)
        number = torch.arange(blocks, device=q.device)
        for begin in range(0, blocks, at_once):
            end = min(begin + at_once, blocks)
            rows = slice(begin * per_block, end * per_block)
            scores = (queries[:, :, rows].flatten(1, 2) @ keys.transpose(-1, -2)).float().view(heads, -1, squares)
            scores *= dim**-0.5 / stride
            visible = (square <= square[rows, None]) & ((square + 1) * stride > first[rows, None])
            p = scores.masked_fill_(~visible, float("-inf")).softmax(-1).nan_to_num_(0.0)
            mass = p.view(heads, end - begin, per_block, blocks, per_block).sum((2, 4)) / per_block
            own = number[begin:end, None]
            # Blocks of the future have no mass, so none of them is kept.
            lines, keep = kept_lines(mass, self.threshold, (number == own) | (number == 0), 0, blocks)
            chosen[:, begin:end].scatter_(-1, lines, keep)
        return chosen
