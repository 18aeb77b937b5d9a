"""Choose the stages of a group cast: resolve ``topology.stages=auto`` by the mask and by prices."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from mtrain_cli.attention.mask_rule import MaskRule
from mtrain_cli.config.cluster import load_cluster
from mtrain_cli.config.schema import Config
from mtrain_cli.config.sizes import with_count
from mtrain_cli.parallel.exchange_selection import ExchangeChoice, ExchangeNeeds, choose_exchange
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.schedule import ScheduleOptions, make_schedule
from mtrain_cli.parallel.stage_prices import attention_seconds
from mtrain_cli.parallel.traffic import Rates
from mtrain_cli.training.layout_choice import LayoutChoice

# auto takes more than one stage only if attention then takes less than this share of its time.
_WORTH_IT = 0.98


def choose_staged_exchange(
    config: Config, chosen: LayoutChoice, needs: ExchangeNeeds, device: str
) -> ExchangeChoice:
    """Choose the exchange of a run after its layout, with the stages of a group cast.

    For dense attention, ``topology.stages=auto`` compares the time of attention in 1, 2 and 3
    stages (`mtrain_cli.parallel.stage_prices`), for sequences that are one document.

    device: of the run, cuda or cpu.

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
    if topology.stages != "auto" or not one.traits.by_mask or not dense:
        return one
    if one.heads == needs.workers:
        return one  # nothing moves by mask
    topology = replace(topology, exchange=one.name)
    most = 3 if one.traits.hierarchical else 2
    staged = (choose_exchange(replace(topology, stages=n), needs) for n in range(2, most + 1))
    choices = {choice.stages: choice for choice in (*staged, one)}  # 3 stages may mean 2
    cluster, where = None, "H200s"
    if topology.cluster != "auto":
        cluster = load_cluster(topology.cluster, f"topology.cluster={topology.cluster}")
        where = f"the links of topology.cluster={topology.cluster}"
    rules = MaskRule.of(config).by_layers(config.model.num_layers)
    times = {
        stages: _seconds(
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
            f"{_milliseconds(times[n])} with {with_count(n, 'stage')}" for n in times if n != best
        )
        prices += f", attention of a layer takes {_milliseconds(times[best])}, {others}"
    prices += f" (topology.stages=auto, predicted for {named_on(device, where)})"
    return replace(choices[best], reason=f"{one.reason}; {prices}")


def named_on(device: str, hardware: str) -> str:
    """Return a name of hardware with a word that it is not that of a run on a CPU."""
    return hardware if device == "cuda" else f"{hardware}, not for CPU processes"


@lru_cache(maxsize=64)  # a search for the longest sequence tries about 20, twice
def _seconds(
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
    total = sum(
        layers
        * attention_seconds(
            schedule,
            layout,
            [rule.undivided(layout.seq, layout.padded_seq)] * sequences,
            sizes,
            rates,
        )
        for rule, layers in rules
    )
    return total / sum(layers for _, layers in rules)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
