"""Which exchange stands for its traits, also if several have the same."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from mtrain_cli.config import exchanges
from mtrain_cli.config.exchanges import EXCHANGE_TRAITS, HEAD_SHARING, exchange_name, flat_name


@pytest.mark.parametrize(
    "name", [name for name, traits in EXCHANGE_TRAITS.items() if not traits.by_mask]
)
def test_auto_takes_the_same_exchange_if_others_with_its_traits_come_first(name, monkeypatch):
    traits = EXCHANGE_TRAITS[name]
    others = dict(EXCHANGE_TRAITS)
    monkeypatch.setattr(exchanges, "EXCHANGE_TRAITS", {f"new_{name}": traits, **others})
    assert exchange_name(gathers=traits.gathers, hierarchical=traits.hierarchical) == name


def test_only_hierarchical_exchanges_have_a_flat_partner(monkeypatch):
    monkeypatch.setitem(EXCHANGE_TRAITS._all, "mirrored_ring", EXCHANGE_TRAITS["ring"])
    assert flat_name("mirrored_ring") == "mirrored_ring"
    assert flat_name("hierarchical_ring") == "ring"
    assert flat_name("hierarchical_all_gather") == "all_gather"
    assert flat_name("hierarchical_group_cast") == "group_cast"
    assert [flat_name(name) for name in ("ring", "ulysses")] == ["ring", "ulysses"]


def test_only_the_modules_that_define_exchanges_spell_their_names():
    named = {*EXCHANGE_TRAITS, *HEAD_SHARING}
    root = Path(exchanges.__file__).parents[2]
    # Collectives of `parallel.operations` are called all_gather, too.
    modules = "schedule", "gather", "ring", "operations"
    package = root / "mtrain_cli"
    definitions = [package / "config/exchanges.py"]
    definitions += [package / f"parallel/{name}.py" for name in modules]
    for file in sorted([*package.rglob("*.py"), *(root / "mtrain_extras/studies").rglob("*.py")]):
        if file not in definitions:
            nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
            spelled = {node.value for node in nodes if isinstance(node, ast.Constant)} & named
            assert not spelled, file
