"""Price the operations of an attention pass on a cluster.

All ranks run the same program, so one price has the times of all ranks, [workers]. Prices have an
expected value (`VALUE`), a best case (`LOW`) and a worst case (`HIGH`). Kernels take calibrated
curves, a message latency + bytes / bandwidth (BurstEngine, table 1). A node is one of the cluster,
not a virtual one (`topology.gpus_per_node`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mtrain_cli.attention.mask import IntArray
from mtrain_cli.config.cluster import Cluster, Constant, Link
from mtrain_cli.parallel.program import (
    RECEIVED,
    Copy,
    Post,
    ShardSizes,
    Size,
)
from mtrain_cli.parallel.recording import (
    BACKWARD,
    FORWARD,
)
from mtrain_cli.parallel.schedule import GROUP_CAST, GROUP_REDUCE, HEADS, SUM
from mtrain_cli.simulation import calibration
from mtrain_cli.simulation.calibration import HIGH, LOW, VALUE, FloatArray, KernelCurves
from mtrain_cli.simulation.spmd_schedule import SpmdSchedule, SpmdTransfer
from mtrain_cli.simulation.work_counts import FLOP_PER_PAIR, StepWork

BOUNDS = (VALUE, LOW, HIGH)
LEAST_COPY_US = 2.0
# Number of kernel launches, counted roughly in the code of exchanges and kernels: at the start of a
# pass, and in a step with an index, without one, or only with messages.
LAUNCHES: Mapping[str, float] = {"begin": 10, "sparse step": 14, "dense step": 6, "moves": 3}
# Microseconds to estimate a vertical-slash index where they were not measured: INDEX_ALONE_US +
# INDEX_PER_TOKEN_US * (tokens of a GPU), and at least INDEX_TOGETHER_US on several GPUs. Two H200s
# took 1.05, 1.43 and 1.79 ms with 32K, 64K and 128K tokens each (profiles/notes.md).
INDEX_ALONE_US, INDEX_PER_TOKEN_US, INDEX_TOGETHER_US = 800.0, 7.5e-3, 1050.0
# `block_topk` scores every query with every key. With 128K tokens, an H200 took 139 ms for 16 heads
# of 128 dimensions. With learned scores, it took 7.7 and 122 ms for 2 KV heads, at 128K and 512K,
# and one update of the maps 2.9 and 9.1 ms for 16 query heads (docs/sparse-attention.md).
INDEX_PER_SCORE_US, SCORE_DIMS, SCORE_TFLOPS = 5.1e-7, 64, 989.0
LEARNED_SCORE = 0.82  # share of the time of a score that a learned one takes
UPDATE_SCORES = 2_700  # scores as long as an update, for each query head and key
# Attention of the same table: 130 and 2,089 ms for lists of blocks, which the kernel's curve of
# slashes and columns gives 106 and 1,691 ms. Diagonals of 64 took 102 and 1,696.
LISTED_BLOCKS = Constant(
    1.23, "measured",
    "time of lists of blocks of 64 in the kernel triton, over that of slashes; not varied",
    1.23, 1.23,
)  # fmt: skip
INDEX_DEVICE, INDEX_HEADS, INDEX_HBM_GBPS = "NVIDIA H200", 16, 4200.0
INDEX_BOUNDS = {LOW: 0.7, VALUE: 1.0, HIGH: 1.5}
# Bytes that `attention.sdpa` moves per key, number of a head and call in backward: the call writes
# the gradients of keys and values in 2 bytes each, and they are added to float32 sums.
_SUMMED_BYTES = 2 * (2 + 2 + 4 + 4)
# Kernels that such a call launches, counted in `attention.sdpa`.
_STRIPE_LAUNCHES = {FORWARD: 3, BACKWARD: 8}

# The fields latency, busy, outer and share of a `PricedMessage`, [workers] each
LinkPrice = tuple[FloatArray, FloatArray, np.ndarray, FloatArray]


@dataclass(frozen=True, eq=False)
class PricedMessage:
    """One transfer as every rank performs it. Arrays are [workers], times in microseconds.

    busy: time for which the message occupies the link into the receiving rank.
    latency: time between the end of ``busy`` and the arrival of the message.
    outer: whether the message that a rank receives crosses nodes.
    share: share of a rank's computing power that is lost while the message is in flight.
    size: number of bytes that a rank sends, and receives.
    """

    transfer: SpmdTransfer
    latency: FloatArray
    busy: FloatArray
    outer: NDArray[np.bool_]
    share: FloatArray
    size: int


@dataclass(frozen=True)
class Costs:
    """Prices of operations on one cluster, for one bound.

    estimated: number of tokens over which an index is estimated; 0 if that takes no time.
    scores: number of scores from which an index is estimated, as scores of `SCORE_DIMS`.
    measured: whether estimating this kind of index was measured on this GPU model.
    stripe: number of tokens per stripe, if a kernel takes one call per stripe; else 0.
    order: see `exchanges.RingVariant`.
    """

    cluster: Cluster
    kernels: KernelCurves
    sizes: ShardSizes
    spmd: SpmdSchedule
    head_dim: int
    sparse: bool = False
    estimated: float = 0
    scores: float = 0.0
    measured: bool = True
    stripe: int = 0
    order: str = "next"
    bound: str = VALUE
    _messages: dict[tuple, LinkPrice] = field(default_factory=dict, repr=False, compare=False)

    def rate(self, constant: Constant) -> float:
        """Return a bandwidth or another rate for `bound`. The best case uses its high value."""
        return getattr(constant, {LOW: HIGH, HIGH: LOW}.get(self.bound, VALUE))

    def burden(self, constant: Constant) -> float:
        """Return a latency or another cost for `bound`. The best case uses its low value."""
        return getattr(constant, self.bound)

    def bytes_of(self, size: Size) -> int:
        return int(size.of(self.sizes, self.spmd.grid.heads))

    def copied(self, size: float) -> float:
        """Return the us to read and write ``size`` bytes: 0, or at least `LEAST_COPY_US`."""
        if not size:
            return 0.0
        return max(size / self.rate(self.cluster.gpu.hbm_gbps) / 1e3, LEAST_COPY_US)

    def crosses(self, transfer: SpmdTransfer) -> np.ndarray:
        """Return whether the message that each rank receives crosses nodes, bool [workers]."""
        per_node, places = self.cluster.gpus_per_node, self._places
        if transfer.source is not None:
            return places[transfer.source] // per_node != places // per_node
        return np.full(len(places), len({peer // per_node for peer in transfer.first.peers}) > 1)

    def copy_us(self, size: Size) -> float:
        return self.copied(size.of(self.sizes, self.spmd.grid.heads))

    @cached_property
    def _places(self) -> IntArray:
        """The GPU of each rank."""
        ranks = np.arange(self.spmd.grid.workers)
        if self.order == "ends":
            return np.where(ranks % 2, len(ranks) - 1 - ranks // 2, ranks // 2)
        return ranks

    @property
    def sharing(self) -> int:
        """The number of GPUs that share a network card."""
        return 1 if self.cluster.outer is None else int(self.burden(self.cluster.outer.shared_by))

    @cached_property
    def _cards(self) -> IntArray:
        ranks, per_node = self._places, self.cluster.gpus_per_node
        return ranks // per_node * per_node + ranks % per_node // self.sharing

    def message(
        self,
        transfer: SpmdTransfer,
        size: int,
        recorded: int | None = None,
        crossing: float | None = None,
    ) -> PricedMessage:
        """Price a transfer of ``size`` bytes from each rank.

        recorded: bytes of a profile's row.
        crossing: bytes of a group cast that cross nodes over the busiest network card.
        """
        t = transfer.first
        key = t.channel, t.payload, t.kind, size, id(transfer.to), id(transfer.peers), crossing
        if key not in self._messages:
            if transfer.to is None:
                self._messages[key] = self._collective(transfer, size, crossing)
            else:
                self._messages[key] = self._between_two(transfer, size)
        return PricedMessage(transfer, *self._messages[key], size if recorded is None else recorded)

    def _between_two(self, transfer: SpmdTransfer, size: int) -> LinkPrice:
        assert transfer.to is not None
        assert transfer.source is not None
        outer = self.crosses(transfer)
        alone, busy, share = (np.zeros(len(outer)) for _ in range(3))
        for crossing in (False, True):
            if not (outer == crossing).any():
                continue
            link = self.cluster.link(outer=crossing)
            mine = outer == crossing
            # A network card is full duplex, so the direction with more messages counts.
            ways = (transfer.source, np.arange(len(mine))) if crossing else ()
            sharing = np.max([np.ones(len(mine)), *(self._sharing(w, mine) for w in ways)], axis=0)
            per_us = self.rate(link.bandwidth_gbps) * 1e3
            capacity = max(self.rate(link.capacity_gbps) * 1e3, per_us)
            moving = np.where(mine, size * np.maximum(1.0 / per_us, sharing / capacity), 0.0)
            alone += np.where(mine, self.burden(link.latency_us) + moving, 0.0)
            busy += np.where(mine, size * sharing / capacity, 0.0)
            share[mine] = self.burden(link.gpu_share)
        # A rank sends and receives at once; it loses the larger of the two shares.
        return alone - busy, busy, outer, np.maximum(share, share[transfer.to])

    def _sharing(self, ranks: IntArray, crossing: np.ndarray) -> FloatArray:
        """Return how many messages between nodes use each rank's network card, [workers].

        ranks: the sender or the receiver of each message. crossing: whether it crosses nodes.
        """
        cards = self._cards[ranks]
        messages = np.bincount(cards[crossing], minlength=len(cards))[cards]
        return np.maximum(messages, 1).astype(np.float64)

    def _collective(self, transfer: SpmdTransfer, size: int, crossing: float | None) -> LinkPrice:
        peers, outer = transfer.first.peers, self.crosses(transfer)
        to_all, members = transfer.first.payload == HEADS, self._members(peers)
        us, busy = self.collective(to_all, len(peers), members, size)
        link = self.cluster.link(outer=bool(outer[0]))
        if transfer.first.kind in ("reduce_scatter", SUM) and link.reduce_factor is not None:
            us, busy = (self.burden(link.reduce_factor) * t for t in (us, busy))
        if crossing is not None and outer[0]:
            # Each rank sends directly to those that need its rows.
            busy = crossing / self._capacity(link)
            us = self.burden(link.latency_us)
            us += max(busy, size / self._capacity(self.cluster.inner))
        share = self.burden(link.gpu_share)
        latencies, busies, shares = (np.full(len(outer), v) for v in (us - busy, busy, share))
        return latencies, busies, outer, shares

    def _members(self, peers: tuple[int, ...]) -> int:
        nodes = np.bincount(np.array(peers) // self.cluster.gpus_per_node)
        return int(nodes.max())

    def collective(self, to_all: bool, ranks: int, members: int, size: int) -> tuple[float, float]:
        """Return the microseconds of a collective, and those for which links are busy.

        Args:
            to_all: whether it is an all-to-all. Other collectives count as a ring.
            members: largest number of these ranks on one node.
            size: number of bytes that each rank sends.
        """
        inner = self.cluster.inner
        inner_us = self._moving(inner, size, to_all)
        if members == ranks:
            # Inside a node, launch overhead dominates; in the worst case it grows with the ranks.
            longer = _longer(inner, ranks) if self.bound == HIGH and not to_all else 1.0
            latency = self.burden(inner.collective_latency_us) * longer
            return latency + inner_us, min(inner_us, size / self._capacity(inner))
        link = self.cluster.link(outer=True)
        shared = self.sharing
        latency = self.burden(link.collective_latency_us)
        if to_all:
            across = size * (ranks - members) / (ranks - 1)
            moving = self._moving(link, across, to_all) * shared
            moving = max(moving, self._moving(inner, size - across, to_all))
            return latency + moving, min(moving, across * shared / self._capacity(link))
        # The groups of all ranks share the network cards of a node. Each member of a group carries
        # a part of the group's bytes.
        moving = max(self._moving(link, size) * shared / members, inner_us if members > 1 else 0.0)
        return latency * _longer(link, ranks) + moving, moving

    def _moving(self, link: Link, size: float, to_all: bool = False) -> float:
        factor = link.all_to_all_factor if to_all else None
        longer = 1.0 if factor is None else self.burden(factor)
        return longer * size / (self.rate(link.collective_bandwidth_gbps) * 1e3)

    def _capacity(self, link: Link) -> float:
        return max(self.rate(link.capacity_gbps), self.rate(link.collective_bandwidth_gbps)) * 1e3

    def host(self, what: str) -> float:
        name = f"{'sparse' if self.sparse else 'dense'} step" if what == "step" else what
        return LAUNCHES[name] * self.burden(self.cluster.gpu.launch_us)

    def stripes_us(self, pairs: IntArray, direction: str) -> FloatArray:
        """Return the time of a step that its kernel calls alone do not have, in microseconds.

        A kernel that takes one call per stripe launches each call, and in backward adds its key
        gradients. A stripe's queries see about the same keys, so ``pairs / stripe`` is the sum over
        calls and heads of the keys.
        """
        if not self.stripe:
            return np.zeros(pairs.shape)
        stripes = self.sizes.tokens * self.spmd.grid.heads / self.stripe
        calls = np.where(pairs > 0, stripes, 0.0)
        us = calls * _STRIPE_LAUNCHES[direction] * self.burden(self.cluster.gpu.launch_us)
        if direction != BACKWARD:
            return us
        moved = pairs / self.stripe * self.head_dim * _SUMMED_BYTES
        return us + moved / (self.rate(self.cluster.gpu.hbm_gbps) * 1e3)

    def index_us(self) -> float:
        if not self.estimated:
            return 0.0
        workers, heads, gpu = self.spmd.grid.workers, self.sizes.heads, self.cluster.gpu
        # Every head reads the scores of all keys a few times.
        slower = INDEX_HBM_GBPS / gpu.hbm_gbps.value
        slower = 1.0 if calibration.same_device(INDEX_DEVICE, gpu.name) else slower
        tokens, each = self.estimated / workers, INDEX_PER_TOKEN_US * heads / INDEX_HEADS * slower
        times = self.kernels.non_attention
        alone = None if times is None else times.index(tokens, heads, each)
        if alone is None:
            alone = INDEX_ALONE_US + each * tokens
        if workers > 1:
            alone = max(alone, INDEX_TOGETHER_US)
        alone += self.scores / workers * INDEX_PER_SCORE_US * SCORE_TFLOPS / gpu.peak_tflops.value
        wider = {LOW: calibration.UNKNOWN[0], VALUE: 1.0, HIGH: calibration.UNKNOWN[1]}[self.bound]
        return alone * INDEX_BOUNDS[self.bound] * (1.0 if self.measured else wider)


def _longer(link: Link, ranks: int) -> float:
    """Return the factor, at least 1, from the measured latency of a ring to more ranks."""
    return max(1.0, (ranks - 1) / max(1.0, link.collective_ranks.value - 1))


class LayerPrices:
    """Prices of one layer's operations in one pass."""

    def __init__(
        self,
        costs: Costs,
        work: Mapping[str, StepWork],
        direction: str,
        masked: Mapping[str, StepWork] | None = None,
    ) -> None:
        """Price all calls. masked: all pairs of the mask, for kernels that skip none of them."""
        self.costs, self.direction = costs, direction
        counted = BACKWARD if direction == BACKWARD else FORWARD
        self.counts = work[counted]
        self.columns = bool(self.counts.columns.any())
        kernels, bound = costs.kernels, costs.bound
        per_pair = FLOP_PER_PAIR[counted] * costs.head_dim
        of_columns: IntArray | int = 0 if self.counts.of_columns is None else self.counts.of_columns
        pairs = self.counts.pairs
        if self.counts.hidden is not None:
            pairs = pairs + self.counts.hidden
        # Gathered columns have a call of their own. The calls of the steps then have slashes only.
        whole = kernels.whole[counted]
        without = self.columns or (whole.form == calibration.SPARSE and not np.any(of_columns))
        curve = kernels.part(counted, calibration.DIAGONALS) if without else whole
        if not curve.skips and masked is not None:
            pairs, of_columns = masked[counted].pairs, 0
        self._attention = curve.us(
            float(per_pair) * (pairs - of_columns), float(per_pair) * of_columns, bound
        ) + costs.stripes_us(pairs, counted)
        zero = np.zeros(len(self.counts.columns))
        of_gathered = kernels.part(counted, calibration.ALONE_COLUMNS)
        self._columns = of_gathered.us(
            zero, per_pair * self.counts.column_pairs.astype(np.float64), bound
        )

    def attention(self, step: int) -> FloatArray:
        return self._attention[:, step]

    def work(self, step: int) -> dict[str, IntArray]:
        return {"pairs": self.counts.pairs[:, step], "blocks": self.counts.blocks[:, step]}

    def message(self, transfer: SpmdTransfer, post: Post) -> PricedMessage:
        # A profile records the payload of an all-reduce, which sends more bytes than that.
        recorded = self.costs.bytes_of(post.payload) if transfer.first.kind == SUM else None
        size, sizes, crossing = self.costs.bytes_of(post.sends), self.costs.sizes, None
        if transfer.first.kind in (GROUP_CAST, GROUP_REDUCE) and sizes.crossing:
            ((_, unit, _),) = post.payload.terms  # numbers the casts of both passes
            sent = sizes.casts[unit.cast][unit.kind == RECEIVED]
            by_sharing = sizes.crossing[unit.cast]
            rows = by_sharing[min(self.costs.sharing, len(by_sharing)) - 1]
            crossing = float(size * rows / sent) if sent else 0.0
        return self.costs.message(transfer, size, recorded, crossing)

    def copy(self, op: Copy) -> float:
        return self.costs.copy_us(op.moves)

    def column_times(self) -> tuple[FloatArray, dict[str, IntArray]]:
        counts = {"pairs": self.counts.column_pairs, "columns": self.counts.columns}
        return self._columns, counts
