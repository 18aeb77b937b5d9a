"""How much of dense attention an index keeps."""

from __future__ import annotations

import torch

from mtrain_cli.attention.index import Index
from mtrain_cli.sparsity.pattern import MaskedPositions

_SCORE_BYTES = 1 << 29


def recall(
    index: Index, q: torch.Tensor, k: torch.Tensor, masked: MaskedPositions, rows: torch.Tensor
) -> torch.Tensor:
    """The share of the attention of the queries at positions ``rows`` (int64 [rows], the same for every sequence) that falls on pairs
    which the index allows: the quantity of MTraining, figure 2b. Softmax in float32 over all that the mask allows.

    q [batch, seq, heads, head_dim], k [batch, seq, kv_heads, head_dim], all on one worker -> float32 [batch, heads, rows]; NaN for
    padding.
    """
    assert masked.group.size == 1, "recall needs all keys of a sequence in one place"
    batch, seq, heads, dim = q.shape
    kv_heads = k.shape[2]
    group = heads // kv_heads
    result = torch.full((batch, heads, len(rows)), float("nan"), device=q.device)
    at_once = max(1, _SCORE_BYTES // (4 * seq * group * max(1, len(rows))))
    step = max(1, len(rows) * at_once) if at_once > 1 else max(1, _SCORE_BYTES // (4 * seq * group))
    keys_at = torch.arange(seq, device=q.device)
    for start in range(0, len(rows), step):
        part = rows[start : start + step]
        allowed = index.allowed(part, keys_at)
        for b in range(batch):
            hidden = ~masked.visible(b, part, seq)
            for g in range(kv_heads):
                own = slice(g * group, (g + 1) * group)
                scores = (
                    torch.einsum("rhd,kd->hrk", q[b, part, own].float(), k[b, :, g].float())
                    * dim**-0.5
                )
                p = scores.masked_fill_(hidden, float("-inf")).softmax(-1)
                result[b, own, start : start + len(part)] = (p * allowed[b, own]).sum(-1)
    return result
