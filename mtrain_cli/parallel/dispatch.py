"""Dispatch: which rank holds which chunks of a batch, so that no rank works longer than the others.

A static mask, such as packed documents, gives many keys to some queries and few to others.
`balance` gives the same number of equal chunks to every rank and minimizes the largest

    cost(rank) = pairs(rank) + price * rows(rank)

``pairs`` are the query-key pairs that a rank computes, and ``rows`` the keys and values that it
receives (`traffic`). Every rank finds the same dispatch without a message.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mtrain_cli.attention.mask import IntArray
from mtrain_cli.config.cluster import Cluster
from mtrain_cli.config.schema import MOST_CHUNKS_PER_WORKER
from mtrain_cli.parallel.layout import Balanced
from mtrain_cli.parallel.traffic import (
    ROW_BLOCK,
    Bits,
    LayerMasks,
    Nodes,
    Rates,
    Traffic,
    count_bits,
    from_bits,
    needs_of_chunks,
    padded_length,
    pairs_per_query,
    rows_moved,
    times_of_rows,
    to_bits,
)

_COUNTED_TOGETHER = 64  # swaps whose blocks are counted in one call
_LEAST_GAIN = 10_000  # a swap lowers the largest cost by a part of this number, or is not worth it


class RowPrices(NamedTuple):
    """The number of pairs that take as long as one received row of keys and values.

    The defaults hold for 16 query heads and 2 KV heads on H200s (`Rates`).
    """

    inner: int = 250
    outer: int = 1500

    @staticmethod
    def on(cluster: Cluster | None, query_heads: int, kv_heads: int) -> RowPrices:
        """Return the prices for forward and backward together on a cluster; None means H200s."""
        # A pair takes 4 FLOP per query head and dimension forward, and 10 backward. A row has 16
        # bytes per KV head and dimension: bfloat16 in both passes, and gradients in float32.
        rates = Rates.on(cluster)
        time_of_pair, size = 14 * query_heads / rates.flops, 16 * kv_heads
        return RowPrices(*(round(size / r / time_of_pair) for r in (rates.inner, rates.outer)))


@dataclass(frozen=True)
class ChunkWork:
    """What the queries of each chunk compute and need.

    needs, holds: [chunks, kinds, words], the blocks that a chunk's queries see, and its own blocks.
    """

    pairs: IntArray
    needs: Bits
    holds: Bits
    times: IntArray

    def of(self, chunks: IntArray) -> ChunkWork:
        return ChunkWork(self.pairs[chunks], self.needs[chunks], self.holds[chunks], self.times)

    def merged(self, together: int) -> ChunkWork:
        starts = np.arange(0, len(self.pairs), together)
        return ChunkWork(
            np.add.reduceat(self.pairs, starts),
            np.bitwise_or.reduceat(self.needs, starts),
            np.bitwise_or.reduceat(self.holds, starts),
            self.times,
        )


class Assignment:
    """An assignment of chunks to ranks and what it costs. `swap` keeps the costs up to date.

    A rank *has* a block if no rank of its node has to send it: the rank holds the block, or relays
    it into the node because the holder, in another node, has the same local number. Swaps stay
    inside a node. They change which rank relays a block, but not which blocks enter a node.
    """

    def __init__(self, work: ChunkWork, owner: IntArray, nodes: Nodes, prices: RowPrices) -> None:
        self.work, self.nodes, self.prices = work, nodes, prices
        self.owner, self.swaps = owner.copy(), 0
        chunks = len(owner)
        blocks = (nodes.workers, *work.needs.shape[1:])
        self.needs, self._once, self._has = (np.zeros(blocks, np.uint64) for _ in range(3))
        self.pairs, self._received, self._relayed = np.zeros((3, nodes.workers), np.int64)
        # Blocks of each chunk that the queries of a rank, and of a node, see.
        self._seen_by_rank = np.zeros((nodes.workers, chunks), np.int64)
        self._seen_by_node = np.zeros((nodes.count, chunks), np.int64)
        # How many more blocks a rank receives if a chunk leaves it, or joins it.
        self._if_left = np.zeros(chunks, np.int64)
        self._if_joined = np.zeros((nodes.workers, chunks), np.int64)
        self._in_node = [
            np.flatnonzero(owner // nodes.per_node == node) for node in range(nodes.count)
        ]
        self._work_in_node = (
            [work.of(near) for near in self._in_node] if nodes.count > 1 else [work]
        )
        for rank in range(nodes.workers):
            self._update_needs(rank)
        for node, inside in enumerate(self._work_in_node):
            self._seen_by_node[node] = self._count(_union(inside.needs) & work.holds)
        for rank in range(nodes.workers):
            self._update_cost(rank)

    @property
    def cost(self) -> IntArray:
        """Pairs and priced blocks of each rank, int64 [workers]."""
        inner, outer = self.prices
        return self.pairs + inner * self._received + outer * self._relayed

    def most(self) -> int:
        return int(self.cost.max())

    def held(self) -> Bits:
        """Return the blocks that each rank holds, [workers, kinds, words]."""
        ranks = range(self.nodes.workers)
        return np.stack([_union(self.work.holds[self.owner == rank]) for rank in ranks])

    def best_swap(self) -> tuple[int, int] | None:
        """Return two chunks whose swap makes the most expensive rank cheaper; None without one.

        Of all such swaps, take the one after which the most expensive rank that changes costs
        least, and less than the most expensive rank now.
        """
        cost, per_node = self.cost, self.nodes.per_node
        top = int(np.argmax(cost))
        limit = int(cost[top] - cost[top] // _LEAST_GAIN)
        promising = []
        # The chunks of `top`, and the chunks that it relays into its node.
        for rank in range(top % per_node, self.nodes.workers, per_node):
            near = self._in_node[rank // per_node]
            mine, others = near[self.owner[near] == rank], near[self.owner[near] != rank]
            bound = self._bound(mine[:, None], others[None], cost)
            i, j = np.nonzero(bound < limit)
            promising.append((bound[i, j], mine[i], others[j]))
        bound, out, into = map(np.concatenate, zip(*promising, strict=True))
        best, swap = limit, None
        # Count the most promising swap first. Few of the others promise more than it achieves.
        tried = np.array([np.argmin(bound)]) if len(bound) else np.array([], np.int64)
        while len(tried):
            exact = self.most_after(out[tried], into[tried], cost)
            at = int(np.argmin(exact))
            if exact[at] < best:
                best, swap = int(exact[at]), (int(out[tried[at]]), int(into[tried[at]]))
            bound[tried] = best
            left = bound < best
            bound, out, into = bound[left], out[left], into[left]
            tried = np.argsort(bound, kind="stable")[:_COUNTED_TOGETHER]
        return swap

    def most_after(self, out: IntArray, into: IntArray, cost: IntArray) -> IntArray:
        """Return the largest cost of a rank that changes if two chunks swap, exactly."""
        return self._most(out, into, self._more(out, into), self._more(into, out), cost)

    def _more(self, leaves: IntArray, joins: IntArray) -> IntArray:
        """Return how many more blocks a rank receives if one chunk leaves and the other joins."""
        rank, work = self.owner[leaves], self.work
        needs = self.needs[rank] & ~(work.needs[leaves] & self._once[rank]) | work.needs[joins]
        has = self._has[rank] & ~work.holds[leaves] | work.holds[joins]
        return self._count(needs & ~has) - self._received[rank]

    def _bound(self, out: IntArray, into: IntArray, cost: IntArray) -> IntArray:
        """Return a lower bound of `most_after`, [out, into]."""
        # One chunk leaves or the other joins, each alone. Both together can only cost more: the
        # chunk that joins may need blocks that the chunk that leaves needed or held.
        more_a = self._if_left[out] + self._if_joined[self.owner[out], into]
        more_b = self._if_left[into] + self._if_joined[self.owner[into], out]
        return self._most(out, into, more_a, more_b, cost)

    def _most(
        self, out: IntArray, into: IntArray, more_a: IntArray, more_b: IntArray, cost: IntArray
    ) -> IntArray:
        inner, outer = self.prices
        per_node, nodes = self.nodes.per_node, self.nodes.count
        a, b = self.owner[out], self.owner[into]
        pairs = self.work.pairs[into] - self.work.pairs[out]
        most = np.maximum(cost[a] + pairs + inner * more_a, cost[b] - pairs + inner * more_b)
        for step in range(1, nodes):  # the ranks of other nodes that relay the chunks
            node = (a // per_node + step) % nodes
            x, y = node * per_node + a % per_node, node * per_node + b % per_node
            seen = self._seen_by_node
            enter = outer * (seen[node, into] - seen[node, out])
            seen = self._seen_by_rank
            most = np.maximum(most, cost[x] + enter + inner * (seen[x, out] - seen[x, into]))
            most = np.maximum(most, cost[y] - enter + inner * (seen[y, into] - seen[y, out]))
        return most

    def swap(self, out: int, into: int) -> None:
        ranks, per_node = self.owner[[out, into]].tolist(), self.nodes.per_node
        self.owner[[out, into]] = ranks[::-1]
        self.swaps += 1
        for rank in ranks:
            self._update_needs(rank)
        for rank in ranks:
            for alike in range(rank % per_node, self.nodes.workers, per_node):
                self._update_cost(alike)

    def _update_needs(self, rank: int) -> None:
        needs = self.work.needs[self.owner == rank]
        so_far = np.bitwise_or.accumulate(needs, axis=0)
        self.needs[rank] = so_far[-1]
        self._once[rank] = so_far[-1] & ~_union(so_far[:-1] & needs[1:])
        self._seen_by_rank[rank] = self._count(so_far[-1] & self.work.holds)

    def _update_cost(self, rank: int) -> None:
        """Count what a rank computes and receives, and what each chunk would change."""
        work, (node, local) = self.work, divmod(rank, self.nodes.per_node)
        alike = self.owner % self.nodes.per_node == local
        mine, near = np.flatnonzero(self.owner == rank), self._work_in_node[node]
        needs, has = self.needs[rank], _union(work.holds[alike])
        self._has[rank] = has
        self.pairs[rank] = work.pairs[mine].sum()
        seen = self._seen_by_node[node]
        self._relayed[rank] = seen[alike].sum() - seen[mine].sum()
        received = self._received[rank] = self._count(needs & ~has)
        without = needs & ~(work.needs[mine] & self._once[rank])
        self._if_left[mine] = self._count(without & ~(has & ~work.holds[mine])) - received
        joined = self._count((near.needs | needs) & ~(near.holds | has))
        self._if_joined[rank, self._in_node[node]] = joined - received

    def _count(self, bits: Bits) -> IntArray:
        return count_bits(bits, self.work.times)


def _union(sets: Bits) -> Bits:
    return np.bitwise_or.reduce(sets, axis=0)


def seeds(pairs: IntArray, workers: int) -> Iterator[tuple[str, IntArray]]:
    """Yield the assignments that need no search, each with its name."""
    chunks = np.arange(len(pairs))
    each = len(pairs) // workers
    yield "contiguous", chunks // each
    if each % 2 == 0:
        part = chunks // (each // 2)
        yield "zigzag", np.minimum(part, 2 * workers - 1 - part)
    yield "striped", chunks % workers
    for pieces in (8, 16):
        if each % pieces == 0:
            together = each // pieces
            owner = _longest_first(pairs.reshape(-1, together).sum(1), workers)
            yield f"longest first, {pieces} pieces per worker", np.repeat(owner, together)


def _longest_first(pairs: IntArray, workers: int) -> IntArray:
    """Assign the largest pieces first, each to the rank with room that has the fewest pairs."""
    room = [len(pairs) // workers] * workers
    ranks = [(0, rank) for rank in range(workers)]
    owner = np.empty(len(pairs), np.int64)
    for piece in np.argsort(-pairs, kind="stable").tolist():
        load, rank = heapq.heappop(ranks)
        owner[piece] = rank
        room[rank] -= 1
        if room[rank]:
            heapq.heappush(ranks, (load + int(pairs[piece]), rank))
    return owner


def best_assignment(
    work: ChunkWork, nodes: Nodes, prices: RowPrices, most_swaps: int
) -> Assignment:
    """Return the best assignment found. It costs at most the best seed.

    Swaps begin at the cheapest seed, and at the contiguous one: its ranks receive few rows, and
    swaps then balance the pairs. If both end up within 0.5 %, take the one in fewer pieces, because
    kernels compute a few large rectangles faster.
    """
    owners = dict(seeds(work.pairs, nodes.workers))
    if nodes.count > 1:
        node = _by_node(work, nodes, prices, most_swaps)
        owners["two levels"] = _inside_nodes(work, node, nodes, prices, most_swaps)
        owners["relays dealt out"] = _deal_relays(work, node, nodes)
    made = {name: Assignment(work, owner, nodes, prices) for name, owner in owners.items()}
    cheapest = min(made.values(), key=Assignment.most)
    allowed, ends = cheapest.most(), list(dict.fromkeys((cheapest, made["contiguous"])))
    for assignment in ends:
        while assignment.swaps < most_swaps and (swap := assignment.best_swap()):
            assignment.swap(*swap)
    allowed = min(allowed, min(map(Assignment.most, ends)) * 201 // 200)
    return min(
        (assignment for assignment in ends if assignment.most() <= allowed),
        key=lambda assignment: int(np.count_nonzero(np.diff(assignment.owner))),
    )


def _by_node(work: ChunkWork, nodes: Nodes, prices: RowPrices, most_swaps: int) -> IntArray:
    """Assign chunks to nodes. A block that enters a node costs one of its ranks."""
    merged = work.merged(nodes.per_node)  # fewer, longer chunks make this level fast
    flat, price = Nodes(nodes.count, nodes.count), RowPrices(prices.outer, 0)
    return np.repeat(best_assignment(merged, flat, price, most_swaps).owner, nodes.per_node)


def _inside_nodes(
    work: ChunkWork, node: IntArray, nodes: Nodes, prices: RowPrices, most_swaps: int
) -> IntArray:
    per_node, owner = nodes.per_node, np.empty_like(node)
    for n in range(nodes.count):
        mine = np.flatnonzero(node == n)
        inside = best_assignment(work.of(mine), Nodes(per_node, per_node), prices, most_swaps)
        owner[mine] = n * per_node + inside.owner
    return owner


def _deal_relays(work: ChunkWork, node: IntArray, nodes: Nodes) -> IntArray:
    """Deal the chunks that other nodes need to the ranks of their node in turn."""
    per_node, owner = nodes.per_node, np.empty_like(node)
    for n in range(nodes.count):
        mine = np.flatnonzero(node == n)
        needed = _union(work.needs[node != n]) & work.holds[mine]
        relayed = count_bits(needed, work.times) > 0
        local = np.empty_like(mine)
        local[relayed] = np.arange(relayed.sum()) % per_node
        left = len(mine) // per_node - np.bincount(local[relayed], minlength=per_node)
        local[~relayed] = np.repeat(np.arange(per_node), left)
        owner[mine] = n * per_node + local
    return owner


# Shorter chunks balance better but cut a shard into more pieces.
_SHORTEST_CHUNK = 512
_FEWEST_CHUNKS_PER_WORKER = 8


@dataclass(frozen=True)
class Dispatch:
    """An assignment of chunks to ranks. Every rank holds the same number of chunks."""

    chunk: int
    owner: IntArray
    traffic: Traffic
    prices: RowPrices

    @property
    def cost(self) -> IntArray:
        """Pairs plus priced rows of each rank, int64 [workers]."""
        return self.traffic.cost(*self.prices)


def chunk_tokens(seq: int, workers: int, unit: int = ROW_BLOCK) -> int:
    """Return the number of tokens per chunk that `balance` should use.

    A chunk has 512 tokens, or a 32nd of a worker's tokens if that is more, but at most an eighth of
    them. It grows by less than a factor of two if a longer chunk needs less padding.

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
) -> Dispatch:
    """Assign the chunks of a batch to ranks so that the most expensive rank costs little.

    The result never costs more than a contiguous, zigzag or striped assignment of the same chunks,
    or one that deals out the largest pieces first.

    Rows travel in blocks of 128, or of the largest power of two below that divides ``chunk``.

    masks: all padded to the same multiple of ``workers * chunk``.
    """
    nodes, padded = Nodes.of(workers, per_node), padded_length(masks)
    if padded == 0 or padded % (workers * chunk):
        raise ValueError(
            f"{padded} positions are not the same number of chunks of {chunk} tokens for each of "
            f"{workers} workers. Pad the masks to a multiple of {workers * chunk}."
        )
    prices, times = prices or RowPrices(), times_of_rows(masks, layers)
    block, chunks = math.gcd(chunk, ROW_BLOCK), padded // chunk
    holds = to_bits(np.repeat(np.eye(chunks, dtype=bool), chunk // block, axis=1))
    work = ChunkWork(
        pairs_per_query(masks, layers).reshape(chunks, chunk).sum(1),
        needs_of_chunks(masks, chunk, block),
        np.repeat(holds[:, None], len(masks), axis=1),
        times,
    )
    by_block = RowPrices(*(block * price for price in prices))
    found = best_assignment(work, nodes, by_block, max(100, 8 * workers))
    blocks = padded // block
    held = block * from_bits(found.held()[:, 0], blocks)
    traffic = Traffic(found.pairs, *rows_moved(from_bits(found.needs, blocks), held, nodes, times))
    return Dispatch(chunk, found.owner, traffic, prices)


@dataclass(frozen=True)
class Balancer:
    """Makes the balanced layout of each batch of a run. All its layouts have the same shape."""

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
        """Number of groups of neighboring ranks that share heads and count as one rank."""
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
        sizes, per_node = (padded, self.groups, self.chunk), self.groups_per_node
        return balance(*sizes, per_node=per_node, prices=self.prices, layers=self.layers)

    def layout(self, masks: LayerMasks) -> Balanced:
        return self.layout_of(self.dispatch(masks))

    def layout_of(self, dispatch: Dispatch) -> Balanced:
        owner = dispatch.owner.copy()
        for group in range(self.groups):  # its members get equal, ascending parts of its chunks
            held, members = np.flatnonzero(dispatch.owner == group), np.arange(self.heads)
            owner[held] = group * self.heads + np.repeat(members, len(held) // self.heads)
        return Balanced.of(owner, self.workers, self.seq, self.chunk)
