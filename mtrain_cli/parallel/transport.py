"""Carries out the transfers of one pass of a schedule, and the buffers that they use again and again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from mtrain_cli.launch import failures, progress_record
from mtrain_cli.parallel import nvtx_ranges
from mtrain_cli.parallel.collectives import start_all_gather, start_reduce_scatter
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.recording import NOTHING, WAIT, MessageTag, Recorder
from mtrain_cli.parallel.schedule import Transfer
from mtrain_cli.parallel.wide_copy import contiguous

UNSCHEDULED = -2  # in place of the number of a transfer


class ExchangeError(RuntimeError):
    """A message of an exchange did not come: a peer is gone or hangs. Names the exchange, the step and the peer."""

    peer_lost = True


@contextmanager
def explain_peer_loss(
    where: str, activity: str, failure: str, waits_for: int | None = None
) -> Iterator[None]:
    """Says in this worker's record, and in the error where a peer is lost, what goes on inside.

    what: the place, such as ``ring, layer 3, forward, step 2 of 4``. doing: for the record; waits_for: as there. missing: for the error.

    Raises:
        ExchangeError: a peer is gone, or did not answer in time.
    """
    progress_record.note(f"{where}: {activity}", waits_for)
    try:
        yield
    except ExchangeError:
        raise
    except RuntimeError as error:
        if not failures.lost_peer(error):
            raise
        raise ExchangeError(f"{where}: {failure} ({failures.first_sentence(error)})") from error
    progress_record.note(where)


class Buffers:
    """Tensors of messages, handed out again and again: each is free when its content has been used and sent. The shard that waits for the
    backward pass does not come back: autograd holds it as long as it may be asked for.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[torch.Size, torch.dtype, torch.device], list[torch.Tensor]] = (
            defaultdict(list)
        )

    def take(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Uninitialised."""
        free = self._free[shape, dtype, device]
        return free.pop() if free else torch.empty(shape, dtype=dtype, device=device)

    def take_like(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.take(tensor.shape, dtype or tensor.dtype, tensor.device)

    def free_tensors(self) -> list[torch.Tensor]:
        """All that are free now."""
        return [tensor for tensors in self._free.values() for tensor in tensors]

    def release(self, tensor: torch.Tensor) -> None:
        """Back, once everything that reads or writes it has been queued on the current stream or waited for by it."""
        self._free[tensor.shape, tensor.dtype, tensor.device].append(tensor)


@dataclass
class Transport:
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
    # What a collective reads, until the stream that computes has waited for it: to wait on another stream lets go of it too early.
    _inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    _messages: dict[int, MessageTag] = field(default_factory=dict)

    def span(self, kind: str, message: MessageTag = NOTHING) -> AbstractContextManager[None]:
        """What is done inside is one span of the current step, where times are recorded."""
        if self.recorder is None or not self.recorder.recording:
            return nvtx_ranges.span(kind, self.direction, message.link, self.at)
        return self.recorder.span(kind, self.at, message)

    def begin_step(self, at: int) -> None:
        """What follows belongs to this step."""
        self.at = at
        progress_record.note(self._where)

    @property
    def pass_name(self) -> str:
        return f"{self.exchange}, {self.layer}, {self.direction}"

    def start_hop(self, transfer: Transfer, leaving: torch.Tensor, arriving: torch.Tensor) -> None:
        """Begins to send one tensor to a peer and to receive another from one."""
        assert transfer.to is not None
        assert transfer.source is not None
        group = self.group.channel(transfer.channel, transfer.payload)
        with self._posting(transfer):
            self._record_post(transfer, leaving.nbytes, arriving.nbytes)
            self._works[transfer.number] = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, leaving, self.group.ranks[transfer.to], group),
                    dist.P2POp(dist.irecv, arriving, self.group.ranks[transfer.source], group),
                ]
            )
        self._record_end(transfer)

    def start_gather(self, transfer: Transfer, mine: torch.Tensor) -> torch.Tensor:
        """Begins to gather -> [peers, ...], complete after `wait`."""
        with self._posting(transfer):
            mine = contiguous(mine)
            others = mine.nbytes * (len(transfer.peers) - 1)
            self._record_post(transfer, others, others)
            gathered, work = start_all_gather(
                mine, len(transfer.peers), self.group.channel(transfer.channel, transfer.payload)
            )
            self._works[transfer.number], self._inputs[transfer.number] = [work], mine
        self._record_end(transfer)
        return gathered

    def start_scatter(self, transfer: Transfer, shards: torch.Tensor) -> torch.Tensor:
        """Begins to add up shards [peers, ...] over the peers -> this rank's, complete after `wait`."""
        with self._posting(transfer):
            others = shards.nbytes // len(shards) * (len(transfer.peers) - 1)
            self._record_post(transfer, others, others)
            mine, work = start_reduce_scatter(
                shards, self.group.channel(transfer.channel, transfer.payload)
            )
            self._works[transfer.number], self._inputs[transfer.number] = [work], shards
        self._record_end(transfer)
        return mine

    def all_to_all(self, transfer: Transfer, parts: torch.Tensor) -> torch.Tensor:
        """parts [peers, ...], one for each -> the one of every peer for this rank, complete at once."""
        arrived = torch.empty_like(parts)
        others = parts.nbytes // len(parts) * (len(parts) - 1)
        with self._posting(transfer):
            message = self._record_post(transfer, others, others)
            with self.span(WAIT, message), self._while_receiving(transfer.number):
                dist.all_to_all_single(
                    arrived, parts, group=self.group.channel(transfer.channel, transfer.payload)
                )
        if self.recorder is not None:
            self.recorder.arrived(transfer.number)
        return arrived

    def start_all_reduce(
        self, tensor: torch.Tensor, link: str, payload: str, group: dist.ProcessGroup | None
    ) -> dist.Work:
        """Begins to add up a tensor over a group, beside the schedule and one at a time. Complete after `wait_all_reduce`."""
        message = MessageTag(
            link,
            payload,
            sent=tensor.nbytes,
            received=tensor.nbytes,
            number=UNSCHEDULED,
            peers=self.group.ranks,
        )
        self._messages[UNSCHEDULED] = message
        if self.recorder is not None:
            self.recorder.posted(self.at, message)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        assert work is not None
        if self.recorder is not None:
            self.recorder.watch(UNSCHEDULED, [work])
        return work

    def wait_all_reduce(self, work: dist.Work) -> None:
        """Waits for what `start_all_reduce` began."""
        with self.span(WAIT, self._messages[UNSCHEDULED]):
            work.wait()
        if self.recorder is not None:
            self.recorder.arrived(UNSCHEDULED)

    def wait(self, number: int) -> None:
        """What is queued on the current stream from here on sees the content of the transfer; on a CPU it has come."""
        works = self._works.pop(number, [])
        with self.span(WAIT, self._messages.get(number, NOTHING)) if works else nullcontext():
            for at, work in enumerate(works):
                # gloo has one for each direction, NCCL one for both.
                with (
                    self._while_sending(number)
                    if len(works) == 2 and at == 0
                    else self._while_receiving(number)
                ):
                    work.wait()
        if works and self.recorder is not None:
            self.recorder.arrived(number)
        self._inputs.pop(number, None)

    def finish(self) -> None:
        """Waits for what nothing has waited for."""
        for number in list(self._works):
            self.wait(number)

    def _record_post(self, transfer: Transfer, sent: int, received: int) -> MessageTag:
        """Notes that a transfer is posted now. sent, received: bytes."""
        ranks = self.group.ranks
        shard, leaving = (
            (transfer.receives[0], transfer.sends[0]) if transfer.kind == "p2p" else (-1, -1)
        )
        to, source = (
            -1 if rank is None else ranks[rank] for rank in (transfer.to, transfer.source)
        )
        peers = tuple(ranks[peer] for peer in transfer.peers)
        message = MessageTag(
            transfer.channel,
            transfer.payload,
            shard,
            leaving,
            to,
            source,
            sent,
            received,
            transfer.number,
            peers,
        )
        self._messages[transfer.number] = message
        if self.recorder is not None:
            self.recorder.posted(self.at, message)
        return message

    def _record_end(self, transfer: Transfer) -> None:
        if self.recorder is not None:
            self.recorder.watch(transfer.number, self._works[transfer.number])

    @contextmanager
    def _posting(self, transfer: Transfer) -> Iterator[None]:
        """Begins it behind the transfer that it sends on. On a GPU the order of one communicator is enough; behind another one it waits on
        a stream of its own, so that the computation does not.
        """
        self._transfers[transfer.number] = transfer
        works = self._works.get(transfer.after, []) if transfer.after is not None else []
        with explain_peer_loss(
            self._where, f"posts {transfer.payload}", f"{transfer.payload} could not be posted"
        ):
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

    @property
    def _where(self) -> str:
        return f"{self.pass_name}, step {self.at + 1} of {self.steps}"

    def _while_sending(self, number: int) -> AbstractContextManager[None]:
        t = self._transfers[number]
        assert t.to is not None
        peer = self.group.ranks[t.to]
        return explain_peer_loss(
            self._where,
            f"waits for rank {peer} to take {t.payload}",
            f"rank {peer} did not take {t.payload}",
            peer,
        )

    def _while_receiving(self, number: int) -> AbstractContextManager[None]:
        t = self._transfers[number]
        peer = progress_record.SEVERAL if t.source is None else self.group.ranks[t.source]
        message = f"{t.payload} " + (
            f"among {len(t.peers)} ranks" if t.source is None else f"from rank {peer}"
        )
        return explain_peer_loss(
            self._where, f"waits for {message}", f"{message} did not come", peer
        )


_SIDE_STREAMS: dict[int, torch.cuda.Stream] = {}


def _side_stream() -> torch.cuda.Stream:
    device = torch.cuda.current_device()
    if device not in _SIDE_STREAMS:
        _SIDE_STREAMS[device] = torch.cuda.Stream()
    return _SIDE_STREAMS[device]
