"""The keys to which a query attends most, and the attention that they hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mtrain_cli.sparsity.pattern import MaskedPositions
from mtrain_cli.sparsity.recall import row_probabilities


@dataclass(frozen=True)
class TopKeys:
    """The keys with the most attention of the sampled queries of one sequence.

    mass: [counts, heads, rows], share of attention that the k largest keys hold, for each count k.
    keys: int32 [heads, rows, largest k], positions of these keys, the largest first. Entries after
        the last key that the query sees are meaningless.
    seen: int64 [rows], number of keys that each query sees.
    """

    mass: torch.Tensor
    keys: torch.Tensor
    seen: torch.Tensor


def top_keys(
    q: torch.Tensor,
    k: torch.Tensor,
    masked: MaskedPositions,
    rows: torch.Tensor,
    counts: Sequence[int],
) -> TopKeys:
    """Find the largest keys of some queries of the first sequence (MTraining, figure 2b).

    Args:
        q, k: [1, seq, heads, head_dim] and [1, seq, kv_heads, head_dim], on one worker.
        rows: int64 [rows], positions of the queries.
        counts: numbers of keys, from 1 to seq.
    """
    assert len(q) == 1, "one sequence at a time"
    heads, largest = q.shape[2], max(counts)
    assert 1 <= min(counts) <= largest <= k.shape[1]
    at = torch.tensor([count - 1 for count in counts], device=q.device)
    mass = torch.empty(len(counts), heads, len(rows), device=q.device)
    keys = torch.empty(heads, len(rows), largest, dtype=torch.int32, device=q.device)
    for part, _, of_group, p in row_probabilities(q, k, masked, rows):
        values, places = p.topk(largest, -1)
        mass[:, of_group, part] = values.cumsum(-1)[..., at].movedim(-1, 0).to(mass.dtype)
        keys[of_group, part] = places.int()
    seen = rows - masked.tables.first[0, rows] + 1
    return TopKeys(mass, keys, seen)
