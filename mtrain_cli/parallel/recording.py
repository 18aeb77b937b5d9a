"""Times of what a rank does in an exchange: which part of which step, when it began, and how long it took.

On a GPU a span is a pair of events on the stream that computes: a wait shows there as the time for which that stream stands still. Nothing
is read, and nothing waits, before `Recorder.read`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

Moment = torch.cuda.Event | float

# Kinds of span on the stream that computes, none of which overlap: `arrange` copies what was gathered into sequence order or cuts it into
# shards again; `gap` is what is left of a step, such as the time of launching kernels.
INDEX, WAIT, ATTENTION, COLUMNS, MERGE, ARRANGE, GAP = "index", "wait", "attention", "columns", "merge", "arrange", "gap"
# Messages under way beside it; and what contains the others: all of one iteration, and one pass of the attention of a layer.
SEND, RECEIVE, ITERATION, PASS = "send", "receive", "iteration", "pass"
COMPUTING = (INDEX, WAIT, ATTENTION, COLUMNS, MERGE, ARRANGE, GAP)
KINDS = (*COMPUTING, SEND, RECEIVE, ITERATION, PASS)
# `recompute`: the forward pass once more, for the backward pass of a layer that kept nothing. Spans of an iteration have none.
DIRECTIONS = ("", "forward", "recompute", "backward")


@dataclass(frozen=True)
class Span:
    """layer: as the model numbers them. direction: forward or backward. step: of the schedule, from 0. link: the channel whose message was
    waited for, empty otherwise. start, seconds: from the beginning of the recording, on this rank's clock.
    """

    kind: str
    layer: str
    direction: str
    step: int
    link: str
    start: float
    seconds: float


class Recorder:
    """Collects spans from `start` to `read`; outside of these it records nothing."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[str, str, str, int, str, Moment, Moment]] = []
        self._pool: list[torch.cuda.Event] = []
        self._zero: Moment | None = None

    def start(self) -> None:
        """Begins: times count from here."""
        self._spans.clear()
        self._zero = self.now()

    @contextmanager
    def span(self, kind: str, layer: str, direction: str, step: int, link: str = "") -> Iterator[None]:
        """What is queued inside, or on a CPU done, is one span."""
        if self._zero is None:
            yield
            return
        started = self.now()
        yield
        self._spans.append((kind, layer, direction, step, link, started, self.now()))

    def read(self) -> list[Span]:
        """Ends the recording; waits until everything recorded has happened."""
        zero, self._zero = self._zero, None
        assert zero is not None, "nothing was started"
        if self._cuda:
            torch.cuda.synchronize()
        found = []
        for kind, layer, direction, step, link, began, ended in self._spans:
            found.append(Span(kind, layer, direction, step, link, _between(zero, began), _between(began, ended)))
            self._pool += [moment for moment in (began, ended) if isinstance(moment, torch.cuda.Event)]
        self._spans.clear()
        return found

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


def _between(began: Moment, ended: Moment) -> float:
    """Seconds."""
    if isinstance(began, float):
        assert isinstance(ended, float)
        return ended - began
    assert not isinstance(ended, float)
    return began.elapsed_time(ended) / 1e3
