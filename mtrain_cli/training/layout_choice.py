"""Choose a layout and the stages of a group cast: resolve `auto` by the mask, the data and prices.

Every stage beyond the first adds kernel calls and merges, and hides a part of the casts behind own
keys. Whether this pays depends on the links. `attention_seconds` walks the programs of a layer with
a clock for each rank; `simulation.timeline` walks the same programs with calibrated kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from mtrain_cli.attention.mask import IntArray, SequenceMask
from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.attention.named_masks import CAUSAL
from mtrain_cli.config.cluster import cluster_of
from mtrain_cli.config.exchanges import EXCHANGE_TRAITS, HEAD_SHARING, by_mask_name
from mtrain_cli.config.mask_settings import MaskSettings
from mtrain_cli.config.schema import Config
from mtrain_cli.config.sizes import with_count
from mtrain_cli.parallel.cast_rows import largest_shares
from mtrain_cli.parallel.dispatch import Balancer, Dispatch, RowPrices
from mtrain_cli.parallel.exchange_selection import ExchangeChoice, ExchangeNeeds, choose_exchange
from mtrain_cli.parallel.layout import Balanced, Layout, Placement, make_layout
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
from mtrain_cli.parallel.traffic import (
    LayerMasks,
    MovedRows,
    Nodes,
    Rates,
    Traffic,
    count_traffic,
    pairs_per_query,
)

# auto takes the balanced layout only if it costs less than this share of the other layout.
_WORTH_IT = 0.98


@dataclass(frozen=True)
class LayoutChoice:
    """The layout of sequences that are one document.

    reason: why it was chosen; "" if nothing but `Config.layout` decided.
    balancer: makes the layout of each batch; None if all batches have the same layout.
    exchange: the exchange that `topology.exchange=auto` stands for; None to choose it by bytes.
    """

    layout: Layout
    reason: str = ""
    balancer: Balancer | None = None
    exchange: str | None = None


def choose_layout(config: Config, cp: int, per_node: int) -> LayoutChoice:
    """Choose the layout of a context group of ``cp`` workers, ``per_node`` of them on a node.

    With a dynamic index, workers hold whole blocks. A mask other than ``causal`` may leave some
    queries with few keys. For dense attention, ``auto`` then compares two costs
    (`mtrain_cli.parallel.dispatch`) of a sequence that is one document: of the balanced layout with
    a group cast, which alone profits from it, and of the layout and exchange for ``causal``.
    """
    balancer = make_balancer(config, cp, per_node)
    exchange, dense = config.topology.exchange, config.sparsity.pattern == "dense"
    cast = by_mask_name(hierarchical=per_node < cp)
    if config.topology.layout == Balanced.name:
        static = _static_layout(balancer, config.mask)
        chosen = cast if exchange == "auto" and dense and balancer.groups > 1 else None
        return LayoutChoice(static, "as configured", balancer, chosen)
    layout = make_layout(
        config.layout, cp, config.seq, config.topology.block_size, unit=config.sparsity.block or 1
    )
    traits = EXCHANGE_TRAITS.get(exchange)
    by_mask = traits is not None and traits.by_mask
    if (
        config.topology.layout != "auto"
        or balancer.groups == 1
        or not dense
        or config.mask.kind == "causal"
        or not (by_mask or exchange == "auto")
    ):
        return LayoutChoice(layout)
    static_cost, balanced = _static_costs(balancer, config.mask, layout, by_mask=by_mask)
    named = exchange if by_mask else cast
    other = f"{layout.name} and {exchange if by_mask else 'whole shards'} {static_cost:.2f}"
    prices = f"a batch costs {balanced:.2f} of its mean pairs, with {other}"
    reason = f"auto: with balanced and {named}, {prices}"
    if balanced >= _WORTH_IT * static_cost:
        return LayoutChoice(layout, reason)
    static = _static_layout(balancer, config.mask)
    return LayoutChoice(static, reason, balancer, None if by_mask else named)


def make_balancer(config: Config, cp: int, per_node: int) -> Balancer:
    """Return the balancer of a context group, also if the run has another layout."""
    topology, model, mask = config.topology, config.model, config.mask
    heads = topology.ulysses if isinstance(topology.ulysses, int) else 1
    whole_nodes = cp <= per_node or per_node % heads == 0 or heads % per_node == 0
    heads = heads if cp % heads == 0 and whole_nodes else 1  # `choose_exchange` refuses others
    full = sum(map(mask.is_full, range(model.num_layers)))
    return Balancer(
        cp,
        config.seq,
        unit=config.sparsity.block or 1,
        heads=cp if topology.exchange in HEAD_SHARING else heads,
        per_node=per_node,
        prices=row_prices(config),
        layers=(model.num_layers - full, full) if mask.is_mixed else (1,),
        given_chunk=topology.chunk,
    )


def row_prices(config: Config) -> RowPrices:
    """Return the prices of rows on the cluster of a run, for its balanced layouts."""
    model = config.model
    cluster = cluster_of(config.topology.cluster)
    return RowPrices.on(cluster, model.num_heads, model.num_kv_heads)


@lru_cache(maxsize=64)
def _static_dispatch(balancer: Balancer, mask: MaskSettings) -> Dispatch:
    return balancer.dispatch(_undivided(mask, balancer.seq, balancer.padded_seq))


def _undivided(mask: MaskSettings, length: int, padded: int) -> LayerMasks:
    kinds = [mask, CAUSAL] if mask.is_mixed else [mask]
    return [[MaskRule(False, kind).undivided(length, padded)] for kind in kinds]


def _static_layout(balancer: Balancer, mask: MaskSettings) -> Balanced:
    return balancer.layout_of(_static_dispatch(balancer, mask))


@lru_cache(maxsize=64)  # a search for the longest sequence tries about 20, twice
def _static_costs(
    balancer: Balancer, mask: MaskSettings, layout: Layout, *, by_mask: bool
) -> tuple[float, float]:
    """Return the costs of a layout and of the balanced one, divided by a rank's mean pairs."""
    dispatch = _static_dispatch(balancer, mask)
    inside = Placement(layout, balancer.heads).inside
    shards = [inside.positions(rank) for rank in range(inside.workers)]
    masks = _undivided(mask, layout.seq, layout.padded_seq)
    per_node = balancer.groups_per_node
    traffic = count_traffic(masks, shards, per_node=per_node, layers=balancer.layers)
    if not by_mask:
        rows = inside.tokens_per_worker * sum(balancer.layers)
        nodes = Nodes.of(inside.workers, per_node)
        traffic = _whole_shards(traffic, rows, nodes)
    mean = float(dispatch.traffic.pairs.mean())
    present = traffic.cost(*dispatch.prices)
    return float(present.max()) / mean, float(dispatch.cost.max()) / mean


def _whole_shards(traffic: Traffic, rows: int, nodes: Nodes) -> Traffic:
    """Return the traffic if every rank receives all shards, and each shard enters a node once."""
    mates, others = nodes.per_node - 1, nodes.count - 1
    moved = (np.full(nodes.workers, rows * shards) for shards in (mates, mates * others, others))
    near, relayed, outer = (MovedRows(number, number) for number in moved)
    return Traffic(traffic.pairs, near, relayed, outer)


Clock = NDArray[np.float64]
Work = dict[int | None, NDArray[np.floating]]  # FLOP by stage, [workers] each

_FLOP_PER_PAIR = {False: 4, True: 10}  # by backward; per query head and dimension
# Seconds of a call beyond its FLOP, and of the shortest copy, on H200s.
_CALL, _COPY = 30e-6, 2e-6


def choose_staged_exchange(
    config: Config, chosen: LayoutChoice, needs: ExchangeNeeds, device: str
) -> ExchangeChoice:
    """Choose the exchange of a run after its layout, with the stages of a group cast.

    Raises:
        ConfigError: the settings do not fit the model, the nodes or the pattern.
    """
    topology = config.topology
    if chosen.exchange is not None:
        topology = replace(topology, exchange=chosen.exchange)
    one = choose_exchange(topology, needs)
    if chosen.exchange is not None:
        one = replace(one, reason="moves the rows that a balanced layout leaves with other workers")
    dense = config.sparsity.pattern == "dense"
    moves = one.traits.by_mask and one.heads < needs.workers
    if topology.stages != "auto" or not moves or not dense:
        return one
    topology = replace(topology, exchange=one.name)
    most = 3 if one.traits.hierarchical else 2
    staged = (choose_exchange(replace(topology, stages=n), needs) for n in range(2, most + 1))
    choices = {choice.stages: choice for choice in (*staged, one)}  # 3 stages may mean 2
    cluster = cluster_of(topology.cluster)
    where = f"the links of topology.cluster={topology.cluster}" if cluster else "H200s"
    rules = MaskRule.of(config).by_layers(config.model.num_layers)
    times = {
        stages: _mean_seconds(
            choice.name,
            choice.options(needs.workers),
            chosen.layout,
            rules,
            config.train.micro_batch,
            replace(needs, device_memory=None),
            Rates.on(cluster),
        )
        for stages, choice in sorted(choices.items())
    }
    best = min(times, key=times.__getitem__)
    best = best if times[best] < _WORTH_IT * times[1] else 1
    prices = f"with {with_count(best, 'stage')}"
    if device == "cuda":
        others = " and ".join(
            f"{1e3 * times[n]:.3g} ms with {with_count(n, 'stage')}" for n in times if n != best
        )
        prices += f", attention of a layer takes {1e3 * times[best]:.3g} ms, {others}"
    prices += f" (topology.stages=auto, predicted for {named_on(device, where)})"
    return replace(choices[best], reason=f"{one.reason}; {prices}")


def named_on(device: str, hardware: str) -> str:
    """Return a name of hardware with a word that it is not that of a run on a CPU."""
    return hardware if device == "cuda" else f"{hardware}, not for CPU processes"


@lru_cache(maxsize=64)  # a search for the longest sequence tries about 20, twice
def _mean_seconds(
    exchange: str,
    options: ScheduleOptions,
    layout: Layout,
    rules: tuple[tuple[MaskRule, int], ...],
    sequences: int,
    needs: ExchangeNeeds,
    rates: Rates,
) -> float:
    """Return the time of attention in seconds, averaged over the layers of a model."""
    schedule = make_schedule(exchange, options)
    sizes = replace(needs.sizes(needs.shard), sequences=sequences)
    total = 0.0
    for rule, layers in rules:
        masks = [rule.undivided(layout.seq, layout.padded_seq)] * sequences
        total += layers * attention_seconds(schedule, layout, masks, sizes, rates)
    return total / sum(layers for _, layers in rules)


def attention_seconds(
    schedule: Schedule,
    layout: Layout,
    masks: Sequence[SequenceMask],
    sizes: ShardSizes,
    rates: Rates,
) -> float:
    """Return the time of the slowest rank for attention of a layer, forward plus backward.

    schedule: of a group cast, whose sizes follow from the masks.
    masks: one per sequence of a micro-batch.
    """
    inside = Placement(layout, schedule.heads).inside
    nodes = Nodes.of_groups(schedule.workers, schedule.per_node, schedule.heads)
    shards = [inside.positions(rank) for rank in range(inside.workers)]
    pairs = pairs_by_stage(masks, shards, nodes, schedule.stages)
    sizes = replace(sizes, casts=largest_shares(schedule, layout, masks))
    seconds = 0.0
    for backward in (False, True):
        flop_per_pair = float(_FLOP_PER_PAIR[backward] * sizes.heads * sizes.head_dim)
        work: Work = {stage: number * flop_per_pair for stage, number in pairs.items()}
        program = lower(schedule, 0, backward=backward)
        seconds += _Walk(program, sizes, nodes, schedule.per_node, rates).seconds(work)
    return seconds


def pairs_by_stage(
    masks: Sequence[SequenceMask], shards: Sequence[IntArray], nodes: Nodes, stages: int
) -> dict[int | None, IntArray]:
    """Return the pairs of each rank with the keys of each stage of a group cast, [workers] each.

    Key None has all pairs. shards: the positions that each rank holds.
    """
    per_query = pairs_per_query([masks])
    whole = np.array([per_query[queries].sum() for queries in shards])
    pairs: dict[int | None, IntArray] = {None: whole}
    if stages == 1:
        return pairs
    own = np.array([_pairs_with(masks, queries, queries) for queries in shards])
    pairs |= {0: own, 1: whole - own}
    if stages == 3:
        starts = range(0, nodes.workers, nodes.per_node)
        of_node = [np.concatenate(shards[start : start + nodes.per_node]) for start in starts]
        keys = [of_node[rank // nodes.per_node] for rank in range(len(shards))]
        inside = np.array([_pairs_with(masks, *of) for of in zip(shards, keys, strict=True)])
        pairs |= {1: inside - own, 2: whole - inside}
    return pairs


def _pairs_with(masks: Sequence[SequenceMask], queries: IntArray, keys: IntArray) -> int:
    """Return the number of pairs of these queries with these keys."""
    ordered = np.sort(keys)
    return sum(
        int((np.searchsorted(ordered, bound[:, queries]) * sign).sum())
        for mask in masks
        for bound, sign in ((mask.high, 1), (mask.low, -1))
    )


class _Walk:
    """Plays one program on all ranks. Clocks are float64 [nodes, ranks of a node], in seconds.

    Ranks that share heads have one clock. per_node: number of single ranks that share a node.
    """

    def __init__(
        self, program: Program, sizes: ShardSizes, nodes: Nodes, per_node: int, rates: Rates
    ) -> None:
        self.program, self.sizes, self.nodes, self.rates = program, sizes, nodes, rates
        self.per_node = per_node
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
