"""Compute the dense attention of sampled queries, and measure how much of it an index keeps."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from mtrain_cli.attention.index import Index
from mtrain_cli.attention.partials import accumulation_dtype
from mtrain_cli.sparsity.pattern import MaskedPositions

_SCORE_BYTES = 1 << 29


def row_probabilities(
    q: Tensor, k: Tensor, masked: MaskedPositions, rows: Tensor
) -> Iterator[tuple[slice, int, slice, Tensor]]:
    """Yield the softmax probabilities of some queries over all keys that the mask allows.

    Each item is (slice of ``rows``, sequence, slice of the query heads, [heads, rows, keys]) within
    the memory budget. All items of a slice of ``rows`` follow each other.
    """
    assert masked.group.size == 1, "needs all keys of a sequence on one worker"
    batch, seq, heads, dim = q.shape
    kv_heads, dtype = k.shape[2], accumulation_dtype(q.dtype)
    group = heads // kv_heads
    step = max(1, _SCORE_BYTES // (4 * seq * group))  # queries at a time
    for start in range(0, len(rows), step):
        part = slice(start, min(start + step, len(rows)))
        for b in range(batch):
            hidden = ~masked.visible(b, rows[part], seq)
            for g in range(kv_heads):
                of_group = slice(g * group, (g + 1) * group)
                queries, keys = q[b, rows[part], of_group].to(dtype), k[b, :, g].to(dtype)
                scores = torch.einsum("rhd,kd->hrk", queries, keys) * dim**-0.5
                yield part, b, of_group, scores.masked_fill_(hidden, float("-inf")).softmax(-1)


def recall(index: Index, q: Tensor, k: Tensor, masked: MaskedPositions, rows: Tensor) -> Tensor:
    """Return the share of dense attention that the index keeps (MTraining, section 3.1).

    The share of a query is the sum of its softmax probabilities over the keys that the index
    allows, float32 [batch, heads, rows]; NaN for padding.
    """
    batch, seq, heads, _ = q.shape
    result = torch.full((batch, heads, len(rows)), float("nan"), device=q.device)
    key_positions = torch.arange(seq, device=q.device)
    current, allowed = None, torch.empty(0)
    for part, b, of_group, p in row_probabilities(q, k, masked, rows):
        if part != current:
            current, allowed = part, index.allowed(rows[part], key_positions)
        result[b, of_group, part] = (p * allowed[b, of_group]).sum(-1).float()
    return result
