"""Choose blocks by antidiagonal sums of scores (XAttention, arXiv:2503.16428)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtrain_cli.attention.index import BlockBitmap
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.attention.partials import high_product
from mtrain_cli.config.pattern_settings import XAttentionSettings
from mtrain_cli.sparsity.pattern import NO_ROWS, MaskedPositions, select_by_mass

_SCORE_BYTES = 1 << 30


@dataclass(frozen=True)
class XAttentionPattern(XAttentionSettings):
    """For every query block, choose the fewest key blocks that hold a share of antidiagonal mass.

    The scores are cut into squares of ``stride`` queries and keys. Only the antidiagonal of each is
    computed: query r meets key stride - 1 - r. The first block and the own one are always kept.
    """

    def request(self) -> IndexRequest:
        return IndexRequest(self.block, bitmap=True)

    def describe(self) -> str:
        share = f"{100 * self.threshold:g}%"
        return f"blocks that hold {share} of antidiagonal scores, stride {self.stride}"

    def probed_rows(self, length: int) -> Tensor:
        return NO_ROWS

    def estimate(self, q: Tensor, k: Tensor, masked: MaskedPositions, layer: int) -> BlockBitmap:
        """Return the index. One collective gathers all keys, as in MTraining's baseline."""
        geometry = masked.geometry
        keys = masked.gather_blocks(torch.stack([masked.in_blocks(t, b) for b, t in enumerate(k)]))
        bits = [self._choose(masked.in_blocks(t, b), keys[b], masked, b) for b, t in enumerate(q)]
        return BlockBitmap(self.block, geometry.blocks, torch.stack(bits), geometry.query_blocks)

    def _choose(self, q: Tensor, k: Tensor, masked: MaskedPositions, sequence: int) -> Tensor:
        """Return the key blocks of each local query block, bool [heads, local blocks, blocks]."""
        heads, dim = q.shape[2:]
        kv_heads, blocks, stride = k.shape[1], masked.geometry.blocks, self.stride
        # Concatenate the queries of a square in reverse order, and the keys of a square in order.
        # The dot product of the two is the sum of the square's antidiagonal.
        squares_of_q = q.flatten(0, 1).unflatten(0, (-1, stride)).flip(1)
        queries = squares_of_q.permute(2, 0, 1, 3).flatten(2).unflatten(0, (kv_heads, -1))
        keys = k.unflatten(0, (-1, stride)).permute(2, 0, 1, 3).flatten(2)
        squares, per_block = keys.shape[1], self.block // stride
        first = masked.tables.first[sequence].view(-1, stride).amin(-1)
        square = torch.arange(squares, device=q.device)
        key_block, own_blocks = square[:blocks], masked.geometry.query_blocks.long()
        own_squares = (own_blocks[:, None] * per_block + square[:per_block]).flatten()
        local = len(own_blocks)
        at_once = max(1, _SCORE_BYTES // (4 * heads * per_block * squares))
        chosen = torch.zeros(heads, local, blocks, dtype=torch.bool, device=q.device)
        for begin in range(0, local, at_once):
            end = min(begin + at_once, local)
            rows = slice(begin * per_block, end * per_block)
            mine = own_squares[rows]
            # Products rounded to 16 bits would choose other blocks.
            products = high_product(queries[:, :, rows].flatten(1, 2), keys.transpose(-1, -2))
            scores = products.view(heads, -1, squares)
            scores *= dim**-0.5 / stride
            visible = (square <= mine[:, None]) & ((square + 1) * stride > first[mine][:, None])
            p = scores.masked_fill_(~visible, float("-inf")).softmax(-1).nan_to_num_(0.0)
            mass = p.view(heads, end - begin, per_block, blocks, per_block).sum((2, 4)) / per_block
            own = own_blocks[begin:end, None]
            # Future blocks have no mass, so they are never kept.
            blocks_by_rank, kept = select_by_mass(
                mass, self.threshold, (key_block == own) | (key_block == 0), 0, blocks
            )
            chosen[:, begin:end].scatter_(-1, blocks_by_rank, kept)
        return chosen


def make_pattern(settings: XAttentionSettings, seed: int) -> XAttentionPattern:
    return XAttentionPattern(**vars(settings))
