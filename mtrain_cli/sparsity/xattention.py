"""Blocks chosen by antidiagonal sums of scores (XAttention, arXiv:2503.16428)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.attention.index import BlockBitmap
from mtrain_cli.attention.kernel import IndexRequest, accumulation_dtype
from mtrain_cli.sparsity.pattern import NO_ROWS, MaskedPositions, kept_lines

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
        return f"blocks that hold {100 * self.threshold:g}% of antidiagonal scores, stride {self.stride}"

    def covers(self, seq: int) -> str | None:
        return (
            f"2 blocks of {self.block} tokens, the own and the first, cover"
            if seq <= 2 * self.block
            else None
        )

    def probed_rows(self, length: int) -> torch.Tensor:  # noqa: ARG002
        return NO_ROWS

    def estimate(
        self, q: torch.Tensor, k: torch.Tensor, masked: MaskedPositions, layer: int
    ) -> BlockBitmap:
        """One collective: all keys go to all workers, as in the published distributed form; queries stay."""
        geometry = masked.geometry
        keys = self._sequence(
            torch.stack([self._padded(t, masked, b) for b, t in enumerate(k)]), masked
        )
        bits = torch.stack(
            [self._choose(self._padded(t, masked, b), keys[b], masked, b) for b, t in enumerate(q)]
        )
        return BlockBitmap(self.block, geometry.blocks, bits, geometry.query_blocks)

    def _padded(self, tokens: torch.Tensor, masked: MaskedPositions, sequence: int) -> torch.Tensor:
        """[tokens, heads, head_dim] -> whole blocks [local blocks, block, heads, head_dim], with zeros for padding."""
        real = masked.real(sequence)
        whole = torch.nn.functional.pad(
            tokens[:real], (0, 0, 0, 0, 0, len(masked.host_positions) - real)
        )
        return whole.unflatten(0, (-1, self.block))

    def _sequence(self, mine: torch.Tensor, masked: MaskedPositions) -> torch.Tensor:
        """[batch, local blocks, block, heads, head_dim] of this worker -> [batch, tokens, heads, head_dim] of all, in sequence order."""
        if type(self).__name__ not in masked.cache:
            order = np.argsort(np.concatenate(masked.shards))
            masked.cache[type(self).__name__] = to_device(order, mine.device)
        everyone = masked.group.gather(mine).transpose(0, 1).flatten(1, 2)
        return everyone.index_select(1, masked.cache[type(self).__name__]).flatten(1, 2)

    def _choose(
        self, q: torch.Tensor, k: torch.Tensor, masked: MaskedPositions, sequence: int
    ) -> torch.Tensor:
        """One sequence, q [local blocks, block, heads, head_dim], k [tokens, kv_heads, head_dim] -> bool [heads, local blocks, blocks]."""
        heads, dim = q.shape[2:]
        kv_heads, blocks, stride = k.shape[1], masked.geometry.blocks, self.stride
        # A square's queries in reverse order and its keys, side by side: one product sums an antidiagonal.
        queries = (
            q.flatten(0, 1)
            .unflatten(0, (-1, stride))
            .flip(1)
            .permute(2, 0, 1, 3)
            .flatten(2)
            .unflatten(0, (kv_heads, -1))
        )
        keys = k.unflatten(0, (-1, stride)).permute(2, 0, 1, 3).flatten(2)
        squares, per_block = keys.shape[1], self.block // stride
        first = masked.geometry.first[sequence].view(-1, stride).amin(-1)
        square = torch.arange(squares, device=q.device)
        number, own_blocks = square[:blocks], masked.geometry.query_blocks.long()
        own_squares = (own_blocks[:, None] * per_block + square[:per_block]).flatten()
        local = len(own_blocks)
        at_once = max(1, _SCORE_BYTES // (4 * heads * per_block * squares))
        chosen = torch.zeros(heads, local, blocks, dtype=torch.bool, device=q.device)
        for begin in range(0, local, at_once):
            end = min(begin + at_once, local)
            rows = slice(begin * per_block, end * per_block)
            mine = own_squares[rows]
            scores = _products(queries[:, :, rows].flatten(1, 2), keys.transpose(-1, -2)).view(
                heads, -1, squares
            )
            scores *= dim**-0.5 / stride
            visible = (square <= mine[:, None]) & ((square + 1) * stride > first[mine][:, None])
            p = scores.masked_fill_(~visible, float("-inf")).softmax(-1).nan_to_num_(0.0)
            mass = p.view(heads, end - begin, per_block, blocks, per_block).sum((2, 4)) / per_block
            own = own_blocks[begin:end, None]
            # Blocks of the future have no mass, so none of them is kept.
            lines, keep = kept_lines(
                mass, self.threshold, (number == own) | (number == 0), 0, blocks
            )
            chosen[:, begin:end].scatter_(-1, lines, keep)
        return chosen


def _products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Batched a @ b in the accumulation dtype: sums of thousands of numbers are not to be rounded before they are compared."""
    high = accumulation_dtype(a.dtype)
    if a.is_cuda and a.dtype != high:
        return torch.bmm(a, b, out_dtype=high)
    return a.to(high) @ b.to(high)
