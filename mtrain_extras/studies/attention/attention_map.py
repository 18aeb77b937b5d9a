"""The whole attention matrix of a head and its gradient, as the means of square cells.

The matrix itself is never in memory: the functions compute some rows at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mtrain_cli.attention.partials import accumulation_dtype

_SCORE_BYTES = 1 << 29  # of one matrix of scores


@dataclass(frozen=True)
class AttentionMap:
    """Means over cells of queries and keys (MTraining, figures 2c and 2d).

    A cell covers ``width`` queries and ``width`` keys; the last row and column may cover fewer. The
    means count only the pairs that the mask allows. They are NaN if there is no such pair.

    width: number of tokens along each side of a cell.
    attention: float64 [cells, cells], mean of the softmax probabilities A.
    gradient: float64 [cells, cells], mean of |dL/dS|, where S are the scores divided by
        sqrt(head_dim).
    """

    width: int
    attention: torch.Tensor
    gradient: torch.Tensor


@torch.no_grad()
def attention_map(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dout: torch.Tensor,
    first: torch.Tensor,
    cells: int,
) -> AttentionMap:
    """Compute A and dL/dS = A * (dO V^T - delta) (MTraining, equation 1), both dense.

    delta of a query is the sum of A * dO V^T over its keys.

    Args:
        q, k, v, dout: [tokens, head_dim] of one query head; ``dout`` is the gradient of its output.
        first: int [tokens], position of the first key that each query sees. The last is the query's
            own position.
        cells: largest number of cells along a side.
    """
    tokens, dim = q.shape
    dtype, device = accumulation_dtype(q.dtype), q.device
    width = -(-tokens // cells)
    side = -(-tokens // width)
    q, k, v, dout = (t.to(dtype) for t in (q, k, v, dout))
    q = q * dim**-0.5
    sums = torch.zeros(3, side, side, dtype=torch.float64, device=device)
    starts = torch.arange(side, device=device) * width
    positions = torch.arange(tokens, device=device)
    step = max(1, _SCORE_BYTES // (dtype.itemsize * tokens))  # queries at a time
    for begin in range(0, tokens, step):
        rows = positions[begin : begin + step]
        seen = begin + len(rows)  # later keys are hidden from all of these queries
        keys, oldest = positions[:seen], first[rows, None]
        hidden = (keys < oldest) | (keys > rows[:, None])
        scores = (q[rows] @ k[:seen].T).masked_fill_(hidden, float("-inf"))
        p = scores.softmax(-1).nan_to_num_(nan=0.0)
        dp = dout[rows] @ v[:seen].T
        ds = dp.sub_((p * dp).sum(-1, keepdim=True)).mul_(p).abs_()
        # The number of keys of each cell that a query sees.
        pairs = torch.minimum(starts + width, rows[:, None] + 1) - torch.maximum(starts, oldest)
        for total, values in zip(
            sums, (_by_cell(p, width, side), _by_cell(ds, width, side), pairs.clamp_(min=0)),
            strict=True,
        ):  # fmt: skip
            total.index_add_(0, rows // width, values.double())
    return AttentionMap(width, *(sums[:2] / sums[2]))


def _by_cell(values: torch.Tensor, width: int, side: int) -> torch.Tensor:
    """Sum the columns of each cell: [rows, keys] to [rows, side]. Missing keys count as 0."""
    missing = side * width - values.shape[-1]
    return torch.nn.functional.pad(values, (0, missing)).unflatten(-1, (side, width)).sum(-1)
