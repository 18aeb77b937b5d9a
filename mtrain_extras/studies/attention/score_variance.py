"""How much of the variance of attention scores depends on the distance, and how much on the key.

A slash in the attention matrix is a set of pairs with the same distance of query and key, and a
column is a set of pairs with the same key. If the scores of a head depend only on the distance, the
head attends in slashes; if they depend only on the key, it attends in columns.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import torch

_SPECTRUM_BYTES = 1 << 29  # of the transforms of some dimensions
_CHUNK, _KEYS = 512, 8192  # queries and keys whose scores are computed together
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
    """Sum the scores q.k / sqrt(head_dim) exactly, without the matrix of scores.

    A sum over the queries of a key needs only the sum of these queries, a sum of squares only their
    sum of outer products, and the sums by distance are a correlation, which a Fourier transform
    computes. So the time grows as tokens * log(tokens). All is computed in float64.

    Args:
        q, k: [tokens, heads, head_dim] and [tokens, kv_heads, head_dim], one sequence.
        first: int [tokens], position of the first key that each query sees. The mask must consist
            of documents, with the same window or none.
    """
    tokens, heads, dim = q.shape
    kv_heads = k.shape[1]
    at = torch.arange(tokens, device=q.device)
    end = torch.searchsorted(first.to(at), at, right=True)  # of the queries that see each key
    starts = [*(at[first == at]).tolist(), tokens]
    documents = list(itertools.pairwise(starts))
    for begin, stop in documents:
        window = int(end[begin]) - begin
        assert bool((end[begin:stop] == (at[begin:stop] + window).clamp(max=stop)).all())
    distances = torch.zeros(heads, tokens, dtype=torch.float64, device=q.device)
    keys, squares = torch.zeros_like(distances), torch.zeros_like(distances[:, 0])
    for kv_head in range(kv_heads):
        own = slice(kv_head * heads // kv_heads, (kv_head + 1) * heads // kv_heads)
        q_GNH = q[:, own].transpose(0, 1).double() * dim**-0.5
        k_NH = k[:, kv_head].double()
        for begin, stop in documents:
            window = int(end[begin]) - begin
            found = _correlation(q_GNH[:, begin:stop], k_NH[begin:stop])
            distances[own, :window] += found[:, :window]
        # Tokens come last: a GPU scans other dimensions on few of its cores.
        earlier_GHN = torch.nn.functional.pad(q_GNH.mT.contiguous().cumsum(-1), (1, 0))
        of_queries_GHN = earlier_GHN[..., end] - earlier_GHN[..., :-1]
        keys[own] = (of_queries_GHN * k_NH.T).sum(1)
        del earlier_GHN, of_queries_GHN
        squares[own] = _sum_of_squares(q_GNH, k_NH, end)
    return ScoreSums(distances, keys, squares)


def _correlation(q_GNH: torch.Tensor, k_NH: torch.Tensor) -> torch.Tensor:
    """Sum the products of queries and keys by their distance, [heads, tokens]."""
    heads, tokens, dim = q_GNH.shape
    size = 1 << (2 * tokens - 1).bit_length()  # so that no distance wraps around
    spectrum = torch.zeros(heads, size // 2 + 1, dtype=torch.complex128, device=q_GNH.device)
    width = max(1, _SPECTRUM_BYTES // (16 * (heads + 1) * len(spectrum[0])))
    for own in torch.arange(dim).split(width):
        q_GHN, k_HN = (x[..., own].transpose(-1, -2) for x in (q_GNH, k_NH))
        spectrum += (torch.fft.rfft(q_GHN, size) * torch.fft.rfft(k_HN, size).conj()).sum(1)
    return torch.fft.irfft(spectrum, size)[:, :tokens]


def _sum_of_squares(q_GNH: torch.Tensor, k_NH: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    """Sum (q.k)^2 over the queries from each key's position to before its ``end``, [heads]."""
    heads, tokens, dim = q_GNH.shape
    at = torch.arange(tokens, device=end.device)
    outer_GHH, total = q_GNH.new_zeros(heads, dim, dim), q_GNH.new_zeros(heads)
    chunks = [*range(0, tokens, _CHUNK), tokens]
    ending = torch.searchsorted(end, torch.tensor(chunks).to(end), right=True).tolist()
    for number, (begin, stop) in enumerate(itertools.pairwise(chunks)):
        rows_GQH, places = q_GNH[:, begin:stop], at[begin:stop]
        for first in range(ending[number], ending[number + 1], _KEYS):
            own = slice(first, min(first + _KEYS, ending[number + 1]))
            total += _squares_before(end[own], k_NH[own], rows_GQH, places, outer_GHH)
        total -= _squares_before(places, k_NH[begin:stop], rows_GQH, places, outer_GHH)
        outer_GHH += rows_GQH.transpose(1, 2) @ rows_GQH
    return total


def _squares_before(
    until_K: torch.Tensor,
    k_KH: torch.Tensor,
    rows_GQH: torch.Tensor,
    places_Q: torch.Tensor,
    outer_GHH: torch.Tensor,
) -> torch.Tensor:
    """Sum (q.k)^2 over some keys and the queries before ``until_K``, [heads]."""
    scores = (rows_GQH @ k_KH.T).square_()
    scores *= places_Q[:, None] < until_K
    return ((k_KH @ outer_GHH) * k_KH).sum((1, 2)) + scores.sum((1, 2))


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
