"""The exchanges that a run can choose, and their traits.

Code that depends on the kind of an exchange reads its traits and never compares its name.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExchangeTraits:
    """The properties of an exchange on which other code depends.

    gathers: a rank gathers all keys before its kernel runs. Otherwise shards circulate in rings.
    hierarchical: messages inside a node and between nodes use separate channels.
    """

    gathers: bool
    hierarchical: bool


EXCHANGE_TRAITS = {
    "all_gather": ExchangeTraits(gathers=True, hierarchical=False),
    "hierarchical_all_gather": ExchangeTraits(gathers=True, hierarchical=True),
    "ring": ExchangeTraits(gathers=False, hierarchical=False),
    "hierarchical_ring": ExchangeTraits(gathers=False, hierarchical=True),
}
# Settings that share heads among all workers of a sequence -> the exchange that they run.
HEAD_SHARING = {"ulysses": "all_gather"}
# Several exchanges may have the same traits. `auto` takes these.
_AUTOMATIC = ("all_gather", "hierarchical_all_gather", "ring", "hierarchical_ring")
_CHOSEN = {EXCHANGE_TRAITS[name]: name for name in _AUTOMATIC}


def exchange_name(*, gathers: bool, hierarchical: bool) -> str:
    """Return the exchange that ``topology.exchange=auto`` takes for these traits."""
    return _CHOSEN[ExchangeTraits(gathers, hierarchical)]


def flat_name(name: str) -> str:
    """Return a hierarchical exchange's equivalent without node levels; other names unchanged."""
    traits = EXCHANGE_TRAITS.get(name)
    if traits is None or not traits.hierarchical:
        return name
    return exchange_name(gathers=traits.gathers, hierarchical=False)
