"""Play the schedule of a pipeline without processes: prove that it ends, and time it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from mtrain_cli.parallel.pipeline_schedule import FORWARD, RECEIVE, SEND, Action, Channel, Pipeline

# Sends of a channel whose tensors the executor keeps. The next send waits for the oldest one.
SENDS_IN_FLIGHT = 2


class ScheduleError(RuntimeError):
    """A schedule whose stages wait for each other for ever, or whose messages are out of order."""


@dataclass(frozen=True)
class Span:
    """One computation of a stage, in the unit of time of `play`'s arguments."""

    stage: int
    action: Action
    begin: float
    end: float


@dataclass(frozen=True)
class Played:
    stages: int
    spans: tuple[Span, ...]

    @property
    def makespan(self) -> float:
        return max(span.end for span in self.spans)

    def busy(self, stage: int) -> float:
        return sum(span.end - span.begin for span in self.spans if span.stage == stage)

    @property
    def bubble(self) -> float:
        """Share of the makespan in which a stage idles, as the mean over stages."""
        busy = sum(self.busy(stage) for stage in range(self.stages))
        return 1 - busy / (self.stages * self.makespan)


@dataclass(frozen=True)
class TimedPipeline:
    """A schedule whose passes and messages take known times, in any unit.

    forward, backward: time of one micro-batch's pass through each virtual stage.
    hop: time of a message.
    """

    pipeline: Pipeline
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    hop: float = 0.0

    @cached_property
    def played(self) -> Played:
        def seconds(action: Action) -> float:
            times = self.forward if action.kind == FORWARD else self.backward
            return times[action.virtual_stage]

        return play(self.pipeline, seconds, hop=self.hop)


@dataclass
class _Channel:
    """Messages of one channel in order, and when they were sent and their receives posted."""

    sent: list[tuple[Action, float]] = field(default_factory=list)
    posted: list[tuple[Action, float]] = field(default_factory=list)


def play(
    pipeline: Pipeline,
    seconds: Callable[[Action], float] = lambda _: 1.0,
    *,
    hop: float = 0.0,
    actions: Sequence[Sequence[Action]] | None = None,
) -> Played:
    """Play all stages of a pipeline.

    A computation waits for its message. A send does not wait, unless `SENDS_IN_FLIGHT` sends of
    its channel have no receive yet.

    Args:
        seconds: duration of a computation.
        hop: duration of a message, from the time when both ends have posted it.
        actions: those of each stage; None for a training step.

    Raises:
        ScheduleError: the stages wait for each other, or a channel's ends disagree on its messages.
    """
    stages = range(pipeline.stages)
    lists = [pipeline.actions(stage) for stage in stages] if actions is None else actions
    player = _Player(pipeline, seconds, hop)
    at, going = [0] * len(lists), True
    while going:
        going = False
        for stage, own in enumerate(lists):
            while at[stage] < len(own) and player.step(stage, own[at[stage]]):
                at[stage] += 1
                going = True
    stuck = [f"stage {s} at {own[at[s]]}" for s, own in enumerate(lists) if at[s] < len(own)]
    if stuck:
        raise ScheduleError(f"{pipeline}: waits for ever: {'; '.join(stuck)}")
    player.check_ends()
    return Played(pipeline.stages, tuple(player.spans))


class _Player:
    def __init__(self, pipeline: Pipeline, seconds: Callable[[Action], float], hop: float) -> None:
        self.pipeline, self.seconds, self.hop = pipeline, seconds, hop
        self.spans: list[Span] = []
        self._now = [0.0] * pipeline.stages
        self._channels: dict[Channel, _Channel] = defaultdict(_Channel)

    def step(self, stage: int, action: Action) -> bool:
        """Play one action of a stage. Return False if it has to wait for another stage."""
        if action.kind in (SEND, RECEIVE):
            return self._message(stage, action)
        arrived = self._arrival(action)
        if arrived is None:
            return False
        begin = max(self._now[stage], arrived)
        end = begin + self.seconds(action)
        self.spans.append(Span(stage, action, begin, end))
        self._now[stage] = end
        return True

    def check_ends(self) -> None:
        """Check that both ends of each channel have the same messages in the same order."""
        for channel, ends in self._channels.items():
            sent, posted = ([a.message for a, _ in end] for end in (ends.sent, ends.posted))
            if sent != posted:
                raise ScheduleError(f"{self.pipeline}: messages of {channel} are out of order")

    def _message(self, stage: int, action: Action) -> bool:
        channel = self._channels[self.pipeline.channel(action)]
        if action.kind == RECEIVE:
            channel.posted.append((action, self._now[stage]))
            return True
        oldest = len(channel.sent) - SENDS_IN_FLIGHT
        if oldest >= len(channel.posted):
            return False
        if oldest >= 0:
            self._now[stage] = max(self._now[stage], channel.posted[oldest][1])
        channel.sent.append((action, self._now[stage]))
        return True

    def _arrival(self, action: Action) -> float | None:
        """Return when the input of a computation has arrived. None if it is not on its way."""
        for receive in self.pipeline.received(action):
            channel = self._channels[self.pipeline.channel(receive)]
            place = next(
                (n for n, (posted, _) in enumerate(channel.posted) if posted == receive), None
            )
            assert place is not None, f"{action} without its receive"
            if place >= len(channel.sent):
                return None
            sent, when = channel.sent[place]
            if sent.message != receive.message:
                raise ScheduleError(f"{self.pipeline}: {receive} would get {sent.message}")
            return max(when, channel.posted[place][1]) + self.hop
        return 0.0
