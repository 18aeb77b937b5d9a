"""Projections of queries and keys to few dimensions, which learn where queries of a layer look.

The queries of a KV group and its keys are projected to ``rank`` dimensions each. The softmax over
their products imitates the group's attention, so that it shows which blocks a query needs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.attention.partials import Pair, has_triton
from mtrain_cli.sparsity.pattern import MaskedPositions

FIRST_UPDATES = 128  # with the first batch, before the maps choose anything
EARLY_UPDATES, LATER_UPDATES = 8, 1  # with every later batch
_SETTLED = 1024  # updates from which on a batch is a later one
_FIRST_ROWS, _ROWS = 256, 64  # most queries of each of the first updates, and of a later one
_SCORE_BYTES = 1 << 29
_RATE, _LAST_RATE = 3e-3, 3e-4
_WARM_UP = 20
_BETAS = (0.9, 0.999)
_BASE_WEIGHT = 0.02  # of queries without far attention, which must learn to choose nothing


@dataclass
class IndexMaps:
    """The maps of a layer and their Adam moments, float32, equal on all workers.

    query: [kv_heads, group * head_dim, rank].
    key: [kv_heads, head_dim, rank].
    updates: number of updates, int64 on the CPU.
    """

    query: Tensor
    key: Tensor
    query_mean: Tensor
    query_square: Tensor
    key_mean: Tensor
    key_square: Tensor
    updates: Tensor

    @staticmethod
    def make(
        heads: int, kv_heads: int, head_dim: int, rank: int, seed: int, device: torch.device
    ) -> IndexMaps:
        """Return maps whose products are those of random projections, summed over a group."""
        generator = torch.Generator().manual_seed(seed)
        draws = torch.randn(kv_heads, head_dim, rank, generator=generator, dtype=torch.float64)
        key = torch.linalg.qr(draws)[0].float().to(device)
        query = (key * head_dim**-0.5).repeat(1, heads // kv_heads, 1)
        means, squares = ([torch.zeros_like(t) for t in (query, key)] for _ in range(2))
        count = torch.zeros((), dtype=torch.int64)
        return IndexMaps(query, key, means[0], squares[0], means[1], squares[1], count)

    @property
    def due(self) -> int:
        """Number of updates that the next batch makes."""
        if not self.updates:
            return FIRST_UPDATES
        return EARLY_UPDATES if self.updates < _SETTLED else LATER_UPDATES

    def project(self, q: Tensor, k: Tensor) -> Pair:
        """Return queries and keys [..., kv_heads, rank] of [..., heads, head_dim]."""
        groups = q.unflatten(-2, (k.shape[-2], -1)).flatten(-2)
        return (
            torch.einsum("...gd,gdr->...gr", groups, self.query.to(q.dtype)),
            torch.einsum("...gd,gdr->...gr", k, self.key.to(k.dtype)),
        )

    def learn(self, q: Tensor, k: Tensor, masked: MaskedPositions, b: int, seed: int) -> None:
        """Update the maps with sampled queries of one sequence. All workers call it together.

        The loss of a query is the cross-entropy between two distributions over its far keys, each
        with one more entry for all near keys, those of blocks that every query sees: its attention,
        where a key has the largest of the group's heads, and the softmax over projected products.
        Queries count by their largest far attention, or those that ask nothing would rule.

        q, k: [local blocks, block, heads or kv_heads, head_dim].
        """
        block, heads = q.shape[1:3]
        keys, kv_heads = k.flatten(0, 1).float(), k.shape[2]
        rng = np.random.default_rng([seed, int(self.updates)])
        length = masked.masks[b].length
        most = _ROWS if self.updates >= FIRST_UPDATES else _FIRST_ROWS
        # The count must not depend on the number of workers, nor on how many of them share keys.
        scores = kv_heads if _fused(k, block) else heads
        seq = masked.tables.blocks * block
        count = max(16, min(most, _SCORE_BYTES // (4 * scores * seq)))
        rows = np.sort(rng.integers(min(2 * block, length - 1), length, count))
        queries = self._gathered(q.flatten(0, 1), rows, masked)
        at = to_device(rows, q.device)
        seen = masked.visible(b, at, len(keys))
        number, own = masked.positions // block, at[:, None] // block
        near = (number >= own - 1) | (number == 0)
        # [kv_heads, rows, keys]
        far, near_sum = _attention(queries, k.flatten(0, 1), at, seen, near, masked, b)
        far_sum, near_sum = masked.group.sum(torch.stack([far.sum(-1), near_sum]))
        whole = (far_sum + near_sum).clamp(min=1e-20)
        weight = masked.group.max(far.amax(-1)) + _BASE_WEIGHT
        weight /= weight.sum(-1, keepdim=True)

        # [kv_heads, rows, group * head_dim] and [kv_heads, keys, head_dim]
        wide = queries.float().unflatten(1, (kv_heads, -1)).movedim(1, 0).flatten(2)
        keys = keys.movedim(1, 0)
        low_q, low_k = wide @ self.query, keys @ self.key
        logits = (low_q @ low_k.mT).masked_fill_(~seen, -math.inf)
        of_near = logits.masked_fill(~near, -math.inf)
        gradient = (logits - _whole_lse(logits, masked)[..., None]).exp_()
        gradient -= far / whole[..., None]
        near_share = (near_sum / whole)[..., None]
        gradient -= near_share * (of_near - _whole_lse(of_near, masked)[..., None]).exp_()
        gradient *= weight[..., None]
        # A GPU computes few sums over many keys with few of its multiprocessors, so sum by blocks.
        by_block = gradient.unflatten(-1, (-1, block)).transpose(1, 2)
        by_query = (by_block @ low_k.unflatten(1, (-1, block))).sum(1)
        of_keys = (gradient.mT @ low_q).unflatten(1, (-1, block))
        by_key = (keys.unflatten(1, (-1, block)).mT @ of_keys).sum(1)
        sizes = [by_query[0].numel(), by_key[0].numel()]
        summed = masked.group.sum(torch.cat([by_query.flatten(1), by_key.flatten(1)], 1))
        by_query, by_key = (
            part.reshape(shape.shape)
            for part, shape in zip(summed.split(sizes, 1), (by_query, by_key), strict=True)
        )
        self._step(wide.mT @ by_query, by_key)

    def _gathered(self, tokens: Tensor, rows: np.ndarray, masked: MaskedPositions) -> Tensor:
        """Return the tokens of all workers at these positions, exactly, [rows, heads, dim]."""
        slots = np.searchsorted(masked.host_positions, rows)
        slots = slots.clip(max=len(masked.host_positions) - 1)
        own = masked.host_positions[slots] == rows
        picked = tokens.index_select(0, to_device(slots, tokens.device))
        # One worker has each token, and others add zeros.
        return masked.group.sum(picked * to_device(own, tokens.device)[:, None, None])

    def _step(self, by_query: Tensor, by_key: Tensor) -> None:
        """Apply Adam (arXiv:1412.6980, algorithm 1)."""
        self.updates += 1
        step = int(self.updates)
        progress = min(1.0, step / _SETTLED)
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        rate = (_LAST_RATE + (_RATE - _LAST_RATE) * cosine) * min(1.0, step / _WARM_UP)
        for values, mean, square, gradient in (
            (self.query, self.query_mean, self.query_square, by_query),
            (self.key, self.key_mean, self.key_square, by_key),
        ):
            mean.lerp_(gradient, 1 - _BETAS[0])
            square.lerp_(gradient**2, 1 - _BETAS[1])
            size = (square / (1 - _BETAS[1] ** step)).sqrt_().add_(1e-8)
            values.sub_(mean / size, alpha=rate / (1 - _BETAS[0] ** step))


def _attention(
    queries: Tensor, keys: Tensor, at: Tensor, seen: Tensor, near: Tensor, masked: MaskedPositions,
    b: int,
) -> Pair:  # fmt: skip
    """Return the attention to far keys, and the sum over near ones, of some queries.

    queries: [rows, heads, head_dim], at positions ``at``. keys: [keys, kv_heads, head_dim].
    seen, near: bool [rows, keys].

    Returns:
        [kv_heads, rows, keys], the largest of a group's heads, 0 for near keys; and [kv_heads,
        rows], their mean.
    """
    block, kv_heads, scale = masked.tables.block, keys.shape[1], queries.shape[2] ** -0.5
    if _fused(keys, block):
        from mtrain_cli.kernels.triton import probe

        first, rows, tile = masked.tables.first[b][at], at.int(), min(block, 64)
        shards = (queries, keys, first, rows, masked.geometry.query_blocks, block, tile, scale)
        of_tiles = probe.tile_lse(*shards)  # [tiles, heads, rows]
        lse = masked.group.gather(of_tiles.logsumexp(0)).logsumexp(0)
        far = probe.largest_attention(*shards, lse).masked_fill_(near, 0.0)
        near_tiles = near[:, ::tile].T[:, None]
        sums = (of_tiles - lse).exp_().mul_(near_tiles).sum(0)
        return far, sums.unflatten(0, (kv_heads, -1)).mean(1)
    grouped = queries.float().unflatten(1, (kv_heads, -1)).movedim(1, 0)
    scores = (grouped.flatten(1, 2) @ keys.float().movedim(1, 0).mT).mul_(scale)
    scores = scores.unflatten(1, (len(at), -1)).masked_fill_(~seen[:, None], -math.inf)
    attention = scores.sub_(_whole_lse(scores, masked)[..., None]).exp_()
    far = attention.amax(2).masked_fill_(near, 0.0)
    return far, attention.mul_(near[:, None]).sum(-1).mean(-1)


def _fused(keys: Tensor, block: int) -> bool:
    return keys.is_cuda and keys.dtype != torch.float32 and block >= 16 and has_triton()


def _whole_lse(scores: Tensor, masked: MaskedPositions) -> Tensor:
    """Return the log-sum-exp over the keys of all workers; 0 if a query sees none of them."""
    lse = masked.group.gather(scores.logsumexp(-1)).logsumexp(0)
    return lse.masked_fill_(lse.isneginf(), 0.0)
