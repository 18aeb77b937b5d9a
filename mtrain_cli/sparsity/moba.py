"""Mixture of block attention: each query chooses a few large chunks of keys (MoBA, arXiv:2502.13189)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.attention.index import BlockBitmap, GatedBitmap
from mtrain_cli.attention.kernel import IndexRequest, accumulation_dtype
from mtrain_cli.sparsity.pattern import NO_ROWS, MaskedPositions

_SCORE_BYTES = 1 << 28  # scores that exist at once while queries choose


@dataclass(frozen=True)
class MobaPattern:
    """The chunks whose mean key scores highest, the query's own among them.

    chunk: keys of a chunk, a multiple of block. top_k: chunks a query sees, its own included. by_query: every query chooses by itself, as
    in the paper; else the queries of a block choose together, by their mean. Of equal scores the earlier chunk goes first. Padding counts
    in no mean.
    """

    block: int
    chunk: int
    top_k: int
    by_query: bool = True
    name: ClassVar[str] = "moba"
    synthetic: ClassVar[bool] = False

    def request(self) -> IndexRequest:
        return IndexRequest(self.block, bitmap=True, chunk=self.chunk if self.by_query else 0)

    def describe(self) -> str:
        return f"{self.top_k} chunks of {self.chunk} keys for every " + (
            "query" if self.by_query else f"block of {self.block} queries"
        )

    def covers(self, seq: int) -> str | None:
        return (
            f"{self.top_k} chunks of {self.chunk} keys cover"
            if self.top_k * self.chunk >= seq
            else None
        )

    def probed_rows(self, length: int) -> torch.Tensor:  # noqa: ARG002
        return NO_ROWS

    def estimate(
        self, q: torch.Tensor, k: torch.Tensor, masked: MaskedPositions, layer: int
    ) -> BlockBitmap:
        """One collective: the sums of all chunks."""
        heads, geometry = q.shape[2], masked.geometry
        blocks, size = geometry.blocks, self._size(masked)
        chunks, per_chunk = -(-blocks * self.block // size), size // self.block
        numbers = geometry.query_blocks.long()
        query_counts, key_counts = self._counts(masked)
        # Sums of blocks are added in float64: rounded once, they do not tell in which order workers added them.
        sums = torch.zeros(
            len(k), chunks * per_chunk, *k.shape[2:], dtype=torch.float64, device=k.device
        )
        sums = (
            sums.index_copy_(1, numbers, _block_sums(k, masked).double())
            .unflatten(1, (chunks, per_chunk))
            .sum(2)
        )
        means = masked.group.sum(sums) / key_counts[..., None, None]
        if self.by_query:
            return self._by_query(q, means, masked)
        queries = _block_sums(q, masked).double() / query_counts[..., None, None]
        keys = means.repeat_interleave(heads // k.shape[2], 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", queries, keys)
        own = numbers * self.block // size
        chunk = torch.arange(chunks, device=q.device)
        scores = (
            scores.nan_to_num(0.0)
            .masked_fill(chunk > own[:, None], float("-inf"))
            .masked_fill(chunk == own[:, None], float("inf"))
        )
        best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., : self.top_k]
        taken = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & (
            chunk <= own[:, None]
        )
        bits = taken.repeat_interleave(per_chunk, -1)[..., :blocks]
        past = torch.arange(blocks, device=q.device) <= numbers[:, None]
        return BlockBitmap(self.block, blocks, bits & past, geometry.query_blocks)

    def _by_query(
        self, q: torch.Tensor, means: torch.Tensor, masked: MaskedPositions
    ) -> GatedBitmap:
        """means: float64 [batch, chunks, kv_heads, head_dim], the mean key of each chunk."""
        geometry, block, size = masked.geometry, self.block, self._size(masked)
        batch, heads = len(q), q.shape[2]
        chunks, kv_heads, dtype = means.shape[1], means.shape[2], accumulation_dtype(q.dtype)
        local, words = len(masked.numbers), -(-chunks // 32)
        bits = torch.zeros(batch, heads, local, geometry.blocks, dtype=torch.bool, device=q.device)
        gates = torch.zeros(batch, heads, local * block, words, dtype=torch.int32, device=q.device)
        keys = means.to(dtype).permute(0, 2, 3, 1)  # [batch, kv_heads, head_dim, chunks]
        past = torch.arange(geometry.blocks, device=q.device) <= geometry.query_blocks[:, None]
        at_once = max(1, _SCORE_BYTES // (8 * heads * block * words * 32)) * block
        for b in range(batch):
            real = masked.real(b)
            for begin in range(0, real, at_once):
                end = min(begin + at_once, real)
                queries = (
                    q[b, begin:end].to(dtype).unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)
                )  # [kv_heads, group, rows, head_dim]
                scores = (queries @ keys[b, :, None]).flatten(0, 1)
                position = masked.positions[begin:end]
                seen = self._best(scores, position, geometry.first[b, position], size)
                gates[b, :, begin:end] = _packed(seen)
                whole = (
                    torch.nn.functional.pad(seen, (0, 0, 0, -(end - begin) % block))
                    .unflatten(1, (-1, block))
                    .any(2)
                )
                rows = slice(begin // block, -(-end // block))
                bits[b, :, rows] = (
                    whole.repeat_interleave(size // block, -1)[..., : geometry.blocks] & past[rows]
                )
        return GatedBitmap(block, geometry.blocks, bits, geometry.query_blocks, gates, size)

    def _best(
        self, scores: torch.Tensor, position: torch.Tensor, first: torch.Tensor, size: int
    ) -> torch.Tensor:
        """scores [heads, rows, chunks] of queries at positions that see keys from first on -> bool like scores, their chunks."""
        chunk = torch.arange(scores.shape[-1], device=scores.device)
        own = (position // size)[:, None]
        there = (chunk <= own) & ((chunk + 1) * size > first[:, None])
        scores = (
            scores.nan_to_num(0.0)
            .masked_fill(~there, float("-inf"))
            .masked_fill(chunk == own, float("inf"))
        )
        top_k = min(self.top_k, scores.shape[-1])
        least = torch.topk(scores, top_k, dim=-1).values[..., -1:]
        above, equal = scores > least, scores == least
        # Among equal values, keep the first ones that fit.
        room = top_k - above.sum(-1, keepdim=True)
        return (above | (equal & (equal.cumsum(-1) <= room))) & there

    def _size(self, masked: MaskedPositions) -> int:
        """Keys of a chunk; of a chunk beyond the end nothing is to be padded."""
        return min(self.chunk, masked.geometry.blocks * self.block)

    def _counts(self, masked: MaskedPositions) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens, or 1 where there is none, of the local blocks [batch, local blocks] and of all chunks [batch, chunks]; float64."""
        key = (type(self).__name__, self.chunk)
        if key not in masked.cache:
            lengths = np.array([[mask.length] for mask in masked.masks])
            size = self._size(masked)
            chunks = np.arange(-(-masked.geometry.blocks * self.block // size))
            starts = ((masked.numbers * self.block, self.block), (chunks * size, size))
            counts = (
                np.clip(lengths - start, 1, most).astype(np.float64) for start, most in starts
            )
            masked.cache[key] = tuple(
                to_device(count, masked.geometry.first.device) for count in counts
            )
        return masked.cache[key]


def _packed(bits: torch.Tensor) -> torch.Tensor:
    """bool [..., n] -> int32 [..., ceil(n / 32)], bit i % 32 of word i // 32."""
    words = torch.nn.functional.pad(bits, (0, -bits.shape[-1] % 32)).unflatten(-1, (-1, 32)).long()
    return (words << torch.arange(32, device=bits.device)).sum(-1).to(torch.int32)


def _block_sums(tokens: torch.Tensor, masked: MaskedPositions) -> torch.Tensor:
    """[batch, tokens, heads, dim] -> float32 (float64 for such tokens) [batch, local blocks, heads, dim], without padding."""
    block, dtype = masked.geometry.block, accumulation_dtype(tokens.dtype)
    sums = torch.zeros(
        len(tokens), len(masked.numbers), *tokens.shape[2:], dtype=dtype, device=tokens.device
    )
    for b, total in enumerate(sums):
        # Positions ascend, so that padding comes last.
        whole, rest = divmod(masked.real(b), block)
        torch.sum(
            tokens[b, : whole * block].unflatten(0, (whole, block)),
            1,
            dtype=dtype,
            out=total[:whole],
        )
        if rest:
            total[whole] = tokens[b, whole * block : whole * block + rest].sum(0, dtype=dtype)
    return sums
