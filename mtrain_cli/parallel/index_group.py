"""The collectives by which the workers of a context group estimate one index together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from mtrain_cli.parallel.collectives import all_gather
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.sparsity.pattern import Alone, IndexGroup


@dataclass(frozen=True)
class DistributedIndexGroup:
    """rank, size: place in the process group, and its workers."""

    rank: int
    size: int
    process_group: dist.ProcessGroup

    def sum(self, mine: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(mine, group=self.process_group)
        return mine

    def max(self, mine: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=self.process_group)
        return mine

    def gather(self, mine: torch.Tensor) -> torch.Tensor:
        return all_gather(mine.contiguous(), self.size, self.process_group)


def make_index_group(group: ContextGroup) -> IndexGroup:
    """The workers of a context group; its messages go where keys and values go, before these."""
    if group.size == 1:
        return Alone()
    assert group.kv is not None
    return DistributedIndexGroup(group.rank, group.size, group.kv)
