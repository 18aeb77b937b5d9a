"""Choose a layout, and an exchange after it: resolve `auto` by the mask, the data and prices."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.attention.named_masks import CAUSAL
from mtrain_cli.config.cluster import cluster_of
from mtrain_cli.config.exchanges import EXCHANGE_TRAITS, HEAD_SHARING, by_mask_name
from mtrain_cli.config.mask_settings import MaskSettings
from mtrain_cli.config.schema import Config
from mtrain_cli.config.sizes import with_count
from mtrain_cli.parallel.dispatch import Balancer, Dispatch, RowPrices
from mtrain_cli.parallel.exchange_selection import ExchangeChoice, ExchangeNeeds, choose_exchange
from mtrain_cli.parallel.layout import Balanced, Layout, Placement, make_layout
from mtrain_cli.parallel.traffic import (
    LayerMasks,
    MovedRows,
    Nodes,
    Traffic,
    count_traffic,
)
from mtrain_cli.training.stage_prices import stage_prices, static_stages

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
    prices = stage_prices(config, one, needs)
    if prices is None:
        return one
    kinds = MaskRule.of(config).by_layers(config.model.num_layers)
    found = static_stages(prices, chosen.layout, kinds, config.train.micro_batch)
    cluster = cluster_of(topology.cluster)
    where = f"the links of topology.cluster={topology.cluster}" if cluster else "H200s"
    text = f"{with_count(found.best[0], 'stage')}, {found.best[1]} in backward"
    if device == "cuda":
        text += f": {found.described} a layer"
    key = "stages" if topology.stages == "auto" else "stages_backward"
    text += f" (topology.{key}=auto, predicted for {named_on(device, where)})"
    forward, backward = found.best
    one = replace(one, stages=forward, stages_backward=backward)
    return replace(one, reason=f"{one.reason}; {text}")


def named_on(device: str, hardware: str) -> str:
    """Return a name of hardware with a word that it is not that of a run on a CPU."""
    return hardware if device == "cuda" else f"{hardware}, not for CPU processes"
