"""The collectives that move whole shards, under the names that this PyTorch has for them (renamed in 2.13, absent before)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def all_gather(
    mine: torch.Tensor, workers: int, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """mine [...], contiguous -> [workers, ...] in rank order, on every rank."""
    everyone = mine.new_empty(workers, *mine.shape)
    _gather(everyone.view(-1), mine.view(-1), group=group)
    return everyone


def reduce_scatter(shards: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """shards [workers, ...], contiguous: the sum over ranks of shards[r] arrives at rank r."""
    mine = torch.empty_like(shards[0])
    _scatter(mine.view(-1), shards.view(-1), group=group)
    return mine


def share(mine: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """``mine`` of every rank, in rank order, on every rank: what JSON can hold, sent as JSON. Tuples arrive as lists.

    torch's own object collectives send pickles, which can run code where they arrive.
    """
    workers = dist.get_world_size(group)
    content = torch.frombuffer(bytearray(json.dumps(mine).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(workers)]
    dist.all_gather(sizes, torch.tensor([content.numel()]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.nn.functional.pad(content, (0, longest - content.numel()))
    everyone = [torch.empty(longest, dtype=torch.uint8) for _ in range(workers)]
    dist.all_gather(everyone, padded, group=group)
    return [
        json.loads(found[: int(size)].numpy().tobytes())
        for found, size in zip(everyone, sizes, strict=True)
    ]


def start_all_gather(
    mine: torch.Tensor, workers: int, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, dist.Work]:
    """As `all_gather`, complete once the work has been waited for."""
    everyone = mine.new_empty(workers, *mine.shape)
    return everyone, _gather(
        everyone.view(-1), mine.contiguous().view(-1), group=group, async_op=True
    )


def start_reduce_scatter(
    shards: torch.Tensor, group: dist.ProcessGroup | None = None
) -> tuple[torch.Tensor, dist.Work]:
    """As `reduce_scatter`, complete once the work has been waited for."""
    mine = torch.empty_like(shards[0])
    return mine, _scatter(mine.view(-1), shards.view(-1), group=group, async_op=True)
