"""Choose key blocks for each block of queries by the largest score of any query-key pair.

One question among the queries of a block is enough to choose the block that answers it. A sum or a
mean over the queries, as `xattention` and `moba` take it, would let the other queries outvote it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.attention.index import BlockBitmap, GatedBitmap, pack_bits
from mtrain_cli.attention.kernel import IndexRequest
from mtrain_cli.attention.partials import Pair, accumulation_dtype, has_triton, high_product
from mtrain_cli.config.pattern_settings import BlockTopkSettings
from mtrain_cli.sparsity.pattern import NO_ROWS, MaskedPositions

_SINKS = 16  # first keys of a sequence, which nearly every query attends to
_SAMPLES = 1024  # queries and keys of a sequence from which projections are found
_SCORE_BYTES = 1 << 28


@dataclass(frozen=True)
class BlockTopkPattern(BlockTopkSettings):
    """Rank blocks by the maximum of q k - lse over their pairs.

    lse is a query's log-sum-exp over its own block and the first keys. The attention that a query
    gives to a key is at most exp(q k - lse), so no larger attention lies in a block that ranks
    lower. Queries that rest on near keys rank low, and leave the density to those that look far.

    A query sees a chosen block only from the first query of its block on that ranks it so high:
    what later queries look for would tell the model what the next tokens are. With a density, the
    level that a rank must reach, one number per head, and the row cap still depend on all queries.
    """

    @property
    def is_causal(self) -> bool:
        return self.score != "mean"

    def request(self) -> IndexRequest:
        return IndexRequest(self.block, bitmap=True, chunk=self.block if self.is_causal else 0)

    def describe(self) -> str:
        scores = {
            "exact": "exact scores",
            "pca": f"scores of {self.rank} dimensions",
            "mean": "the score of mean query and mean key (a control)",
        }[self.score]
        each = "KV head" if self.index_per == "kv_group" else "query head"
        size = (
            f"every block with a pair above {self.threshold:g}"
            if self.threshold
            else f"{100 * self.density:g}% of the pairs"
        )
        return f"{size} for every {each} and block of queries, by the largest of {scores}"

    def probed_rows(self, length: int) -> Tensor:
        return NO_ROWS

    def estimate(self, q: Tensor, k: Tensor, masked: MaskedPositions, layer: int) -> BlockBitmap:
        """Return the index. Workers gather the keys that scores need, and count scores together."""
        blocks_of = [masked.in_blocks(t[b], b) for t in (q, k) for b in range(len(q))]
        queries, keys = torch.stack(blocks_of[: len(q)]), torch.stack(blocks_of[len(q) :])
        lse = self._near_lse(queries, keys, masked)
        if self.score == "pca" and self.rank < q.shape[-1]:
            queries, keys = self._project(queries, keys, masked)
        if self.score == "mean":
            counts = masked.tables.lengths[:, None] - masked.geometry.key_blocks * self.block
            counts = counts.clamp(1, self.block)[..., None, None, None]
            queries, keys = (t.float().sum(2, keepdim=True) / counts for t in (queries, keys))
            lse = lse.masked_fill(lse.isposinf(), 0.0).mean(-1, keepdim=True)
        everyone = masked.gather_blocks(keys)  # [batch, keys, kv_heads, dim]
        heads, groups = q.shape[2], k.shape[2] if self.index_per == "kv_group" else q.shape[2]
        bits, gates = [], []
        for b in range(len(q)):
            find = partial(
                self._find, queries[b], everyone[b], lse[b], q.shape[-1] ** -0.5, masked, b
            )
            scores = find().unflatten(0, (groups, -1)).amax(1)
            forced = self._forced(masked, b)
            chosen, level = self._choose(scores, forced, masked, b)
            bits.append(chosen.repeat_interleave(heads // groups, 0))
            if self.is_causal:
                per_head = level.repeat_interleave(heads // groups)
                starts = find(per_head).unflatten(0, (groups, -1)).amin(1)
                gates.append(self._gates(chosen, starts.masked_fill(forced, 0)))
        geometry = masked.geometry
        index = BlockBitmap(self.block, geometry.blocks, torch.stack(bits), geometry.query_blocks)
        if not gates:
            return index
        by_head = torch.stack(gates).repeat_interleave(heads // groups, 1)
        return GatedBitmap(**vars(index), gates=by_head, chunk=self.block)

    def _gates(self, chosen: Tensor, starts: Tensor) -> Tensor:
        """Return which blocks each query sees, int32 [heads, local queries, words].

        starts: [heads, local, blocks], first query of a query block that sees a key block.
        """
        row, words = torch.arange(self.block, device=starts.device), -(-starts.shape[-1] // 32)
        gates = torch.empty(
            *starts.shape[:2], self.block, words, dtype=torch.int32, device=starts.device
        )
        for slot in range(starts.shape[1]):
            seen = chosen[:, slot, None] & (starts[:, slot, None] <= row[:, None])
            gates[:, slot] = pack_bits(seen)
        return gates.flatten(1, 2)

    def _near_lse(self, q: Tensor, k: Tensor, masked: MaskedPositions) -> Tensor:
        """Return each query's lse over near keys, [batch, heads, local blocks, block].

        It is +inf for padding. The first keys of the sequence are those that a query of the first
        block does not already see as its own.
        """
        batch, local, block, heads, dim = q.shape
        kv_heads, dtype = k.shape[3], accumulation_dtype(q.dtype)
        sinks = k.new_zeros(batch, _SINKS, kv_heads, dim)
        if masked.numbers[0] == 0:
            sinks.copy_(k[:, 0, :_SINKS])
        masked.group.sum(sinks)
        rows = masked.positions.view(local, block)
        first = masked.tables.first[:, masked.positions].view(batch, local, block, 1)
        sink = torch.arange(_SINKS, device=q.device)
        result = torch.empty(batch, heads, local, block, dtype=dtype, device=q.device)
        at_once = max(1, _SCORE_BYTES // (4 * heads * block * (block + _SINKS)))
        for b in range(batch):
            for begin in range(0, local, at_once):
                part = slice(begin, begin + at_once)
                near = torch.cat([k[b, part], sinks[b].expand(len(k[b, part]), -1, -1, -1)], 1)
                own = rows[part]
                key = torch.cat([own, sink.expand(len(own), -1)], 1)[:, None]
                seen = (key >= first[b, part]) & (key <= own[..., None])
                seen[..., block:] &= sink < own[:, :1, None]  # else it is a key of its own block
                # [kv_heads * blocks, group * block, dim] and [kv_heads * blocks, dim, keys]
                left = q[b, part].unflatten(2, (kv_heads, -1)).permute(2, 0, 3, 1, 4)
                right = near.permute(2, 0, 3, 1).flatten(0, 1)
                products = high_product(left.flatten(2, 3).flatten(0, 1), right)
                scores = products.view(*left.shape[:-1], -1).mul_(dim**-0.5)
                lse = scores.masked_fill_(~seen[:, None], float("-inf")).logsumexp(-1)
                result[b, :, part] = lse.transpose(1, 2).flatten(0, 1)
        return result.masked_fill_(result.isneginf(), float("inf"))

    def _project(self, q: Tensor, k: Tensor, masked: MaskedPositions) -> Pair:
        """Return queries and keys of ``rank`` dimensions, of whose products the error is least.

        With the Cholesky factors A and B of the second moments of a group's queries and of its
        keys, the directions are those of the largest singular values of A' B.
        """
        kv_heads, dim = k.shape[3:]
        samples = self._sampled(torch.cat([q, k], 3), masked).double()
        queries, keys = samples.split([q.shape[3], kv_heads], 2)
        # [kv_heads, samples, dim]
        queries = queries.unflatten(2, (kv_heads, -1)).movedim(2, 0).flatten(1, 3)
        keys = keys.movedim(2, 0).flatten(1, 2)
        factors = []
        for tokens in (queries, keys):
            moments = tokens.mT @ tokens
            level = moments.diagonal(dim1=1, dim2=2).mean(-1)[:, None, None].clamp(min=1e-30)
            noise = 1e-6 * level * torch.eye(dim, dtype=torch.float64, device=q.device)
            factors.append(torch.linalg.cholesky(moments / level + noise))
        a, b = factors
        u, s, vt = torch.linalg.svd(a.mT @ b)
        root = s[:, None, : self.rank].sqrt()
        left = torch.linalg.solve_triangular(a.mT, u[..., : self.rank] * root, upper=True)
        right = torch.linalg.solve_triangular(b.mT, vt.mT[..., : self.rank] * root, upper=True)
        by_head = left.to(q.dtype).repeat_interleave(q.shape[3] // kv_heads, 0)
        low_q = torch.einsum("bnihd,hdr->bnihr", q, by_head)
        return low_q, torch.einsum("bnihd,hdr->bnihr", k, right.to(k.dtype))

    def _sampled(self, tokens: Tensor, masked: MaskedPositions) -> Tensor:
        """Return tokens of all workers, evenly spaced, [batch, samples, heads, dim]."""
        result = tokens.new_zeros(len(tokens), _SAMPLES, *tokens.shape[3:])
        for b, own in enumerate(tokens):
            length = masked.masks[b].length
            wanted = np.unique(np.linspace(0, length - 1, min(_SAMPLES, length)).astype(np.int64))
            _, target, slots = np.intersect1d(
                wanted, masked.host_positions, assume_unique=True, return_indices=True
            )
            at, source = (to_device(t, tokens.device) for t in (target, slots))
            result[b].index_copy_(0, at, own.flatten(0, 1).index_select(0, source))
        return masked.group.sum(result)  # exact: one worker has each token and others add zeros

    def _find(
        self,
        q: Tensor,
        k: Tensor,
        lse: Tensor,
        scale: float,
        masked: MaskedPositions,
        b: int,
        level: Tensor | None = None,
    ) -> Tensor:
        """Return the largest score of each local query block and earlier key block.

        q: [local blocks, rows, heads, dim]. k: [blocks * rows, kv_heads, dim]. rows: the block
            size, or 1 for means.
        level: float [heads], for the first query of a block with a score of that level instead.

        Returns:
            [heads, local blocks, blocks]; -inf where no query sees a key, or the block size if no
            query has such a score.
        """
        local, rows, heads, _ = q.shape
        blocks, kv_heads = masked.geometry.blocks, k.shape[1]
        numbers, tables = masked.geometry.query_blocks, masked.tables
        first = tables.first[b].view(blocks, -1)
        if rows == 1:
            first = first.amin(-1, keepdim=True) // self.block
        if fused_scores_usable(q, self.block) and rows > 1:
            from mtrain_cli.kernels.triton import block_scores

            return block_scores.largest_scores(
                q.contiguous(), k.contiguous(), lse, first, numbers, scale, self.block, level
            )
        results = []
        key = torch.arange(len(k), device=q.device)
        transposed = k.permute(1, 2, 0)
        # The shapes of these products do not depend on the number of workers, nor does rounding.
        for i in range(local):
            number = int(masked.numbers[i])
            queries = q[i].permute(1, 0, 2).unflatten(0, (kv_heads, -1)).flatten(1, 2)
            scores = high_product(queries, transposed).view(heads, rows, -1).to(lse.dtype)
            scores = scores.mul_(scale).sub_(lse[:, i, :, None])
            seen = (key >= first[number][:, None]) & (key < number * rows)
            scores.masked_fill_(~seen | ~(scores < math.inf), -math.inf)
            of_queries = scores.view(heads, rows, blocks, rows).amax(-1)
            if level is None:
                results.append(of_queries.amax(1))
            else:
                reached = (of_queries.float() >= level[:, None, None]).to(torch.int32)
                results.append(torch.where(reached.any(1), reached.argmax(1), rows))
        return torch.stack(results, 1)

    def _forced(self, masked: MaskedPositions, b: int) -> Tensor:
        """Return the first block, the own one and the one before, bool [local, blocks]."""
        numbers = masked.geometry.query_blocks.long()[:, None]
        block = torch.arange(masked.geometry.blocks, device=numbers.device)
        forced = (block == numbers) | (block == numbers - 1) | (block == 0)
        return forced & (masked.tables.per_block[b] > 0)

    def _choose(self, scores: Tensor, forced: Tensor, masked: MaskedPositions, b: int) -> Pair:
        """Return the chosen blocks, bool [heads, local, blocks], and their least score [heads]."""
        if self.threshold:
            level = scores.new_full((len(scores),), math.log(self.threshold), dtype=torch.float32)
            return forced | (scores.float() >= level[:, None, None]), level
        pairs = masked.tables.per_block[b]
        ranks = _ordered(scores.float().masked_fill_(forced, -math.inf))
        numbers = masked.geometry.query_blocks.long()[:, None]
        allowed = self.row_cap * self.density * (numbers + 1)
        cap = (allowed.ceil().long() - forced.sum(-1, keepdim=True)).clamp(min=1)
        ranks.masked_fill_(ranks < _level(ranks, cap, lambda count: count), 0)
        sums = torch.stack([pairs.sum(dtype=torch.int64), (pairs * forced).sum(dtype=torch.int64)])
        total, used = masked.group.sum(sums)
        room = ((self.density * total.double() - used) / self.block**2).floor().long().clamp(min=0)
        level = _level(ranks.flatten(1), room, masked.group.sum)
        return forced | (ranks >= level[..., None]), _score_of(level[:, 0])


def fused_scores_usable(q: Tensor, block: int) -> bool:
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16) or block < 16:
        return False
    return q.shape[-1] in (16, 32, 64, 128) and has_triton()


_LOWEST = -(0x7F800000 + 1)  # of -inf


def _ordered(scores: Tensor) -> Tensor:
    """Return int64 numbers in the order of float32 scores: 0 for -inf, more for all others."""
    bits = scores.view(torch.int32)
    ordered = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    return (ordered - _LOWEST).clamp_(min=0)


def _score_of(ranks: Tensor) -> Tensor:
    """Return the float32 scores with these `_ordered` numbers."""
    ordered = (ranks + _LOWEST).to(torch.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).view(torch.float32)


def _level(ranks: Tensor, room: Tensor, add: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the least level above 0 that at most ``room`` ranks of a row reach, [..., 1].

    Every bit of a level takes one comparison with all ranks, and one sum over the workers.
    """
    level = torch.zeros_like(ranks[..., :1])
    for bit in reversed(range(32)):
        # The largest level that still more than `room` ranks reach.
        higher = level | (1 << bit)
        reached = add((ranks >= higher).sum(-1, keepdim=True))
        level = torch.where(reached > room, higher, level)
    return level + 1


def make_pattern(settings: BlockTopkSettings, seed: int) -> BlockTopkPattern:
    return BlockTopkPattern(**vars(settings))
