"""Mixture of block attention: each block of queries chooses a few large chunks of keys (MoBA, arXiv:2502.13189)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from mtrain_cli.attention.index import BlockBitmap
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.sparsity.pattern import Masked


@dataclass(frozen=True)
class MobaPattern:
    """The chunks whose mean key scores highest, its own among them, for the mean query of every block.

    chunk: keys of a chunk, a multiple of block. top_k: chunks a query block sees, its own included. The paper gates every query by itself;
    here the queries of a block share their choice, which is what a kernel can skip. Of equal scores the earlier chunk goes first.
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

    def estimate(self, q: torch.Tensor, k: torch.Tensor, masked: Masked, layer: int) -> BlockBitmap:  # noqa: ARG002
        seq, heads = q.shape[1:3]
        blocks = masked.geometry.blocks
        size = min(self.chunk, blocks * self.block)  # of a chunk beyond the end nothing is to be padded
        chunks = -(-seq // size)
        queries = _means(q, self.block)
        keys = _means(k, size).repeat_interleave(heads // k.shape[2], 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", queries, keys)
        own = torch.arange(blocks, device=q.device) * self.block // size
        chunk = torch.arange(chunks, device=q.device)
        scores = scores.nan_to_num(0.0).masked_fill(chunk > own[:, None], float("-inf")).masked_fill(chunk == own[:, None], float("inf"))
        best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., : self.top_k]
        taken = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & (chunk <= own[:, None])
        bits = taken.repeat_interleave(size // self.block, -1)[..., :blocks]
        return BlockBitmap(self.block, blocks, bits & torch.ones(blocks, blocks, dtype=torch.bool, device=q.device).tril())


def _means(tokens: torch.Tensor, size: int) -> torch.Tensor:
    """[batch, seq, heads, dim] -> float32 means of consecutive ``size`` tokens; the last group may be shorter."""
    seq = tokens.shape[1]
    groups = -(-seq // size)
    padded = torch.nn.functional.pad(tokens.float(), (0, 0, 0, 0, 0, groups * size - seq)).unflatten(1, (groups, size))
    counts = torch.full((groups,), float(size), device=tokens.device)
    counts[-1] = seq - (groups - 1) * size
    return padded.sum(2) / counts[:, None, None]
