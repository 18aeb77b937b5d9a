"""Divide the time of a training step into parts, from a `torch.profiler` trace.

On a GPU, each instant counts for the first entry of this list that is active:
1. a compute kernel; if several overlap, the one that started first
2. a copy
3. an NCCL transfer
4. an NCCL wait for other ranks
5. idle

An NCCL kernel runs from the moment its rank arrives until the message is complete. The rank that
arrives last therefore has the shortest kernel of a message. On all ranks, the duration of this
shortest kernel counts as transfer. The rest of a rank's kernel counts as a wait for other ranks,
whether a link or computation delayed those ranks. Only durations are compared, so the clocks of the
ranks need not agree.

On a CPU, each instant counts for the first entry of this list that is active:
1. the innermost operator of the training thread
2. a gloo message
3. the host: Python, or a wait

All times are whole nanoseconds, so sums are exact. This module needs no device.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtrain_cli.grouping import grouped
from mtrain_cli.parallel.profiler_labels import (
    ATTENTION,
    CLOSING,
    INDEX,
    LOSS,
    OPTIMIZER,
    PREFIX,
    STEP,
)

PRODUCTS, ELEMENTWISE, WEIGHTS = "products", "element-wise", "weights"
COPIES, OTHER = "copies", "other"
LINKS, WAITS, IDLE, HOST = "links", "waits", "idle", "host"
COMPUTING = (ATTENTION, INDEX, PRODUCTS, ELEMENTWISE, LOSS, WEIGHTS, OPTIMIZER, COPIES, OTHER)
OF_GPU, OF_CPU = (*COMPUTING, LINKS, WAITS, IDLE), (*COMPUTING, LINKS, HOST)

Event = Mapping[str, Any]
Interval = tuple[int, int]  # [begin, end) in nanoseconds
Thread = tuple[Any, Any]  # process and thread
# Identifies an NCCL message on all ranks: the values of `_OF_MESSAGE`, which are its kind, then the
# number of earlier messages of this kind.
Message = tuple[Any, ...]

_STEP, _CLOSING = PREFIX + STEP, PREFIX + CLOSING
_MESSAGES = "gloo:"  # Annotations of gloo messages start with this. They overlap operators.
_NCCL = re.compile(r"^nccl", re.IGNORECASE)
# The part of a kernel by its name, for kernels that were launched outside all ranges of
# `profiler_labels`. The order matters: the name of CuTe's attention kernel also contains "cutlass".
_KERNELS = (
    (ATTENTION, re.compile(r"(?i)flash|fmha|attention|sdpa")),
    (OPTIMIZER, re.compile(r"(?i)adam|multi_tensor_apply")),
    (PRODUCTS, re.compile(r"(?i)gemm|gemv|nvjet|cutlass|cublas|splitk|xmma|^triton_tem_")),
    (
        ELEMENTWISE,
        re.compile(r"(?i)^triton_|elementwise_kernel|reduce_kernel|layer_norm|rms_?norm"),
    ),
)
# The part of one of PyTorch's CPU operators by its name.
_OPERATORS = (
    (
        PRODUCTS,
        re.compile(r"(add|b|badd|)mm|addmv|mv|dot|linear|matmul|mkldnn_linear|_linear_pointwise"),
    ),
    (COPIES, re.compile(r"copy_|_to_copy|clone|fill_|zero_|cat|_foreach_copy_")),
    (
        ELEMENTWISE,
        re.compile(
            r"(add|sub|mul|div|addcmul|addcdiv|neg|pow|exp|r?sqrt)_?"
            r"|sigmoid|silu(_backward)?|sum|mean|cos|sin|.*rms_norm.*"
        ),
    ),
)
_FUSED_OPERATOR = "## Call CompiledFxGraph"  # compiled CPU code outside of operators
_LAUNCH = re.compile(r"^cu(da)?Launch")
_SYNCHRONISING = re.compile(r"^cu(da)?(Stream|Device|Event|Ctx)Synchronize")


@dataclass(frozen=True)
class OperationTotals:
    """Totals of the GPU kernels or CPU operators with one name.

    part: part of the step to which these kernels or operators belong.
    calls: number of calls.
    ns: time in these calls, in nanoseconds. The time of nested operators does not count. Time that
        overlaps with other kernels counts.
    """

    name: str
    part: str
    calls: int
    ns: int


@dataclass(frozen=True)
class StepBreakdown:
    """Sums over all recorded steps of one rank. Times are in nanoseconds.

    steps: number of steps.
    step: wall-clock time of all steps.
    parts: wall-clock time by part. The sum of the parts is `step`.
    hidden: time of communication that overlaps with computation. The parts for links and waits hold
        the exposed communication.
    kinds: totals by name of kernel or operator, the longest first.

    The fields below are for GPUs. On a CPU, these fields keep their defaults:

    launches: number of launched kernels.
    launching: host time in launch calls.
    syncs: number of calls that wait for the device.
    syncing: host time in calls that wait for the device.
    ahead: median time from the launch of a kernel to its start; None without kernels.
    unmatched: number of NCCL messages that were not found on other ranks. The whole time of these
        messages counts as transfer.
    """

    steps: int
    step: int
    parts: dict[str, int]
    hidden: int
    kinds: list[OperationTotals] = field(repr=False)
    launches: int = 0
    launching: int = 0
    syncs: int = 0
    syncing: int = 0
    ahead: float | None = None
    unmatched: int = 0


def find_parts(
    events: Iterable[Event], *, gpu: bool, least: Mapping[Message, int] | None = None
) -> StepBreakdown:
    """Return the parts of one rank's steps.

    Args:
        events: `traceEvents` of the trace. Each step is an annotation named `profiler_labels.STEP`.
        gpu: whether the steps ran on a GPU.
        least: result of `shortest`. If a message is missing from it, the whole time of the message
            counts as transfer.

    Raises:
        ValueError: the trace holds no step.
    """
    kept, steps = _kept(events)
    return _of_gpu(kept, steps, least or {}) if gpu else _of_cpu(kept, steps)


def messages(events: Iterable[Event]) -> dict[Message, int]:
    """Return the duration of each NCCL message in the steps of one rank, in nanoseconds.

    Skip a message if the trace does not give its group and size.

    Raises:
        ValueError: the trace holds no step.
    """
    kept, steps = _kept(events)
    kernels = _inside((s for s in kept if s.category == "kernel"), steps)
    return {
        message: span.end - span.begin
        for span, message in zip(kernels, _messages(kernels), strict=True)
        if message is not None
    }


def shortest(everyone: Sequence[Mapping[Message, int]]) -> dict[Message, int]:
    """Return the duration of each message on the rank where it was shortest, in nanoseconds.

    Messages of one kind have the same group, operation and size. Among messages of one kind, the
    order identifies a message. Skip a message if a rank of its group lacks this message, or if
    ranks have different numbers of messages of this kind.

    everyone: results of `messages` on all ranks.
    """
    kinds = [Counter(message[:-1] for message in mine) for mine in everyone]
    durations: dict[Message, list[int]] = defaultdict(list)
    for mine in everyone:
        for message, ns in mine.items():
            durations[message].append(ns)
    return {
        message: min(ns)
        for message, ns in durations.items()
        if str(len(ns)) == message[2] and len({kind[message[:-1]] for kind in kinds} - {0}) == 1
    }


def _kept(events: Iterable[Event]) -> tuple[list[_Span], list[_Span]]:
    """Return the spans of known categories, and the spans of the steps."""
    kept = [_Span.of(e) for e in events if e.get("ph") == "X" and e.get("cat") in _CATEGORIES]
    steps = sorted(
        (s for s in kept if s.category == "user_annotation" and s.name == _STEP),
        key=lambda s: s.begin,
    )
    if not steps:
        raise ValueError(f"the trace has no annotation {_STEP}")
    return kept, steps


def kernel_part(name: str) -> str:
    """Return the part to which a kernel of this name belongs."""
    if _NCCL.search(name):
        return LINKS
    return next((part for part, names in _KERNELS if names.search(name)), OTHER)


def operator_part(name: str) -> str | None:
    """Return the part to which a CPU operator of this name belongs.

    Return None for Python functions, autograd nodes and requests to gloo: their time counts for the
    operators that they call.
    """
    if name.startswith(_FUSED_OPERATOR):
        return ELEMENTWISE
    library, colons, operator = name.partition("::")
    if library == "fsdp":
        return WEIGHTS
    if not colons or library in ("autograd", "torch", "c10d", "_c10d_functional"):
        return None
    return next((part for part, names in _OPERATORS if names.fullmatch(operator)), OTHER)


def range_part(name: str) -> str | None:
    """Return the part to which all work inside an annotation of this name belongs.

    Return None if the name does not determine a part.
    """
    if name.startswith(PREFIX):
        own = name.removeprefix(PREFIX)
        return own if own in COMPUTING else None
    if name.startswith("FSDP::"):
        return WEIGHTS
    return OPTIMIZER if name.startswith("Optimizer.") else None


# --- events ---

_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME = ("cuda_runtime", "cuda_driver")
_OF_MESSAGE = (
    *("Process Group Name", "Process Group Ranks", "Group size", "Collective name"),
    *("In msg nelems", "Out msg nelems", "dtype"),
)
_CATEGORIES = frozenset((*_DEVICE, *_RUNTIME, "cpu_op", "user_annotation"))


@dataclass(frozen=True, slots=True)
class _Span:
    category: str
    name: str
    thread: Thread
    begin: int
    end: int
    correlation: Any
    external: Any
    message: tuple[Any, ...] | None  # NCCL kernels: values of `_OF_MESSAGE`

    @staticmethod
    def of(event: Event) -> _Span:
        begin, arguments = round(float(event["ts"]) * 1e3), event.get("args") or {}
        end = begin + max(0, round(float(event.get("dur") or 0) * 1e3))
        thread = event.get("pid"), event.get("tid")
        message = None
        if event["cat"] == "kernel" and _NCCL.search(event["name"]) and "Group size" in arguments:
            message = tuple(str(arguments.get(name)) for name in _OF_MESSAGE)
        correlation, external = arguments.get("correlation"), arguments.get("External id")
        return _Span(
            event["cat"], event["name"], thread, begin, end, correlation, external, message
        )


def _inside(spans: Iterable[_Span], steps: Sequence[_Span]) -> list[_Span]:
    """Return the spans that begin inside a step, ordered by start."""
    return sorted(
        (s for s in spans if any(step.begin <= s.begin < step.end for step in steps)),
        key=lambda s: (s.begin, -s.end),
    )


def _innermost(
    ranges: Sequence[tuple[_Span, str]], at: Sequence[tuple[Thread, int]]
) -> list[str | None]:
    """Return the part of the innermost range around each instant; None outside all ranges.

    Args:
        ranges: a (span, part) pair for each range.
        at: instants as (thread, time in nanoseconds).
    """
    latest_first = sorted(ranges, key=lambda r: (-r[0].begin, r[0].end))  # to pop from the end
    by_thread = grouped(latest_first, lambda r: r[0].thread)
    words: list[str | None] = [None] * len(at)
    stacks: dict[Thread, list[tuple[_Span, str]]] = defaultdict(list)
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


# --- time ---


def _claim(
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


def _length(intervals: Iterable[Interval]) -> int:
    return sum(end - begin for begin, end in intervals)


def _kinds(calls: Iterable[tuple[str, str, int]]) -> list[OperationTotals]:
    """Sum calls by name and part, the longest sum first.

    calls: (name, part, time in nanoseconds) of each call.
    """
    kinds = [
        OperationTotals(*key, len(of_kind), sum(ns for *_, ns in of_kind))
        for key, of_kind in grouped(calls, lambda call: call[:2]).items()
    ]
    return sorted(kinds, key=lambda k: (-k.ns, k.name, k.part))


# --- GPU ---


def _messages(device: Iterable[_Span]) -> list[Message | None]:
    """Return the message of each span; None for a span that is not an NCCL message.

    Messages of one kind (see `shortest`) are numbered by their start. Ranks agree on these numbers,
    because all ranks of a group send the group's messages in the same order.
    """
    numbers: dict[tuple[Any, ...], int] = defaultdict(int)
    numbered: list[Message | None] = []
    for span in device:
        numbered.append(None if span.message is None else (*span.message, numbers[span.message]))
        if span.message is not None:
            numbers[span.message] += 1
    return numbered


def _of_gpu(
    spans: Sequence[_Span], steps: Sequence[_Span], least: Mapping[Message, int]
) -> StepBreakdown:
    # All work that a step launches also ends in it, because a step ends with a wait for the device.
    device = _inside((s for s in spans if s.category in _DEVICE), steps)
    runtime = [s for s in spans if s.category in _RUNTIME]
    # A runtime call may contain a driver call with the same correlation id. Keep the outer call.
    launches = {s.correlation: s for s in sorted(runtime, key=lambda s: -s.begin)}
    assigned = [
        _device_part(span, word)
        for span, word in zip(device, _launched_in(device, launches, spans), strict=True)
    ]

    parts, hidden, unmatched = _device_parts(device, assigned, steps, least)
    closing = [s for s in spans if s.name == _CLOSING]
    launching = [s for s in _inside(launches.values(), steps) if _LAUNCH.match(s.name)]
    syncing = [
        s
        for s in _inside(runtime, steps)
        if _SYNCHRONISING.match(s.name) and not any(c.begin <= s.begin < c.end for c in closing)
    ]
    ahead = [
        span.begin - launch.end
        for span, word in zip(device, assigned, strict=True)
        # The start of an NCCL kernel depends on other streams, not only on the host.
        if span.category == "kernel"
        and word != LINKS
        and (launch := launches.get(span.correlation)) is not None
    ]
    return StepBreakdown(
        steps=len(steps),
        step=_length((step.begin, step.end) for step in steps),
        parts=parts,
        hidden=hidden,
        kinds=_kinds((s.name, w, s.end - s.begin) for s, w in zip(device, assigned, strict=True)),
        launches=sum(s.category == "kernel" for s in device),
        launching=sum(s.end - s.begin for s in launching),
        syncs=len(syncing),
        syncing=sum(s.end - s.begin for s in syncing),
        ahead=statistics.median(ahead) if ahead else None,
        unmatched=unmatched,
    )


def _device_parts(
    device: Sequence[_Span],
    assigned: Sequence[str],
    steps: Sequence[_Span],
    least: Mapping[Message, int],
) -> tuple[dict[str, int], int, int]:
    """Divide the steps among the parts.

    Returns:
        (time of each part, time of overlapped messages, number of unmatched messages). Times are in
        nanoseconds.
    """
    computing, copying, moving, waiting, under_way = (
        list[tuple[int, int, str]]() for _ in range(5)
    )
    unmatched = 0
    for span, word, message in zip(device, assigned, _messages(device), strict=True):
        if word != LINKS:
            layer = computing if span.category == "kernel" else copying
            layer.append((span.begin, span.end, word))
            continue
        took = span.end - span.begin
        arrived = span.end - (took if message is None else least.get(message, took))
        unmatched += message not in least
        under_way.append((span.begin, span.end, LINKS))
        waiting.append((span.begin, arrived, WAITS))
        moving.append((arrived, span.end, LINKS))
    moving.sort(key=lambda interval: interval[0])
    parts = dict.fromkeys(OF_GPU, 0)
    free: list[Interval] = [(step.begin, step.end) for step in steps]
    in_all = {LINKS: 0}
    _claim(free, under_way, in_all)
    for layer in (computing, copying, moving, waiting):
        free = _claim(free, layer, parts)
    parts[IDLE] = _length(free)
    return parts, in_all[LINKS] - parts[LINKS] - parts[WAITS], unmatched


def _launched_in(
    device: Sequence[_Span], launches: Mapping[Any, _Span], spans: Sequence[_Span]
) -> list[str | None]:
    """Return the part of the host range that launched each device span, or None."""
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
        if s.category == "user_annotation" and (part := range_part(s.name)) is not None
    ]
    return _innermost(ranges, at)


def _device_part(span: _Span, word: str | None) -> str:
    """Return the part of a device span.

    word: part of the host range that launched the span; None if unknown.
    """
    if span.category == "kernel" and _NCCL.search(span.name):
        return LINKS
    if word is not None:
        return word
    return kernel_part(span.name) if span.category == "kernel" else COPIES


# --- CPU ---


def _of_cpu(spans: Sequence[_Span], steps: Sequence[_Span]) -> StepBreakdown:
    thread = steps[0].thread
    mine = _inside(
        (s for s in spans if s.thread == thread and s.category in ("cpu_op", "user_annotation")),
        steps,
    )
    mine = [s for s in mine if not s.name.startswith(_MESSAGES) and s.name != _STEP]
    parts = dict.fromkeys(OF_CPU, 0)
    whole: list[Interval] = [(step.begin, step.end) for step in steps]
    worked = [(span, word, own) for span, word, own in _self_times(mine) if word is not None]
    busy = sorted((begin, end, word) for _, word, own in worked for begin, end in own)
    messages = sorted((s.begin, s.end, LINKS) for s in spans if s.name.startswith(_MESSAGES))
    in_all = {LINKS: 0}
    _claim(whole, messages, in_all)
    free = _claim(_claim(whole, busy, parts), messages, parts)
    parts[HOST] = _length(free)
    kinds = _kinds((span.name, word, _length(own)) for span, word, own in worked)
    hidden = in_all[LINKS] - parts[LINKS]
    return StepBreakdown(len(steps), _length(whole), parts, hidden, kinds)


def _self_times(spans: Sequence[_Span]) -> list[tuple[_Span, str | None, list[Interval]]]:
    """Return (span, part, self time) of each span of one thread, ordered by start.

    Self time is the list of intervals of a span that lie outside all nested spans. The part is None
    if the self time counts for no part.
    """
    times: list[tuple[_Span, str | None, list[Interval]]] = []
    # Open spans: index in times, end, part of the range around the span, begin of the self time
    # that is not yet in times.
    stack: list[list[Any]] = []

    def close(until: int) -> None:
        while stack and stack[-1][1] <= until:
            number, end, _, since = stack.pop()
            if since < end:
                times[number][2].append((since, end))
            if stack:
                stack[-1][3] = max(stack[-1][3], end)

    for span in spans:
        close(span.begin)
        end = span.end
        around = None
        if stack:
            above = stack[-1]
            if above[3] < span.begin:
                times[above[0]][2].append((above[3], span.begin))
            # Times are rounded, so an inner span may end after its outer span. Cut it there.
            end, around = min(end, above[1]), above[2]
        word = None
        if span.category == "user_annotation":
            around = range_part(span.name) or around
        elif own := operator_part(span.name):
            word = around or own
        times.append((span, word, []))
        stack.append([len(times) - 1, end, around, span.begin])
    close(max((s.end for s in spans), default=0))
    return times
