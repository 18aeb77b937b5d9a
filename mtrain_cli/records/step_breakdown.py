"""Break a training step down into parts that add up to it, from a `torch.profiler` trace.

GPU: each instant of a step belongs to what the device does: a kernel that computes, else a copy,
else NCCL that transfers, else NCCL that waits, else idle. Of overlapping kernels, the first to
start gets the instant. An NCCL kernel lasts from the arrival of its own rank until the message is
through. Its duration on the rank where the same message was shortest (the last rank to arrive) is
the transfer; the rest is waiting for other ranks. That includes slowdowns of one rank by a link or
by computation. This uses durations only, so the ranks' clocks need not agree.

CPU: each instant belongs to the innermost operator of the training thread, else to gloo messages in
flight, else to the host (Python, or waiting).

All times are whole nanoseconds, so sums are exact. Nothing here needs a device.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
# group, its ranks, their number, collective, elements in and out, dtype, number among equals
Message = tuple[Any, ...]

_STEP, _CLOSING = PREFIX + STEP, PREFIX + CLOSING
_MESSAGES = "gloo:"  # annotations of gloo's messages; they overlap the thread's operators
_NCCL = re.compile(r"^nccl", re.IGNORECASE)
# Parts by kernel name, for launches outside our ranges. The order matters: the name of CuTe's
# attention also contains "cutlass".
_KERNELS = (
    (ATTENTION, re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE)),
    (OPTIMIZER, re.compile(r"adam|multi_tensor_apply", re.IGNORECASE)),
    (
        PRODUCTS,
        re.compile(r"gemm|gemv|nvjet|cutlass|cublas|splitk|xmma|^triton_tem_", re.IGNORECASE),
    ),
    (
        ELEMENTWISE,
        re.compile(
            r"^triton_|elementwise_kernel|reduce_kernel|layer_norm|rms_?norm", re.IGNORECASE
        ),
    ),
)
# Parts by name of PyTorch's own CPU operators.
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
    """Totals of one name: kernels of a GPU or operators of a CPU.

    ns: own time, including what overlaps other kernels
    """

    name: str
    part: str
    calls: int
    ns: int


@dataclass(frozen=True)
class StepBreakdown:
    """Sums over all recorded steps of one rank, in ns. `launches` and below exist on a GPU only.

    steps: number of steps
    step: time of the steps
    parts: the same time by part
    hidden: messages that computation or copies overlap; exposed ones are the parts links and waits
    kinds: totals by name, the longest first
    launches, launching: kernels launched, host time in launch calls
    syncs, syncing: calls in which the host waits for the device, host time in them
    ahead: median time from the launch of a kernel to its start
    unmatched: NCCL messages not found on other ranks; they count as transfer only
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
        events: `traceEvents`; each step is an annotation named `profiler_labels.STEP`.
        gpu: whether the steps ran on a GPU.
        least: result of `shortest`; messages not in it count as transfer only.

    Raises:
        ValueError: the trace holds no step.
    """
    kept, steps = _kept(events)
    return _of_gpu(kept, steps, least or {}) if gpu else _of_cpu(kept, steps)


def messages(events: Iterable[Event]) -> dict[Message, int]:
    """Return ns of each NCCL message in one rank's steps, as far as the trace identifies it.

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
    """Return each message's ns on the rank where it was shortest.

    Only messages that all ranks of the group sent, in equal numbers of their kind.
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
    """Return the spans of known categories, and the steps."""
    kept = [_Span.of(e) for e in events if e.get("ph") == "X" and e.get("cat") in _CATEGORIES]
    steps = sorted(
        (s for s in kept if s.category == "user_annotation" and s.name == _STEP),
        key=lambda s: s.begin,
    )
    if not steps:
        raise ValueError(f"the trace has no annotation {_STEP}")
    return kept, steps


def kernel_part(name: str) -> str:
    """Return the part of a kernel from its name alone."""
    if _NCCL.search(name):
        return LINKS
    return next((part for part, names in _KERNELS if names.search(name)), OTHER)


def operator_part(name: str) -> str | None:
    """Return the part of a CPU operator from its name alone.

    None for spans that only contain others: Python, autograd nodes, requests to gloo.
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
    """Return the part of all work launched inside an annotation of this name, or None."""
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
    "Process Group Name",
    "Process Group Ranks",
    "Group size",
    "Collective name",
    "In msg nelems",
    "Out msg nelems",
    "dtype",
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
    message: tuple[Any, ...] | None  # of a kernel of NCCL

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
    """Return the spans that begin in a step, ordered by start."""
    return sorted(
        (s for s in spans if any(step.begin <= s.begin < step.end for step in steps)),
        key=lambda s: (s.begin, -s.end),
    )


def _innermost(
    ranges: Sequence[tuple[_Span, str]], at: Sequence[tuple[Thread, int]]
) -> list[str | None]:
    """Return for each (thread, time) the part of the innermost range around it, or None."""
    by_thread: dict[Thread, list[tuple[_Span, str]]] = defaultdict(list)
    for labelled in ranges:
        by_thread[labelled[0].thread].append(labelled)
    for spans in by_thread.values():
        spans.sort(key=lambda r: (-r[0].begin, r[0].end))  # the next range is last
    words: list[str | None] = [None] * len(at)
    stacks: dict[Thread, list[tuple[_Span, str]]] = defaultdict(list)
    for number in sorted(range(len(at)), key=lambda n: at[n][1]):
        thread, time = at[number]
        coming, stack = by_thread.get(thread, []), stacks[thread]
        while coming and coming[-1][0].begin <= time:
            stack.append(coming.pop())
        # Ranges of a thread nest, so only the top can have ended.
        while stack and stack[-1][0].end <= time:
            stack.pop()
        words[number] = stack[-1][1] if stack else None
    return words


# --- time ---


def _claim(
    free: Sequence[Interval], wanted: Sequence[tuple[int, int, str]], parts: dict[str, int]
) -> list[Interval]:
    """Give each interval of ``wanted``, sorted by start, the free time that it covers.

    Adds the time to ``parts`` and returns what remains free.
    """
    left: list[Interval] = []
    place, cursor = 0, None  # index of the current free interval; where its free rest begins
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
                break  # the next one may begin in the same interval
            place, cursor = place + 1, None
    if place < len(free):
        begin = free[place][0] if cursor is None else cursor
        left += [(begin, free[place][1])] if begin < free[place][1] else []
        left += free[place + 1 :]
    return left


def _length(intervals: Iterable[Interval]) -> int:
    return sum(end - begin for begin, end in intervals)


def _kinds(totals: Mapping[tuple[str, str], Sequence[int]]) -> list[OperationTotals]:
    kinds = [OperationTotals(name, part, calls, ns) for (name, part), (calls, ns) in totals.items()]
    return sorted(kinds, key=lambda k: (-k.ns, k.name, k.part))


# --- GPU ---


def _messages(device: Iterable[_Span]) -> list[Message | None]:
    """Number equal messages in the order of their start.

    All ranks send the messages of a group in the same order, one after the other.
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
    # Work launched in a step ends in it, since a step ends with a wait for the device.
    device = _inside((s for s in spans if s.category in _DEVICE), steps)
    runtime = [s for s in spans if s.category in _RUNTIME]
    # A runtime call may contain a driver call of the same correlation: keep the outer one.
    launches = {s.correlation: s for s in sorted(runtime, key=lambda s: -s.begin)}
    assigned = [
        _device_part(span, word)
        for span, word in zip(device, _launched_in(device, launches, spans), strict=True)
    ]

    parts = dict.fromkeys(OF_GPU, 0)
    kinds: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    computing, copying, moving, waiting, under_way = (
        list[tuple[int, int, str]]() for _ in range(5)
    )
    unmatched = 0
    for span, word, message in zip(device, assigned, _messages(device), strict=True):
        kind, took = kinds[span.name, word], span.end - span.begin
        kind[0], kind[1] = kind[0] + 1, kind[1] + took
        if word != LINKS:
            (computing if span.category == "kernel" else copying).append(
                (span.begin, span.end, word)
            )
            continue
        arrived = span.end - (took if message is None else least.get(message, took))
        unmatched += message not in least
        under_way.append((span.begin, span.end, LINKS))
        waiting.append((span.begin, arrived, WAITS))
        moving.append((arrived, span.end, LINKS))
    free: list[Interval] = [(step.begin, step.end) for step in steps]
    whole = _length(free)
    in_all = {LINKS: 0}
    _claim(free, under_way, in_all)
    moving.sort(key=lambda interval: interval[0])
    for layer in (computing, copying, moving, waiting):
        free = _claim(free, layer, parts)
    parts[IDLE] = _length(free)

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
        # NCCL kernels wait for other streams, which says nothing about the host.
        if span.category == "kernel"
        and word != LINKS
        and (launch := launches.get(span.correlation)) is not None
    ]
    return StepBreakdown(
        steps=len(steps),
        step=whole,
        parts=parts,
        hidden=in_all[LINKS] - parts[LINKS] - parts[WAITS],
        kinds=_kinds(kinds),
        launches=sum(s.category == "kernel" for s in device),
        launching=sum(s.end - s.begin for s in launching),
        syncs=len(syncing),
        syncing=sum(s.end - s.begin for s in syncing),
        ahead=statistics.median(ahead) if ahead else None,
        unmatched=unmatched,
    )


def _launched_in(
    device: Sequence[_Span], launches: Mapping[Any, _Span], spans: Sequence[_Span]
) -> list[str | None]:
    """Return the part of the range in which each span was launched, or None."""
    known = {s.thread for s in spans if s.category in ("cpu_op", "user_annotation")}
    operators = {
        s.external: s
        for s in spans
        if s.category in ("cpu_op", "user_annotation") and s.external is not None
    }
    at: list[tuple[Thread, int]] = []
    for span in device:
        call = launches.get(span.correlation)
        if call is None or call.thread not in known:
            # The call was not recorded, or under another thread id: use the operator around it.
            call = operators.get(span.external)
        at.append(((None, None), 0) if call is None else (call.thread, call.begin))
    ranges = [
        (s, part)
        for s in spans
        if s.category == "user_annotation" and (part := range_part(s.name)) is not None
    ]
    return _innermost(ranges, at)


def _device_part(span: _Span, word: str | None) -> str:
    """Return the part of a device span; ``word`` is the part of the range that launched it."""
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
    calls = _self_times(mine)
    parts = dict.fromkeys(OF_CPU, 0)
    free: list[Interval] = [(step.begin, step.end) for step in steps]
    whole = _length(free)
    kinds: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for span, word, own in calls:
        if word is not None:
            kind = kinds[span.name, word]
            kind[0], kind[1] = kind[0] + 1, kind[1] + _length(own)
    busy = sorted(
        (begin, end, word) for _, word, own in calls if word is not None for begin, end in own
    )
    free = _claim(free, busy, parts)
    messages = sorted((s.begin, s.end, LINKS) for s in spans if s.name.startswith(_MESSAGES))
    in_all = {LINKS: 0}
    _claim([(step.begin, step.end) for step in steps], messages, in_all)
    free = _claim(free, messages, parts)
    parts[HOST] = _length(free)
    return StepBreakdown(len(steps), whole, parts, in_all[LINKS] - parts[LINKS], _kinds(kinds))


def _self_times(spans: Sequence[_Span]) -> list[tuple[_Span, str | None, list[Interval]]]:
    """Return (span, part or None, own time) of one thread's spans, ordered by start.

    None: the span does not compute itself. Own time excludes spans inside it.
    """
    times: list[tuple[_Span, str | None, list[Interval]]] = []
    # index in times, end, part of the range around it, end of its own time noted so far
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
            # Times are rounded: clip a callee to the end of its caller.
            end, around = min(end, above[1]), above[2]
        if span.category == "user_annotation":
            around, word = range_part(span.name) or around, None
        else:
            word = operator_part(span.name)
            word = word and (around or word)
        times.append((span, word, []))
        stack.append([len(times) - 1, end, around, span.begin])
    close(max((s.end for s in spans), default=0))
    return times
