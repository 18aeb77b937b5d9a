"""One configuration key as a dataclass field: its help line, and the values that it allows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

# `Range.limit` tests rules with this number: a power of two, because some keys require one.
_VAST = 2.0**100


@dataclass(frozen=True)
class UpperLimit:
    """The largest allowed value of a number, and why no run needs a larger one.

    Every number has a limit: larger ones overflow or keep a plan busy for hours.
    """

    value: float
    reason: str


_ANY_RUN = UpperLimit(10**9, "no run has more")


@dataclass(frozen=True)
class Range:
    """The allowed values of a number. Null and words such as auto are not checked.

    rule: text after ``key=value: `` in a message, such as "must be at least 1".
    fits: whether a number obeys the rule.
    """

    rule: str
    fits: Callable[[float], bool]
    most: UpperLimit = _ANY_RUN

    def up_to(self, value: float, reason: str) -> Range:
        return replace(self, most=UpperLimit(value, reason))

    @property
    def limit(self) -> UpperLimit | None:
        """The upper limit, or None if the rule itself sets one."""
        return self.most if self.fits(_VAST) else None

    def is_beyond(self, value: object) -> bool:
        """Return whether ``value`` is a number above the upper limit."""
        limit = self.limit
        return limit is not None and isinstance(value, int | float) and value > limit.value


def option(
    help: str,
    allowed: tuple[str, ...] | Range = (),
    *,
    tokens: bool = False,
    **default: Any,
) -> Any:
    """Return a dataclass field that is a configuration key.

    Args:
        help: the key's line in `mtrain config show` and in the configuration reference.
        allowed: the words that the key takes, or the range of its numbers.
        tokens: the key counts tokens, so it takes sizes such as 512k.
    """
    return field(metadata={"help": help, "allowed": allowed, "tokens": tokens}, **default)


def at_least(least: int, rule: str = "") -> Range:
    """Return the range from ``least``. rule: replaces "must be at least N"."""
    return Range(rule or f"must be at least {least}", lambda value: value >= least)


POSITIVE = at_least(1)
ABOVE_ZERO = Range("must be above 0", lambda value: value > 0)
NOT_NEGATIVE = at_least(0, "must be 0 or more")
SHARE = Range("must be above 0 and at most 1", lambda value: 0 < value <= 1)
FRACTION = Range("must be between 0 and 1", lambda value: 0 <= value <= 1)

MOST_TOKENS = 2**26
STEPS = (10**9, "a year at 30 steps a second")
TOKENS_OF_SEQ = (MOST_TOKENS, "seq has no more tokens")
