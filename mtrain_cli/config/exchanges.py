"""The exchanges of keys and values that a run can choose, and their traits.

Code that depends on the kind of an exchange reads these traits and never compares names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mtrain_cli.config.plugins import Plugins

OVERLAPS, ORDERS = ("none", "keys", "all"), ("next", "ends")


@dataclass(frozen=True)
class RingVariant:
    """How another implementation runs its rings, for predictions.

    overlap: the messages that overlap with computation. ``keys``: all but gradients.
    order: how a ring visits the GPUs. ``ends``: 0, W - 1, 1, W - 2, and so on.
    """

    overlap: str = "all"
    order: str = "next"

    def __post_init__(self) -> None:
        for name, allowed in (("overlap", OVERLAPS), ("order", ORDERS)):
            if (given := getattr(self, name)) not in allowed:
                raise ValueError(f"{name}={given}: allowed: {', '.join(allowed)}")


OURS = RingVariant()


@dataclass(frozen=True)
class ExchangeTraits:
    """The properties of an exchange on which other code depends.

    gathers: whether a rank gathers all keys that it needs before its kernel runs; else shards of
        keys and values circulate in rings.
    hierarchical: whether messages inside a node and between nodes use separate channels.
    by_mask: whether a rank gathers only the rows of keys that its queries see under the masks.
    schedule: ``module:function`` that makes the schedule from `ScheduleOptions`.
    """

    gathers: bool
    hierarchical: bool
    by_mask: bool = False
    schedule: str = field(kw_only=True, compare=False, default="")


_GATHERS, _RINGS = "mtrain_cli.parallel.gather", "mtrain_cli.parallel.ring"
OWN = {
    name: ExchangeTraits(
        gathers=not name.endswith("ring"),
        hierarchical=name.startswith("hierarchical"),
        by_mask=name.endswith("group_cast"),
        schedule=f"{_RINGS if name.endswith('ring') else _GATHERS}:{name}",
    )
    for kind in ("all_gather", "group_cast", "ring")
    for name in (kind, f"hierarchical_{kind}")
}


def _check(name: str, traits: ExchangeTraits, others: Mapping[str, ExchangeTraits]) -> None:
    del name, others
    if not (isinstance(traits, ExchangeTraits) and ":" in traits.schedule):
        raise ValueError("it must be ExchangeTraits whose schedule is module:function")


EXCHANGE_TRAITS: Plugins[ExchangeTraits] = Plugins("mtrain.exchanges", f"{__name__}:OWN", _check)
# The exchanges that predictions compare, in the order of their tables. Predictions compare group
# casts only under a mask other than causal: they count each sequence as one document, in which a
# causal mask needs most rows.
COMPARED_EXCHANGES = ("ring", "hierarchical_ring", "all_gather", "hierarchical_all_gather")
GROUP_CASTS = tuple(name for name, traits in OWN.items() if traits.by_mask)
ULYSSES = "ulysses"
# {value of topology.exchange that splits the heads among all workers of a sequence: the exchange
# that runs then}
HEAD_SHARING = {ULYSSES: "all_gather"}
# mtrain's own exchange with given traits stands for them. Others may have the same traits.
_FIRST = {traits: name for name, traits in OWN.items()}


def exchange_names() -> tuple[str, ...]:
    """Return the values of ``topology.exchange``."""
    return ("auto", *EXCHANGE_TRAITS, *HEAD_SHARING)


def exchange_name(*, gathers: bool, hierarchical: bool) -> str:
    """Return the name of the exchange that ``topology.exchange=auto`` chooses for these traits."""
    return _FIRST[ExchangeTraits(gathers, hierarchical)]


def by_mask_name(*, hierarchical: bool) -> str:
    """Return the name of the exchange that moves only the rows that a mask needs."""
    return _FIRST[ExchangeTraits(gathers=True, hierarchical=hierarchical, by_mask=True)]


def flat_name(name: str) -> str:
    """Return the flat counterpart of a hierarchical exchange; any other name unchanged."""
    traits = EXCHANGE_TRAITS.get(name)
    if traits is None or not traits.hierarchical:
        return name
    return _FIRST[replace(traits, hierarchical=False)]
