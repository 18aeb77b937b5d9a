"""The stages of a pipeline, and the messages between them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain_cli.launch import progress_record
from mtrain_cli.launch.environment import ParallelDims
from mtrain_cli.parallel import recording
from mtrain_cli.parallel.mesh import connect_all
from mtrain_cli.parallel.pipeline_schedule import (
    ACTIVATIONS,
    FORWARD,
    RECEIVE,
    SEND,
    SENDS_IN_FLIGHT,
    Action,
    Channel,
    Pipeline,
)
from mtrain_cli.parallel.recording import NOTHING, WAIT, MessageTag, Recorder
from mtrain_cli.parallel.schedule import STAGE
from mtrain_cli.parallel.transport import explain_peer_loss


@dataclass(frozen=True)
class PipelineGroup:
    """The workers that pass a micro-batch on, from the view of one worker.

    channels: communicators. Each payload has its own in each direction, so that no message queues
        behind another.
    ends: communicator of the first and the last stage if they share the weight of tied embeddings.
    """

    stage: int
    ranks: tuple[int, ...]
    channels: dict[Channel, dist.ProcessGroup] = field(default_factory=dict, repr=False)
    ends: dist.ProcessGroup | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        return len(self.ranks)

    @torch.no_grad()
    def sum_over_ends(self, shared: Tensor) -> None:
        """Replace a tensor of the first and the last stage with its sum over both stages."""
        if self.ends is None:
            return
        other = self.ranks[self.size - 1 - self.stage]
        where = f"pipeline, stage {self.stage}, tied embedding"
        what = f"gradients from rank {other}"
        with explain_peer_loss(where, f"waits for {what}", f"{what} did not arrive", other):
            dist.all_reduce(shared, group=self.ends)


def make_pipeline_group(
    rank: int,
    dims: ParallelDims,
    pipeline: Pipeline,
    device: torch.device,
    timeout: timedelta | None = None,
    *,
    tied: bool = False,
) -> PipelineGroup:
    """Make the communicators of all pipelines, on all ranks. Return this rank's group."""
    channels: dict[Channel, dist.ProcessGroup] = {}
    ends = None
    for ranks in dims.groups("pp"):
        for channel in pipeline.channels():
            _, sender, receiver = channel
            pair = [ranks[sender], ranks[receiver]]
            made = dist.new_group(sorted(pair), timeout=timeout)
            if rank in pair:
                channels[channel] = made
        if tied:
            pair = [ranks[0], ranks[-1]]
            made = dist.new_group(pair, timeout=timeout)
            ends = made if rank in pair else ends
    own = dims.group("pp", rank)
    connect_all([*channels.values(), *([ends] if ends is not None else [])], device)
    _send_first(channels, own, rank, device)
    return PipelineGroup(dims.coordinate("pp", rank), own, channels, ends)


def _send_first(
    channels: dict[Channel, dist.ProcessGroup],
    ranks: Sequence[int],
    rank: int,
    device: torch.device,
) -> None:
    """Send one number through each channel of a pipeline, channel by channel."""
    # With NCCL, both ends' hosts wait in a communicator's first message until the other end takes
    # part. Stages post their first messages in different orders, so they would wait for each other.
    number = torch.zeros(1, device=device)
    for (_, sender, receiver), group in channels.items():
        sends = ranks[sender] == rank
        operation, peer = (dist.isend, ranks[receiver]) if sends else (dist.irecv, ranks[sender])
        for work in dist.batch_isend_irecv([dist.P2POp(operation, number, peer, group)]):
            work.wait()


class StagePasses(Protocol):
    """The computations of one stage, which `PipelineExecutor` calls."""

    def received_like(self, micro_batch: int) -> Tensor: ...

    def forward(self, virtual_stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
        """Return the hidden states after a virtual stage; the last one returns anything."""

    def backward(
        self, virtual_stage: int, micro_batch: int, gradient: Tensor | None
    ) -> Tensor | None:
        """Return the gradient of what `forward` received; None in the first virtual stage."""


_Message = tuple[Action, Tensor, list[dist.Work]]


class PipelineExecutor:
    """Runs the actions of one stage.

    Streams: a message starts behind the work already queued on the current (compute) stream, and
    NCCL runs it on its own stream. Before a computation, the compute stream waits for its message;
    the host does not block. With gloo the host itself waits.
    """

    def __init__(
        self, group: PipelineGroup, pipeline: Pipeline, recorder: Recorder | None = None
    ) -> None:
        self._group, self._pipeline, self._recorder = group, pipeline, recorder
        # Results to send, messages on their way by `Action.message`, and sends by channel.
        self._results: dict[Action, Tensor] = {}
        self._arriving: dict[tuple[str, int, int], _Message] = {}
        self._leaving: dict[Channel, deque[_Message]] = defaultdict(deque)

    def run(self, actions: Sequence[Action], passes: StagePasses) -> None:
        try:
            for action in actions:
                if action.kind == RECEIVE:
                    tensor = passes.received_like(action.micro_batch)
                    works = self._post(action, dist.irecv, tensor)
                    self._arriving[action.message] = action, tensor, works
                elif action.kind == SEND:
                    self._start_send(action)
                else:
                    self._compute(action, passes)
            for channel in self._leaving:
                self._wait_for_sends(channel, 0)
        finally:
            for waiting in (self._results, self._arriving, self._leaving):
                waiting.clear()

    def _compute(self, action: Action, passes: StagePasses) -> None:
        forward, pipeline = action.kind == FORWARD, self._pipeline
        (receive,) = pipeline.received(action) or (None,)
        (send,) = pipeline.sent(action) or (None,)
        arrived = self._finish(*self._arriving.pop(receive.message)) if receive else None
        compute = passes.forward if forward else passes.backward
        place = f"{self._where(action)}, {action.kind}"
        with progress_record.inside(place), self._recorded(recording.STAGE, action):
            result = compute(action.virtual_stage, action.micro_batch, arrived)
        if send is not None:
            assert result is not None, action
            self._results[send] = result

    def _start_send(self, action: Action) -> None:
        channel = self._pipeline.channel(action)
        self._wait_for_sends(channel, SENDS_IN_FLIGHT - 1)
        tensor = self._results.pop(action).detach().contiguous()
        works = self._post(action, dist.isend, tensor)
        self._leaving[channel].append((action, tensor, works))

    def _post(
        self, action: Action, operation: Callable[..., Any], tensor: Tensor
    ) -> list[dist.Work]:
        peer, way = self._peer(action), "to" if action.kind == SEND else "from"
        group = self._group.channels[self._pipeline.channel(action)]
        with self._peer_errors(action, f"{action.kind}s {action.payload} {way} rank {peer}", None):
            # A batch of one uses the channel's own communicator. NCCL would make another one for a
            # single message.
            return dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, group)])

    def _wait_for_sends(self, channel: Channel, most: int) -> None:
        """Wait until at most ``most`` sends of a channel are on their way."""
        while len(self._leaving[channel]) > most:
            self._finish(*self._leaving[channel].popleft())

    def _finish(self, action: Action, tensor: Tensor, works: list[dist.Work]) -> Tensor:
        """Wait for a message and return it."""
        peer, payload = self._peer(action), action.payload
        to, source, activity = -1, peer, f"waits for {payload} from rank {peer}"
        if action.kind == SEND:
            to, source, activity = peer, -1, f"waits for rank {peer} to receive {payload}"
        tag = MessageTag(STAGE, payload, to=to, source=source, size=tensor.nbytes)
        with self._peer_errors(action, activity, peer), self._recorded(WAIT, action, tag):
            for work in works:
                work.wait()
        return tensor

    def _recorded(
        self, kind: str, action: Action, message: MessageTag = NOTHING
    ) -> AbstractContextManager[None]:
        if self._recorder is None:
            return nullcontext()
        forward = action.kind == FORWARD or action.payload == ACTIVATIONS
        direction = recording.FORWARD if forward else recording.BACKWARD
        return self._recorder.of_pipeline(
            kind, action.micro_batch, direction, action.virtual_stage, message
        )

    def _peer(self, action: Action) -> int:
        return self._group.ranks[action.peer % self._pipeline.stages]

    def _where(self, action: Action) -> str:
        stage = f"pipeline, stage {self._group.stage}"
        if self._pipeline.virtual_stages > 1:
            stage += f", virtual stage {action.virtual_stage}"
        return f"{stage}, micro-batch {action.micro_batch}"

    def _peer_errors(
        self, action: Action, activity: str, waits_for: int | None
    ) -> AbstractContextManager[None]:
        verb = "were not received by" if action.kind == SEND else "did not arrive from"
        failure = f"{action.payload} {verb} rank {self._peer(action)}"
        return explain_peer_loss(self._where(action), activity, failure, waits_for)
