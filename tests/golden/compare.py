"""What was recorded against what is found: every number that differs, by its place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

_ZERO = 1e-9  # below it a time or share is zero: rounding differs between machines


def differences(
    recorded: Any, found: Any, tolerance: Mapping[str, float], place: str = ""
) -> Iterator[str]:
    """A line for each place where the two differ.

    tolerance: relative, of floats, by the last name on the way; "" for all others. 0 demands
    the same float. Whole numbers, words and the shape of the tree always have to be equal.
    """
    if isinstance(recorded, dict) and isinstance(found, dict):
        for name in recorded.keys() | found.keys():
            at = f"{place}.{name}" if place else name
            if name not in found or name not in recorded:
                yield f"{at}: {'missing' if name in recorded else 'not recorded'}"
            else:
                below = {**tolerance, "": tolerance.get(name, tolerance[""])}
                yield from differences(recorded[name], found[name], below, at)
    elif isinstance(recorded, list) and isinstance(found, list):
        if len(recorded) != len(found):
            yield f"{place}: {len(found)} entries, recorded {len(recorded)}"
        for number, (one, other) in enumerate(zip(recorded, found, strict=False)):
            yield from differences(one, other, tolerance, f"{place}[{number}]")
    elif not _same(recorded, found, tolerance[""]):
        yield f"{place}: {found!r}, recorded {recorded!r}"


def _same(recorded: Any, found: Any, tolerance: float) -> bool:
    if isinstance(recorded, float) and isinstance(found, float) and tolerance:
        return math.isclose(recorded, found, rel_tol=tolerance, abs_tol=_ZERO)
    return type(recorded) is type(found) and recorded == found
