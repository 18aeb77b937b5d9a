"""Dispatch: which rank holds which chunks of a batch, so that no rank works longer than the others.

A static mask, such as packed documents or a sliding window, gives many keys to some queries and few
to others. `balance` cuts the sequence into equal chunks and gives the same number of them to every
rank. It minimizes the largest cost of a rank:

    cost(rank) = pairs(rank) + price * rows(rank)

``pairs`` is the number of query-key pairs that the rank computes. ``rows`` is the number of rows of
keys and values that it receives: its queries see them, and another rank holds them (`traffic`).
Over several nodes, a row enters a node once. Every rank finds the same dispatch without a message.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mtrain_cli.attention.mask import IntArray
from mtrain_cli.config.cluster import Cluster
from mtrain_cli.config.schema import MOST_CHUNKS_PER_WORKER
from mtrain_cli.parallel.dispatch_search import BlockPrices, ChunkWork, best_assignment
from mtrain_cli.parallel.layout import Balanced
from mtrain_cli.parallel.rates import Rates
from mtrain_cli.parallel.traffic import (
    ROW_BLOCK,
    LayerMasks,
    Nodes,
    Traffic,
    from_bits,
    needs_of_chunks,
    padded_length,
    pairs_per_query,
    rows_moved,
    times_of_rows,
    to_bits,
)

# Shorter chunks balance better but cut a shard into more pieces.
_SHORTEST_CHUNK = 512
_FEWEST_CHUNKS_PER_WORKER = 8


class RowPrices(NamedTuple):
    """The number of pairs that take as long as one received row of keys and values.

    inner: for a row that a rank of the same node sends.
    outer: for a row that enters the node.

    The defaults hold for 16 query heads and 2 KV heads on H200s (`Rates`).
    """

    inner: int = 250
    outer: int = 1500

    @staticmethod
    def of(query_heads: int, kv_heads: int, flops: float, inner: float, outer: float) -> RowPrices:
        """Return the prices for forward and backward together.

        A pair takes 4 FLOP per query head and dimension forward, and 10 backward. A row has 16
        bytes per KV head and dimension: keys and values in bfloat16 in both passes, and their
        gradients in float32.

        flops: FLOP/s of the attention kernel.
        inner, outer: bytes/s that a rank receives inside its node, and from other nodes.
        """
        time_of_pair = 14 * query_heads / flops
        return RowPrices(*(round(16 * kv_heads / link / time_of_pair) for link in (inner, outer)))

    @staticmethod
    def on(cluster: Cluster | None, query_heads: int, kv_heads: int) -> RowPrices:
        rates = Rates.on(cluster)
        return RowPrices.of(query_heads, kv_heads, rates.flops, rates.inner, rates.outer)


@dataclass(frozen=True)
class Dispatch:
    """An assignment of chunks to ranks. Every rank holds the same number of chunks.

    owner: int64 [chunks], the rank that holds each chunk.
    traffic: what each rank computes, sends and receives.
    seed: name of the assignment from which the search began.
    swaps: number of swaps that improved the seed.
    """

    chunk: int
    owner: IntArray
    traffic: Traffic
    prices: RowPrices
    seed: str
    swaps: int

    @property
    def cost(self) -> IntArray:
        """Pairs plus priced rows of each rank, int64 [workers]."""
        return self.traffic.cost(*self.prices)

    def positions(self, worker: int) -> IntArray:
        return self.layout().positions(worker)

    def layout(self, seq: int | None = None) -> Balanced:
        length = seq or len(self.owner) * self.chunk
        return Balanced.of(self.owner, self.traffic.workers, length, self.chunk)


def chunk_tokens(seq: int, workers: int, unit: int = ROW_BLOCK) -> int:
    """Return the number of tokens per chunk that `balance` should use.

    A chunk has 512 tokens, or a 32nd of a worker's tokens if that is more. A short sequence has
    shorter chunks, so that each worker holds 8. The chunk grows by less than a factor of two if a
    longer chunk needs less padding. Pad the sequence to a multiple of ``workers * chunk``.

    unit: number of tokens that divides a chunk, such as the index's block size. So do the 128 rows
        that travel together, unless the sequence is too short.
    """
    each = -(-seq // workers)
    if each >= _FEWEST_CHUNKS_PER_WORKER * ROW_BLOCK:
        unit = math.lcm(unit, ROW_BLOCK)
    shortest = min(_SHORTEST_CHUNK, each // _FEWEST_CHUNKS_PER_WORKER)
    least = max(1, max(shortest, each // MOST_CHUNKS_PER_WORKER) // unit) * unit

    def padding(chunk: int) -> tuple[int, int, int]:
        chunks = -(-each // chunk)
        return chunks * chunk, chunks % 2, chunk  # the zigzag seed takes an even number of chunks

    return min(range(least, 2 * least, unit), key=padding)


def balance(
    masks: LayerMasks,
    workers: int,
    chunk: int,
    *,
    per_node: int | None = None,
    prices: RowPrices | None = None,
    layers: Sequence[int] | None = None,
    block: int | None = None,
    most_swaps: int | None = None,
) -> Dispatch:
    """Assign the chunks of a batch to ranks so that the most expensive rank costs little.

    The result never costs more than a contiguous, zigzag or striped assignment of the same chunks,
    or one that deals out the largest pieces first.

    Args:
        masks: the masks of each kind of layer, one per sequence of the batch, all padded to the
            same multiple of ``workers * chunk``. If all layers have the same masks, give
            ``[masks]``.
        per_node: number of ranks that share a node; None if all do.
        layers: number of layers of each kind; None for one each.
        block: number of rows that travel together, a divisor of ``chunk``; None for 128, or the
            largest power of two below that divides ``chunk``.
        most_swaps: largest number of swaps; None for 100, or 8 per rank if that is more.

    Raises:
        ValueError: the ranks cannot hold the same number of chunks, blocks do not divide a chunk,
            or nodes would have different numbers of ranks.
    """
    nodes, padded = Nodes.of(workers, per_node), padded_length(masks)
    if padded == 0 or padded % (workers * chunk):
        raise ValueError(
            f"{padded} positions are not the same number of chunks of {chunk} tokens for each of "
            f"{workers} workers. Pad the masks to a multiple of {workers * chunk}."
        )
    block = block or math.gcd(chunk, ROW_BLOCK)
    if chunk % block:
        raise ValueError(f"Blocks of {block} rows do not divide chunks of {chunk} tokens.")
    prices, times = prices or RowPrices(), times_of_rows(masks, layers)
    chunks = padded // chunk
    holds = to_bits(np.repeat(np.eye(chunks, dtype=bool), chunk // block, axis=1))
    work = ChunkWork(
        pairs_per_query(masks, layers).reshape(chunks, chunk).sum(1),
        needs_of_chunks(masks, chunk, block),
        np.repeat(holds[:, None], len(masks), axis=1),
        times,
    )
    seed, found = best_assignment(
        work,
        nodes,
        BlockPrices(*(block * price for price in prices)),
        max(100, 8 * workers) if most_swaps is None else most_swaps,
    )
    blocks = padded // block
    held = block * from_bits(found.held()[:, 0], blocks)
    traffic = Traffic(found.pairs, *rows_moved(from_bits(found.needs, blocks), held, nodes, times))
    return Dispatch(chunk, found.owner, traffic, prices, seed, found.swaps)


@dataclass(frozen=True)
class Balancer:
    """Makes the balanced layout of each batch of a run. All its layouts have the same shape.

    unit: number of tokens that divides a chunk, such as the block size of the index.
    heads: number of neighboring ranks that share heads. They count as one rank (Ulysses).
    per_node: number of ranks of the context group per node; None if all share a node.
    given_chunk: number of tokens per chunk; None for `chunk_tokens`.
    """

    workers: int
    seq: int
    unit: int = 1
    heads: int = 1
    per_node: int | None = None
    prices: RowPrices | None = None
    layers: tuple[int, ...] = (1,)
    given_chunk: int | None = None

    @property
    def groups(self) -> int:
        return self.workers // self.heads

    @property
    def groups_per_node(self) -> int | None:
        return None if self.per_node is None else max(1, self.per_node // self.heads)

    @property
    def chunk(self) -> int:
        return self.given_chunk or chunk_tokens(self.seq, self.workers, max(self.unit, 1))

    @property
    def padded_seq(self) -> int:
        return -(-self.seq // (self.workers * self.chunk)) * self.workers * self.chunk

    def dispatch(self, masks: LayerMasks) -> Dispatch:
        """Assign the chunks of a batch to the groups of ranks that share heads."""
        padded = [[mask.repadded(self.padded_seq) for mask in kind] for kind in masks]
        return balance(
            padded,
            self.groups,
            self.chunk,
            per_node=self.groups_per_node,
            prices=self.prices,
            layers=self.layers,
        )

    def layout(self, masks: LayerMasks) -> Balanced:
        return self.layout_of(self.dispatch(masks))

    def layout_of(self, dispatch: Dispatch) -> Balanced:
        owner = dispatch.owner
        if self.heads > 1:
            owner = _dealt_inside(owner, self.groups, self.heads)
        return Balanced.of(owner, self.workers, self.seq, self.chunk)


def _dealt_inside(owner: IntArray, groups: int, members: int) -> IntArray:
    """Deal the chunks of each group to its members in equal, ascending parts."""
    ranks = np.empty_like(owner)
    for group in range(groups):
        held = np.flatnonzero(owner == group)
        ranks[held] = group * members + np.repeat(np.arange(members), len(held) // members)
    return ranks
