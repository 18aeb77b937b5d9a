"""How far two checkpoints choose the same keys and the same lines for the same input.

The measure is the Jaccard index of two sets: the size of their intersection divided by the size of
their union. It is 1 for equal sets, and 0 for sets without a common element.
"""

from __future__ import annotations

import torch

from mtrain_cli.attention.index import VerticalSlash


def key_overlap(one: torch.Tensor, other: torch.Tensor, count: int) -> torch.Tensor:
    """Return the Jaccard index of the ``count`` largest keys of each query, float32 [heads, rows].

    one, other: `TopKeys.keys`, int32 [heads, rows, at least ``count``]. The first ``count`` keys of
        a query must be distinct.
    """
    both = torch.cat([one[..., :count], other[..., :count]], -1).sort(-1).values
    shared = (both[..., 1:] == both[..., :-1]).sum(-1)
    return shared / (2 * count - shared).float()


def line_overlap(one: VerticalSlash, other: VerticalSlash) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the Jaccard indices of slashes and of columns, each float32 [batch, heads].

    Two empty sets have the index 1.
    """
    assert (one.block, one.blocks) == (other.block, other.blocks)
    slashes = _jaccard(one.slashes, other.slashes)
    return slashes, _jaccard(_column_table(one), _column_table(other))


def _column_table(index: VerticalSlash) -> torch.Tensor:
    """Return which keys are columns, bool [batch, heads, blocks * block]."""
    tokens = index.blocks * index.block
    device = index.columns.device
    table = torch.zeros(*index.heads, tokens + 1, dtype=torch.bool, device=device)
    # Unused entries hold `tokens`.
    return table.scatter_(-1, index.columns.long(), True)[..., :-1]


def _jaccard(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    shared, union = (one & other).sum(-1), (one | other).sum(-1)
    return torch.where(union > 0, shared / union.clamp(min=1).float(), 1.0)
