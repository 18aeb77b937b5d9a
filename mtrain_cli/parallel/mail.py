"""Carries out the transfers of one pass of a schedule, and the buffers that they use again and again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from mtrain_cli.parallel.collectives import start_all_gather, start_reduce_scatter
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.recording import WAIT, Recorder
from mtrain_cli.parallel.schedule import Transfer


class ExchangeError(RuntimeError):
    """A message of an exchange did not come: a peer is gone or hangs. Names the exchange, the step and the peer."""

    peer_lost = True


class Buffers:
    """Tensors of messages, made once and handed out again: each is free when its content has been used and sent."""

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)

    def take(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Uninitialised."""
        free = self._free[shape, dtype, device]
        return free.pop() if free else torch.empty(shape, dtype=dtype, device=device)

    def like(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.take(tensor.shape, dtype or tensor.dtype, tensor.device)

    def free(self) -> list[torch.Tensor]:
        """All that are free now."""
        return [tensor for tensors in self._free.values() for tensor in tensors]

    def give(self, tensor: torch.Tensor) -> None:
        """Back, once everything that reads or writes it has been queued on the current stream or waited for by it."""
        self._free[tensor.shape, tensor.dtype, tensor.device].append(tensor)


@dataclass
class Mail:
    """The transfers of one pass of one layer on this rank, and the times of what it does meanwhile.

    exchange, layer, direction: for messages and records, such as ``ring``, ``layer 3``, ``forward``. at: the step, from 0; steps: how many.
    """

    group: ContextGroup
    exchange: str
    layer: str
    direction: str
    steps: int
    recorder: Recorder | None = None
    at: int = 0
    _works: dict[int, list[dist.Work]] = field(default_factory=dict)
    _transfers: dict[int, Transfer] = field(default_factory=dict)

    def span(self, kind: str, link: str = "") -> AbstractContextManager[None]:
        """What is done inside is one span of the current step, where times are recorded."""
        if self.recorder is None:
            return nullcontext()
        return self.recorder.span(kind, self.layer, self.direction, self.at, link)

    def hop(self, transfer: Transfer, leaving: torch.Tensor, arriving: torch.Tensor) -> None:
        """Begins to send one tensor to a peer and to receive another from one."""
        assert transfer.to is not None
        assert transfer.source is not None
        group = self.group.channel(transfer.channel, transfer.payload)
        with self._begun(transfer):
            self._works[transfer.number] = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, leaving, self.group.ranks[transfer.to], group),
                    dist.P2POp(dist.irecv, arriving, self.group.ranks[transfer.source], group),
                ]
            )

    def gather(self, transfer: Transfer, mine: torch.Tensor) -> torch.Tensor:
        """Begins to gather -> [peers, ...], complete after `wait`."""
        with self._begun(transfer):
            everyone, work = start_all_gather(mine, len(transfer.peers), self.group.channel(transfer.channel, transfer.payload))
            self._works[transfer.number] = [work]
        return everyone

    def scatter(self, transfer: Transfer, shards: torch.Tensor) -> torch.Tensor:
        """Begins to add up shards [peers, ...] over the peers -> this rank's, complete after `wait`."""
        with self._begun(transfer):
            mine, work = start_reduce_scatter(shards, self.group.channel(transfer.channel, transfer.payload))
            self._works[transfer.number] = [work]
        return mine

    def trade(self, transfer: Transfer, parts: torch.Tensor) -> torch.Tensor:
        """parts [peers, ...], one for each -> the one of every peer for this rank, complete at once."""
        arrived = torch.empty_like(parts)
        with self._begun(transfer), self.span(WAIT, transfer.channel):
            dist.all_to_all_single(arrived, parts, group=self.group.channel(transfer.channel, transfer.payload))
        return arrived

    def wait(self, number: int) -> None:
        """What is queued on the current stream from here on sees the content of the transfer; on a CPU it has come."""
        works = self._works.pop(number, ())
        if works:
            with self.span(WAIT, self._transfers[number].channel), self._named(number):
                for work in works:
                    work.wait()

    def finish(self) -> None:
        """Waits for what nothing has waited for."""
        for number in list(self._works):
            self.wait(number)

    @contextmanager
    def _begun(self, transfer: Transfer) -> Iterator[None]:
        """Begins it behind the transfer that it sends on. On a GPU the order of one communicator is enough; behind another one it waits on
        a stream of its own, so that the computation does not.
        """
        self._transfers[transfer.number] = transfer
        works = self._works.get(transfer.after, []) if transfer.after is not None else []
        with self._named(transfer.number):
            if not works:
                yield
            elif not torch.cuda.is_available() or not torch.cuda.is_initialized():
                assert transfer.after is not None
                self.wait(transfer.after)
                yield
            elif self._transfers[transfer.after].channel == transfer.channel:  # type: ignore[index]
                yield
            else:
                side = _side_stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    for work in works:
                        work.wait()
                    yield

    @contextmanager
    def _named(self, number: int) -> Iterator[None]:
        try:
            yield
        except ExchangeError:
            raise
        except RuntimeError as error:
            t = self._transfers[number]
            peers = f"from rank {self.group.ranks[t.source]}" if t.source is not None else f"among {len(t.peers)} ranks"
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            where = f"{self.exchange}, {self.layer}, {self.direction}, step {self.at + 1} of {self.steps}"
            raise ExchangeError(f"{where}: {t.payload} {peers} did not come ({reason})") from error


_SIDE: dict[int, torch.cuda.Stream] = {}


def _side_stream() -> torch.cuda.Stream:
    device = torch.cuda.current_device()
    if device not in _SIDE:
        _SIDE[device] = torch.cuda.Stream()
    return _SIDE[device]
