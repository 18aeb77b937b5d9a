"""Collectives that the workers of a context group use to estimate one index together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from mtrain_cli.attention.device_copy import to_device
from mtrain_cli.attention.index import BlockBitmap, GatedBitmap
from mtrain_cli.parallel.collectives import all_gather
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.recording import INDEX, WAIT, MessageTag, Recorder
from mtrain_cli.parallel.schedule import CONTEXT, UNSCHEDULED
from mtrain_cli.sparsity.pattern import IndexGroup, MaskedPositions, SingleWorkerGroup


@dataclass
class DistributedIndexGroup:
    rank: int
    size: int
    process_group: dist.ProcessGroup
    ranks: tuple[int, ...] = ()
    _recorder: Recorder | None = None
    _messages: int = 0

    def set_recorder(self, recorder: Recorder | None) -> None:
        """Record the messages of the next estimate; None records nothing."""
        self._recorder, self._messages = recorder, 0

    def sum(self, own: torch.Tensor) -> torch.Tensor:
        with self._recorded_wait(own.nbytes):
            dist.all_reduce(own, group=self.process_group)
        return own

    def max(self, own: torch.Tensor) -> torch.Tensor:
        with self._recorded_wait(own.nbytes):
            dist.all_reduce(own, dist.ReduceOp.MAX, group=self.process_group)
        return own

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        with self._recorded_wait(own.nbytes * (self.size - 1)):
            return all_gather(own.contiguous(), self.size, self.process_group)

    @contextmanager
    def _recorded_wait(self, nbytes: int) -> Iterator[None]:
        recorder = self._recorder
        if recorder is None:
            yield
            return
        self._messages += 1
        number = UNSCHEDULED - self._messages
        message = MessageTag(CONTEXT, INDEX, size=nbytes, number=number, peers=self.ranks)
        recorder.posted(-1, message)
        with recorder.span(WAIT, -1, message):
            yield
        recorder.arrived(number)


def make_index_group(group: ContextGroup) -> IndexGroup:
    if group.size == 1:
        return SingleWorkerGroup()
    assert group.whole is not None
    return DistributedIndexGroup(group.rank, group.size, group.whole, group.ranks)


def record_index_messages(group: IndexGroup, recorder: Recorder | None) -> None:
    """Record the messages of the next estimate. A single worker sends none."""
    if isinstance(group, DistributedIndexGroup):
        group.set_recorder(recorder)


def gather_rows(index: BlockBitmap, masked: MaskedPositions) -> BlockBitmap:
    """Gather the rows of a bitmap: each worker has estimated the rows of its own queries."""
    if masked.group.size == 1:
        return index
    own_bits = index.bits.to(torch.uint8)
    # [batch, heads, workers * blocks held, blocks]
    bits = masked.group.gather(own_bits).bool().movedim(0, 2).flatten(2, 3)
    order = to_device(np.argsort(np.concatenate(masked.shards)), bits.device)
    whole = BlockBitmap.whole(index.block, bits.index_select(2, order))
    if not isinstance(index, GatedBitmap):
        return whole
    gates = masked.group.gather(index.gates).movedim(0, 2).flatten(2, 3)
    gates = gates.unflatten(2, (-1, index.block)).index_select(2, order).flatten(2, 3)
    return GatedBitmap(whole.block, whole.blocks, whole.bits, whole.rows, gates, index.chunk)
