"""Mixture of block attention: each block of queries chooses a few large chunks of keys (MoBA, arXiv:2502.13189)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from mtrain_cli.attention.index import BlockBitmap
from mtrain_cli.attention.kernel import IndexRequest, accumulation_dtype
from mtrain_cli.attention.transfer import to_device
from mtrain_cli.sparsity.pattern import NO_ROWS, Masked


@dataclass(frozen=True)
class MobaPattern:
    """The chunks whose mean key scores highest, its own among them, for the mean query of every block.

    chunk: keys of a chunk, a multiple of block. top_k: chunks a query block sees, its own included. The paper gates every query by itself;
    here the queries of a block share their choice, which is what a kernel can skip. Of equal scores the earlier chunk goes first. Padding
    counts in no mean.
    """

    block: int
    chunk: int
    top_k: int
    name: ClassVar[str] = "moba"
    synthetic: ClassVar[bool] = False

    def request(self) -> IndexRequest:
        return IndexRequest(self.block, bitmap=True)

    def describe(self) -> str:
        return f"{self.top_k} chunks of {self.chunk} keys for every block of {self.block} queries"

    def covers(self, seq: int) -> str | None:
        return f"{self.top_k} chunks of {self.chunk} keys cover" if self.top_k * self.chunk >= seq else None

    def probed_rows(self, length: int) -> torch.Tensor:  # noqa: ARG002
        return NO_ROWS

    def estimate(self, q: torch.Tensor, k: torch.Tensor, masked: Masked, layer: int) -> BlockBitmap:  # noqa: ARG002
        """One collective: the sums of all chunks."""
        heads, geometry = q.shape[2], masked.geometry
        blocks, size = geometry.blocks, self._size(masked)
        chunks, per_chunk = -(-blocks * self.block // size), size // self.block
        numbers = geometry.query_blocks.long()
        query_counts, key_counts = self._counts(masked)
        # Sums of blocks are added in float64: rounded once, they do not tell in which order workers added them.
        queries = _block_sums(q, masked).double() / query_counts[..., None, None]
        sums = torch.zeros(len(k), chunks * per_chunk, *k.shape[2:], dtype=torch.float64, device=k.device)
        sums = sums.index_copy_(1, numbers, _block_sums(k, masked).double()).unflatten(1, (chunks, per_chunk)).sum(2)
        keys = (masked.group.sum(sums) / key_counts[..., None, None]).repeat_interleave(heads // k.shape[2], 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", queries, keys)
        own = numbers * self.block // size
        chunk = torch.arange(chunks, device=q.device)
        scores = scores.nan_to_num(0.0).masked_fill(chunk > own[:, None], float("-inf")).masked_fill(chunk == own[:, None], float("inf"))
        best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., : self.top_k]
        taken = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & (chunk <= own[:, None])
        bits = taken.repeat_interleave(per_chunk, -1)[..., :blocks]
        past = torch.arange(blocks, device=q.device) <= numbers[:, None]
        return BlockBitmap(self.block, blocks, bits & past, geometry.query_blocks)

    def _size(self, masked: Masked) -> int:
        """Keys of a chunk; of a chunk beyond the end nothing is to be padded."""
        return min(self.chunk, masked.geometry.blocks * self.block)

    def _counts(self, masked: Masked) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, or 1 where there is none, of the local blocks [batch, local blocks] and of all chunks [batch, chunks]; float64."""
        key = (type(self).__name__, self.chunk)
        if key not in masked.cache:
            lengths = np.array([[mask.length] for mask in masked.masks])
            size = self._size(masked)
            chunks = np.arange(-(-masked.geometry.blocks * self.block // size))
            starts = ((masked.numbers * self.block, self.block), (chunks * size, size))
            counts = (np.clip(lengths - start, 1, most).astype(np.float64) for start, most in starts)
            masked.cache[key] = tuple(to_device(count, masked.geometry.first.device) for count in counts)
        return masked.cache[key]


def _block_sums(tokens: torch.Tensor, masked: Masked) -> torch.Tensor:
    """[batch, tokens, heads, dim] -> float32 (float64 for such tokens) [batch, local blocks, heads, dim], without padding."""
    block, dtype = masked.geometry.block, accumulation_dtype(tokens.dtype)
    sums = torch.zeros(len(tokens), len(masked.numbers), *tokens.shape[2:], dtype=dtype, device=tokens.device)
    for b, total in enumerate(sums):
        # Positions ascend, so that padding comes last.
        whole, rest = divmod(masked.real(b), block)
        torch.sum(tokens[b, : whole * block].unflatten(0, (whole, block)), 1, dtype=dtype, out=total[:whole])
        if rest:
            total[whole] = tokens[b, whole * block : whole * block + rest].sum(0, dtype=dtype)
    return sums
