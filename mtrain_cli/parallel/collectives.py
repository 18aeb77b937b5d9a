"""The collectives that move whole shards, under the names that this PyTorch has for them (renamed in 2.13, absent before)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(mine: torch.Tensor, workers: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """mine [...], contiguous -> [workers, ...] in rank order, on every rank."""
    everyone = mine.new_empty(workers, *mine.shape)
    _gather(everyone.view(-1), mine.view(-1), group=group)
    return everyone


def reduce_scatter(shards: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """shards [workers, ...], contiguous: the sum over ranks of shards[r] arrives at rank r."""
    mine = torch.empty_like(shards[0])
    _scatter(mine.view(-1), shards.view(-1), group=group)
    return mine


def start_all_gather(mine: torch.Tensor, workers: int, group: dist.ProcessGroup | None = None) -> tuple[torch.Tensor, dist.Work]:
    """As `all_gather`, complete once the work has been waited for."""
    everyone = mine.new_empty(workers, *mine.shape)
    return everyone, _gather(everyone.view(-1), mine.contiguous().view(-1), group=group, async_op=True)


def start_reduce_scatter(shards: torch.Tensor, group: dist.ProcessGroup | None = None) -> tuple[torch.Tensor, dist.Work]:
    """As `reduce_scatter`, complete once the work has been waited for."""
    mine = torch.empty_like(shards[0])
    return mine, _scatter(mine.view(-1), shards.view(-1), group=group, async_op=True)
