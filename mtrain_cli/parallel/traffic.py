"""Traffic: the pairs that each rank computes, and the rows that ranks send to each other.

A row holds the keys and values of one position, for all sequences of the batch. Rows travel in
whole blocks: a rank receives each block that it does not hold and of which one of its queries sees
a key, in any sequence. The counts are exact. Sets of blocks are bits, one set for each kind of
layer (`LayerMasks`): ``uint64 [..., kinds, words]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.config.cluster import Cluster
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.sizes import divisors

ROW_BLOCK = 128  # rows that travel together: one kernel tile
_COUNTED_TOGETHER = 1 << 22  # counts of blocks that are in memory at the same time: 64 MiB

Bits = NDArray[np.uint64]


# The masks of each kind of layer, one per sequence of the batch, all padded to the same length.
LayerMasks: TypeAlias = Sequence[Sequence[SequenceMask]]


@dataclass(frozen=True)
class Nodes:
    """Ranks in nodes: rank = node * per_node + local number."""

    workers: int
    per_node: int

    @staticmethod
    def of(workers: int, per_node: int | None) -> Nodes:
        """Return the nodes of a group. One node holds all ranks if ``per_node`` is None."""
        per_node = min(workers, per_node or workers)
        if workers % per_node:
            raise ConfigError(
                f"topology.gpus_per_node={per_node}: does not divide {workers} workers; allowed: "
                f"{divisors(workers)}"
            )
        return Nodes(workers, per_node)

    @staticmethod
    def of_groups(workers: int, per_node: int | None, heads: int) -> Nodes:
        """Return the nodes if ``heads`` neighboring ranks share heads and count as one rank."""
        return Nodes.of(workers // heads, None if per_node is None else max(1, per_node // heads))

    @property
    def several(self) -> bool:
        """Whether there are several nodes of several ranks, so that a hierarchy makes sense."""
        return 1 < self.per_node < self.workers

    @property
    def count(self) -> int:
        return self.workers // self.per_node


@dataclass(frozen=True)
class MovedRows:
    """The number of rows that each rank sends and receives, int64 [workers]."""

    sent: IntArray
    received: IntArray

    def __add__(self, other: MovedRows) -> MovedRows:
        return MovedRows(self.sent + other.sent, self.received + other.received)


@dataclass(frozen=True)
class Traffic:
    """What each rank computes, sends and receives, per head and layer.

    relayed: rows of other nodes that move between ranks of a node.
    outer: rows that move between ranks with the same local number, once to each node.
    """

    pairs: IntArray
    near: MovedRows
    relayed: MovedRows
    outer: MovedRows

    @property
    def inner(self) -> MovedRows:
        return self.near + self.relayed

    @property
    def workers(self) -> int:
        return len(self.pairs)

    @property
    def received(self) -> IntArray:
        return self.inner.received + self.outer.received

    @property
    def imbalance(self) -> float:
        """The largest number of pairs of a rank, divided by the mean; 1.0 without pairs."""
        total = int(self.pairs.sum())
        return int(self.pairs.max()) * self.workers / total if total else 1.0

    def cost(self, inner: int, outer: int) -> IntArray:
        """Return pairs plus priced rows of each rank, int64 [workers]."""
        return self.pairs + inner * self.inner.received + outer * self.outer.received

    def share_moved(self, rows: int) -> float:
        return float(self.received.sum() / (rows * max(1, self.workers - 1)))


def count_traffic(
    masks: LayerMasks,
    shards: Sequence[IntArray],
    *,
    per_node: int | None = None,
    block: int = ROW_BLOCK,
    layers: Sequence[int] | None = None,
) -> Traffic:
    """Count what each rank computes, sends and receives if it holds the positions of its shard.

    per_node: number of ranks that share a node; None if all do.
    block: number of rows that travel together, at most. Of a block that several ranks share,
        each rank sends its own rows.
    """
    per_query = pairs_per_query(masks, layers)
    pairs = np.array([per_query[positions].sum() for positions in shards])
    found = rows_needed(masks, shards, block)
    moved = rows_moved(*found, Nodes.of(len(shards), per_node), times_of_rows(masks, layers))
    return Traffic(pairs, *moved)


def blocks_needed(
    masks: LayerMasks, shards: Sequence[IntArray], block: int = ROW_BLOCK
) -> NDArray[np.bool_]:
    """Return whether a query of each rank sees a key of each block, [workers, kinds, blocks]."""
    blocks = -(-padded_length(masks) // block)
    return np.stack(
        [
            [_seen(kind, rows, np.zeros_like(rows), 1, block, blocks)[0] for kind in masks]
            for rows in shards
        ]
    )


def rows_needed(
    masks: LayerMasks, shards: Sequence[IntArray], block: int
) -> tuple[NDArray[np.bool_], IntArray]:
    """Return `blocks_needed`, and the number of rows that each rank holds of each block."""
    needed = blocks_needed(masks, shards, block)
    blocks = needed.shape[-1]
    held = np.stack([np.bincount(positions // block, minlength=blocks) for positions in shards])
    return needed, held


class Route(NamedTuple):
    """Which rows a group cast moves. It is the same for all ranks.

    across: whether it runs among the ranks with the same local number, else inside a node.
    away: by how many nodes, or places in the node, a sender comes before the receiver, in turn.
    own: whether a rank sends its own rows.
    relays: number of the earlier cast whose rows a rank forwards; None if it forwards none.
    """

    across: bool
    away: tuple[int, ...]
    own: bool = True
    relays: int | None = None


@dataclass(frozen=True)
class WantedRows:
    """The number of rows of each rank that each rank, and each node, needs.

    of_ranks: int64 [nodes, ranks of a node, nodes, ranks of a node], by receiver and holder.
    of_nodes: int64 [nodes, nodes, ranks of a node]
    """

    of_ranks: IntArray
    of_nodes: IntArray

    @staticmethod
    def of(
        needed: NDArray[np.bool_], held: IntArray, size: int, times: Sequence[int] | IntArray = (1,)
    ) -> WantedRows:
        """Count from `rows_needed`. size: ranks of a node. times: how often each kind counts."""
        ranks, kinds, blocks = needed.shape
        nodes = ranks // size
        total = np.zeros((ranks + nodes, ranks))
        by_node = np.logical_or.reduce(needed.reshape(nodes, size, kinds, blocks), axis=1)
        together, factors = max(1, _COUNTED_TOGETHER // ranks), np.asarray(times)
        # Products of floats are fast, and exact here: those of 32 bits up to 2^24.
        kind = np.float32 if held.sum(1).max() * factors.sum() < 1 << 24 else np.float64
        for start in range(0, blocks, together):
            part = slice(start, start + together)
            both = np.concatenate([needed[..., part], by_node[..., part]]).swapaxes(0, 1)
            summed = np.tensordot(factors.astype(kind), both.astype(kind), 1)
            total += summed @ held[:, part].T.astype(kind)
        of_ranks, of_nodes = np.split(total.astype(np.int64), [ranks])
        grid = nodes, size
        return WantedRows(of_ranks.reshape(*grid, *grid), of_nodes.reshape(nodes, *grid))

    def moved(self, route: Route, routes: Sequence[Route]) -> MovedRows:
        """Return the rows of a cast. routes: those that ``route.relays`` counts."""
        nodes, size = self.of_nodes.shape[0], self.of_nodes.shape[2]
        node, local = np.divmod(np.arange(nodes * size).reshape(nodes, size), size)
        sent, received = (np.zeros((nodes, size), np.int64) for _ in range(2))
        for k in route.away:
            if route.across:
                source = (node - k) % nodes
                found = self.of_nodes[node, source, local]
                received += found
                sent[source, local] += found
                continue
            source, holders = (local - k) % size, [0] * route.own
            holders += routes[route.relays].away if route.relays is not None else ()
            for back in holders:
                found = self.of_ranks[node, local, (node - back) % nodes, source]
                received += found
                sent[node, source] += found
        return MovedRows(sent.reshape(-1), received.reshape(-1))

    def crossing(self, route: Route, size: int) -> MovedRows:
        """Return the rows of a cast that leave or reach a node of ``size`` ranks, by rank."""
        nodes, of_node = self.of_nodes.shape[0], self.of_nodes.shape[2]
        ranks = np.arange(nodes * of_node)
        sent, received = (np.zeros(len(ranks), np.int64) for _ in range(2))
        if nodes > 1:  # only casts among nodes cross them
            return self.moved(route, ()) if route.across else MovedRows(sent, received)
        for k in route.away:
            source = (ranks - k) % len(ranks)
            rows = self.of_ranks[0, ranks, 0, source] * (ranks // size != source // size)
            sent[source] += rows
            received += rows
        return MovedRows(sent, received)


def rows_moved(
    needed: NDArray[np.bool_], held: IntArray, nodes: Nodes, times: IntArray
) -> tuple[MovedRows, MovedRows, MovedRows]:
    """Return the rows that each rank sends and receives: near, relayed and outer (`Traffic`).

    A rank receives a row of another node through its relay: the rank of its node that has the
    local number of the row's holder.
    """
    wanted = WantedRows.of(needed, held, nodes.per_node, times)
    outer = Route(True, tuple(range(1, nodes.count)))
    near = Route(False, tuple(range(1, nodes.per_node)))
    relayed = near._replace(own=False, relays=0)
    return wanted.moved(near, ()), wanted.moved(relayed, (outer,)), wanted.moved(outer, ())


def needs_of_chunks(masks: LayerMasks, chunk: int, block: int) -> Bits:
    """Return the blocks that the queries of each chunk see, [chunks, kinds, words]."""
    padded = padded_length(masks)
    blocks = padded // block
    together = max(1, _COUNTED_TOGETHER // (blocks + 1))
    slabs = []
    for start in range(0, padded, together * chunk):
        rows = slice(start, min(padded, start + together * chunk))
        size = rows.stop - rows.start
        group = np.arange(size) // chunk
        seen = [_seen(of_kind, rows, group, size // chunk, block, blocks) for of_kind in masks]
        slabs.append(to_bits(np.stack(seen, axis=1)))
    return np.concatenate(slabs)


def _seen(
    masks: Sequence[SequenceMask],
    rows: slice | IntArray,
    group: IntArray,
    groups: int,
    block: int,
    blocks: int,
) -> NDArray[np.bool_]:
    """Return whether a query of each group sees a key of each block, [groups, blocks]."""
    size = groups * (blocks + 1)
    opened = np.zeros(size, np.int64)
    changes = np.diff(group) != 0
    for mask in masks:
        for low, high in zip(mask.low[:, rows], mask.high[:, rows], strict=True):
            # Queries of a group whose intervals touch in turn see one interval together.
            apart = changes | (low[1:] > high[:-1]) | (high[1:] < low[:-1])
            begins = np.append(0, np.flatnonzero(apart) + 1)[: len(group)]
            low, high = np.minimum.reduceat(low, begins), np.maximum.reduceat(high, begins)
            row = group[begins] * (blocks + 1)
            # An interval adds one to the blocks from `first` to before `stop`; if empty, to none.
            first = low // block
            stop = np.where(high > low, (high - 1) // block + 1, first)
            opened += np.bincount(row + first, minlength=size)
            opened -= np.bincount(row + stop, minlength=size)
    return np.cumsum(opened.reshape(groups, blocks + 1), axis=1)[:, :blocks] > 0


def from_bits(bits: Bits, blocks: int) -> NDArray[np.bool_]:
    return np.unpackbits(bits.view(np.uint8), axis=-1, count=blocks).view(np.bool_)


def to_bits(flags: NDArray[np.bool_]) -> Bits:
    """Pack flags [..., blocks] into words [..., ceil(blocks / 64)]."""
    octets = np.packbits(flags, axis=-1)
    pad = [(0, 0)] * (flags.ndim - 1) + [(0, -octets.shape[-1] % 8)]
    return np.pad(octets, pad).view(np.uint64)


def count_bits(bits: Bits, times: IntArray) -> IntArray:
    """Return the number of blocks in each set [..., kinds, words], summed over the kinds."""
    by_kind = np.bitwise_count(bits).sum(-1, dtype=np.int32)
    return by_kind[..., 0] * times[0] if len(times) == 1 else by_kind @ times


def padded_length(masks: LayerMasks) -> int:
    (padded,) = {mask.low.shape[1] for of_kind in masks for mask in of_kind}
    return padded


def _layers(masks: LayerMasks, layers: Sequence[int] | None) -> IntArray:
    return np.array([1] * len(masks) if layers is None else layers, np.int64)


def times_of_rows(masks: LayerMasks, layers: Sequence[int] | None) -> IntArray:
    """Return how often a row of each kind counts: once per layer and sequence, int64 [kinds]."""
    return _layers(masks, layers) * np.array([len(of_kind) for of_kind in masks], np.int64)


def pairs_per_query(masks: LayerMasks, layers: Sequence[int] | None = None) -> IntArray:
    """Return the number of pairs of each position's queries, int64 [padded]."""
    pairs = np.zeros(padded_length(masks), np.int64)
    for of_kind, count in zip(masks, _layers(masks, layers), strict=True):
        for mask in of_kind:
            for low, high in zip(mask.low, mask.high, strict=True):
                pairs += (high - low) if count == 1 else count * (high - low)
    return pairs


_KERNEL_SHARE = 0.55  # of the GPU's peak


class Rates(NamedTuple):
    """Rates of one GPU. The defaults hold for H200s; without NVLink between nodes.

    inner, outer: bytes/s that a GPU receives inside its node, and from other nodes.
    memory: bytes/s of a copy in the GPU's memory, reads plus writes.
    inner_latency, outer_latency: seconds of a collective without its bytes.
    inner_share, outer_share: share of the computing power that a message in flight takes.
    """

    flops: float = 550e12
    inner: float = 310e9
    outer: float = 52e9
    memory: float = 4.2e12
    inner_latency: float = 79e-6
    outer_latency: float = 90e-6
    inner_share: float = 0.23
    outer_share: float = 0.03

    @staticmethod
    def on(cluster: Cluster | None) -> Rates:
        if cluster is None:
            return Rates()
        inner, outer = cluster.inner, cluster.outer
        rates = Rates(
            flops=_KERNEL_SHARE * 1e12 * cluster.gpu.peak_tflops.value,
            inner=1e9 * inner.collective_bandwidth_gbps.value,
            memory=1e9 * cluster.gpu.hbm_gbps.value,
            inner_latency=1e-6 * inner.collective_latency_us.value,
            inner_share=inner.gpu_share.value,
        )
        if outer is None:
            return rates
        # Between nodes, casts are direct messages (`Costs._collective`).
        fastest = max(outer.capacity_gbps.value, outer.collective_bandwidth_gbps.value)
        return rates._replace(
            outer=1e9 * fastest / outer.shared_by.value,
            outer_latency=1e-6 * outer.latency_us.value,
            outer_share=outer.gpu_share.value,
        )

    def collective(self, *, outer: bool) -> tuple[float, float, float]:
        """Return latency, bandwidth and share of a collective in a node, or between nodes."""
        if outer:
            return self.outer_latency, self.outer, self.outer_share
        return self.inner_latency, self.inner, self.inner_share
