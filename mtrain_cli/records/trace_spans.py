"""The spans of a `torch.profiler` trace: what runs inside what, and who claims which time."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtrain_cli.grouping import grouped

Event = Mapping[str, Any]
Interval = tuple[int, int]  # [begin, end) in nanoseconds
Thread = tuple[Any, Any]  # process and thread

NCCL = re.compile(r"^nccl", re.IGNORECASE)
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
RUNTIME = ("cuda_runtime", "cuda_driver")
_OF_MESSAGE = (
    *("Process Group Name", "Process Group Ranks", "Group size", "Collective name"),
    *("In msg nelems", "Out msg nelems", "dtype"),
)
CATEGORIES = frozenset((*DEVICE, *RUNTIME, "cpu_op", "user_annotation"))


@dataclass(frozen=True, slots=True)
class Span:
    category: str
    name: str
    thread: Thread
    begin: int
    end: int
    correlation: Any
    external: Any
    message: tuple[Any, ...] | None  # NCCL kernels: values of `_OF_MESSAGE`

    @staticmethod
    def of(event: Event) -> Span:
        begin, arguments = round(float(event["ts"]) * 1e3), event.get("args") or {}
        end = begin + max(0, round(float(event.get("dur") or 0) * 1e3))
        thread = event.get("pid"), event.get("tid")
        message = None
        if event["cat"] == "kernel" and NCCL.search(event["name"]) and "Group size" in arguments:
            message = tuple(str(arguments.get(name)) for name in _OF_MESSAGE)
        correlation, external = arguments.get("correlation"), arguments.get("External id")
        return Span(event["cat"], event["name"], thread, begin, end, correlation, external, message)


def inside(spans: Iterable[Span], steps: Sequence[Span]) -> list[Span]:
    """Return the spans that begin inside a step, ordered by start."""
    return sorted(
        (s for s in spans if any(step.begin <= s.begin < step.end for step in steps)),
        key=lambda s: (s.begin, -s.end),
    )


def innermost(
    ranges: Sequence[tuple[Span, str]], at: Sequence[tuple[Thread, int]]
) -> list[str | None]:
    """Return the part of the innermost range around each instant; None outside all ranges.

    Args:
        ranges: a (span, part) pair for each range.
        at: instants as (thread, time in nanoseconds).
    """
    latest_first = sorted(ranges, key=lambda r: (-r[0].begin, r[0].end))  # to pop from the end
    by_thread = grouped(latest_first, lambda r: r[0].thread)
    words: list[str | None] = [None] * len(at)
    stacks: dict[Thread, list[tuple[Span, str]]] = defaultdict(list)
    for number in sorted(range(len(at)), key=lambda n: at[n][1]):
        thread, time = at[number]
        coming, stack = by_thread.get(thread, []), stacks[thread]
        while coming and coming[-1][0].begin <= time:
            stack.append(coming.pop())
        # The ranges of a thread nest, so the innermost one ends first.
        while stack and stack[-1][0].end <= time:
            stack.pop()
        words[number] = stack[-1][1] if stack else None
    return words


def claim(
    free: Sequence[Interval], wanted: Sequence[tuple[int, int, str]], parts: dict[str, int]
) -> list[Interval]:
    """Assign the free time inside each interval of ``wanted`` to the part of this interval.

    Args:
        free: intervals that belong to no part yet, sorted.
        wanted: (begin, end, part) of each interval, sorted by begin.
        parts: time by part in nanoseconds. The call adds the assigned time.

    Returns:
        The intervals that remain free.
    """
    left: list[Interval] = []
    # Index of the current free interval, and the time from which it is still free.
    place, cursor = 0, None
    for begin, end, word in wanted:
        while place < len(free):
            if cursor is None:
                cursor = free[place][0]
            until = free[place][1]
            if until <= begin:
                if cursor < until:
                    left.append((cursor, until))
                place, cursor = place + 1, None
                continue
            start, stop = max(begin, cursor), min(end, until)
            if start < stop:
                if cursor < start:
                    left.append((cursor, start))
                parts[word] += stop - start
                cursor = stop
            if end <= until:
                break  # The next interval of `wanted` may begin in the same free interval.
            place, cursor = place + 1, None
    if place < len(free):
        begin = free[place][0] if cursor is None else cursor
        left += [(begin, free[place][1])] if begin < free[place][1] else []
        left += free[place + 1 :]
    return left


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - begin for begin, end in intervals)


def launched_in(
    device: Sequence[Span],
    launches: Mapping[Any, Span],
    spans: Sequence[Span],
    of: Callable[[str], str | None],
) -> list[str | None]:
    """Return the part of the host range that launched each device span, or None.

    of: function that returns the part of a range from its name, or None.
    """
    host = [s for s in spans if s.category in ("cpu_op", "user_annotation")]
    known = {s.thread for s in host}
    operators = {s.external: s for s in host if s.external is not None}
    at: list[tuple[Thread, int]] = []
    for span in device:
        call = launches.get(span.correlation)
        if call is None or call.thread not in known:
            # The launch was not recorded, or has another thread id. Use the operator around it.
            call = operators.get(span.external)
        at.append(((None, None), 0) if call is None else (call.thread, call.begin))
    ranges = [
        (s, part)
        for s in spans
        if s.category == "user_annotation" and (part := of(s.name)) is not None
    ]
    return innermost(ranges, at)
