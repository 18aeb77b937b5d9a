"""Declare configuration keys: dataclass fields with allowed values, and kinds of settings."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

# A number above every limit. A power of two, because some rules require one.
_VAST = 2.0**100


@dataclass(frozen=True)
class Range:
    """The allowed values of a number. Null and words such as auto are always allowed.

    rule: what a number must satisfy, as a text that continues ``key=value: ``.
    fits: function that returns whether a number satisfies the rule.
    most, reason: upper limit, unless the rule itself states one. Every number has a limit, because
        larger numbers overflow or make planning take hours.
    """

    rule: str
    fits: Callable[[float], bool]
    most: float = 10**9
    reason: str = "no run has more"

    def up_to(self, value: float, reason: str) -> Range:
        return replace(self, most=value, reason=reason)

    @property
    def has_limit(self) -> bool:
        """Whether ``most`` applies, since the rule states no limit."""
        return self.fits(_VAST)

    def is_beyond(self, value: object) -> bool:
        """Return whether ``value`` is a number above the limit."""
        return self.has_limit and isinstance(value, int | float) and value > self.most


def option(
    allowed: tuple[str, ...] | Callable[[], tuple[str, ...]] | Range = (),
    *,
    tokens: bool = False,
    expected: str | Callable[[], str] = "",
    words: str = "auto",
    **default: Any,
) -> Any:
    """Return a dataclass field that is a configuration key. Its help is in the docstring.

    allowed: allowed words, or a function that returns them, or the range of allowed numbers; empty
        to allow any value of the type.
    tokens: whether the key counts tokens and so allows sizes such as 512k.
    expected: text on the allowed values, or a function that returns it; "" if the type says it.
    words: regular expression of the texts that a key of numbers or text takes.
    """
    metadata = {"allowed": allowed, "tokens": tokens, "expected": expected, "words": words}
    return field(metadata=metadata, **default)


def at_least(least: int, rule: str = "") -> Range:
    """Return the range of numbers from ``least`` up. rule: text instead of "must be at least N"."""
    return Range(rule or f"must be at least {least}", lambda value: value >= least)


POSITIVE = at_least(1)
ABOVE_ZERO = Range("must be above 0", lambda value: value > 0)
NOT_NEGATIVE = at_least(0, "must be 0 or more")
SHARE = Range("must be above 0 and at most 1", lambda value: 0 < value <= 1)
FRACTION = Range("must be between 0 and 1", lambda value: 0 <= value <= 1)

MOST_TOKENS = 2**26
STEPS = (10**9, "a year of 30 steps per second")
TOKENS_OF_SEQ = (MOST_TOKENS, "the maximum of seq")
TABLE_OF_POSITIONS = (MOST_TOKENS, "a batch holds a table of all positions")


class Variant:
    """Settings of which a run has one kind: mask or pattern.

    A subclass is a frozen dataclass whose fields are its keys. A configuration has the keys of all
    kinds; those of the other kinds are null.
    """

    @classmethod
    def own_keys(cls) -> tuple[str, ...]:
        """Return the names of the kind's keys, without the key that names the kind."""
        return tuple(item.name for item in fields(cls) if item.metadata)  # type: ignore[arg-type]


def fits_variants(
    base: type[Variant], name_field: str, name: str, kind: Any, others: Mapping
) -> None:
    """Raise ValueError if a class of another package does not fit to the kinds before it.

    base: the class that it must extend. name_field: its attribute with its name, such as ``kind``.
    name: name of its entry point. others: {name: class} of the kinds before it.
    """
    if not (isinstance(kind, type) and issubclass(kind, base)):
        raise ValueError(f"it must be a subclass of {base.__name__}")
    if getattr(kind, name_field, None) != name:
        raise ValueError(f"its {name_field} must be {name}, like its entry point")
    declared = [_declared(other) for other in others.values()]
    for key, declaration in _declared(kind).items():
        known = [keys[key] for keys in declared if key in keys]
        if known and declaration not in known:
            raise ValueError(f"its key {key} has another type or range than in mtrain")


def _declared(kind: type[Any]) -> dict[str, Any]:
    """Return type, allowed values and whether it counts tokens, for each key of a class."""
    hints = typing.get_type_hints(kind)
    return {
        item.name: (hints[item.name], item.metadata["allowed"], item.metadata["tokens"])
        for item in fields(kind)
        if item.metadata
    }
