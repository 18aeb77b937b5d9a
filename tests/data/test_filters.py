"""Conditions on the documents of a store."""

import pytest

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.corpora import EVERYTHING, Filters


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"min_tokens": -1}, "--min-tokens -1: must be 0 "),
        ({"min_tokens": 9, "max_tokens": 8}, "--max-tokens 8: is below --min-tokens 9"),
        ({"truncate": True}, "--truncate: cuts documents at --max-tokens"),
    ],
)
def test_contradicting_filters_are_refused(values, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        Filters(**values)


def test_a_minimum_without_a_maximum_is_allowed():
    assert Filters(min_tokens=9, max_tokens=0).max_tokens == 0
    assert Filters(min_tokens=9, max_tokens=9, truncate=True).truncate


def test_the_recipe_tells_filters_apart_and_is_empty_without_any():
    assert EVERYTHING.recipe == {} == Filters().recipe
    recipes = [Filters(min_tokens=3), Filters(max_tokens=3), Filters(domains=("code",))]
    assert len({filters.recipe["filters"] for filters in recipes}) == 3
