"""Group items by a key, and consecutive numbers into spans."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)
_MOST_SHOWN = 12  # most spans in a text


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items of each key, both in the order in which they come."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def spans(numbers: Iterable[int]) -> list[range]:
    """Return the spans of consecutive numbers, in their order."""
    found: list[range] = []
    for number in numbers:
        if found and number == found[-1].stop:
            found[-1] = range(found[-1].start, number + 1)
        else:
            found.append(range(number, number + 1))
    return found


def show_spans(found: Sequence[range]) -> str:
    """Format spans, for example as "1, 4-7, 9"."""
    words = [
        str(span.start) if len(span) == 1 else f"{span.start}-{span.stop - 1}"
        for span in found[:_MOST_SHOWN]
    ]
    return ", ".join(words) + " and more" * (len(found) > _MOST_SHOWN)
