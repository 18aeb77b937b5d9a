"""Compare recorded with computed results, number by number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

_ZERO = 1e-9  # times and shares below are zero: rounding differs between machines


def differences(
    recorded: Any, computed: Any, tolerance: Mapping[str, float], place: str = ""
) -> Iterator[str]:
    """Return a line for each place where the two differ.

    tolerance: relative, for floats, by the last key of the place; "" for all other keys. 0 requires
        equal floats. Integers, strings and the structure must always be equal.
    """
    if isinstance(recorded, dict) and isinstance(computed, dict):
        for name in recorded.keys() | computed.keys():
            at = f"{place}.{name}" if place else name
            if name not in computed or name not in recorded:
                yield f"{at}: {'missing' if name in recorded else 'not recorded'}"
            else:
                below = {**tolerance, "": tolerance.get(name, tolerance[""])}
                yield from differences(recorded[name], computed[name], below, at)
    elif isinstance(recorded, list) and isinstance(computed, list):
        if len(recorded) != len(computed):
            yield f"{place}: {len(computed)} entries, recorded {len(recorded)}"
        for number, (one, other) in enumerate(zip(recorded, computed, strict=False)):
            yield from differences(one, other, tolerance, f"{place}[{number}]")
    elif not _same(recorded, computed, tolerance[""]):
        yield f"{place}: {computed!r}, recorded {recorded!r}"


def _same(recorded: Any, computed: Any, tolerance: float) -> bool:
    if isinstance(recorded, float) and isinstance(computed, float) and tolerance:
        return math.isclose(recorded, computed, rel_tol=tolerance, abs_tol=_ZERO)
    return type(recorded) is type(computed) and recorded == computed
