"""Break a training step down into parts that add up to it, from a `torch.profiler` trace.

GPU: each instant belongs to a compute kernel if one runs, else to a copy, else to an NCCL transfer,
else to an NCCL wait, else to idle. If kernels overlap, the first to start gets the instant. An NCCL
kernel runs from its own rank's arrival until the message is complete. The last rank to arrive has
the shortest kernel for a message. That duration counts as transfer on all ranks, the rest as a wait
for other ranks, whether a link or computation delayed them. Only durations are compared, so the
ranks' clocks need not agree.

CPU: each instant belongs to the innermost operator of the training thread, else to gloo messages in
flight, else to the host (Python or waits).

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
# group, its ranks, their number, collective, elements in and out, dtype, count of equal ones before
Message = tuple[Any, ...]

_STEP, _CLOSING = PREFIX + STEP, PREFIX + CLOSING
_MESSAGES = "gloo:"  # annotations of gloo's messages; they overlap the thread's operators
_NCCL = re.compile(r"^nccl", re.IGNORECASE)
# Parts by kernel name, for launches outside our ranges. The order matters: the name of CuTe's
# attention also contains "cutlass".
_KERNELS = (
    (ATTENTION, re.compile(r"(?i)flash|fmha|attention|sdpa")),
    (OPTIMIZER, re.compile(r"(?i)adam|multi_tensor_apply")),
    (PRODUCTS, re.compile(r"(?i)gemm|gemv|nvjet|cutlass|cublas|splitk|xmma|^triton_tem_")),
    (
        ELEMENTWISE,
        re.compile(r"(?i)^triton_|elementwise_kernel|reduce_kernel|layer_norm|rms_?norm"),
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
    """Totals of the GPU kernels or CPU operators of one name.

    ns: self time, including time that overlaps other kernels
    """

    name: str
    part: str
    calls: int
    ns: int


@dataclass(frozen=True)
class StepBreakdown:
    """Sums over all recorded steps of one rank, in ns. Fields from `launches` on need a GPU.

    steps: number of steps
    step: wall-clock time of the steps
    parts: the same time, by part
    hidden: overlapped communication; exposed communication is in the parts links and waits
    kinds: totals by name, the longest first
    launches, launching: number of launched kernels, host time in launch calls
    syncs, syncing: number of calls that wait for the device, host time in them
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
        least: result of `shortest`; messages that it lacks count as transfer only.

    Raises:
        ValueError: the trace holds no step.
    """
    kept, steps = _kept(events)
    return _of_gpu(kept, steps, least or {}) if gpu else _of_cpu(kept, steps)


def messages(events: Iterable[Event]) -> dict[Message, int]:
    """Return ns of each NCCL message that the trace identifies in one rank's steps.

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

    Skip a message unless all ranks of its group have it and have equally many of its kind.
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
    """For each (thread, time), return the part of the innermost range that contains it, or None."""
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

    Add the time to ``parts`` and return the intervals that remain free.
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


def _kinds(calls: Iterable[tuple[str, str, int]]) -> list[OperationTotals]:
    """Sum calls (name, part, ns) by name and part."""
    totals: dict[tuple[str, str], list[int]] = defaultdict(list)
    for name, part, ns in calls:
        totals[name, part].append(ns)
    kinds = [OperationTotals(*key, len(ns), sum(ns)) for key, ns in totals.items()]
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
    # A runtime call may contain a driver call with the same correlation id: keep the outer one.
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
    """Return ns of each part, ns of overlapped messages, and the number of unmatched messages."""
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
    """Return the part of the range in which each span was launched, or None."""
    host = [s for s in spans if s.category in ("cpu_op", "user_annotation")]
    known = {s.thread for s in host}
    operators = {s.external: s for s in host if s.external is not None}
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
    """Return (span, part, self time) of one thread's spans, ordered by start.

    The part is None if the span only contains others. Self time excludes spans inside it.
    """
    times: list[tuple[_Span, str | None, list[Interval]]] = []
    # index in times, end, part of the range around it, end of the self time noted so far
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
        word = None
        if span.category == "user_annotation":
            around = range_part(span.name) or around
        elif own := operator_part(span.name):
            word = around or own
        times.append((span, word, []))
        stack.append([len(times) - 1, end, around, span.begin])
    close(max((s.end for s in spans), default=0))
    return times
