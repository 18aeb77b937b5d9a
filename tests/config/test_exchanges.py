"""Which exchange stands for its traits, also if several have the same."""

from __future__ import annotations

import pytest

from mtrain_cli.config import exchanges
from mtrain_cli.config.exchanges import EXCHANGE_TRAITS, exchange_name, flat_name


@pytest.mark.parametrize("name", EXCHANGE_TRAITS)
def test_auto_takes_the_same_exchange_if_others_with_its_traits_come_first(name, monkeypatch):
    traits = EXCHANGE_TRAITS[name]
    others = dict(EXCHANGE_TRAITS)
    monkeypatch.setattr(exchanges, "EXCHANGE_TRAITS", {f"new_{name}": traits, **others})
    assert exchange_name(gathers=traits.gathers, hierarchical=traits.hierarchical) == name


def test_only_hierarchical_exchanges_have_a_flat_partner(monkeypatch):
    monkeypatch.setitem(EXCHANGE_TRAITS, "mirrored_ring", EXCHANGE_TRAITS["ring"])
    assert flat_name("mirrored_ring") == "mirrored_ring"
    assert flat_name("hierarchical_ring") == "ring"
    assert flat_name("hierarchical_all_gather") == "all_gather"
    assert [flat_name(name) for name in ("ring", "ulysses")] == ["ring", "ulysses"]
