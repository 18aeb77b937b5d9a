"""How much of the variance of attention scores depends on the distance, and how much on the key.

A slash in the attention matrix is a set of pairs with the same distance of query and key, and a
column is a set of pairs with the same key. If the scores of a head depend only on the distance, the
head attends in slashes; if they depend only on the key, it attends in columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from mtrain_cli.attention.partials import accumulation_dtype

_SCORE_BYTES = 1 << 29  # of one matrix of scores
_PASSES, _PRECISION = 500, 1e-9  # of the least-squares fit; typically 20 passes


@dataclass(frozen=True)
class SeenPairs:
    """The query-key pairs that a mask allows, by distance and by key.

    last: int64 [tokens], position of the last query that sees each key. The first such query is at
        the key's own position. Below the key's position if no query sees the key.
    """

    last: torch.Tensor

    @cached_property
    def by_key(self) -> torch.Tensor:
        """Number of queries that see each key, int64 [tokens]."""
        tokens = torch.arange(len(self.last), device=self.last.device)
        return (self.last - tokens + 1).clamp(min=0)

    @cached_property
    def by_distance(self) -> torch.Tensor:
        """Number of pairs at each distance, int64 [tokens]."""
        return self.keys_at_distance(torch.ones_like(self.last))

    def keys_at_distance(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a value of each key over the pairs at each distance, [..., keys] to [..., distances].

        A key has pairs at the distances below `by_key`.
        """
        tokens = len(self.last)
        sums = values.new_zeros(*values.shape[:-1], tokens + 1).index_add_(-1, self.by_key, values)
        return sums.flip(-1).cumsum(-1).flip(-1)[..., 1:]

    def distances_of_key(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a value of each distance over the pairs of each key, [..., tokens]."""
        sums = torch.nn.functional.pad(values.cumsum(-1), (1, 0))
        return sums[..., self.by_key]


@dataclass(frozen=True)
class ScoreSums:
    """Sums of the scores of some heads over all pairs that the mask allows, float64.

    distances: [heads, tokens], sum over the pairs at each distance.
    keys: [heads, tokens], sum over the queries that see each key.
    squares: [heads], sum of the squared scores.
    """

    distances: torch.Tensor
    keys: torch.Tensor
    squares: torch.Tensor


@dataclass(frozen=True)
class VarianceShares:
    """Shares of the variance of the scores, float64 [heads]. NaN if the scores do not vary.

    slash: share that the best function of the distance explains.
    vertical: share that the best function of the key explains.
    both: share that the best sum of two such functions explains; at least each of the above.
    """

    slash: torch.Tensor
    vertical: torch.Tensor
    both: torch.Tensor

    @property
    def rest(self) -> torch.Tensor:
        """The share that neither distance nor key explains."""
        return 1 - self.both


@torch.no_grad()
def score_sums(q: torch.Tensor, k: torch.Tensor, first: torch.Tensor) -> ScoreSums:
    """Sum the scores q.k / sqrt(head_dim), some rows at a time. The time grows as tokens squared.

    Args:
        q, k: [tokens, heads, head_dim] and [tokens, kv_heads, head_dim], one sequence.
        first: int [tokens], position of the first key that each query sees.
    """
    tokens, heads, dim = q.shape
    group, dtype, device = heads // k.shape[1], accumulation_dtype(q.dtype), q.device
    distances = torch.zeros(heads, tokens, dtype=torch.float64, device=device)
    keys, squares = torch.zeros_like(distances), torch.zeros_like(distances[:, 0])
    backward = torch.arange(tokens - 1, -1, -1, device=device)
    step = min(tokens, max(1, _SCORE_BYTES // (2 * dtype.itemsize * tokens)))  # queries at a time
    buffer = torch.zeros(step * (tokens + step), dtype=dtype, device=device)
    for begin in range(0, tokens, step):
        rows = torch.arange(begin, min(begin + step, tokens), device=device)
        seen, count = begin + len(rows), len(rows)
        # Keys in descending order, so that pairs with equal distance lie on antidiagonals. Each row
        # ends with zeros, which the antidiagonals of other rows cross.
        width = seen + count - 1
        table = buffer[: count * width].zero_().view(count, width)
        shown = backward[tokens - seen :]
        hidden = (shown < first[rows, None]) | (shown > rows[:, None])
        for head in range(heads):
            reversed_keys = k[:seen, head // group].flip(0).to(dtype)
            torch.mm(q[rows, head].to(dtype) * dim**-0.5, reversed_keys.T, out=table[:, :seen])
            scores = table[:, :seen].masked_fill_(hidden, 0.0)
            keys[head, :seen] += scores.sum(0).flip(0).double()
            squares[head] += scores.square().sum(1).double().sum()
            # Column t of the view holds the scores at distance t - (count - 1).
            skewed = table.as_strided((count, width), (width - 1, 1))
            distances[head, :seen] += skewed.sum(0)[count - 1 :].double()
    return ScoreSums(distances, keys, squares)


def variance_shares(sums: ScoreSums, pairs: SeenPairs) -> VarianceShares:
    """Return how much of the scores' variance distance, key, and their sum explain.

    Least squares over all pairs. The fit of the sum alternates between distances and keys.
    """
    by_distance, by_key = pairs.by_distance.double(), pairs.by_key.double()
    count = by_key.sum()
    mean = sums.keys.sum(-1, keepdim=True) / count
    total = sums.squares - count * mean[:, 0].square()
    slash_sums = sums.distances - mean * by_distance
    key_sums = sums.keys - mean * by_key
    per_distance, per_key = 1 / by_distance.clamp(min=1), 1 / by_key.clamp(min=1)
    # Values that are constant up to rounding have no variance to explain.
    varies = total > 1e-9 * sums.squares
    total = torch.where(varies, total, float("nan"))

    def share(explained: torch.Tensor) -> torch.Tensor:
        return (explained / total).clamp(0.0, 1.0)

    slash = share((slash_sums.square() * per_distance).sum(-1))
    vertical = share((key_sums.square() * per_key).sum(-1))
    of_key = torch.zeros_like(key_sums)
    both = previous = torch.full_like(total, -1.0)
    for _ in range(_PASSES):
        of_distance = (slash_sums - pairs.keys_at_distance(of_key)) * per_distance
        of_key = (key_sums - pairs.distances_of_key(of_distance)) * per_key
        both = share((of_distance * slash_sums).sum(-1) + (of_key * key_sums).sum(-1))
        if not ((both - previous).abs() > _PRECISION).any():
            break
        previous = both
    return VarianceShares(slash, vertical, torch.maximum(both, torch.maximum(slash, vertical)))
