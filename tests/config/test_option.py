"""Fields of the schema as keys with a help text and allowed values."""

import pytest

from mtrain_cli.config import keys
from mtrain_cli.config.option import (
    ABOVE_ZERO,
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    Range,
    at_least,
)


@pytest.mark.parametrize(
    ("bounds", "inside", "outside"),
    [
        (POSITIVE, 1, 0),
        (ABOVE_ZERO, 1e-30, 0),
        (NOT_NEGATIVE, 0, -1e-30),
        (SHARE, 1, 0),
        (SHARE, 1e-30, 1.001),
        (FRACTION, 0, 1.001),
        (FRACTION, 1, -1e-30),
        (at_least(7), 7, 6),
    ],
)
def test_a_range_has_inclusive_ends(bounds, inside, outside):
    assert bounds.fits(inside)
    assert not bounds.fits(outside)


def test_only_a_rule_without_an_upper_end_has_a_limit():
    assert not SHARE.has_limit
    limited = POSITIVE.up_to(5, "five are enough")
    assert limited.has_limit
    assert limited.is_beyond(6)
    assert not limited.is_beyond(5)
    assert not limited.is_beyond("auto")
    assert Range("a power of two", lambda value: int(value) & (int(value) - 1) == 0).has_limit


def test_every_number_has_an_upper_limit_with_a_reason():
    """Without limits, 1e15 tokens fill the memory and 1e30 seconds overflow."""
    for key in keys.all_keys().values():
        if key.range:
            message = key.out_of_range(2.0**100)
            assert message is not None, key.name
            if key.range.has_limit:
                assert message.startswith("must be at most ")
                assert key.range.reason in message
                assert key.range.reason in key.allowed or key.range.most >= 1e9
