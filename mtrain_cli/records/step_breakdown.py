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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtrain_cli.grouping import grouped
from mtrain_cli.parallel.profiler_labels import (
    ATTENTION,
    CLOSING,
    EXPERTS,
    INDEX,
    LOSS,
    MESSAGE,
    OPTIMIZER,
    PREFIX,
    ROUTER,
    STEP,
    layer_of,
)
from mtrain_cli.records.trace_spans import (
    CATEGORIES,
    DEVICE,
    NCCL,
    RUNTIME,
    Event,
    Interval,
    Span,
    claim,
    innermost,
    inside,
    launched_in,
    length,
)

PRODUCTS, ELEMENTWISE, WEIGHTS = "products", "element-wise", "weights"
COPIES, OTHER = "copies", "other"
LINKS, WAITS, IDLE, HOST = "links", "waits", "idle", "host"
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
_NO_EXPERTS = ""  # label of the work that no layer with experts does
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
class ExpertTime:
    """The time of one pass of a layer with experts, in all recorded steps of one rank.

    layer, direction: number of the layer, and ``forward``, ``recompute`` or ``backward``.
    router: nanoseconds of the router, without its backward pass.
    computing: nanoseconds of the products and element-wise kernels of the experts.
    waiting: nanoseconds of messages of router and experts that do not overlap with computation.
    """

    layer: int
    direction: str
    router: int
    computing: int
    waiting: int


@dataclass(frozen=True)
class StepBreakdown:
    """Sums over all recorded steps of one rank. Times are in nanoseconds.

    step: wall-clock time of all steps.
    parts: wall-clock time by part. The sum of the parts is `step`.
    hidden: time of communication that overlaps with computation. The parts for links and waits hold
        the exposed communication.

    The fields below are for GPUs. On a CPU, these fields keep their defaults:

    launching: host time in launch calls.
    syncs: number of calls that wait for the device.
    syncing: host time in calls that wait for the device.
    ahead: median time from the launch of a kernel to its start; None without kernels.
    unmatched: number of NCCL messages that were not found on other ranks. The whole time of these
        messages counts as transfer.

    For a model with experts, on GPUs and CPUs:

    experts: times of each pass of a layer with experts.
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
    experts: list[ExpertTime] = field(default_factory=list)


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
    kernels = inside((s for s in kept if s.category == "kernel"), steps)
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


def _kept(events: Iterable[Event]) -> tuple[list[Span], list[Span]]:
    kept = [Span.of(e) for e in events if e.get("ph") == "X" and e.get("cat") in CATEGORIES]
    steps = sorted(
        (s for s in kept if s.category == "user_annotation" and s.name == _STEP),
        key=lambda s: s.begin,
    )
    if not steps:
        raise ValueError(f"the trace has no annotation {_STEP}")
    return kept, steps


def kernel_part(name: str) -> str:
    """Return the part to which a kernel of this name belongs."""
    if NCCL.search(name):
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


# --- GPU ---


def _messages(device: Iterable[Span]) -> list[Message | None]:
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
    spans: Sequence[Span], steps: Sequence[Span], least: Mapping[Message, int]
) -> StepBreakdown:
    # All work that a step launches also ends in it, because a step ends with a wait for the device.
    device = inside((s for s in spans if s.category in DEVICE), steps)
    runtime = [s for s in spans if s.category in RUNTIME]
    # A runtime call may contain a driver call with the same correlation id. Keep the outer call.
    launches = {s.correlation: s for s in sorted(runtime, key=lambda s: -s.begin)}
    assigned = [
        _device_part(span, word)
        for span, word in zip(device, launched_in(device, launches, spans, range_part), strict=True)
    ]

    parts, hidden, unmatched = _device_parts(device, assigned, steps, least)
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
        launches=sum(s.category == "kernel" for s in device),
        launching=sum(s.end - s.begin for s in launching),
        syncs=len(syncing),
        syncing=sum(s.end - s.begin for s in syncing),
        ahead=statistics.median(ahead) if ahead else None,
        unmatched=unmatched,
        experts=_expert_times(_device_times(device, launches, spans, steps)),
    )


def _device_parts(
    device: Sequence[Span],
    assigned: Sequence[str],
    steps: Sequence[Span],
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
    claim(free, under_way, in_all)
    for layer in (computing, copying, moving, waiting):
        free = claim(free, layer, parts)
    parts[IDLE] = length(free)
    return parts, in_all[LINKS] - parts[LINKS] - parts[WAITS], unmatched


def _device_part(span: Span, word: str | None) -> str:
    """Return the part of a device span.

    word: part of the host range that launched the span; None if unknown.
    """
    if span.category == "kernel" and NCCL.search(span.name):
        return LINKS
    if word is not None:
        return word
    return kernel_part(span.name) if span.category == "kernel" else COPIES


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
    messages = sorted((s.begin, s.end, LINKS) for s in spans if s.name.startswith(_MESSAGES))
    in_all = {LINKS: 0}
    claim(whole, messages, in_all)
    free = claim(claim(whole, busy, parts), messages, parts)
    parts[HOST] = length(free)
    kinds = _kinds((span.name, word, length(own)) for span, word, own in worked)
    hidden = in_all[LINKS] - parts[LINKS]
    experts = _expert_times(_thread_times(spans, steps))
    return StepBreakdown(len(steps), length(whole), parts, hidden, kinds, experts=experts)


def _self_times(spans: Sequence[Span]) -> list[tuple[Span, str | None, list[Interval]]]:
    """Return (span, part, self time) of each span of one thread, ordered by start.

    Self time is the list of intervals of a span that lie outside all nested spans. The part is None
    if the self time counts for no part.
    """
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


def _device_times(
    device: Sequence[Span],
    launches: Mapping[Any, Span],
    spans: Sequence[Span],
    steps: Sequence[Span],
) -> Iterator[tuple[str, bool, int]]:
    """Yield (annotation, whether a wait, nanoseconds) of the work of layers with experts."""
    labels = launched_in(device, launches, spans, _expert_label)
    if not any(labels):
        return
    messages: list[tuple[int, int, str]] = []
    others: list[tuple[int, int, str]] = []
    for span, label in zip(device, labels, strict=True):
        is_message = span.category == "kernel" and NCCL.search(span.name)
        if not is_message:
            others.append((span.begin, span.end, _NO_EXPERTS))
            if label is not None:
                yield label, False, span.end - span.begin
        elif label is not None:
            messages.append((span.begin, span.end, label))
    free = claim([(s.begin, s.end) for s in steps], others, {_NO_EXPERTS: 0})
    exposed = dict.fromkeys((label for *_, label in messages), 0)
    claim(free, messages, exposed)
    for label, ns in exposed.items():
        yield label, True, ns


def _expert_label(name: str) -> str | None:
    return name if layer_of(name) is not None else None


def _expert_times(times: Iterable[tuple[str, bool, int]]) -> list[ExpertTime]:
    """Add up (annotation, whether a wait, nanoseconds) by layer and direction."""
    sums: dict[tuple[int, str], dict[str, int]] = defaultdict(Counter)
    for annotation, is_wait, ns in times:
        found = layer_of(annotation)
        assert found is not None
        name, layer, direction = found
        sums[layer, direction]["waiting" if is_wait else name] += ns
    return [
        ExpertTime(*key, found[ROUTER], found[EXPERTS], found["waiting"])
        for key, found in sorted(sums.items())
    ]


def _thread_times(spans: Sequence[Span], steps: Sequence[Span]) -> Iterator[tuple[str, bool, int]]:
    """Yield (annotation, whether a wait, nanoseconds) of layers with experts.

    The whole time of an annotation counts, except waits for messages inside it.
    """
    own = [s for s in spans if s.category == "user_annotation" and s.name.startswith(PREFIX)]
    own = inside(own, steps)
    waits = [s for s in own if s.name == PREFIX + MESSAGE]
    ranges = [(s, s.name) for s in own if _expert_label(s.name) is not None]
    around = innermost(ranges, [(s.thread, s.begin) for s in waits])
    for span, name in ranges:
        yield name, False, span.end - span.begin
    for span, label in zip(waits, around, strict=True):
        if label is not None:
            yield label, False, span.begin - span.end
            yield label, True, span.end - span.begin
