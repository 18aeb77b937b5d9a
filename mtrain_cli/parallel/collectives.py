"""Collectives that move whole shards, under the old and the new names of PyTorch's functions.

PyTorch 2.13 renamed `all_gather_into_tensor` and `reduce_scatter_tensor`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_gather: Callable[..., Any] = (
    getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_scatter: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


def all_gather(own: Tensor, workers: int, group: dist.ProcessGroup | None = None) -> Tensor:
    """Gather contiguous ``own`` [...] from all ranks. Return [workers, ...] in rank order."""
    gathered = own.new_empty(workers, *own.shape)
    _gather(gathered.view(-1), own.view(-1), group=group)
    return gathered


def average(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    """Replace the floating-point tensors by their means over a group, in one message."""
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    flat = torch.cat([tensor.flatten() for tensor in floating])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
    for tensor, mean in zip(floating, flat.split([t.numel() for t in floating]), strict=True):
        tensor.copy_(mean.view_as(tensor))


class Together:
    """Messages that arrive together: all have arrived after `wait`."""

    def __init__(self, works: Iterable[dist.Work]) -> None:
        self._works = [*works]

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def start_all_to_all(
    arriving: Tensor,
    leaving: Tensor,
    receive: Sequence[int],
    send: Sequence[int],
    group: dist.ProcessGroup,
    *,
    blocks: bool = False,
) -> dist.Work | Together:
    """Start to exchange rows. ``arriving`` is complete after the returned work's ``wait()``.

    On a GPU this is `dist.all_to_all_single` without its checks, which take longer than the call of
    the group: experts send many messages. On a CPU each pair of ranks exchanges messages, and every
    rank receives first. gloo's all-to-all (gloo/alltoall.cc) sends first. Of two ranks, the later
    one then queues the notice that it can receive behind its data, so both directions of their
    connection take turns: between two ranks, an all-to-all took twice as long.

    receive, send: number of rows from and for each rank; empty if all are equal.
    blocks: whether the current stream of a GPU waits at once.
    """
    if leaving.is_cpu:
        rank, ranks = group.rank(), group.size()
        parts, own = (
            rows.split(list(counts) or len(rows) // ranks)
            for rows, counts in ((arriving, receive), (leaving, send))
        )
        parts[rank].copy_(own[rank])
        others = [(rank + k) % ranks for k in range(1, ranks)]
        receives = [group.recv([parts[peer]], peer, 0) for peer in others[::-1] if len(parts[peer])]
        sends = (group.send([own[peer]], peer, 0) for peer in others if len(own[peer]))
        return Together([*receives, *sends])
    options = dist.AllToAllOptions()
    options.asyncOp = not blocks
    start: Callable[..., dist.Work | None] = getattr(group, "all_to_all_single", None) or (
        group.alltoall_base
    )
    work = start(arriving, leaving, list(receive), list(send), options)
    return Together([]) if work is None else work


def share(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return a list of every rank's ``own``, in rank order.

    The values travel as JSON, so tuples arrive as lists. torch's own collectives for objects send
    pickles, which can run code on the receiver.
    """
    workers = dist.get_world_size(group)
    content = torch.frombuffer(bytearray(json.dumps(own).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(workers)]
    dist.all_gather(sizes, torch.tensor([content.numel()]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.nn.functional.pad(content, (0, longest - content.numel()))
    gathered = [torch.empty(longest, dtype=torch.uint8) for _ in range(workers)]
    dist.all_gather(gathered, padded, group=group)
    return [
        json.loads(row[: int(size)].numpy().tobytes())
        for row, size in zip(gathered, sizes, strict=True)
    ]


def start_all_gather(
    own: Tensor, workers: int, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, dist.Work]:
    """Start `all_gather`. The returned tensor is complete after the returned work's ``wait()``."""
    gathered = own.new_empty(workers, *own.shape)
    return gathered, _gather(
        gathered.view(-1), own.contiguous().view(-1), group=group, async_op=True
    )


def start_reduce_scatter(
    shards: Tensor, group: dist.ProcessGroup | None = None
) -> tuple[Tensor, dist.Work]:
    """Start to sum contiguous ``shards`` [workers, ...] over ranks."""
    own = torch.empty_like(shards[0])
    return own, _scatter(own.view(-1), shards.view(-1), group=group, async_op=True)
