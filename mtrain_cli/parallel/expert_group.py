"""The workers that share the experts of each layer, and the rows that travel between them.

Each worker of an expert group holds an equal part of the experts. A token's row travels to the
workers of its experts and back (expert parallelism, arXiv:2006.16668, section 3.2). All workers of
a group start their messages in the same order, even if no row travels.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mtrain_cli.launch import progress_record
from mtrain_cli.launch.parallel_dims import ParallelDims
from mtrain_cli.parallel import nvtx_ranges, profiler_labels
from mtrain_cli.parallel.collectives import all_gather, start_all_to_all
from mtrain_cli.parallel.mesh import STAGE, connect_all, new_group
from mtrain_cli.parallel.recording import WAIT
from mtrain_cli.parallel.tensor_group import MessageObserver, other_ranks
from mtrain_cli.parallel.transport import explain_peer_loss

EXPERTS = "experts"  # dimension of the mesh along which workers hold different experts
SHARD_OF_EXPERTS = "shard_of_experts"  # the dimension along which they hold shards of the same ones
_LINK = "expert"


class RowMessage:
    def __init__(self, received: Tensor, sent: Tensor, work: Any, group: ExpertGroup) -> None:
        # Without a reference, the allocator could reuse the memory of rows that still leave.
        self._received, self._sent, self._work, self._group = received, [sent], work, group

    def wait(self) -> Tensor:
        """Return the rows, ordered by the worker that sent them. On a GPU, the stream waits."""
        label = profiler_labels.label(profiler_labels.MESSAGE)
        with self._group.peer_errors(), nvtx_ranges.span(WAIT, "", _LINK, -1), label:
            self._work.wait()
        self._sent.clear()
        return self._received


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
    ) -> RowMessage:
        """Start to exchange rows, contiguous ``[sum(send), D]`` in the order of the workers.

        send, receive: number of rows for and from each worker.
        into: contiguous tensor that receives the rows; None for a new one.
        """
        width = rows.shape[1]
        arriving = rows.new_empty(sum(receive), width) if into is None else into
        self.received[0] += (len(arriving) - receive[self.rank]) * width * rows.itemsize
        with self.peer_errors(), nvtx_ranges.span("post", "", _LINK, -1):
            work = start_all_to_all(arriving, rows, receive, send, self.process_group)
        return RowMessage(arriving, rows, work, self)

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
