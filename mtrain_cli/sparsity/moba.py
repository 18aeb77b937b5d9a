"""Mixture of block attention (MoBA, arXiv:2502.13189): each query chooses large chunks of keys."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.attention.index import BlockBitmap, GatedBitmap, pack_bits
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.attention.partials import Pair, accumulation_dtype
from mtrain_cli.config.pattern_settings import MobaSettings
from mtrain_cli.sparsity.pattern import NO_ROWS, MaskedPositions

_SCORE_BYTES = 1 << 28  # maximum bytes of scores at a time


@dataclass(frozen=True)
class MobaPattern(MobaSettings):
    """Choose a query's own chunk of keys, and those whose mean key has the best product with it.

    Of equal scores, the earlier chunk wins. With ``gate="query"``, every query chooses, as in the
    paper; with ``gate="block"``, the mean query of each block chooses for its queries.
    """

    @property
    def by_query(self) -> bool:
        return self.gate == "query"

    def request(self) -> IndexRequest:
        return IndexRequest(self.block, bitmap=True, chunk=self.chunk if self.by_query else 0)

    def describe(self) -> str:
        chooser = "query" if self.by_query else f"block of {self.block} queries"
        return f"{self.top_k} chunks of {self.chunk} keys for every {chooser}"

    def probed_rows(self, length: int) -> Tensor:
        return NO_ROWS

    def estimate(self, q: Tensor, k: Tensor, masked: MaskedPositions, layer: int) -> BlockBitmap:
        """Return the index. One collective sums the keys of each chunk over all workers."""
        heads, geometry = q.shape[2], masked.geometry
        blocks, size = geometry.blocks, self._chunk_size(masked)
        chunks, per_chunk = -(-blocks * self.block // size), size // self.block
        numbers = geometry.query_blocks.long()
        query_counts, key_counts = self._counts(masked)
        # Add block sums in float64 and round once, so that the order of workers does not matter.
        shape = (len(k), chunks * per_chunk, *k.shape[2:])
        sums = torch.zeros(shape, dtype=torch.float64, device=k.device)
        sums.index_copy_(1, numbers, _block_sums(k, masked).double())
        sums = sums.unflatten(1, (chunks, per_chunk)).sum(2)
        means = masked.group.sum(sums) / key_counts[..., None, None]
        if self.by_query:
            return self._choose_per_query(q, means, masked)
        queries = _block_sums(q, masked).double() / query_counts[..., None, None]
        keys = means.repeat_interleave(heads // k.shape[2], 2)
        scores = torch.einsum("bqhd,bkhd->bhqk", queries, keys)
        own = numbers * self.block // size
        chunk = torch.arange(chunks, device=q.device)
        seen = chunk <= own[:, None]
        scores = _with_own_first(scores, seen, chunk == own[:, None])
        best = torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., : self.top_k]
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & seen
        bits = chosen.repeat_interleave(per_chunk, -1)[..., :blocks]
        causal = torch.arange(blocks, device=q.device) <= numbers[:, None]
        return BlockBitmap(self.block, blocks, bits & causal, geometry.query_blocks)

    def _choose_per_query(self, q: Tensor, means: Tensor, masked: MaskedPositions) -> GatedBitmap:
        geometry, block, size = masked.geometry, self.block, self._chunk_size(masked)
        batch, heads = len(q), q.shape[2]
        chunks, kv_heads, dtype = means.shape[1], means.shape[2], accumulation_dtype(q.dtype)
        local, words = len(masked.numbers), -(-chunks // 32)
        bits = torch.zeros(batch, heads, local, geometry.blocks, dtype=torch.bool, device=q.device)
        gates = torch.zeros(batch, heads, local * block, words, dtype=torch.int32, device=q.device)
        keys = means.to(dtype).permute(0, 2, 3, 1)  # [batch, kv_heads, head_dim, chunks]
        causal = torch.arange(geometry.blocks, device=q.device) <= geometry.query_blocks[:, None]
        at_once = max(1, _SCORE_BYTES // (8 * heads * block * words * 32)) * block
        for b in range(batch):
            num_tokens = masked.num_tokens(b)
            for begin in range(0, num_tokens, at_once):
                end = min(begin + at_once, num_tokens)
                grouped = q[b, begin:end].to(dtype).unflatten(1, (kv_heads, -1))
                queries = grouped.permute(1, 2, 0, 3)  # [kv_heads, group, rows, head_dim]
                scores = (queries @ keys[b, :, None]).flatten(0, 1)
                position = masked.positions[begin:end]
                seen = self._best_chunks(scores, position, geometry.tables.first[b, position], size)
                gates[b, :, begin:end] = pack_bits(seen)
                whole = torch.nn.functional.pad(seen, (0, 0, 0, -(end - begin) % block))
                block_chunks = whole.unflatten(1, (-1, block)).any(2)
                rows = slice(begin // block, -(-end // block))
                chosen = block_chunks.repeat_interleave(size // block, -1)
                bits[b, :, rows] = chosen[..., : geometry.blocks] & causal[rows]
        return GatedBitmap(block, geometry.blocks, bits, geometry.query_blocks, gates, size)

    def _best_chunks(self, scores: Tensor, position: Tensor, first: Tensor, size: int) -> Tensor:
        """Return which chunks each query chooses, bool [heads, queries, chunks]."""
        chunk = torch.arange(scores.shape[-1], device=scores.device)
        own = (position // size)[:, None]
        candidate = (chunk <= own) & ((chunk + 1) * size > first[:, None])
        scores = _with_own_first(scores, candidate, chunk == own)
        top_k = min(self.top_k, scores.shape[-1])
        lowest_kept = torch.topk(scores, top_k, dim=-1).values[..., -1:]
        above, equal = scores > lowest_kept, scores == lowest_kept
        # Chunks that tie for the last places: keep the earliest.
        room = top_k - above.sum(-1, keepdim=True)
        return (above | (equal & (equal.cumsum(-1) <= room))) & candidate

    def _chunk_size(self, masked: MaskedPositions) -> int:
        """Return the number of keys per chunk, at most the length of the padded sequence."""
        return min(self.chunk, masked.geometry.blocks * self.block)

    def _counts(self, masked: MaskedPositions) -> Pair:
        """Return the number of tokens in each local block, and in each chunk. Return 1 for 0."""
        key = (type(self).__name__, self.chunk)
        if key not in masked.cache:
            lengths = np.array([[mask.length] for mask in masked.masks])
            size = self._chunk_size(masked)
            chunks = np.arange(-(-masked.geometry.blocks * self.block // size))
            counts = (
                np.clip(lengths - starts, 1, most).astype(np.float64)
                for starts, most in (
                    (masked.numbers * self.block, self.block),
                    (chunks * size, size),
                )
            )
            masked.cache[key] = tuple(to_device(count, masked.device) for count in counts)
        return masked.cache[key]


def make_pattern(settings: MobaSettings, seed: int) -> MobaPattern:
    return MobaPattern(**vars(settings))


def _with_own_first(scores: Tensor, candidate: Tensor, own: Tensor) -> Tensor:
    """Return scores that rank a query's own chunk first, and chunks it cannot choose last."""
    scores = scores.nan_to_num(0.0).masked_fill(~candidate, float("-inf"))
    return scores.masked_fill(own, float("inf"))


def _block_sums(tokens: Tensor, masked: MaskedPositions) -> Tensor:
    """Return the sum of each local block's tokens, [batch, local blocks, heads, head_dim]."""
    block, dtype = masked.geometry.block, accumulation_dtype(tokens.dtype)
    sums = tokens.new_zeros(len(tokens), len(masked.numbers), *tokens.shape[2:], dtype=dtype)
    for b, total in enumerate(sums):
        # Positions ascend, so padding comes last.
        num_tokens = masked.num_tokens(b)
        full_blocks, remainder = divmod(num_tokens, block)
        full, rest = tokens[b, :num_tokens].split([full_blocks * block, remainder])
        blocks = full.unflatten(0, (full_blocks, block))
        torch.sum(blocks, 1, dtype=dtype, out=total[:full_blocks])
        if remainder:
            total[full_blocks] = rest.sum(0, dtype=dtype)
    return sums
