"""Prices of one layer's pass on a cluster: expected (`VALUE`), at best and worst (`LOW`, `HIGH`).

Kernels are priced by calibrated curves, copies by memory bandwidth, messages by the latency and
bandwidth of their links: a message between two GPUs takes latency + bytes / bandwidth (BurstEngine,
table 1). A collective counts as a ring: each link carries what a rank has to receive; across nodes,
the network cards of a node carry it together. GPUs behind one card share it. Nodes are those of the
cluster; a schedule may divide them further (`topology.gpus_per_node`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from mtrain_cli.attention.mask import IntArray
from mtrain_cli.attention.packed_columns import COLUMN_TILE
from mtrain_cli.parallel.exchange_bytes import ShardSizes, sent_bytes
from mtrain_cli.parallel.recording import BACKWARD, FORWARD
from mtrain_cli.parallel.schedule import HEADS, QUERIES
from mtrain_cli.simulation import program as words
from mtrain_cli.simulation.calibration import (
    ALONE_COLUMNS,
    DIAGONALS,
    HIGH,
    LOW,
    SPARSE,
    UNKNOWN,
    VALUE,
    KernelCurves,
    same_device,
)
from mtrain_cli.simulation.cluster import Cluster, Constant, Gpu, Link
from mtrain_cli.simulation.program import FloatArray, PricedMessage, Prices, collective_of_all
from mtrain_cli.simulation.spmd_schedule import SpmdSchedule, SpmdTransfer
from mtrain_cli.simulation.work_counts import FLOP_PER_PAIR, StepWork

BOUNDS = (VALUE, LOW, HIGH)
LEAST_COPY_US = 2.0
_SUM_BYTES = 4  # of a number that is accumulated
# Kernel launches, counted roughly in the code of exchanges and kernels: at the start of a pass; in
# a step with and without an index; in a step with messages only.
LAUNCHES: Mapping[str, float] = {"begin": 10, "sparse step": 14, "dense step": 6, "moves": 3}
# us to estimate a vertical-slash index, where `profiling.non_attention_benchmark` did not measure
# it. On two H200s 1.05, 1.43 and 1.79 ms with 32K, 64K and 128K tokens each (profiles/notes.md); on
# one 1.2 to 1.46 ms with 4K to 128K, most of it launches.
INDEX_ALONE_US, INDEX_PER_TOKEN_US, INDEX_TOGETHER_US = 800.0, 7.5e-3, 1050.0
INDEX_DEVICE, INDEX_HEADS, INDEX_HBM_GBPS = "NVIDIA H200", 16, 4200.0
INDEX_BOUNDS = {LOW: 0.7, VALUE: 1.0, HIGH: 1.5}


def index_scale(gpu: Gpu, heads: int) -> float:
    """Return how many times as long a token takes in an index estimate as where it was measured.

    Every head reads the scores of all keys a few times: time grows with the number of heads and
    with 1 / memory bandwidth. The part that does not depend on the length is launches, and is not
    scaled.
    """
    of_gpu = 1.0 if same_device(INDEX_DEVICE, gpu.name) else INDEX_HBM_GBPS / gpu.hbm_gbps.value
    return heads / INDEX_HEADS * of_gpu


@dataclass(frozen=True)
class Costs:
    """Prices of everything on one cluster, under one bound.

    sizes: of a shard.
    columns: single columns a head, at the width in which they travel.
    estimated: tokens over which an index is estimated; 0 if there is none, or if it costs nothing.
    measured: whether the estimate of such an index was measured on such a GPU.
    bound: `LOW`, `VALUE` or `HIGH` (the longest time).
    """

    cluster: Cluster
    kernels: KernelCurves
    sizes: ShardSizes
    lockstep: SpmdSchedule
    head_dim: int
    columns: int = 0
    sequences: int = 1
    sparse: bool = False
    estimated: int = 0
    measured: bool = True
    bound: str = VALUE
    _messages: dict[tuple, PricedMessage] = field(default_factory=dict, repr=False, compare=False)

    def rate(self, constant: Constant) -> float:
        """Return a constant of which more is faster, under the bound."""
        return {LOW: constant.high, VALUE: constant.value, HIGH: constant.low}[self.bound]

    def burden(self, constant: Constant) -> float:
        """Return a constant of which more is slower, under the bound."""
        return {LOW: constant.low, VALUE: constant.value, HIGH: constant.high}[self.bound]

    def copied(self, numbers_of_bytes: float) -> float:
        """Return the us in which memory moves this many bytes; at least those of a launch."""
        if not numbers_of_bytes:
            return 0.0
        return max(numbers_of_bytes / self.rate(self.cluster.gpu.hbm_gbps) / 1e3, LEAST_COPY_US)

    def crosses(self, move: SpmdTransfer) -> np.ndarray:
        """Return bool [workers]: whether data that arrives at a rank crosses nodes."""
        per_node, ranks = self.cluster.gpus_per_node, np.arange(self.lockstep.grid.workers)
        if move.source is not None:
            return move.source // per_node != ranks // per_node
        return np.full(len(ranks), len({peer // per_node for peer in move.first.peers}) > 1)

    @cached_property
    def _cards(self) -> IntArray:
        """[workers]: the network card of each rank."""
        shared = 1 if self.cluster.outer is None else int(self.burden(self.cluster.outer.shared_by))
        ranks, per_node = np.arange(self.lockstep.grid.workers), self.cluster.gpus_per_node
        return ranks // per_node * per_node + ranks % per_node // shared

    def message(self, move: SpmdTransfer, direction: str, *, first: bool) -> PricedMessage:
        backward = direction == BACKWARD
        size = sent_bytes(move.first, self.sizes, first=first, backward=backward)
        key = (
            move.first.channel,
            move.first.payload,
            move.first.kind,
            size,
            id(move.to),
            id(move.peers),
        )
        if key not in self._messages:
            self._messages[key] = (
                self._between_two(move, size)
                if move.to is not None
                else self._collective(move, size)
            )
        like, t = self._messages[key], move.first
        return PricedMessage(
            t.number,
            t.channel,
            t.payload,
            move.queue,
            t.after,
            move.to,
            move.source,
            move.peers,
            like.latency,
            like.busy,
            like.outer,
            like.share,
            size,
            size,
            move,
        )

    def _between_two(self, move: SpmdTransfer, size: int) -> PricedMessage:
        assert move.to is not None
        assert move.source is not None
        outer = self.crosses(move)
        alone, busy, share = (np.zeros(len(outer)) for _ in range(3))
        for crossing in (False, True):
            if not (outer == crossing).any():
                continue
            link = self.cluster.link(outer=crossing)
            mine = outer == crossing
            # A card carries incoming and outgoing messages at the same time: the busier way counts.
            sharing = (
                np.maximum(
                    self._sharing(move.source, mine), self._sharing(np.arange(len(mine)), mine)
                )
                if crossing
                else 1
            )
            per_us = self.rate(link.bandwidth_gbps) * 1e3
            capacity = max(self.rate(link.capacity_gbps) * 1e3, per_us)
            moving = np.where(mine, size * np.maximum(1.0 / per_us, sharing / capacity), 0.0)
            alone += np.where(mine, self.burden(link.latency_us) + moving, 0.0)
            busy += np.where(mine, size * sharing / capacity, 0.0)
            share[mine] = self.burden(link.gpu_share)
        # A rank loses the larger share of its sent and its received message.
        share = np.maximum(share, share[move.to])
        return PricedMessage(
            0,
            "",
            "",
            ("", False),
            None,
            move.to,
            move.source,
            None,
            alone - busy,
            busy,
            outer,
            share,
            size,
            size,
        )

    def _sharing(self, ranks: IntArray, crossing: np.ndarray) -> FloatArray:
        """Return [workers]: how many of the crossing messages share the card of each rank."""
        cards = self._cards[ranks]
        return np.maximum(np.bincount(cards[crossing], minlength=len(cards))[cards], 1).astype(
            np.float64
        )

    def _collective(self, move: SpmdTransfer, size: int) -> PricedMessage:
        t = move.first
        outer = self.crosses(move)
        us, busy = self.collective(t.payload == HEADS, len(t.peers), self._members(t.peers), size)
        workers = len(outer)
        share = np.full(workers, self.burden(self.cluster.link(outer=bool(outer[0])).gpu_share))
        latency = np.full(workers, us - busy)
        return PricedMessage(
            0,
            "",
            "",
            ("", False),
            None,
            None,
            None,
            move.peers,
            latency,
            np.full(workers, busy),
            outer,
            share,
            size,
            size,
        )

    def _members(self, peers: tuple[int, ...]) -> int:
        """Return the most ranks of a collective that share a node."""
        nodes = np.bincount(np.array(peers) // self.cluster.gpus_per_node)
        return int(nodes.max())

    def collective(self, to_all: bool, ranks: int, members: int, size: int) -> tuple[float, float]:
        """Return the us of a collective, and for how many of them links are busy.

        to_all: an all-to-all; otherwise a ring.
        ranks: that take part; members: of these, the ranks of a node.
        size: bytes that a rank sends.
        """
        inner = self.cluster.inner
        inner_us = self._moving(inner, size)
        if members == ranks:
            # Inside a node most of it is launches; growth with the ranks is the worst case.
            longer = _longer(inner, ranks) if self.bound == HIGH and not to_all else 1.0
            return self.burden(
                inner.collective_latency_us
            ) * longer + inner_us, size / self._capacity(inner)
        link = self.cluster.link(outer=True)
        shared = int(self.burden(link.shared_by))
        latency = self.burden(link.collective_latency_us)
        if to_all:
            across = size * (ranks - members) / (ranks - 1)
            moving = max(self._moving(link, across) * shared, self._moving(inner, size - across))
            return latency + moving, across * shared / self._capacity(link)
        # All groups of this kind share the cards of a node; each member carries a part.
        moving = max(self._moving(link, size) * shared / members, inner_us if members > 1 else 0.0)
        return latency * _longer(link, ranks) + moving, moving

    def _moving(self, link: Link, size: float) -> float:
        return size / (self.rate(link.collective_bandwidth_gbps) * 1e3)

    def _capacity(self, link: Link) -> float:
        return max(self.rate(link.capacity_gbps), self.rate(link.collective_bandwidth_gbps)) * 1e3

    def sum_of_columns(self, direction: str) -> PricedMessage:
        """Price the all-reduce of columns, which sends every number about twice."""
        grid = self.lockstep.grid
        each = _SUM_BYTES if direction == BACKWARD else self.sizes.dtype_bytes
        width = -(-self.columns // COLUMN_TILE) * COLUMN_TILE
        size = 2 * self.sequences * (self.sizes.heads // grid.heads) * width * self.head_dim * each
        ranks = grid.workers // grid.heads
        members = max(1, min(ranks, self.cluster.gpus_per_node // grid.heads))
        us, busy = self.collective(False, ranks, members, int(2 * (ranks - 1) / ranks * size))
        crosses = members < ranks
        share = self.burden(self.cluster.link(outer=crosses).gpu_share)
        return collective_of_all(
            "columns",
            grid.workers,
            grid.heads,
            (us - busy, busy),
            share,
            crosses=crosses,
            size=size,
        )

    def host(self, what: str) -> float:
        """Return the host's us to launch ``begin``, ``step`` or ``moves``."""
        name = f"{'sparse' if self.sparse else 'dense'} step" if what == "step" else what
        return LAUNCHES[name] * self.burden(self.cluster.gpu.launch_us)

    def index_us(self) -> float:
        if not self.estimated:
            return 0.0
        workers = self.lockstep.grid.workers
        tokens, each = (
            self.estimated / workers,
            INDEX_PER_TOKEN_US * index_scale(self.cluster.gpu, self.sizes.heads),
        )
        measured = (
            None
            if self.kernels.non_attention is None
            else self.kernels.non_attention.index(tokens, self.sizes.heads, each)
        )
        alone = INDEX_ALONE_US + each * tokens if measured is None else measured
        wider = (
            1.0 if self.measured else {LOW: UNKNOWN[0], VALUE: 1.0, HIGH: UNKNOWN[1]}[self.bound]
        )
        return (
            max(alone, INDEX_TOGETHER_US if workers > 1 else 0.0) * INDEX_BOUNDS[self.bound] * wider
        )

    # Copies and additions, in bytes that memory reads and writes. They follow
    # `parallel.all_gather_exchange` and `parallel.ring_exchange` line by line.

    @property
    def _rows(self) -> float:
        """Numbers in a rank's queries, and so in its output and in their gradients."""
        return self.sizes.tokens * self.sizes.heads * self.head_dim

    @property
    def _kv(self) -> float:
        """Numbers in a rank's keys and values; too few heads are repeated."""
        heads = self.lockstep.grid.heads
        return 2 * self.sizes.tokens * max(self.sizes.kv_heads, heads) * self.head_dim

    def merge(self, direction: str, step: int) -> float:
        e, high = self.sizes.dtype_bytes, _SUM_BYTES
        added, copied = 2 * high + e, high + e
        if direction != BACKWARD:
            # The first partial output is kept as it is; the second merge casts it to float32.
            return (
                0.0
                if step == 0
                else self.copied(added * self._rows + (copied * self._rows if step == 1 else 0))
            )
        if self.lockstep.schedule.circulates == QUERIES:
            return self.copied(copied * self._rows + added * self._kv)
        return self.copied(added * self._rows + copied * self._kv)

    def other(self, direction: str, what: str) -> float:
        e, high, rows, kv = self.sizes.dtype_bytes, _SUM_BYTES, self._rows, self._kv
        schedule, heads = self.lockstep.schedule, self.lockstep.grid.heads
        rings = schedule.exchange in ("ring", "hierarchical_ring")
        backward = direction == BACKWARD
        gathered = kv * schedule.workers / heads
        parts = (
            next(beat.part[1] for beat in self.lockstep.beats(direction) if beat.computes) // heads
        )
        queries = schedule.circulates == QUERIES
        bytes_of = {
            words.PACK: (
                2 * e * rows + high * rows + (4 * e * rows if queries else 0) if rings else 0
            )
            if backward
            else 2 * e * kv,
            words.PICK: 2
            * e
            * 2
            * self.sequences
            * (self.sizes.heads / heads)
            * self.columns
            * self.head_dim,
            words.TRADE: 3 * e * ((rows if backward else rows + kv) if what == words.TRADE else 0),
            words.ORDER: 2 * e * gathered / parts,
            # PyTorch's kernel copies out and dout; the other kernels take views.
            words.CUT: 2 * 2 * e * rows / parts
            if parts > 1 and self.kernels.whole[BACKWARD].kernel == "sdpa"
            else 0,
            words.SHARDS: (e + high) * gathered / parts,
            words.ADD: 3 * high * (rows if queries else kv),
            words.SCATTER: 3
            * high
            * 2
            * self.sequences
            * (self.sizes.heads / heads)
            * self.columns
            * self.head_dim
            / schedule.workers,
            words.RESULT: self._result(backward, rings, parts),
        }
        return self.copied(bytes_of[what])

    def _result(self, backward: bool, rings: bool, parts: int) -> float:
        e, high = self.sizes.dtype_bytes, _SUM_BYTES
        if rings:
            return (high + e) * (self._rows + (self._kv if backward else 0))
        joined = 2 * e * self._rows if parts > 1 else 0
        return joined + ((high + e) * self._kv if backward else 0)


def _longer(link: Link, ranks: int) -> float:
    """Return how many times as long a ring's latency is with ``ranks`` as with the measured ranks.

    At least 1: fewer ranks are not assumed to be faster.
    """
    return max(1.0, (ranks - 1) / max(1.0, link.collective_ranks.value - 1))


class LayerPrices(Prices):
    """Prices of the work of one layer in one pass."""

    def __init__(
        self,
        costs: Costs,
        work: Mapping[str, StepWork],
        direction: str,
        masked: Mapping[str, StepWork] | None = None,
    ) -> None:
        """masked: the work without an index, for kernels that compute what an index leaves out."""
        self.costs, self.direction = costs, direction
        counted = BACKWARD if direction == BACKWARD else FORWARD
        self.counts = work[counted]
        self.columns = bool(self.counts.columns.any())
        kernels, bound = costs.kernels, costs.bound
        per_pair = FLOP_PER_PAIR[counted] * costs.head_dim
        of_columns: IntArray | int = 0 if self.counts.of_columns is None else self.counts.of_columns
        pairs = self.counts.pairs
        # Gathered columns are a call of their own; the other calls then have diagonals only.
        whole = kernels.whole[counted]
        without = self.columns or (whole.form == SPARSE and not np.any(of_columns))
        curve = kernels.part(counted, DIAGONALS) if without else whole
        if not curve.skips and masked is not None:
            pairs, of_columns = masked[counted].pairs, 0
        self._attention = curve.us(
            float(per_pair) * (pairs - of_columns), float(per_pair) * of_columns, bound
        )
        zero = np.zeros(len(self.counts.columns))
        of_gathered = kernels.part(counted, ALONE_COLUMNS)
        self._columns = of_gathered.us(
            zero, per_pair * self.counts.column_pairs.astype(np.float64), bound
        )

    def attention(self, step: int) -> FloatArray:
        return self._attention[:, step]

    def work(self, step: int) -> tuple[IntArray, IntArray]:
        return self.counts.pairs[:, step], self.counts.blocks[:, step]

    def message(self, move: SpmdTransfer, *, first: bool) -> PricedMessage:
        return self.costs.message(move, self.direction, first=first)

    def merge(self, step: int) -> float:
        return self.costs.merge(self.direction, step)

    def other(self, what: str) -> float:
        return self.costs.other(self.direction, what)

    def index(self) -> float:
        return self.costs.index_us()

    def dispatch(self, what: str) -> float:
        return self.costs.host(what)

    def column_times(self) -> tuple[FloatArray, IntArray, IntArray]:
        return self._columns, self.counts.columns, self.counts.column_pairs

    def column_sum(self) -> PricedMessage:
        return self.costs.sum_of_columns(self.direction)
