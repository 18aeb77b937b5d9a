"""The largest score of each head, which QK-clip bounds (arXiv:2507.20534, section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtrain_cli.attention.index import Index
from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.attention.partials import high_product
from mtrain_cli.attention.tiles import Tiles

_SCORE_BYTES = 1 << 27  # of the scores that are computed at once


@torch.no_grad()
def max_logits(
    q: Tensor, k: Tensor, positions: IntArray, masks: Sequence[SequenceMask], index: Index | None
) -> Tensor:
    """Return the largest q k / sqrt(head_dim) of each head over the allowed pairs, [heads].

    A second pass over the pairs that the masks allow: no kernel keeps its running maxima, and the
    log-sum-exp only bounds them.

    q: [sequences, tokens, heads, head_dim], queries at these positions. k: whole sequences.
    index: narrows the pairs; None for all.
    """
    seq, kv_heads = k.shape[1:3]
    heads, group = q.shape[2], q.shape[2] // kv_heads
    rows = max(1, _SCORE_BYTES // (4 * heads * seq))
    keys = torch.arange(seq, device=q.device)
    whole = torch.full((kv_heads, group), -torch.inf, device=q.device)
    for b, mask in enumerate(masks):
        of_sequence = k[b].permute(1, 2, 0)
        for start in range(0, len(positions), rows):
            part = positions[start : start + rows]
            spans = mask.spans(part, keys.cpu().numpy())
            stop = int(spans.high.max())
            if not spans.pairs:
                continue
            own = q[b, start : start + rows].permute(1, 0, 2).unflatten(0, (kv_heads, group))
            scores = high_product(own.flatten(1, 2), of_sequence[..., :stop])
            seen = Tiles.make([spans], q.device).seen()[0, ..., :stop]
            if index is not None:
                at = torch.from_numpy(part).to(q.device)
                seen = seen & index.allowed(at, keys[:stop])[b]
            seen = seen.expand(heads, -1, -1).reshape(kv_heads, -1, stop)
            largest = scores.masked_fill_(~seen, -torch.inf).flatten(2).amax(-1)
            whole = torch.maximum(whole, largest.unflatten(1, (group, -1)).amax(-1))
    return whole.flatten() * q.shape[3] ** -0.5
