"""Run the transfers of one pass of a schedule, and recycle the buffers of their messages.

Streams: every transfer starts behind the work already queued on the current (compute) stream. NCCL
then runs the transfer on its own stream. `Transport.wait` makes the compute stream wait for the
transfer; the host does not block. With gloo the host itself waits.

Deadlocks: the transfers of one communicator run in the order in which they are posted, so all ranks
post them in the order of the schedule, even in a step without pairs to compute. A hop posts its
send and its receive as one batch, so a ring in which all ranks send cannot deadlock.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from mtrain_cli.attention.partials import Pair
from mtrain_cli.launch import failures, progress_record
from mtrain_cli.parallel import nvtx_ranges
from mtrain_cli.parallel.collectives import (
    Together,
    start_all_gather,
    start_all_to_all,
    start_reduce_scatter,
)
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.recording import NOTHING, WAIT, MessageTag, Recorder
from mtrain_cli.parallel.schedule import SUM, Transfer


class ExchangeError(RuntimeError):
    """A transfer failed because a peer is gone or hangs."""

    peer_lost = True


@contextmanager
def explain_peer_loss(
    where: str, activity: str, failure: str, waits_for: int | None = None
) -> Iterator[None]:
    """Record this worker's activity. If the ``with`` block loses a peer, raise `ExchangeError`.

    where: the current step, such as ``ring, layer 3, forward, step 2 of 4``.
    activity: text for `progress_record`, such as ``waits for kv from rank 1``.
    failure: text for the error, such as ``kv from rank 1 did not arrive``.
    """
    progress_record.note(f"{where}: {activity}", waits_for)
    try:
        yield
    except ExchangeError:
        raise
    except RuntimeError as error:
        if not failures.is_peer_loss(error):
            raise
        raise ExchangeError(f"{where}: {failure} ({failures.first_sentence(error)})") from error
    progress_record.note(where)


class Buffers:
    """A pool of message tensors, by shape, dtype and device.

    A shard that a forward pass saves for backward never returns to the pool, because autograd may
    need the shard for longer.
    """

    def __init__(self) -> None:
        self._free = defaultdict[tuple[torch.Size, torch.dtype, torch.device], list[Tensor]](list)

    def take(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized tensor, from the pool if it holds one of this shape and dtype."""
        free = self._free[shape, dtype, device]
        return free.pop() if free else torch.empty(shape, dtype=dtype, device=device)

    def take_like(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return self.take(tensor.shape, dtype or tensor.dtype, tensor.device)

    def release(self, tensor: Tensor) -> None:
        """Return a tensor to the pool. The next user may overwrite the tensor.

        Call this only when all reads and writes of the tensor are queued on the current stream, or
        when the current stream has waited for them: the next user must run after them.
        """
        self._free[tensor.shape, tensor.dtype, tensor.device].append(tensor)


@dataclass
class Transport:
    """This rank's transfers in one pass of one layer."""

    group: ContextGroup
    exchange: str
    layer: str
    direction: str
    steps: int
    recorder: Recorder | None = None
    at: int = 0
    _works: dict[int, Sequence[dist.Work | Together]] = field(default_factory=dict)
    _transfers: dict[int, Transfer] = field(default_factory=dict)
    # Inputs of collectives, until the compute stream has waited. A Work drops its own reference
    # when any stream waits for it (`_posting`, `Recorder.watch`); without this one the allocator
    # could reuse the memory too early.
    _inputs: dict[int, Tensor] = field(default_factory=dict)
    _messages: dict[int, MessageTag] = field(default_factory=dict)

    def span(self, kind: str, message: MessageTag = NOTHING) -> AbstractContextManager[None]:
        if self.recorder is None or not self.recorder.recording:
            return nvtx_ranges.span(kind, self.direction, message.link, self.at)
        return self.recorder.span(kind, self.at, message)

    def begin_step(self, at: int) -> None:
        self.at = at
        progress_record.note(self._where)

    @property
    def pass_name(self) -> str:
        return f"{self.exchange}, {self.layer}, {self.direction}"

    def start_hop(self, transfer: Transfer, leaving: Tensor, arriving: Tensor) -> None:
        """Start to send one tensor and to receive another. Keep both until `wait`."""
        assert transfer.to is not None
        assert transfer.source is not None
        with self._posting(transfer, leaving.nbytes) as group:
            # The receive comes first: `start_all_to_all` says why.
            self._works[transfer.number] = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.irecv, arriving, self.group.ranks[transfer.source], group),
                    dist.P2POp(dist.isend, leaving, self.group.ranks[transfer.to], group),
                ]
            )

    def start_gather(self, transfer: Transfer, own: Tensor) -> Tensor:
        """Start an all-gather of a contiguous tensor. Return [peers, ...], valid after `wait`."""
        with self._posting(transfer, own.nbytes) as group:
            gathered, work = start_all_gather(own, len(transfer.peers), group)
            self._works[transfer.number], self._inputs[transfer.number] = [work], own
        return gathered

    def start_scatter(self, transfer: Transfer, shards: Tensor) -> Tensor:
        """Start a reduce-scatter of [peers, ...]. Return this rank's sum, valid after `wait`."""
        with self._posting(transfer, shards.nbytes) as group:
            own, work = start_reduce_scatter(shards, group)
            self._works[transfer.number], self._inputs[transfer.number] = [work], shards
        return own

    def start_rows(
        self,
        transfer: Transfer,
        leaving: Callable[[], Tensor],
        row_bytes: int,
        sent: Sequence[int],
        received: Sequence[int],
    ) -> Pair:
        """Start to send each peer its rows. Return what leaves, and what `wait` completes.

        leaving: makes the contiguous tensor to send, [rows, ...], by peer. It runs behind the
            transfer ``transfer.after``, whose tensors it may read.
        """
        with self._posting(transfer, row_bytes * sum(sent)) as group:
            assert group is not None
            rows = leaving()
            arrived = rows.new_empty(sum(received), *rows.shape[1:])
            work = start_all_to_all(arrived, rows, received, sent, group)
            self._works[transfer.number], self._inputs[transfer.number] = [work], rows
        return rows, arrived

    def all_to_all(self, transfer: Transfer, parts: Tensor) -> Tensor:
        """Send parts[i] to peer i. Return the received parts, [peers, ...], ready to use."""
        arrived = torch.empty_like(parts)
        with (
            self._posting(transfer, parts.nbytes) as group,
            self.span(WAIT, self._messages[transfer.number]),
            self._while_receiving(transfer.number),
        ):
            assert group is not None
            start_all_to_all(arrived, parts, (), (), group, blocks=True).wait()
        if self.recorder is not None:
            self.recorder.arrived(transfer.number)
        return arrived

    def start_all_reduce(self, transfer: Transfer, tensor: Tensor) -> None:
        """Start to sum a tensor in place over all ranks that hold the same heads.

        The schedule does not contain it: it has its own communicator, with at most one in flight.
        """
        with self._posting(transfer, tensor.nbytes) as group:
            work = dist.all_reduce(tensor, group=group, async_op=True)
            assert work is not None
            self._works[transfer.number] = [work]

    def wait(self, number: int) -> None:
        """Wait for a transfer. With gloo the host waits, with NCCL only the current stream."""
        works = self._works.pop(number, [])
        with self.span(WAIT, self._messages.get(number, NOTHING)) if works else nullcontext():
            for at, work in enumerate(works):
                # gloo returns one Work for the receive and one for the send, NCCL one for both.
                with self._while_sending(number) if at == 1 else self._while_receiving(number):
                    work.wait()
        if works and self.recorder is not None:
            self.recorder.arrived(number)
        self._inputs.pop(number, None)

    def end(self) -> None:
        assert not self._works, "every transfer has been waited for"
        progress_record.note(f"after {self.pass_name}")

    def _message(self, transfer: Transfer, posted: int) -> MessageTag:
        # A profile counts the tensor of an all-reduce once.
        moved = posted if transfer.kind == SUM else int(posted * transfer.share)
        ranks = self.group.ranks
        shard = leaving = -1
        if transfer.kind == "p2p":
            # Ranks that share heads hold one shard together.
            shard, leaving = (s[0] // self.group.heads for s in (transfer.receives, transfer.sends))
        to, source = (-1 if r is None else ranks[r] for r in (transfer.to, transfer.source))
        peers = tuple(ranks[peer] for peer in transfer.peers)
        kind = transfer.channel, transfer.payload
        return MessageTag(*kind, shard, leaving, to, source, moved, transfer.number, peers)

    @contextmanager
    def _posting(self, transfer: Transfer, posted: int) -> Iterator[dist.ProcessGroup | None]:
        """Yield the communicator on which to post a transfer, and record the transfer."""
        number = transfer.number
        self._transfers[number] = transfer
        failure = f"{transfer.payload} could not be posted"
        with (
            explain_peer_loss(self._where, f"posts {transfer.payload}", failure),
            self._after_earlier(transfer),
        ):
            message = self._messages[number] = self._message(transfer, posted)
            if self.recorder is not None:
                self.recorder.posted(self.at, message)
            if transfer.kind == SUM:
                yield self.group.same_heads.whole
            else:
                yield self.group.channel(transfer.channel, transfer.payload)
        if self.recorder is not None and number in self._works:
            self.recorder.watch(number, self._works[number])

    @contextmanager
    def _after_earlier(self, transfer: Transfer) -> Iterator[None]:
        """Order a transfer that the ``with`` block posts after `transfer.after`."""
        # On one NCCL communicator the order of posting is enough. Otherwise a side stream waits for
        # the earlier transfer, not the compute stream. gloo has no streams, so the host waits.
        works = [] if transfer.after is None else self._works.get(transfer.after, [])
        if transfer.after is None or not works:
            yield
        elif not torch.cuda.is_available() or not torch.cuda.is_initialized():
            self.wait(transfer.after)
            yield
        elif self._transfers[transfer.after].channel == transfer.channel:
            yield
        else:
            # The block allocates tensors on the side stream (`CastRows.picked`). They need no
            # record_stream. The allocator reuses their memory on the side stream only, and that
            # stream first waits here for all work that the compute stream has queued. So it waits
            # for every use of memory that the host has freed.
            side = _side_stream(torch.cuda.current_device())
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
        activity = f"waits for rank {peer} to take {t.payload}"
        return explain_peer_loss(
            self._where, activity, f"rank {peer} did not take {t.payload}", peer
        )

    def _while_receiving(self, number: int) -> AbstractContextManager[None]:
        t = self._transfers[number]
        peer, what = progress_record.SEVERAL, f"{t.payload} among {len(t.peers)} ranks"
        if t.source is not None:
            peer = self.group.ranks[t.source]
            what = f"{t.payload} from rank {peer}"
        return explain_peer_loss(self._where, f"waits for {what}", f"{what} did not arrive", peer)


@cache
def _side_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
