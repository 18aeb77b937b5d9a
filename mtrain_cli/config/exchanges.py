"""The exchanges of keys and values that a run can choose, and their traits.

Code that depends on the kind of an exchange reads these traits. It never compares the name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExchangeTraits:
    """The properties of an exchange on which other code depends.

    gathers: whether a rank gathers all keys before its kernel runs. If not, shards of keys and
        values circulate in rings.
    hierarchical: whether messages inside a node and messages between nodes use separate channels.
    """

    gathers: bool
    hierarchical: bool


EXCHANGE_TRAITS = {
    "all_gather": ExchangeTraits(gathers=True, hierarchical=False),
    "hierarchical_all_gather": ExchangeTraits(gathers=True, hierarchical=True),
    "ring": ExchangeTraits(gathers=False, hierarchical=False),
    "hierarchical_ring": ExchangeTraits(gathers=False, hierarchical=True),
}


def exchange_name(*, gathers: bool, hierarchical: bool) -> str:
    """Return the first exchange that has these traits. ``topology.exchange=auto`` chooses it."""
    traits = ExchangeTraits(gathers, hierarchical)
    return next(name for name in EXCHANGE_TRAITS if EXCHANGE_TRAITS[name] == traits)


def flat_name(name: str) -> str:
    """Return the exchange that does the same as a hierarchical one, without levels of nodes.

    Return any other name unchanged.
    """
    traits = EXCHANGE_TRAITS.get(name)
    if traits is None or not traits.hierarchical:
        return name
    return exchange_name(gathers=traits.gathers, hierarchical=False)
