"""Record where a rank's attention spends its time, as spans with a start and a length.

On a GPU, a span is a pair of events on the compute stream, and the end of a message is an event on
a stream that does nothing else. Only `Recorder.read` reads the events, so recording never blocks.
If a profiler listens, each span is also an NVTX range.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from mtrain_cli.grouping import grouped
from mtrain_cli.parallel import nvtx_ranges
from mtrain_cli.parallel.collectives import Together

Moment = torch.cuda.Event | float

# Kinds of span on the compute stream; they never overlap. `arrange` is other work of a pass, such
# as copies into sequence order and sums over rows. `gap` is the rest of a step, such as launch
# overhead.
INDEX, WAIT, ATTENTION, COLUMNS = "index", "wait", "attention", "columns"
MERGE, ARRANGE, GAP = "merge", "arrange", "gap"
# SEND, RECEIVE: messages, which overlap with the spans above. ITERATION, STAGE (one pass of a
# micro-batch through a virtual stage of a pipeline) and PASS (one pass of one layer's attention)
# contain other spans. EXPERTS (one pass of one layer's experts) lies outside attention passes.
SEND, RECEIVE, ITERATION, PASS, STAGE = "send", "receive", "iteration", "pass", "stage"
EXPERTS = "experts"
COMPUTING = (INDEX, WAIT, ATTENTION, COLUMNS, MERGE, ARRANGE, GAP)
KINDS = (*COMPUTING, SEND, RECEIVE, ITERATION, PASS, STAGE, EXPERTS)
# `recompute`: a second forward pass, for the backward pass of a layer under checkpointing. Spans of
# an iteration have no direction.
FORWARD, RECOMPUTE, BACKWARD = "forward", "recompute", "backward"
DIRECTIONS = ("", FORWARD, RECOMPUTE, BACKWARD)


@dataclass(frozen=True)
class MessageTag:
    """The message that a span sends, receives or waits for.

    to, source: the ranks to which and from which this rank sends and receives; -1 for a collective.
    size: number of bytes that this rank sends, and receives.
    number: the transfer's number in its pass; negative if no schedule contains the transfer.
    """

    link: str = ""
    payload: str = ""
    shard: int = -1
    leaving: int = -1
    to: int = -1
    source: int = -1
    size: int = 0
    number: int = -1
    peers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Span:
    """One timed part of a rank's work.

    layer, step: -1 if the span belongs to no layer or to no step. Spans of a pipeline have its
        virtual stage as their step.
    start: start time in seconds on this rank's monotonic clock (`time.perf_counter`).
    """

    kind: str
    micro: int
    layer: int
    direction: str
    step: int
    message: MessageTag
    start: float = 0.0
    seconds: float = 0.0

    @property
    def of_pass(self) -> tuple[int, int, str]:
        """(micro-batch, layer, direction) of the attention pass that contains the span."""
        return self.micro, self.layer, self.direction


NOTHING = MessageTag()


class Recorder:
    """Collect spans from `start` to `read`. Only one pass of one layer may run at a time."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[Span, Moment, Moment]] = []
        # number of a transfer -> the step that posted it, the message, the time
        self._under_way: dict[int, tuple[int, MessageTag, Moment]] = {}
        self._pool: list[torch.cuda.Event] = []
        self._watchers: dict[tuple[str, bool, bool], torch.cuda.Stream] = {}
        self._zero: tuple[Moment, float, float] | None = None
        self._micro, self._layer, self._direction = 0, -1, ""
        self._forwards: set[tuple[int, int]] = set()

    @property
    def recording(self) -> bool:
        return self._zero is not None

    def start(self) -> float:
        """Start recording. Return how far device times may be from the host's clock, in seconds."""
        self._spans.clear()
        self._forwards.clear()
        self._micro, self._layer, self._direction = 0, -1, ""
        if self._cuda:
            torch.cuda.synchronize()
        before = time.perf_counter()
        zero = self.now()
        if self._cuda:
            torch.cuda.synchronize()
        after = time.perf_counter() if self._cuda else before
        # The event happened somewhere between the two.
        self._zero = zero, (before + after) / 2, (after - before) / 2
        return self._zero[2]

    def micro_batch(self, number: int) -> None:
        self._micro = number

    def iteration(self) -> AbstractContextManager[None]:
        return self._timed(ITERATION, -1, NOTHING)

    def of_pipeline(
        self, kind: str, micro: int, direction: str, stage: int, message: MessageTag = NOTHING
    ) -> AbstractContextManager[None]:
        self._micro = micro
        return self._of_layer(kind, -1, direction, stage, message)

    def attention_pass(self, layer: int, direction: str) -> AbstractContextManager[None]:
        """Record the ``with`` block as a pass of a layer; a second forward is recomputation."""
        if self.recording and direction == FORWARD:
            direction = RECOMPUTE if (self._micro, layer) in self._forwards else FORWARD
            self._forwards.add((self._micro, layer))
        return self._of_layer(PASS, layer, direction)

    def expert_pass(self, layer: int, direction: str) -> AbstractContextManager[None]:
        return self._of_layer(EXPERTS, layer, direction)

    @contextmanager
    def _of_layer(
        self, kind: str, layer: int, direction: str, step: int = -1, message: MessageTag = NOTHING
    ) -> Iterator[None]:
        before = self._layer, self._direction
        self._layer, self._direction = layer, direction
        try:
            with self._timed(kind, step, message):
                yield
        finally:
            # Non-reentrant checkpointing ends recomputation early, by an exception.
            self._layer, self._direction = before

    def span(
        self, kind: str, step: int, message: MessageTag = NOTHING
    ) -> AbstractContextManager[None]:
        """Record the ``with`` block as one span: on a GPU, the work that the block queues."""
        return self._timed(kind, step, message) if self.recording else nullcontext()

    @contextmanager
    def _timed(self, kind: str, step: int, message: MessageTag) -> Iterator[None]:
        if not self.recording:
            yield
            return
        began = self.now()
        try:
            with nvtx_ranges.span(kind, self._direction, message.link, step):
                yield
        finally:
            self._add(kind, step, message, began, self.now())

    def posted(self, step: int, message: MessageTag) -> None:
        """Record when a transfer starts: on a GPU, after the work queued so far."""
        if self.recording:
            self._under_way[message.number] = step, message, self.now()

    def watch(self, number: int, works: Sequence[dist.Work | Together]) -> None:
        """On a GPU, record the end of a transfer, even before the compute stream waits for it."""
        if not self.recording or not self._cuda or number not in self._under_way:
            return
        step, message, began = self._under_way.pop(number)
        # A communicator's messages end in order, so one stream per communicator can wait for them.
        # No other work runs on that stream.
        key = message.link, message.payload.startswith("d"), message.number < 0
        if key not in self._watchers:
            self._watchers[key] = torch.cuda.Stream()
        with torch.cuda.stream(self._watchers[key]):
            for work in works:
                work.wait()
            self._moved(step, message, began, self.now())

    def arrived(self, number: int) -> None:
        """Record the end of a transfer for which the host has waited (on a CPU)."""
        if number in self._under_way:
            step, message, began = self._under_way.pop(number)
            self._moved(step, message, began, self.now())

    def _moved(self, step: int, message: MessageTag, began: Moment, ended: Moment) -> None:
        for kind in (SEND, RECEIVE):
            self._add(kind, step, message, began, ended)

    def _add(self, kind: str, step: int, message: MessageTag, began: Moment, ended: Moment) -> None:
        span = Span(kind, self._micro, self._layer, self._direction, step, message)
        self._spans.append((span, began, ended))

    def read(self) -> list[Span]:
        """Stop recording, wait until all recorded work has ended, and return the spans."""
        assert self._zero is not None, "nothing was started"
        (zero, host, _), self._zero = self._zero, None
        if self._cuda:
            torch.cuda.synchronize()
        # An event's elapsed time is float32 milliseconds, too coarse for long times: measure the
        # spans of a pass from the start of that pass.
        anchors: dict[tuple[int, int, str], tuple[Moment, float]] = {
            span.of_pass: (began, host + elapsed(zero, began))
            for span, began, _ in self._spans
            if span.kind == PASS
        }
        spans = []
        used: dict[int, torch.cuda.Event] = {}
        for span, began, ended in self._spans:
            anchor, at = anchors.get(span.of_pass, (zero, host))
            start = at if anchor is began else at + elapsed(anchor, began)
            spans.append(replace(span, start=start, seconds=elapsed(began, ended)))
            used.update({id(m): m for m in (began, ended) if isinstance(m, torch.cuda.Event)})
        self._pool += used.values()
        self._spans.clear()
        self._under_way.clear()
        return spans

    def now(self) -> Moment:
        """Return a new event on the current stream. On a CPU, return the time in seconds."""
        if not self._cuda:
            return time.perf_counter()
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, began: Moment, ended: Moment) -> float:
        """Wait until both moments have passed, and return the time between them in seconds."""
        if self._cuda:
            torch.cuda.synchronize()
        return elapsed(began, ended)


def with_gaps(spans: list[Span]) -> list[Span]:
    """Add a gap for every part of a pass that no span covers, in the step of the next span.

    Spans of the kinds index and arrange may contain waits, around which they are split: workers
    that estimate an index wait for each other, and with gloo the host waits for a collective before
    it posts the next one.
    """
    waits = sorted((s for s in spans if s.kind == WAIT), key=lambda s: s.start)
    starts = [s.start for s in waits]
    filled = [
        part
        for span in spans
        for part in (_without(span, waits, starts) if span.kind in (INDEX, ARRANGE) else (span,))
    ]
    inside = (span for span in filled if span.kind in COMPUTING or span.kind == PASS)
    for members in grouped(inside, lambda span: span.of_pass).values():
        whole = next((s for s in members if s.kind == PASS), None)
        if whole is None:
            continue
        at, step = whole.start, -1
        end = replace(whole, start=whole.start + whole.seconds, seconds=0.0)
        for span in [*sorted((s for s in members if s.kind != PASS), key=lambda s: s.start), end]:
            step = max(step, span.step)
            if span.start > at:
                filled.append(
                    replace(whole, kind=GAP, step=step, start=at, seconds=span.start - at)
                )
            at = max(at, span.start + span.seconds)
    return filled


def _without(span: Span, waits: list[Span], starts: list[float]) -> list[Span]:
    """Return the parts of a span that lie outside all waits."""
    end = span.start + span.seconds
    left, at = [], span.start
    for wait in waits[bisect_left(starts, span.start) : bisect_left(starts, end)]:
        left.append(replace(span, start=at, seconds=wait.start - at))
        at = wait.start + wait.seconds
    return [*left, replace(span, start=at, seconds=end - at)]


def moment(device: torch.device) -> Moment:
    """Return a new event on the current stream. On a CPU, return the time in seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed(began: Any, ended: Any) -> float:
    """Return the seconds between two moments, which must have passed on a GPU."""
    return ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1e3
