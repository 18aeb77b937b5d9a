"""Process groups: who shares a sequence, and who shares parameters."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


@dataclass(frozen=True)
class ContextGroup:
    """The workers that share one sequence, as one of them sees it.

    kv and gradients are separate communicators, so that messages of the one never queue behind the other. None: a group of one.
    ranks: global ranks in context order.
    """

    rank: int
    ranks: tuple[int, ...]
    kv: dist.ProcessGroup | None = None
    gradients: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @staticmethod
    def alone() -> ContextGroup:
        return ContextGroup(0, (0,))


def make_context_group(rank: int, world: int, cp: int, device: torch.device, timeout: timedelta | None = None) -> ContextGroup:
    """Consecutive ranks form a context group: ``dp_rank = rank // cp``. Called by all ranks, since groups are made together.

    timeout: of each message, after which a peer counts as hung; None for torch's own, whatever that of the default group is.
    """
    mine: ContextGroup | None = None
    for first in range(0, world, cp):
        ranks = tuple(range(first, first + cp))
        # Every rank takes part in making every group, its own or not.
        kv, gradients = (dist.new_group(list(ranks), timeout=timeout) if cp > 1 else None for _ in range(2))
        if rank in ranks:
            mine = ContextGroup(rank - first, ranks, kv, gradients)
    assert mine is not None
    if mine.size > 1:
        for group in (mine.kv, mine.gradients):
            # The first message builds the connections; a collective makes that happen on all ranks at once.
            dist.all_reduce(torch.zeros(1, device=device), group=group)
    return mine


def make_parameter_mesh(world: int, device: str) -> DeviceMesh:
    """One flat axis over data and context ranks: parameters, gradients and optimizer states are sharded over all of them."""
    return init_device_mesh(device, (world,), mesh_dim_names=("shard",))
