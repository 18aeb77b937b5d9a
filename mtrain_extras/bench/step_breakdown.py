"""Divide the time of a training step into parts, from a `torch.profiler` trace.

Each instant counts for the first that is active. On a GPU: a compute kernel (if several overlap,
the one that started first), a copy, an NCCL transfer, an NCCL wait for other ranks, idle. On a CPU:
the innermost operator of the training thread, a gloo message, the host.

An NCCL kernel runs from the moment its rank arrives until the message is complete, so the rank that
arrives last has the shortest kernel of a message. On all ranks, the duration of this kernel counts
as transfer, and the rest of a kernel as a wait for other ranks. Only durations are compared, so the
clocks of the ranks need not agree. All times are whole nanoseconds, so sums are exact.
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
    EXPERTS,
    HOST,
    IDLE,
    INDEX,
    LINKS,
    LOSS,
    OPTIMIZER,
    PREFIX,
    ROUTER,
    STEP,
    WAITS,
)

Event = Mapping[str, Any]
Interval = tuple[int, int]  # [begin, end) in nanoseconds
Thread = tuple[Any, Any]  # process and thread
Wanted = tuple[int, int, str]  # interval and its part
NCCL = re.compile(r"^nccl", re.IGNORECASE)
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
RUNTIME = ("cuda_runtime", "cuda_driver")
_OF_MESSAGE = (
    *("Process Group Name", "Process Group Ranks", "Group size", "Collective name"),
    *("In msg nelems", "Out msg nelems", "dtype"),
)
CATEGORIES = frozenset((*DEVICE, *RUNTIME, "cpu_op", "user_annotation"))
PRODUCTS, ELEMENTWISE, WEIGHTS = "products", "element-wise", "weights"
COPIES, OTHER = "copies", "other"
COMPUTING = (
    *(ATTENTION, INDEX, ROUTER, EXPERTS, PRODUCTS, ELEMENTWISE, LOSS, WEIGHTS, OPTIMIZER),
    *(COPIES, OTHER),
)
OF_GPU, OF_CPU = (*COMPUTING, LINKS, WAITS, IDLE), (*COMPUTING, LINKS, HOST)

# Identifies an NCCL message on all ranks: the values of `_OF_MESSAGE`, which are its kind, then the
# number of earlier messages of this kind.
Message = tuple[Any, ...]

_STEP, _CLOSING = PREFIX + STEP, PREFIX + CLOSING
_MESSAGES = "gloo:"  # Annotations of gloo messages start with this. They overlap operators.
# The part of a kernel by its name, for kernels that were launched outside all ranges of
# `profiler_labels`. The order matters: the name of CuTe's attention kernel also contains "cutlass".
_KERNELS = {
    ATTENTION: r"(?i)flash|fmha|attention|sdpa",
    OPTIMIZER: r"(?i)adam|multi_tensor_apply",
    PRODUCTS: r"(?i)gemm|gemv|nvjet|cutlass|cublas|splitk|xmma|^triton_tem_",
    # The last ones are those of kernels/triton/fp8_rows.py.
    ELEMENTWISE: r"(?i)^triton_|elementwise_kernel|reduce_kernel|layer_norm|rms_?norm|"
    r"^_(cast|norm|gate)",
}
# The part of one of PyTorch's CPU operators by its name.
_OPERATORS = {
    PRODUCTS: r"(add|b|badd|)mm|addmv|mv|dot|linear|matmul|mkldnn_linear|_linear_pointwise",
    COPIES: r"copy_|_to_copy|clone|fill_|zero_|cat|_foreach_copy_",
    ELEMENTWISE: r"(add|sub|mul|div|addcmul|addcdiv|neg|pow|exp|r?sqrt)_?"
    r"|sigmoid|silu(_backward)?|sum|mean|cos|sin|.*rms_norm.*",
}
_FUSED_OPERATOR = "## Call CompiledFxGraph"  # compiled CPU code outside of operators
_LAUNCH = re.compile(r"^cu(da)?Launch")
_SYNCHRONISING = re.compile(r"^cu(da)?(Stream|Device|Event|Ctx)Synchronize")


@dataclass(frozen=True)
class OperationTotals:
    """Totals of the GPU kernels or CPU operators with one name and part of the step.

    ns: time in these calls, without nested operators, with time that overlaps with other kernels.
    """

    name: str
    part: str
    calls: int
    ns: int


@dataclass(frozen=True)
class MessageTotals:
    """Totals of the messages of one kind that one part of the step sent. Times in nanoseconds.

    name: of the collective. part: `OTHER` with gloo, whose threads have no ranges.
    ns: from start to end of each message. waits: beyond its shortest time on any rank (GPU).
    exposed: while such a message is in flight, and nothing computes or copies.
    """

    name: str
    part: str
    calls: int
    ns: int
    waits: int
    exposed: int


@dataclass(frozen=True)
class StepBreakdown:
    """Sums over all recorded steps of one rank. Times are in nanoseconds.

    step: wall-clock time of all steps, which is the sum of ``parts``.
    hidden: communication that overlaps with computation. Links and waits hold the exposed one.
    launching, syncing: host time in launch calls, and in calls that wait for the device (GPU).
    ahead: median time from the launch of a kernel to its start; None without kernels.
    unmatched: NCCL messages that were not found on other ranks and count as transfer.
    """

    steps: int
    step: int
    parts: dict[str, int]
    hidden: int
    kinds: list[OperationTotals] = field(repr=False)
    messages: list[MessageTotals] = field(repr=False, default_factory=list)
    launches: int = 0
    launching: int = 0
    syncs: int = 0
    syncing: int = 0
    ahead: float | None = None
    unmatched: int = 0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> StepBreakdown:
        """Make it from its `dataclasses.asdict`, which ranks exchange."""
        kinds = [OperationTotals(**kind) for kind in values["kinds"]]
        sent = [MessageTotals(**totals) for totals in values["messages"]]
        return cls(**{**values, "kinds": kinds, "messages": sent})


def find_parts(
    events: Iterable[Event], *, gpu: bool, least: Mapping[Message, int] | None = None
) -> StepBreakdown:
    """Return the parts of one rank's steps, which are annotations named `profiler_labels.STEP`.

    Args:
        events: `traceEvents` of the trace.
        least: result of `shortest`. The whole time of a message that it lacks counts as transfer.

    Raises:
        ValueError: the trace holds no step.
    """
    kept, steps = _kept(events)
    return _of_gpu(kept, steps, least or {}) if gpu else _of_cpu(kept, steps)


def messages(events: Iterable[Event]) -> dict[Message, int]:
    """Return the ns of each NCCL message of one rank whose group and size the trace gives.

    Raises:
        ValueError: the trace holds no step.
    """
    kept, steps = _kept(events)
    kernels = inside((s for s in kept if s.category == "kernel"), steps)
    return {
        message: span.end - span.begin
        for span, message in zip(kernels, _messages(kernels), strict=True)
        if message is not None
    }


def shortest(everyone: Sequence[Mapping[Message, int]]) -> dict[Message, int]:
    """Return the ns of each message on the rank where it was shortest.

    A message does not count if a rank of its group lacks it, or if ranks have different numbers of
    messages of this kind. everyone: results of `messages` on all ranks.
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


def _kept(events: Iterable[Event]) -> tuple[list[Span], list[Span]]:
    kept = [Span.of(e) for e in events if e.get("ph") == "X" and e.get("cat") in CATEGORIES]
    steps = [s for s in kept if s.category == "user_annotation" and s.name == _STEP]
    if not steps:
        raise ValueError(f"the trace has no annotation {_STEP}")
    return kept, sorted(steps, key=lambda s: s.begin)


def kernel_part(name: str) -> str:
    if NCCL.search(name):
        return LINKS
    return next((part for part, names in _KERNELS.items() if re.search(names, name)), OTHER)


def operator_part(name: str) -> str | None:
    """Return the part of a CPU operator; None for what only calls operators, such as autograd."""
    if name.startswith(_FUSED_OPERATOR):
        return ELEMENTWISE
    library, colons, operator = name.partition("::")
    if library == "fsdp":
        return WEIGHTS
    if not colons or library in ("autograd", "torch", "c10d", "_c10d_functional"):
        return None
    return next(
        (part for part, names in _OPERATORS.items() if re.fullmatch(names, operator)), OTHER
    )


def range_part(name: str) -> str | None:
    """Return the part of all work inside an annotation of this name; None if it has none."""
    if name.startswith(PREFIX):
        own = name.removeprefix(PREFIX).partition("/")[0]
        return own if own in COMPUTING else None
    if name.startswith("FSDP::"):
        return WEIGHTS
    return OPTIMIZER if name.startswith("Optimizer.") else None


def _kinds(calls: Iterable[tuple[str, str, int]]) -> list[OperationTotals]:
    """Sum calls by name and part, the longest sum first."""
    kinds = [
        OperationTotals(*key, len(of_kind), sum(ns for *_, ns in of_kind))
        for key, of_kind in grouped(calls, lambda call: call[:2]).items()
    ]
    return sorted(kinds, key=lambda k: (-k.ns, k.name, k.part))


def _message_totals(
    sent: Iterable[tuple[tuple[str, str], Interval, int]], free: Sequence[Interval]
) -> list[MessageTotals]:
    """Sum messages by name and part, the longest sum first.

    sent: ((name, part), interval, ns of waiting), sorted by begin. free: without computation.
    """
    totals = []
    for (name, part), alike in grouped(sent, lambda message: message[0]).items():
        exposed = {part: 0}
        claim(free, [(*interval, part) for _, interval, _ in alike], exposed)
        took = length(interval for _, interval, _ in alike)
        waits = sum(waited for *_, waited in alike)
        totals.append(MessageTotals(name, part, len(alike), took, waits, exposed[part]))
    return sorted(totals, key=lambda t: (-t.ns, t.name, t.part))


# --- GPU ---


def _messages(device: Iterable[Span]) -> list[Message | None]:
    """Return the message of each span, numbered among those of its kind; None for other spans.

    Ranks agree on the numbers: all ranks of a group send the group's messages in the same order.
    """
    numbers: Counter[tuple[Any, ...]] = Counter()
    numbered: list[Message | None] = []
    for span in device:
        numbered.append(span.message and (*span.message, numbers[span.message]))
        numbers[span.message or ()] += 1
    return numbered


def _of_gpu(
    spans: Sequence[Span], steps: Sequence[Span], least: Mapping[Message, int]
) -> StepBreakdown:
    # All work that a step launches also ends in it, because a step ends with a wait for the device.
    device = inside((s for s in spans if s.category in DEVICE), steps)
    runtime = [s for s in spans if s.category in RUNTIME]
    # A runtime call may contain a driver call with the same correlation id. Keep the outer call.
    launches = {s.correlation: s for s in sorted(runtime, key=lambda s: -s.begin)}
    words = launched_in(device, launches, spans)
    assigned = [
        LINKS
        if span.category == "kernel" and NCCL.search(span.name)
        else word or (kernel_part(span.name) if span.category == "kernel" else COPIES)
        for span, word in zip(device, words, strict=True)
    ]
    parts, hidden, unmatched, sent = _device_parts(device, assigned, words, steps, least)
    closing = [s for s in spans if s.name == _CLOSING]
    launching = [s for s in inside(launches.values(), steps) if _LAUNCH.match(s.name)]
    syncing = [
        s
        for s in inside(runtime, steps)
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
        step=length((step.begin, step.end) for step in steps),
        parts=parts,
        hidden=hidden,
        kinds=_kinds((s.name, w, s.end - s.begin) for s, w in zip(device, assigned, strict=True)),
        messages=sent,
        launches=sum(s.category == "kernel" for s in device),
        launching=sum(s.end - s.begin for s in launching),
        syncs=len(syncing),
        syncing=sum(s.end - s.begin for s in syncing),
        ahead=statistics.median(ahead) if ahead else None,
        unmatched=unmatched,
    )


def _device_parts(
    device: Sequence[Span],
    assigned: Sequence[str],
    senders: Sequence[str | None],
    steps: Sequence[Span],
    least: Mapping[Message, int],
) -> tuple[dict[str, int], int, int, list[MessageTotals]]:
    """Return (ns of each part, ns of overlapped messages, number of unmatched messages, totals).

    senders: the part whose range launched each span.
    """
    computing, copying, moving, waiting, under_way = (list[Wanted]() for _ in range(5))
    sent: list[tuple[tuple[str, str], Interval, int]] = []
    unmatched = 0
    for span, word, sender, message in zip(
        device, assigned, senders, _messages(device), strict=True
    ):
        if word != LINKS:
            layer = computing if span.category == "kernel" else copying
            layer.append((span.begin, span.end, word))
            continue
        took = span.end - span.begin
        arrived = span.end - (took if message is None else least.get(message, took))
        unmatched += message not in least
        named = span.message[_OF_MESSAGE.index("Collective name")] if span.message else span.name
        kind = named.strip("_"), sender or OTHER
        sent.append((kind, (span.begin, span.end), arrived - span.begin))
        under_way.append((span.begin, span.end, LINKS))
        waiting.append((span.begin, arrived, WAITS))
        moving.append((arrived, span.end, LINKS))
    moving.sort(key=lambda interval: interval[0])
    parts = dict.fromkeys(OF_GPU, 0)
    free: list[Interval] = [(step.begin, step.end) for step in steps]
    in_all = {LINKS: 0}
    claim(free, under_way, in_all)
    free = claim(claim(free, computing, parts), copying, parts)
    totals = _message_totals(sent, free)
    parts[IDLE] = length(claim(claim(free, moving, parts), waiting, parts))
    return parts, in_all[LINKS] - parts[LINKS] - parts[WAITS], unmatched, totals


# --- CPU ---


def _of_cpu(spans: Sequence[Span], steps: Sequence[Span]) -> StepBreakdown:
    thread = steps[0].thread
    mine = inside(
        (s for s in spans if s.thread == thread and s.category in ("cpu_op", "user_annotation")),
        steps,
    )
    mine = [s for s in mine if not s.name.startswith(_MESSAGES) and s.name != _STEP]
    parts = dict.fromkeys(OF_CPU, 0)
    whole: list[Interval] = [(step.begin, step.end) for step in steps]
    worked = [(span, word, own) for span, word, own in _self_times(mine) if word is not None]
    busy = sorted((begin, end, word) for _, word, own in worked for begin, end in own)
    sent = sorted(
        (s for s in spans if s.name.startswith(_MESSAGES)), key=lambda s: (s.begin, s.end)
    )
    messages = [(s.begin, s.end, LINKS) for s in sent]
    in_all = {LINKS: 0}
    claim(whole, messages, in_all)
    free = claim(whole, busy, parts)
    totals = _message_totals(
        # One that began between steps belongs to the measurement.
        (
            ((s.name.removeprefix(_MESSAGES), OTHER), (s.begin, s.end), 0)
            for s in inside(sent, steps)
        ),
        free,
    )
    parts[HOST] = length(claim(free, messages, parts))
    kinds = _kinds((span.name, word, length(own)) for span, word, own in worked)
    hidden = in_all[LINKS] - parts[LINKS]
    return StepBreakdown(len(steps), length(whole), parts, hidden, kinds, totals)


def _self_times(spans: Sequence[Span]) -> list[tuple[Span, str | None, list[Interval]]]:
    """Return (span, part or None, intervals outside nested spans) of the spans of one thread."""
    times: list[tuple[Span, str | None, list[Interval]]] = []
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


# --- spans of a trace ---


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
    """For each (thread, ns), return the part of the innermost span that contains it, or None."""
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
    free: Sequence[Interval], wanted: Sequence[Wanted], parts: dict[str, int]
) -> list[Interval]:
    """Add the free ns inside each interval of ``wanted`` to its part; return what remains free.

    Both lists are sorted by begin.
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
    device: Sequence[Span], launches: Mapping[Any, Span], spans: Sequence[Span]
) -> list[str | None]:
    """Return the part of the host range that launched each device span; None if unknown."""
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
    annotations = (s for s in spans if s.category == "user_annotation")
    ranges = [(s, part) for s in annotations if (part := range_part(s.name)) is not None]
    return innermost(ranges, at)
