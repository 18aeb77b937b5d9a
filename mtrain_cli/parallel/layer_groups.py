"""The workers that share each layer's heads and MLP, or its experts, and their messages.

Tensor parallelism (arXiv:1909.08053, section 3) cuts q, k, v, gate and up by output features, o and
down by input features. Sequence parallelism (arXiv:2205.05198, section 4.2.2) cuts everything
between them by tokens: a worker gathers the tokens of its group before q, k and v, and before gate
and up, and keeps the sums of its own tokens after o and down. With expert parallelism
(arXiv:2006.16668, section 3.2) a token's row travels to the workers of its experts and back. All
workers of a group start their messages in the same order, even if no row travels.

Shape suffixes: R own rows, S rows of the whole group in rank order, W any width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property, partial
from itertools import islice
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional

from mtrain_cli.launch import progress_record
from mtrain_cli.launch.environment import ParallelDims
from mtrain_cli.parallel import nvtx_ranges, profiler_labels
from mtrain_cli.parallel.collectives import (
    all_gather,
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter,
)
from mtrain_cli.parallel.mesh import STAGE, connect_all, new_group
from mtrain_cli.parallel.recording import NOTHING, WAIT, MessageTag, Recorder
from mtrain_cli.parallel.schedule import HIDDEN, TENSOR, UNSCHEDULED
from mtrain_cli.parallel.transport import explain_peer_loss

_FAR = 1_000_000  # keeps the numbers of messages apart from those of a sparse index


@dataclass
class MessageObserver:
    """What else happens when a worker of a group starts a message, or waits for one."""

    recorder: Recorder | None = None
    waiting: Callable[[], AbstractContextManager[None]] = nullcontext
    _messages: int = 0

    def set_recorder(self, recorder: Recorder | None) -> None:
        """Record the messages that follow, which all workers of the group then number alike."""
        self.recorder, self._messages = recorder, 0

    def next_number(self) -> int:
        self._messages += 1
        return UNSCHEDULED - _FAR - self._messages


class Message:
    """A message to this worker. Without ``work``, it has arrived."""

    def __init__(
        self,
        received: Tensor,
        work: Any = None,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        sent: Tensor | None = None,
    ) -> None:
        # A Work drops its reference to what leaves when any stream waits for it, such as that of
        # `Recorder.watch`. Without this one the allocator could reuse the memory too early.
        self._received, self._work, self._waiting, self._sent = received, work, waiting, sent

    def wait(self) -> Tensor:
        """Return what arrived. On a GPU, the current stream waits."""
        if self._work is not None:
            with self._waiting():
                self._work.wait()
            self._work = self._sent = None
        return self._received


@dataclass(frozen=True)
class TensorGroup:
    """The workers that share each layer's matrices, from the view of one worker.

    Each worker holds an equal, consecutive part of the tokens of one rank of a context group.
    """

    rank: int
    size: int
    process_group: dist.ProcessGroup = field(repr=False)
    observer: MessageObserver = field(default_factory=MessageObserver, repr=False, compare=False)

    def own_rows(self, rows: int) -> int:
        return -(-rows // self.size)

    def own(self, tokens_BN: Tensor, fill: int) -> Tensor:
        """Return this worker's part of numbers per token, ``[1, own rows]``, padded by ``fill``."""
        flat = tokens_BN.flatten()
        own = self.own_rows(len(flat))
        padded = functional.pad(flat, (0, own * self.size - len(flat)), value=fill)
        return padded.view(self.size, 1, own)[self.rank]

    def padded(self, rows_SW: Tensor) -> Tensor:
        """Return rows of the group with zero rows added, so that all workers have equal parts."""
        missing = -len(rows_SW) % self.size
        return functional.pad(rows_SW, (0, 0, 0, missing)) if missing else rows_SW

    def start_gather(self, own_RW: Tensor) -> Message:
        """Start to gather the rows of all workers in rank order, ``[size * R, W]``."""
        own_RW = own_RW.contiguous()
        with self._posting(own_RW.nbytes) as posted:
            gathered, work = start_all_gather(own_RW, self.size, self.process_group)
            tag = posted(work)
        return Message(gathered.flatten(0, 1), work, partial(self.waits, tag), own_RW)

    def start_scatter(self, parts_SW: Tensor) -> Message:
        """Start to add up the tensors of all workers. Each gets its own rows, ``[R, W]``."""
        shards = parts_SW.contiguous().unflatten(0, (self.size, -1))
        with self._posting(shards[0].nbytes) as posted:
            own, work = start_reduce_scatter(shards, self.process_group)
            tag = posted(work)
        return Message(own, work, partial(self.waits, tag), shards)

    def sum(self, parts: Tensor) -> None:
        with self.peer_errors():
            dist.all_reduce(parts, group=self.process_group)

    def broadcast(self, tensor: Tensor) -> None:
        with self.peer_errors():
            dist.broadcast(tensor, self._ranks[0], group=self.process_group)

    @contextmanager
    def _posting(self, row_bytes: int) -> Iterator[Callable[[Any], MessageTag]]:
        """Start a message in the ``with`` block, which passes its work to the yielded function."""
        recorder, tag = self.observer.recorder, NOTHING
        if recorder is not None and recorder.recording:
            size = (self.size - 1) * row_bytes
            number, peers = self.observer.next_number(), self._ranks
            tag = MessageTag(TENSOR, HIDDEN, size=size, number=number, peers=peers)
            recorder.posted(-1, tag)

        def posted(work: Any) -> MessageTag:
            if recorder is not None and tag is not NOTHING:
                recorder.watch(tag.number, [work])
            return tag

        with self.peer_errors(), nvtx_ranges.span("post", "", TENSOR, -1):
            yield posted

    @contextmanager
    def waits(self, tag: MessageTag) -> Iterator[None]:
        recorder = self.observer.recorder if tag is not NOTHING else None
        if recorder is None:
            span = nvtx_ranges.span(WAIT, "", TENSOR, -1)
        else:
            span = recorder.span(WAIT, -1, tag)
        with self.peer_errors(), self.observer.waiting(), span:
            yield
        if recorder is not None:
            recorder.arrived(tag.number)

    @property
    def _ranks(self) -> tuple[int, ...]:
        return tuple(dist.get_process_group_ranks(self.process_group))

    def peer_errors(self) -> AbstractContextManager[None]:
        others = other_ranks(self._ranks, self.rank)
        waits, failure = f"waits for {others}", f"a message from {others} did not arrive"
        return explain_peer_loss("tensor parallelism", waits, failure, progress_record.SEVERAL)


def other_ranks(ranks: Sequence[int], own: int) -> str:
    """Name the ranks of a group except the one at place ``own``, such as ``ranks 1, 3``."""
    others = [str(rank) for place, rank in enumerate(ranks) if place != own]
    return f"rank{'s' * (len(others) > 1)} {', '.join(others)}"


def make_tensor_group(
    rank: int, dims: ParallelDims, device: torch.device, timeout: timedelta | None = None
) -> TensorGroup | None:
    """Make the communicators of all tensor groups, on all ranks. Return this rank's group."""
    if dims.tp == 1:
        return None
    process_group = new_group(rank, dims.groups("tp"), timeout)
    assert process_group is not None
    connect_all([process_group], device)
    return TensorGroup(dims.coordinate("tp", rank), dims.tp, process_group)


def gather_rows(own_RW: Tensor, group: TensorGroup) -> Tensor:
    """Return the rows of all workers, ``[size * R, W]``. Backward adds up the gradients."""
    return _Rows.apply(own_RW, group, True)


def scatter_rows(parts_SW: Tensor, group: TensorGroup) -> Tensor:
    """Add up all workers' tensors. Return own rows, ``[R, W]``. Backward gathers gradients."""
    return _Rows.apply(parts_SW, group, False)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: TensorGroup, gathers: bool) -> Tensor:
        ctx.group, ctx.gathers = group, gathers
        return (group.start_gather if gathers else group.start_scatter)(rows).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor, None, None]:
        start = ctx.group.start_scatter if ctx.gathers else ctx.group.start_gather
        return start(gradients).wait(), None, None


def staggered(tiles: Iterable[Iterator[None]]) -> None:
    """Run tiles that yield after each message that they have started, one message apart.

    In each round, every running tile goes on to its next message, the newest tile first, so that
    the messages of one tile are on their way while older tiles compute. All workers must have equal
    tiles: they start their messages in the same order.
    """
    waiting, running = iter(tiles), list[Iterator[None]]()
    while running := [*islice(waiting, 1), *running]:
        running = [tile for tile in running if next(tile, _DONE) is not _DONE]


_DONE = object()


def own_region(parameter: DTensor) -> tuple[slice, ...]:
    """Return the region of a whole parameter that this worker holds, one slice per dimension."""
    # Tensor parallelism, the last dimension of the mesh, cuts first. FSDP shards what remains, in
    # chunks of equal size, except that the last chunks may be shorter or empty.
    mesh, placements = parameter.device_mesh, parameter.placements
    region = [slice(0, size) for size in parameter.shape]
    for mesh_dim in reversed(range(mesh.ndim)):
        dim = getattr(placements[mesh_dim], "dim", None)
        if dim is None:
            continue  # replicated
        whole, place = region[dim], mesh.get_local_rank(mesh_dim)
        chunk = -(-(whole.stop - whole.start) // mesh.size(mesh_dim))
        begin = min(whole.start + place * chunk, whole.stop)
        region[dim] = slice(begin, min(begin + chunk, whole.stop))
    return tuple(region)


def own_part(parameter: Tensor) -> Tensor:
    """Return this worker's part of a gathered parameter. The parameter's gradient is cut alike.

    The gradient of a parameter that tensor parallelism does not cut is the sum over the worker's
    own tokens or heads (`sum_copied_gradients`).
    """
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def copies(parameter: Tensor) -> int:
    """Return the number of workers that hold the same shard of a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    mesh = parameter.device_mesh
    placements = enumerate(parameter.placements)
    return prod(mesh.size(dim) for dim, kind in placements if isinstance(kind, Replicate))


@torch.no_grad()
def sum_copied_gradients(parameters: Iterable[Tensor], tensor: TensorGroup) -> None:
    """Add up the gradients of the parameters that all workers of a tensor group hold whole.

    A worker has such a gradient, of a norm or of experts, only for its own tokens or heads.
    """
    gradients = [p.grad for p in parameters if p.grad is not None and copies(p) > 1]
    shards = [g.to_local() for g in gradients if isinstance(g, DTensor)]
    if not shards:
        return
    packed = torch.cat([shard.flatten() for shard in shards])
    tensor.sum(packed)
    for shard, summed in zip(shards, packed.split([s.numel() for s in shards]), strict=True):
        shard.copy_(summed.view_as(shard))


EXPERTS = "experts"  # dimension of the mesh along which workers hold different experts
SHARD_OF_EXPERTS = "shard_of_experts"  # the dimension along which they hold shards of the same ones
_LINK = "expert"


@dataclass(frozen=True)
class ExpertGroup:
    """The workers that share the experts, from the view of one worker.

    Worker r holds the r-th of ``size`` equal, consecutive parts of the experts.
    """

    rank: int
    size: int
    process_group: dist.ProcessGroup = field(repr=False)
    received: list[int] = field(default_factory=lambda: [0], repr=False, compare=False)
    observer: MessageObserver = field(default_factory=MessageObserver, repr=False, compare=False)

    def most(self, numbers: list[int], device: torch.device) -> list[int]:
        """Return the largest of the workers' numbers at each place of a list."""
        largest = torch.tensor(numbers, device=device)
        with self.peer_errors():
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=self.process_group)
        return list(map(int, largest.tolist()))

    def gather_counts(self, counts_E: Tensor) -> Tensor:
        """Return the numbers of rows that each worker has for each expert, ``[size, E]``."""
        with self.peer_errors(), profiler_labels.label(profiler_labels.MESSAGE):
            return all_gather(counts_E.contiguous(), self.size, self.process_group)

    def start(
        self, rows: Tensor, send: list[int], receive: list[int], into: Tensor | None = None
    ) -> Message:
        """Start to exchange rows, contiguous ``[sum(send), D]`` in the order of the workers.

        send, receive: number of rows for and from each worker.
        into: contiguous tensor that receives the rows; None for a new one.
        """
        width = rows.shape[1]
        arriving = rows.new_empty(sum(receive), width) if into is None else into
        self.received[0] += (len(arriving) - receive[self.rank]) * width * rows.itemsize
        with self.peer_errors(), nvtx_ranges.span("post", "", _LINK, -1):
            work = start_all_to_all(arriving, rows, receive, send, self.process_group)
        return Message(arriving, work, self._waiting, rows)

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        label = profiler_labels.label(profiler_labels.MESSAGE)
        with self.peer_errors(), nvtx_ranges.span(WAIT, "", _LINK, -1), label:
            yield

    def peer_errors(self) -> AbstractContextManager[None]:
        return explain_peer_loss("expert parallelism", *self._waits, progress_record.SEVERAL)

    @cached_property
    def _waits(self) -> tuple[str, str]:
        ranks = dist.get_process_group_ranks(self.process_group)
        rows = f"rows from {other_ranks(ranks, self.rank)}"
        return f"waits for {rows}", f"{rows} did not arrive"


def make_expert_group(
    rank: int,
    dims: ParallelDims,
    degree: int,
    device: torch.device,
    timeout: timedelta | None = None,
) -> ExpertGroup | None:
    """Make the communicators of all expert groups, on all ranks. Return this rank's group.

    A group has ``degree`` consecutive ranks of a stage.
    """
    if degree == 1:
        return None
    sets = (range(first, first + degree) for first in range(0, dims.workers, degree))
    own = new_group(rank, sets, timeout)
    assert own is not None
    connect_all([own], device)
    return ExpertGroup(rank % degree, degree, own)


def make_expert_mesh(dims: ParallelDims, degree: int, device: str) -> DeviceMesh:
    """Make the mesh over the ranks of a stage that holds the experts, ``[shards, degree]``."""
    sizes = (dims.pp, dims.dp * dims.cp * dims.tp // degree, degree)
    names = (STAGE, SHARD_OF_EXPERTS, EXPERTS)
    cut = dims.pp == 1
    mesh = init_device_mesh(device, sizes[cut:], mesh_dim_names=names[cut:])
    return mesh if cut else mesh[names[1:]]
