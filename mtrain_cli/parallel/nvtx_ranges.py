"""NVTX ranges in the domain ``mtrain``, for Nsight Systems and other profilers.

The step of the exchange is the payload of a range, so that `nsys stats` can aggregate by name. If
no profiler listens, a range costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

DOMAIN = "mtrain"
COLORS = {
    "attention": "green",
    "columns": "cyan",
    "wait": "red",
    "index": "yellow",
    "merge": "blue",
    "arrange": "purple",
}


class NvtxRanges:
    """Push and pop the ranges of a domain, and cache the attributes by range name and step."""

    def __init__(self, domain: Any) -> None:
        self._domain = domain
        self._attributes: dict[tuple[str, int], Any] = {}

    @contextmanager
    def span(self, name: str, kind: str, step: int) -> Iterator[None]:
        key = name, step
        if key not in self._attributes:
            color = COLORS.get(kind, "gray")
            self._attributes[key] = self._domain.get_event_attributes(
                message=name, color=color, category=kind, payload=step
            )
        self._domain.push_range(self._attributes[key])
        try:
            yield
        finally:
            self._domain.pop_range()


def name(kind: str, direction: str, link: str) -> str:
    """Return a range's name, such as ``attention.forward``, ``wait.inner`` or ``index``."""
    if link:
        return f"{kind}.{link}"
    return f"{kind}.{direction}" if direction and kind != "index" else kind


def span(kind: str, direction: str, link: str, step: int) -> AbstractContextManager[None]:
    """Mark the ``with`` block as one range of this thread."""
    ranges = listener()
    return nullcontext() if ranges is None else ranges.span(name(kind, direction, link), kind, step)


@cache
def listener() -> NvtxRanges | None:
    """Return the object that records ranges, or None if no profiler listens."""
    try:
        import nvtx
    except ImportError:
        return None
    domain = nvtx.get_domain(DOMAIN)
    # Without a profiler the nvtx library returns a dummy domain.
    return None if type(domain).__name__ == "DummyDomain" else NvtxRanges(domain)
