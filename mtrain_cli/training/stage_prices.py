"""Price the stages of a group cast, for a run and for each micro-batch.

Every stage adds a kernel call and a merge, and hides a part of the casts. Whether this pays depends
on the links and on the masks. Programs are walked with a clock for each rank;
`simulation.timeline` walks the same programs with calibrated kernels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.config.cluster import cluster_of
from mtrain_cli.config.schema import Config
from mtrain_cli.parallel.cast_rows import (
    node_size,
    shares_of,
    too_many_to_count,
    wanted_rows,
    whole_shares,
)
from mtrain_cli.parallel.exchange_selection import ExchangeChoice, ExchangeNeeds
from mtrain_cli.parallel.layout import Layout, Placement
from mtrain_cli.parallel.lowering import lower
from mtrain_cli.parallel.program import (
    Compute,
    Copy,
    Post,
    Program,
    ShardSizes,
    Size,
    Stage,
    Wait,
    Whole,
)
from mtrain_cli.parallel.schedule import (
    GRADIENTS,
    HEADS,
    INNER,
    OUTER,
    Schedule,
    ScheduleOptions,
    make_schedule,
)
from mtrain_cli.parallel.traffic import Nodes, Rates

CANDIDATES = (0, 1, 2, 3, 4, 6, 8)  # numbers of stages
# The most workers whose stages are priced for a run, and for each micro-batch, in 0.4 s of a CPU.
MOST_PRICED, OFTEN_PRICED = 1024, 256
_WORTH_IT = 0.98  # stages must take less than this share of the time without

Clock = NDArray[np.float64]
Work = dict[int | None, NDArray[np.floating]]  # FLOP by stage, [workers] each

_FLOP_PER_PAIR = {False: 4, True: 10}  # by backward; per query head and dimension
# Seconds of a call beyond its FLOP, and of the shortest copy, on H200s.
_CALL, _COPY = 30e-6, 2e-6


@dataclass(frozen=True)
class PricedStages:
    """The seconds of attention of a layer by number of stages, in forward and in backward.

    given: `topology.stages` and `topology.stages_backward` where the user set them, else None.
    """

    forward: Mapping[int, float]
    backward: Mapping[int, float]
    given: tuple[int | None, int | None] = (None, None)

    @property
    def best(self) -> tuple[int, int]:
        """The stages of both passes: the fastest, or 0 if they save less than 2 %."""
        found = []
        for given, times in zip(self.given, (self.forward, self.backward), strict=True):
            best = min(times, key=times.__getitem__)
            best = best if times[best] < _WORTH_IT * times[0] else 0
            found.append(best if given is None else given)
        return found[0], found[1]

    @property
    def described(self) -> str:
        def total(forward: int, backward: int) -> str:
            return f"{1e3 * (self.forward[forward] + self.backward[backward]):.3g} ms"

        others = [(n, n) for n in sorted(self.forward) if (n, n) != self.best]
        text = ", ".join(f"{total(*n)} with {n[0]}" for n in others)
        return f"{total(*self.best)}, {text} in both passes"


@dataclass(frozen=True)
class StagePrices:
    """Prices the stages of one group cast under any masks.

    options: of the schedule, without stages. given: see `PricedStages`.
    """

    exchange: str
    options: ScheduleOptions
    sizes: ShardSizes
    rates: Rates
    given: tuple[int | None, int | None] = (None, None)

    def of(self, layout: Layout, masks: Sequence[SequenceMask]) -> PricedStages:
        """Price all candidates for the masks of a micro-batch. All ranks get the same result."""
        inside = Placement(layout, self.options.heads).inside
        shards = [inside.positions(rank) for rank in range(inside.workers)]
        one = make_schedule(self.exchange, self.options)
        pairs = pairs_between(masks, shards) * (self.sizes.heads * self.sizes.head_dim)
        wanted = None if too_many_to_count(layout) else wanted_rows(one, inside, masks)
        times: tuple[dict[int, float], dict[int, float]] = {}, {}
        for stages in sorted({*CANDIDATES, *(n for n in self.given if n is not None)}):
            of_stages = replace(self.options, stages=stages, stages_backward=stages)
            schedule, *programs = _lowered(self.exchange, of_stages)
            if schedule.stages < stages:  # the same as an earlier candidate
                break
            rows = inside.tokens_per_worker
            shares = shares_of(schedule, wanted, rows) if wanted else whole_shares(schedule)
            sizes = replace(self.sizes, casts=shares)
            for backward, of_pass in enumerate(times):
                flop = pairs * _FLOP_PER_PAIR[bool(backward)]
                walk = _Walk(programs[backward], sizes, schedule, self.rates)
                of_pass[stages] = walk.seconds(by_stage(schedule, flop))
        return PricedStages(*times, self.given)


def stage_prices(
    config: Config, choice: ExchangeChoice, needs: ExchangeNeeds
) -> StagePrices | None:
    """Return the prices with which ``auto`` chooses stages; None if nothing is to choose."""
    topology = config.topology
    keys = (topology.stages, choice.stages), (topology.stages_backward, choice.stages_backward)
    given = [None if key == "auto" else n for key, n in keys]
    moves = choice.traits.by_mask and choice.heads < needs.workers
    dense = config.sparsity.pattern == "dense"
    if None not in given or not moves or not dense or needs.workers > MOST_PRICED:
        return None
    sizes = replace(needs.sizes(needs.shard), sequences=config.train.micro_batch)
    options = replace(choice.options(needs.workers), stages=0, stages_backward=0)
    rates = Rates.on(cluster_of(topology.cluster))
    return StagePrices(choice.name, options, sizes, rates, (given[0], given[1]))


@lru_cache(maxsize=64)  # a search for the longest sequence tries about 20, twice
def static_stages(
    prices: StagePrices, layout: Layout, kinds: tuple[tuple[MaskRule, int], ...], sequences: int
) -> PricedStages:
    """Return the times averaged over the layers of a model, without packed documents."""
    found = [
        (prices.of(layout, [rule.undivided(layout.seq, layout.padded_seq)] * sequences), layers)
        for rule, layers in kinds
    ]
    every = sum(layers for _, layers in found)

    def mean(backward: bool) -> dict[int, float]:
        tables = [(p.backward if backward else p.forward, layers) for p, layers in found]
        return {n: sum(of[n] * layers for of, layers in tables) / every for n in tables[0][0]}

    return PricedStages(mean(False), mean(True), prices.given)


@lru_cache(maxsize=64)
def _lowered(exchange: str, options: ScheduleOptions) -> tuple[Schedule, Program, Program]:
    schedule = make_schedule(exchange, options)
    return schedule, lower(schedule, 0), lower(schedule, 0, backward=True)


def pairs_between(masks: Sequence[SequenceMask], shards: Sequence[IntArray]) -> NDArray[np.float64]:
    """Return the number of pairs of each rank's queries with each rank's keys, [ranks, ranks].

    shards: the positions that each rank holds.
    """
    ranks, size = len(shards), sum(map(len, shards))
    owner = np.empty(size, np.int64)
    for rank, positions in enumerate(shards):
        owner[positions] = rank
    # Ranks hold whole blocks of this size.
    unit = int(np.gcd.reduce(np.flatnonzero(np.diff(owner)) + 1, initial=size))
    blocks, holder = size // unit + 1, np.append(owner[::unit], 0)
    order = np.argsort(holder[:-1], kind="stable")  # blocks, by the rank that holds them
    first = np.searchsorted(holder[order], np.arange(ranks))
    pairs = np.zeros((ranks, ranks))
    for ends, sign in (
        (ends, sign)
        for mask in masks
        for bound, sign in ((mask.high, 1), (mask.low, -1))
        for ends in bound
        if ends.any()
    ):
        block, rest = np.divmod(ends, unit)
        whole = np.bincount(owner * blocks + block, minlength=ranks * blocks)
        # Queries that end after each block see all of its keys.
        after = whole.reshape(ranks, blocks)[:, :0:-1].cumsum(1)[:, ::-1]
        pairs += sign * unit * np.add.reduceat(after[:, order], first, axis=1)
        inside = np.bincount(owner * ranks + holder[block], rest, minlength=ranks**2)
        pairs += sign * inside.reshape(ranks, ranks)
    return pairs


def by_stage(schedule: Schedule, of_ranks: NDArray[np.float64]) -> Work:
    """Sum over the keys of each stage. of_ranks: [ranks, ranks], by queries and keys."""
    ranks, size, heads = len(of_ranks), node_size(schedule), schedule.heads
    work: Work = {None: of_ranks.sum(1)}
    node, local = np.divmod(np.arange(ranks), size)
    for step in schedule.forward[0]:
        if step.stage is None or step.part != schedule.forward[0][0].part:
            continue
        total = np.zeros(ranks)
        for key in step.keys[::heads]:
            # The same place, seen from each rank.
            far, near = divmod(key // heads, size)
            keys = (node + far) % (ranks // size) * size + (local + near) % size
            total += of_ranks[np.arange(ranks), keys]
        work[step.stage] = total
    return work


class _Walk:
    """Plays one program on all ranks. Clocks are float64 [nodes, ranks of a node], in seconds.

    Ranks that share heads have one clock.
    """

    def __init__(
        self, program: Program, sizes: ShardSizes, schedule: Schedule, rates: Rates
    ) -> None:
        self.program, self.sizes, self.rates = program, sizes, rates
        self.per_node = schedule.per_node
        self.nodes = nodes = Nodes.of_groups(schedule.workers, schedule.per_node, schedule.heads)
        self.now = np.zeros((nodes.count, nodes.per_node))
        self.free: dict[tuple[str, bool], Clock] = {}  # by communicator
        self.arrived: dict[int, Clock] = {}
        self.flying: list[tuple[Clock, float]] = []  # arrival, share of the computing power

    def seconds(self, flop: Work) -> float:
        """Return the time of the slowest rank. flop: of all heads."""
        for op in self.program.operations:
            match op:
                case Compute():
                    match op.keys:
                        case Stage(stage):
                            of_keys = flop[stage]
                        case Whole():
                            of_keys = flop[None]
                        case _:
                            of_keys = flop[0]
                    seconds = of_keys / op.part[1] / self.rates.flops
                    self._compute(_CALL + seconds.reshape(self.now.shape))
                case Post():
                    self._post(op)
                case Wait():
                    self.now = np.maximum(self.now, self.arrived[op.number])
                case Copy():
                    if bytes_moved := self._bytes(op.moves):
                        self.now = self.now + max(_COPY, bytes_moved / self.rates.memory)
        return float(self.now.max())

    def _bytes(self, size: Size) -> float:
        return float(size.of(self.sizes, self.program.sharing))

    def _compute(self, seconds: Clock) -> None:
        """Advance the clocks by work that messages in flight slow down."""
        self.flying = [entry for entry in self.flying if (entry[0] > self.now).any()]
        lost = np.zeros_like(self.now)
        for arrival, share in self.flying:
            # Until the message arrives, the kernel gets 1 - share of the GPU.
            beside = np.minimum(seconds / (1 - share), np.maximum(arrival - self.now, 0.0))
            lost += share * beside
        self.now = self.now + seconds + lost

    def _post(self, op: Post) -> None:
        t = op.transfer
        queue = t.channel, t.payload in GRADIENTS
        ready = np.maximum(self.now, self.free.get(queue, self.now))
        if t.after is not None:
            ready = np.maximum(ready, self.arrived[t.after])
        # Ranks with equal local numbers cast across nodes, and the ranks of a node inside it.
        axis = {OUTER: (0,), INNER: (1,), HEADS: ()}.get(t.channel, (0, 1))
        begins = np.broadcast_to(ready.max(axis=axis, keepdims=True), ready.shape)
        size, rates, peers = self._bytes(op.sends), self.rates, len(t.peers)
        members = {OUTER: 1, INNER: peers, HEADS: min(peers, self.per_node)}.get(
            t.channel, self.nodes.per_node
        )
        crosses, inside = members < peers, size if members > 1 else 0.0
        latency, moving = rates.inner_latency, size / rates.inner
        if crosses:
            across = size / members
            if t.channel == HEADS:
                across = size * (peers - members) / (peers - 1)
                inside = size - across
            latency, moving = rates.outer_latency, max(across / rates.outer, inside / rates.inner)
        ends = begins + latency + moving
        self.free[queue] = self.arrived[t.number] = ends
        self.flying.append((ends, rates.outer_share if crosses else rates.inner_share))
