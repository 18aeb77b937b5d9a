"""The collectives by which the workers of a context group estimate one index together."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from mtrain_cli.attention.index import BlockBitmap
from mtrain_cli.parallel.collectives import all_gather
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.sparsity.pattern import Alone, IndexGroup, Masked


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
    """The workers of a context group; its messages pass by those of keys and values."""
    if group.size == 1:
        return Alone()
    assert group.whole is not None
    return DistributedIndexGroup(group.rank, group.size, group.whole)


def gathered(index: BlockBitmap, masked: Masked) -> BlockBitmap:
    """The rows of all workers, from those that each estimated for its own queries."""
    if masked.group.size == 1:
        return index
    bits = masked.group.gather(index.bits.to(torch.uint8)).bool().movedim(0, 2).flatten(2, 3)  # [batch, heads, workers * held, blocks]
    order = torch.from_numpy(np.argsort(np.concatenate(masked.shards))).to(bits.device)
    return BlockBitmap.whole(index.block, bits.index_select(2, order))
