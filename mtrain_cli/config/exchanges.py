"""The exchanges of keys and values that a run can choose, and their traits.

Code that depends on the kind of an exchange reads these traits and never compares names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ExchangeTraits:
    """The properties of an exchange on which other code depends.

    gathers: whether a rank gathers all keys that it needs before its kernel runs. If not, shards of
        keys and values circulate in rings.
    hierarchical: whether messages inside a node and messages between nodes use separate channels.
    by_mask: whether a rank gathers only the rows of keys that its queries see under the masks.
    """

    gathers: bool
    hierarchical: bool
    by_mask: bool = False


EXCHANGE_TRAITS = {
    "all_gather": ExchangeTraits(gathers=True, hierarchical=False),
    "hierarchical_all_gather": ExchangeTraits(gathers=True, hierarchical=True),
    "group_cast": ExchangeTraits(gathers=True, hierarchical=False, by_mask=True),
    "hierarchical_group_cast": ExchangeTraits(gathers=True, hierarchical=True, by_mask=True),
    "ring": ExchangeTraits(gathers=False, hierarchical=False),
    "hierarchical_ring": ExchangeTraits(gathers=False, hierarchical=True),
}
# The exchanges that predictions compare, in the order of their tables. Predictions compare group
# casts only under a mask other than causal: they count each sequence as one document, in which a
# causal mask needs most rows.
COMPARED_EXCHANGES = ("ring", "hierarchical_ring", "all_gather", "hierarchical_all_gather")
GROUP_CASTS = tuple(name for name, traits in EXCHANGE_TRAITS.items() if traits.by_mask)
ULYSSES = "ulysses"
# {value of topology.exchange that splits the heads among all workers of a sequence: the exchange
# that runs then}
HEAD_SHARING = {ULYSSES: "all_gather"}
# The first exchange with given traits stands for them. Others may have the same traits.
_FIRST = {traits: name for name, traits in reversed(EXCHANGE_TRAITS.items())}


def exchange_name(*, gathers: bool, hierarchical: bool) -> str:
    """Return the name of the exchange that ``topology.exchange=auto`` chooses for these traits."""
    return _FIRST[ExchangeTraits(gathers, hierarchical)]


def by_mask_name(*, hierarchical: bool) -> str:
    """Return the name of the exchange that moves only the rows that a mask needs."""
    return _FIRST[ExchangeTraits(gathers=True, hierarchical=hierarchical, by_mask=True)]


def flat_name(name: str) -> str:
    """Return the flat counterpart of a hierarchical exchange, such as ring for hierarchical_ring.

    Return any other name unchanged.
    """
    traits = EXCHANGE_TRAITS.get(name)
    if traits is None or not traits.hierarchical:
        return name
    return _FIRST[replace(traits, hierarchical=False)]
