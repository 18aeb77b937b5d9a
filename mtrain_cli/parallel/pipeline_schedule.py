"""The schedule of a pipeline as data: what each stage does in an optimizer step, in order.

Symbols: p stages, v virtual stages on each, m micro-batches per step. Virtual stage s holds
consecutive layers. It is on stage s % p, so that each stage holds v separate parts of the model
(Narayanan et al., arXiv:2104.04473, section 2.2).

    schedule      order of one stage                       idle share            in flight
    gpipe         all forward passes, then all backward    (p-1) / (m+p-1)       m
    1f1b          p-1-r forward, then one of each in turn  (p-1) / (m+p-1)       min(m, p-r)
    interleaved   as 1f1b, over v virtual stages           (p-1) / (v m + p-1)   up to v p + p-1

The idle share holds for equal virtual stages and free messages. In flight are the micro-batches
whose activations stage r keeps at once, per virtual stage.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from mtrain_cli.config.schema import TopologyConfig

GPIPE, ONE_F_ONE_B, INTERLEAVED = "gpipe", "1f1b", "interleaved"
FORWARD, BACKWARD, SEND, RECEIVE = "forward", "backward", "send", "receive"
ACTIVATIONS, GRADIENTS = "activations", "gradients"

# (payload, sending stage, receiving stage). Each channel has its own communicator.
Channel = tuple[str, int, int]


@dataclass(frozen=True, order=True)
class Action:
    """A pass of a micro-batch through a virtual stage, or the SEND or RECEIVE of a message."""

    kind: str
    virtual_stage: int
    micro_batch: int
    payload: str = ""

    @property
    def peer(self) -> int:
        """The virtual stage at the other end of a message."""
        assert self.payload
        ahead = (self.kind == SEND) == (self.payload == ACTIVATIONS)
        return self.virtual_stage + (1 if ahead else -1)

    @property
    def message(self) -> tuple[str, int, int]:
        """What a message holds: payload, sending virtual stage and micro-batch."""
        sender = self.virtual_stage if self.kind == SEND else self.peer
        return self.payload, sender, self.micro_batch


@dataclass(frozen=True)
class Pipeline:
    """The pipeline of a run.

    virtual_stages: number of virtual stages on each stage (v), more than 1 only for INTERLEAVED.
    micro_batches: number of micro-batches of a context group in a step (m), a multiple of
        ``stages`` if a step of INTERLEAVED trains.
    """

    schedule: str
    stages: int
    virtual_stages: int
    micro_batches: int

    def __post_init__(self) -> None:
        assert self.schedule == INTERLEAVED or self.virtual_stages == 1, self

    @staticmethod
    def of(topology: TopologyConfig, micro_batches: int) -> Pipeline:
        schedule, virtual_stages = topology.schedule, topology.virtual_stages
        if schedule == "auto":
            schedule = INTERLEAVED if virtual_stages > 1 else ONE_F_ONE_B
        return Pipeline(schedule, topology.pipeline_parallel, virtual_stages, micro_batches)

    @property
    def bubble(self) -> float:
        """Share of the time in which stages idle if virtual stages are equal and messages free."""
        return (self.stages - 1) / (self.virtual_stages * self.micro_batches + self.stages - 1)

    @property
    def last(self) -> int:
        return self.stages * self.virtual_stages - 1

    def own(self, stage: int) -> range:
        return range(stage, self.last + 1, self.stages)

    def computations(self, stage: int) -> list[Action]:
        """Return the forward and backward passes of a stage, in order."""
        assert self.schedule != INTERLEAVED or self.micro_batches % self.stages == 0, self
        forward, backward = (list(self._passes(stage, kind)) for kind in (FORWARD, BACKWARD))
        behind = self.stages - 1 - stage
        first = {
            GPIPE: len(forward),
            ONE_F_ONE_B: behind,
            INTERLEAVED: (self.virtual_stages - 1) * self.stages + 2 * behind,
        }
        warm_up = min(first[self.schedule], len(forward))
        in_turn = zip(forward[warm_up:], backward, strict=False)
        steady = [action for pair in in_turn for action in pair]
        return [*forward[:warm_up], *steady, *backward[len(forward) - warm_up :]]

    def actions(self, stage: int) -> list[Action]:
        """Return all actions of a stage in a training step."""
        return self._with_messages(self.computations(stage))

    def forward_actions(self, stage: int) -> list[Action]:
        """Return all actions of a stage if the micro-batches only pass forward (evaluation)."""
        return self._with_messages(list(self._passes(stage, FORWARD)))

    def channel(self, message: Action) -> Channel:
        own, peer = message.virtual_stage % self.stages, message.peer % self.stages
        return (message.payload, *((own, peer) if message.kind == SEND else (peer, own)))

    def channels(self) -> list[Channel]:
        """Return all channels in a fixed order. Only virtual stages wrap around."""
        hops = self.stages if self.virtual_stages > 1 else self.stages - 1
        there = [(stage, (stage + 1) % self.stages) for stage in range(hops)]
        back = [(GRADIENTS, after, before) for before, after in there]
        return [*((ACTIVATIONS, *hop) for hop in there), *back]

    def _passes(self, stage: int, kind: str) -> Iterator[Action]:
        """Yield all passes of one kind, p micro-batches through one virtual stage after another."""
        own = self.own(stage)
        for first in range(0, self.micro_batches, self.stages):
            for virtual_stage in own if kind == FORWARD else reversed(own):
                for number in range(first, min(first + self.stages, self.micro_batches)):
                    yield Action(kind, virtual_stage, number)

    def _with_messages(self, computations: Sequence[Action]) -> list[Action]:
        """Add the messages: a receive is posted one computation ahead, a send at once."""
        received = [self.received(action) for action in computations]
        actions = received[0][:]
        for number, action in enumerate(computations):
            ahead = received[number + 1] if number + 1 < len(received) else []
            actions += [*ahead, action, *self.sent(action)]
        return actions

    def received(self, action: Action) -> list[Action]:
        """Return the receive that a computation waits for, if any."""
        first, payload = (0, ACTIVATIONS) if action.kind == FORWARD else (self.last, GRADIENTS)
        of_pass = action.virtual_stage, action.micro_batch, payload
        return [Action(RECEIVE, *of_pass)] if action.virtual_stage != first else []

    def sent(self, action: Action) -> list[Action]:
        """Return the send of a computation's result, if any."""
        end, payload = (self.last, ACTIVATIONS) if action.kind == FORWARD else (0, GRADIENTS)
        of_pass = action.virtual_stage, action.micro_batch, payload
        return [Action(SEND, *of_pass)] if action.virtual_stage != end else []


def in_flight(actions: Sequence[Action], weight: Callable[[int], float]) -> Counter[int]:
    """Return the micro-batches in flight per virtual stage, when their weight is largest."""
    now, most, largest = Counter[int](), Counter[int](), -1.0
    for action in actions:
        if action.kind == FORWARD:
            now[action.virtual_stage] += 1
            total = sum(count * weight(number) for number, count in now.items())
            if total > largest:
                most, largest = now.copy(), total
        elif action.kind == BACKWARD:
            now[action.virtual_stage] -= 1
    return most


# Sends of a channel whose tensors the executor keeps. The next send waits for the oldest one.
SENDS_IN_FLIGHT = 2
_Messages = list[tuple[Action, float]]


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

    hop: duration of a message, from the time when both ends have posted it.
    """
    stages = range(pipeline.stages)
    lists = [pipeline.actions(stage) for stage in stages] if actions is None else actions
    now, spans = [0.0] * pipeline.stages, list[Span]()
    # The messages of each channel in order, with the times when they were sent or posted.
    sent, posted = defaultdict[Channel, _Messages](list), defaultdict[Channel, _Messages](list)

    def arrival(action: Action) -> float | None:
        """Return when the input of a computation has arrived. None if it is not on its way."""
        for receive in pipeline.received(action):
            channel = pipeline.channel(receive)
            place = [message for message, _ in posted[channel]].index(receive)
            if place >= len(sent[channel]):
                return None
            send, when = sent[channel][place]
            if send.message != receive.message:
                raise ScheduleError(f"{pipeline}: {receive} would get {send.message}")
            return max(when, posted[channel][place][1]) + hop
        return 0.0

    def step(stage: int, action: Action) -> bool:
        """Play one action of a stage. Return False if it has to wait for another stage."""
        if action.kind in (FORWARD, BACKWARD):
            if (arrived := arrival(action)) is None:
                return False
            begin = max(now[stage], arrived)
            now[stage] = begin + seconds(action)
            spans.append(Span(stage, action, begin, now[stage]))
            return True
        channel = pipeline.channel(action)
        if action.kind == SEND:
            oldest = len(sent[channel]) - SENDS_IN_FLIGHT
            if oldest >= len(posted[channel]):
                return False
            if oldest >= 0:
                now[stage] = max(now[stage], posted[channel][oldest][1])
        (sent if action.kind == SEND else posted)[channel].append((action, now[stage]))
        return True

    at, going = [0] * len(lists), True
    while going:
        going = False
        for stage, own in enumerate(lists):
            while at[stage] < len(own) and step(stage, own[at[stage]]):
                at[stage] += 1
                going = True
    stuck = [f"stage {s} at {own[at[s]]}" for s, own in enumerate(lists) if at[s] < len(own)]
    if stuck:
        raise ScheduleError(f"{pipeline}: waits for ever: {'; '.join(stuck)}")
    for channel in sent.keys() | posted.keys():
        if [a.message for a, _ in sent[channel]] != [a.message for a, _ in posted[channel]]:
            raise ScheduleError(f"{pipeline}: messages of {channel} are out of order")
    return Played(pipeline.stages, tuple(spans))
