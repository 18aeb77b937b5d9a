"""Collectives of CUDA tensors that travel through host memory and gloo.

NCCL refuses two ranks on one GPU. With these collectives, several ranks share a GPU, so a machine
with one GPU can run the CUDA code of every exchange. They are slow and block the host.

A communicator of NCCL runs its transfers in order, so a hop may send a buffer before the hop that
fills it has been waited for. Here every transfer first completes all earlier ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from mtrain_cli.parallel import collectives, layer_groups, transport


class Arrival:
    """A transfer in flight. `wait` copies what arrived to the GPU."""

    def __init__(self, work: Any, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._work = work
        self._copies = copies  # (on the GPU, on the host)

    def wait(self) -> None:
        if self._work is None:
            return
        self._work.wait()
        for there, here in self._copies:
            there.copy_(here)
        torch.cuda.synchronize()
        self._work = None


_in_flight: list[Arrival] = []


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    while _in_flight:
        _in_flight.pop(0).wait()
    return tensor.cpu()


def _start(work: Any, copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Arrival:
    _in_flight.append(Arrival(work, copies))
    return _in_flight[-1]


def install() -> None:
    """Replace the collectives that exchanges call. Needs a gloo process group."""
    hops = dist.batch_isend_irecv

    def batch_isend_irecv(ops: list[dist.P2POp]) -> list[Arrival]:
        host = [_to_host(op.tensor) for op in ops]
        works = hops(
            [
                dist.P2POp(op.op, tensor, op.peer, op.group)
                for op, tensor in zip(ops, host, strict=True)
            ]
        )
        return [
            _start(work, [(op.tensor, tensor)] if op.op is dist.irecv else [])
            for work, op, tensor in zip(works, ops, host, strict=True)
        ]

    def two_tensors(call: Callable[..., Any]) -> Callable[..., Any]:
        def staged(
            output: torch.Tensor,
            given: torch.Tensor,
            *splits: list[int],
            group: Any = None,
            async_op: bool = False,
        ) -> Arrival | None:
            arriving, leaving = torch.empty(output.shape, dtype=output.dtype), _to_host(given)
            arrival = _start(
                call(arriving, leaving, *splits, group=group, async_op=True), [(output, arriving)]
            )
            if not async_op:
                arrival.wait()
            return arrival if async_op else None

        return staged

    trade = collectives.start_all_to_all

    def all_to_all(
        output: torch.Tensor, given: torch.Tensor, *splits: Sequence[int], **_: bool
    ) -> Arrival:
        arriving, leaving = torch.empty(output.shape, dtype=output.dtype), _to_host(given)
        return _start(trade(arriving, leaving, *splits), [(output, arriving)])

    reduce = dist.all_reduce

    def all_reduce(
        tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, async_op: bool = False
    ) -> Arrival | None:
        host = _to_host(tensor)
        arrival = _start(reduce(host, op, group=group, async_op=True), [(tensor, host)])
        if not async_op:
            arrival.wait()
        return arrival if async_op else None

    dist.batch_isend_irecv = batch_isend_irecv
    transport.start_all_to_all = layer_groups.start_all_to_all = all_to_all
    dist.all_reduce = all_reduce
    collectives._gather = two_tensors(collectives._gather)
    collectives._scatter = two_tensors(collectives._scatter)
