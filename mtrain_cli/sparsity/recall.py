"""Measure how much of dense attention an index keeps."""

from __future__ import annotations

import torch

from mtrain_cli.attention.index import Index
from mtrain_cli.sparsity.pattern import MaskedPositions

_SCORE_BYTES = 1 << 29


def recall(
    index: Index, q: torch.Tensor, k: torch.Tensor, masked: MaskedPositions, rows: torch.Tensor
) -> torch.Tensor:
    """Return the share of dense attention that the index keeps (MTraining, figure 2b).

    The share of a query is the sum of its softmax probabilities over the keys that the index
    allows. The softmax runs in float32 over all keys that the mask allows.

    Args:
        q, k: [batch, seq, heads, head_dim] and [batch, seq, kv_heads, head_dim], on one worker.
        rows: int64 [rows], positions of the queries to measure, the same for every sequence.

    Returns:
        float32 [batch, heads, rows]; NaN for padding.
    """
    assert masked.group.size == 1, "recall needs all keys of a sequence on one worker"
    batch, seq, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    result = torch.full((batch, heads, len(rows)), float("nan"), device=q.device)
    step = max(1, _SCORE_BYTES // (4 * seq * group))  # queries at a time
    key_positions = torch.arange(seq, device=q.device)
    for start in range(0, len(rows), step):
        chunk = rows[start : start + step]
        allowed = index.allowed(chunk, key_positions)
        for b in range(batch):
            hidden = ~masked.visible(b, chunk, seq)
            for g in range(kv_heads):
                group_heads = slice(g * group, (g + 1) * group)
                queries, keys = q[b, chunk, group_heads].float(), k[b, :, g].float()
                scores = torch.einsum("rhd,kd->hrk", queries, keys) * dim**-0.5
                p = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
                kept = (p * allowed[b, group_heads]).sum(-1)
                result[b, group_heads, start : start + len(chunk)] = kept
    return result
