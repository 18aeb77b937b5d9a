"""The state of a ring pass: the shards and gradients that a rank holds, and the running output."""

from __future__ import annotations

from typing import Any

import torch

from mtrain_cli.attention.partials import accumulation_dtype, merge
from mtrain_cli.parallel.exchange import Shards
from mtrain_cli.parallel.schedule import QUERIES, ScheduleStep, Steps
from mtrain_cli.parallel.transport import Buffers, Transport


class RunningAttention:
    """Attention output and lse over the keys computed so far."""

    def __init__(self, q: torch.Tensor) -> None:
        self._q = q
        self._high = accumulation_dtype(q.dtype)
        self._out: torch.Tensor | None = None
        self._lse: torch.Tensor | None = None

    def add(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge attention over further, disjoint keys. The first out and lse become the buffers."""
        if self._out is None or self._lse is None:
            self._out, self._lse = out, lse
            return
        self._out = self._out.to(self._high)
        merge(self._out, self._lse, out, lse)

    def partial(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if self._out is None or self._lse is None else (self._out, self._lse)

    def replace_partial(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Set a result that already includes the partial one."""
        self._out, self._lse = out, lse

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out in the dtype of q, and lse. Without any keys: out 0, lse -inf."""
        q = self._q
        if self._out is None or self._lse is None:
            lse = torch.full(
                (q.shape[0], q.shape[2], q.shape[1]),
                float("-inf"),
                dtype=self._high,
                device=q.device,
            )
            return torch.zeros_like(q), lse
        return self._out.to(q.dtype), self._lse


class CirculatingShards:
    """The circulating shards that this rank holds in one pass, and when their buffers are free.

    A shard's buffer is released after the last step that computes or sends it, and only once its
    send is known to be complete: before that the hop still reads it.

    Args:
        held: the shards at the start, by number. The caller keeps ownership of these tensors.
        payload: ``kv`` or ``queries``.
        keep: a shard to hold to the end of the pass, for the next pass; its buffer is not released.
    """

    def __init__(
        self,
        buffers: Buffers,
        transport: Transport,
        steps: Steps,
        held: dict[int, torch.Tensor],
        payload: str,
        keep: int | None = None,
    ) -> None:
        self._buffers, self._transport = buffers, transport
        self._steps, self._payload = steps, payload
        self._held = held
        self._keep = keep
        self._caller_owned = set(held)
        self._sending: dict[int, int] = {}  # number of a transfer -> the shard that it sends
        self._last_use: dict[int, int] = {}
        for at, step in enumerate(steps):
            for shard in [*self._shards(step), *(s for t in step.post for s in t.sends)]:
                self._last_use[shard] = at

    def _shards(self, step: ScheduleStep) -> Shards:
        return step.queries if self._payload == QUERIES else step.keys

    def begin_step(self, at: int) -> torch.Tensor:
        """Post and await the transfers of a step. Returns its shard (an empty tensor if none)."""
        step = self._steps[at]
        for transfer in step.post:
            (leaving,), (arriving,) = transfer.sends, transfer.receives
            self._held[arriving] = self._buffers.take_like(self._held[leaving])
            self._sending[transfer.number] = leaving
            self._transport.start_hop(transfer, self._held[leaving], self._held[arriving])
        for number in step.wait:
            self._transport.wait(number)
            # The wait covers both directions of the hop: the shard that left may be reused, too.
            self._sending.pop(number)
        for shard in self._shards(step):
            return self._held[shard]
        return torch.empty(0)

    def end_step(self, at: int) -> None:
        """Release the shards that no later step needs and that no hop still sends."""
        for shard in [
            s
            for s in self._held
            if self._last_use.get(s, -1) <= at and s not in self._sending.values()
        ]:
            if shard != self._keep:
                self._free(shard)

    def kept_shard(self) -> torch.Tensor:
        """Return the shard named by `keep`."""
        assert self._keep is not None
        return self._held[self._keep]

    def _free(self, shard: int) -> None:
        buffer = self._held.pop(shard)
        if shard not in self._caller_owned:
            self._buffers.release(buffer)


class CirculatingGradients:
    """Gradients of the circulating shards: each rank adds its part and passes the sum on."""

    def __init__(self, buffers: Buffers, transport: Transport) -> None:
        self._buffers, self._transport = buffers, transport
        self._parts: dict[int, torch.Tensor] = {}
        # number of a transfer -> the shard that arrives, its buffer, the buffer being sent
        self._in_flight: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}

    def new_part(
        self, shard: int, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return an uninitialised buffer for this rank's part of a shard's gradient. Fill it."""
        assert shard not in self._parts
        self._parts[shard] = self._buffers.take(shape, dtype, device)
        return self._parts[shard]

    def collect_and_send(self, step: ScheduleStep) -> None:
        """Add the gradients that the step collects to this rank's parts, then send its sums on."""
        for number in step.collect:
            self._transport.wait(number)
            shard, arrived, left = self._in_flight.pop(number)
            self._buffers.release(left)
            if shard in self._parts:
                self._parts[shard] += arrived
                self._buffers.release(arrived)
            else:
                self._parts[shard] = arrived
        for transfer in step.send:
            (leaving,), (arriving,) = transfer.sends, transfer.receives
            left = self._parts.pop(leaving)
            arrived = self._buffers.take_like(left)
            self._in_flight[transfer.number] = arriving, arrived, left
            self._transport.start_hop(transfer, left, arrived)

    def take_complete(self, shard: int) -> torch.Tensor:
        """Return the gradient of this rank's own shard, the only one left after the last step."""
        assert not self._in_flight
        (last,) = self._parts
        assert last == shard
        return self._parts.pop(shard)


class QueryMessage:
    """What another worker needs to compute gradients for these queries, as one flat byte tensor.

    It holds q, dout and lse, and out (if the kernel needs it) or delta.
    """

    def __init__(self, rows: tuple[torch.Tensor, ...], *, needs_out: bool) -> None:
        q, dout, out, lse, delta = rows
        self._needs_out = needs_out
        parts = [q, dout, lse, out if needs_out else delta]
        self._shapes = [(t.shape, t.dtype) for t in parts]
        flat = [t.contiguous().view(-1).view(torch.uint8) for t in parts]
        self._sizes = [len(t) for t in flat]
        # Align every part to 256 bytes, as torch's allocator does.
        self._room = [-(-n // 256) * 256 for n in self._sizes]
        self.packed = torch.empty(sum(self._room), dtype=torch.uint8, device=q.device)
        for place, part in zip(self.packed.split(self._room), flat, strict=True):
            place[: len(part)] = part

    def unpack(self, packed: torch.Tensor) -> tuple[Any, ...]:
        """Return q, dout, out, lse, delta; out or delta is None, whichever was not sent."""
        places = zip(packed.split(self._room), self._sizes, self._shapes, strict=True)
        q, dout, lse, last = (
            place[:n].view(dtype).view(shape) for place, n, (shape, dtype) in places
        )
        return (q, dout, last, lse, None) if self._needs_out else (q, dout, None, lse, last)
