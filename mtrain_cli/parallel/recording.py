"""Times of what a rank does in the attention of its layers: which part of which step, when it began, and how long it took.

On a GPU a span is a pair of events on the stream that computes: a wait shows there as the time for which that stream stands still, and the
end of a message as an event on a stream that waits for nothing else. Nothing is read, and nothing waits, before `Recorder.read`. The same
places are NVTX ranges of the domain ``mtrain`` whenever a profiler such as Nsight Systems listens.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from mtrain_cli.parallel import nvtx_ranges

Moment = torch.cuda.Event | float

# Kinds of span on the stream that computes, none of which overlap: `arrange` is what else a pass computes, such as copies into sequence
# order and sums over rows; `gap` is what is left of a step, such as the time of launching kernels.
INDEX, WAIT, ATTENTION, COLUMNS, MERGE, ARRANGE, GAP = (
    "index",
    "wait",
    "attention",
    "columns",
    "merge",
    "arrange",
    "gap",
)
# Messages under way beside it; and what contains the others: all of one iteration, and one pass of the attention of a layer.
SEND, RECEIVE, ITERATION, PASS = "send", "receive", "iteration", "pass"
COMPUTING = (INDEX, WAIT, ATTENTION, COLUMNS, MERGE, ARRANGE, GAP)
KINDS = (*COMPUTING, SEND, RECEIVE, ITERATION, PASS)
# `recompute`: the forward pass once more, for the backward pass of a layer that kept nothing. Spans of an iteration have none.
FORWARD, RECOMPUTE, BACKWARD = "forward", "recompute", "backward"
DIRECTIONS = ("", FORWARD, RECOMPUTE, BACKWARD)


@dataclass(frozen=True)
class MessageTag:
    """What a wait or a message is about.

    link: channel. shard, leaving: whose arrives and whose is sent, -1 for a collective. to, source: ranks, -1 for a collective. sent,
    received: bytes. number: of the transfer among those of its pass, negative for what is in no schedule. peers: ranks of a collective.
    """

    link: str = ""
    payload: str = ""
    shard: int = -1
    leaving: int = -1
    to: int = -1
    source: int = -1
    sent: int = 0
    received: int = 0
    number: int = -1
    peers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Span:
    """direction: one of `DIRECTIONS`. layer, step: -1 for none. micro: which forward pass of the iteration. start: seconds of this rank's
    monotonic clock (`time.perf_counter`). seconds: how long.
    """

    kind: str
    micro: int
    layer: int
    direction: str
    step: int
    message: MessageTag
    start: float
    seconds: float


NOTHING = MessageTag()


class Recorder:
    """Collects spans from `start` to `read`; outside of these it records nothing. One pass of one layer at a time."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[str, int, int, str, int, MessageTag, Moment, Moment]] = []
        self._under_way: dict[
            int, tuple[int, MessageTag, Moment]
        ] = {}  # transfers: step in which it was posted, what, when
        self._pool: list[torch.cuda.Event] = []
        self._watchers: dict[tuple[str, bool, bool], torch.cuda.Stream] = {}
        self._zero: tuple[Moment, float, float] | None = None
        self._micro, self._layer, self._direction = 0, -1, ""
        self._forwards: set[tuple[int, int]] = set()

    @property
    def recording(self) -> bool:
        return self._zero is not None

    def start(self) -> float:
        """Begins -> seconds by which the times of the device may be off against this process' clock."""
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
        # The event happened between the two.
        self._zero = zero, (before + after) / 2, (after - before) / 2
        return self._zero[2]

    def micro_batch(self, number: int) -> None:
        """What follows belongs to this forward pass of the iteration and to its backward pass."""
        self._micro = number

    @contextmanager
    def iteration(self) -> Iterator[None]:
        """What is inside is one iteration."""
        with self._timed(ITERATION, -1, NOTHING):
            yield

    @contextmanager
    def attention_pass(self, layer: int, direction: str) -> Iterator[None]:
        """What is inside is one pass of the attention of a layer; a second forward pass is recomputation."""
        if not self.recording:
            yield
            return
        if direction == FORWARD:
            direction = RECOMPUTE if (self._micro, layer) in self._forwards else FORWARD
            self._forwards.add((self._micro, layer))
        before = self._layer, self._direction
        self._layer, self._direction = layer, direction
        try:
            with self._timed(PASS, -1, NOTHING):
                yield
        finally:
            # Recomputation ends by an exception when it has what it is there for.
            self._layer, self._direction = before

    def span(
        self, kind: str, step: int, message: MessageTag = NOTHING
    ) -> AbstractContextManager[None]:
        """What is queued inside, or on a CPU done, is one span of the pass at hand."""
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
        """A transfer has been posted, behind what has been queued so far."""
        if self.recording:
            self._under_way[message.number] = step, message, self.now()

    def watch(self, number: int, works: list[dist.Work]) -> None:
        """On a GPU, has the end of a transfer recorded where it happens."""
        if not self.recording or not self._cuda or number not in self._under_way:
            return
        step, message, began = self._under_way.pop(number)
        # Messages of one communicator end in their order; waiting for them disturbs no other stream.
        key = message.link, message.payload.startswith("d"), message.number < 0
        if key not in self._watchers:
            self._watchers[key] = torch.cuda.Stream()
        with torch.cuda.stream(self._watchers[key]):
            for work in works:
                work.wait()
            self._moved(step, message, began, self.now())

    def arrived(self, number: int) -> None:
        """On a CPU a transfer ends when this rank has seen that it did."""
        if number in self._under_way:
            step, message, began = self._under_way.pop(number)
            self._moved(step, message, began, self.now())

    def _moved(self, step: int, message: MessageTag, began: Moment, ended: Moment) -> None:
        for kind in (SEND, RECEIVE):
            self._add(kind, step, message, began, ended)

    def _add(self, kind: str, step: int, message: MessageTag, began: Moment, ended: Moment) -> None:
        self._spans.append(
            (kind, self._micro, self._layer, self._direction, step, message, began, ended)
        )

    def read(self) -> list[Span]:
        """Ends the recording; waits until everything recorded has happened."""
        assert self._zero is not None, "nothing was started"
        (zero, host, _), self._zero = self._zero, None
        if self._cuda:
            torch.cuda.synchronize()
        # Events tell milliseconds in float32, long times are coarse: spans of a pass are timed from its beginning.
        anchors: dict[tuple[int, int, str], tuple[Moment, float]] = {
            (micro, layer, direction): (began, host + _between(zero, began))
            for kind, micro, layer, direction, _, _, began, _ in self._spans
            if kind == PASS
        }
        spans_out = []
        used: dict[int, torch.cuda.Event] = {}
        for kind, micro, layer, direction, step, message, began, ended in self._spans:
            anchor, at = anchors.get((micro, layer, direction), (zero, host))
            start = at if anchor is began else at + _between(anchor, began)
            spans_out.append(
                Span(kind, micro, layer, direction, step, message, start, _between(began, ended))
            )
            used.update({id(m): m for m in (began, ended) if isinstance(m, torch.cuda.Event)})
        self._pool += used.values()
        self._spans.clear()
        self._under_way.clear()
        return spans_out

    def now(self) -> Moment:
        """This point of the current stream, or of time."""
        if not self._cuda:
            return time.perf_counter()
        event = self._pool.pop() if self._pool else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, began: Moment, ended: Moment) -> float:
        """Between two moments; waits until both have been."""
        if self._cuda:
            torch.cuda.synchronize()
        return _between(began, ended)


def with_gaps(spans: list[Span]) -> list[Span]:
    """The spans and what of every pass none of them covers. A gap belongs to the step of the span after it, the last one to that before.

    Waits inside of other spans are taken out of these: workers that estimate an index wait for each other, and on a CPU a collective that
    sends on what another brought waits for that.
    """
    waits = sorted((s for s in spans if s.kind == WAIT), key=lambda s: s.start)
    starts = [s.start for s in waits]
    spans_out = [
        part
        for span in spans
        for part in (_without(span, waits, starts) if span.kind in (INDEX, ARRANGE) else (span,))
    ]
    passes: dict[tuple[int, int, str], list[Span]] = {}
    for span in spans_out:
        if span.kind in COMPUTING or span.kind == PASS:
            passes.setdefault((span.micro, span.layer, span.direction), []).append(span)
    for members in passes.values():
        whole = next((s for s in members if s.kind == PASS), None)
        if whole is None:
            continue
        at, step = whole.start, -1
        end = replace(whole, start=whole.start + whole.seconds, seconds=0.0)
        for span in [*sorted((s for s in members if s.kind != PASS), key=lambda s: s.start), end]:
            step = max(step, span.step)
            if span.start > at:
                spans_out.append(
                    replace(whole, kind=GAP, step=step, start=at, seconds=span.start - at)
                )
            at = max(at, span.start + span.seconds)
    return spans_out


def _without(span: Span, waits: list[Span], starts: list[float]) -> list[Span]:
    """What the waits inside of a span leave of it. waits: ascending. starts: of waits."""
    end = span.start + span.seconds
    left, at = [], span.start
    for wait in waits[bisect_left(starts, span.start) : bisect_left(starts, end)]:
        left.append(replace(span, start=at, seconds=wait.start - at))
        at = wait.start + wait.seconds
    return [*left, replace(span, start=at, seconds=end - at)]


def _between(began: Any, ended: Any) -> float:
    """Seconds."""
    return ended - began if isinstance(began, float) else began.elapsed_time(ended) / 1e3
