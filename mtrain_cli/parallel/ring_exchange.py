"""Ring exchanges: shards of KV, or of queries, circulate while each rank computes the one it holds.

One step of a pass does, in this order:

1. post: start the hops of the step (`CirculatingShards.begin_step`). Each sends the shard held here
   and receives the next one into a recycled buffer, while this step computes.
2. wait for the shard that this step computes.
3. compute attention of the local queries with that shard, and merge it into the running output. In
   backward, write this rank's part of the shard's gradient into a buffer.
4. backward only: add the gradient that arrived to this rank's part, and send it on
   (`CirculatingGradients.collect_and_send`).
5. release the buffers of shards that no later step needs (`CirculatingShards.end_step`).

The order of the steps is in `schedule.py`, the messages are in `transport.py`. A rank whose tiles
are empty skips step 3 and nothing else: its neighbours depend on its messages.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from mtrain_cli.attention.partials import accumulation_dtype, row_delta
from mtrain_cli.attention.shared_columns import SharedColumns
from mtrain_cli.launch import progress_record
from mtrain_cli.parallel.circulation import (
    CirculatingGradients,
    CirculatingShards,
    QueryMessage,
    RunningAttention,
)
from mtrain_cli.parallel.exchange import WHOLE_SEQUENCE, Exchange, Shards, ShardTiles
from mtrain_cli.parallel.layout import Layout
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.parallel.recording import ARRANGE, ATTENTION, BACKWARD, COLUMNS, FORWARD, MERGE
from mtrain_cli.parallel.schedule import CONTEXT, KV, QUERIES, Schedule, ScheduleStep
from mtrain_cli.parallel.transport import Transport, explain_peer_loss


class RingExchange(Exchange):
    """An exchange in which shards circulate in one ring, or in rings inside and across nodes.

    shared_columns: gather the KV of an index's single columns once, before the steps, which then
        compute block diagonals only.
    """

    def __init__(
        self,
        layout: Layout,
        group: ContextGroup,
        schedule: Schedule,
        part: tuple[int, int] = (0, 1),
        *,
        shared_columns: bool = True,
    ) -> None:
        super().__init__(layout, group, schedule, part)
        self.shared_columns = shared_columns and group.size > 1
        self.own: Shards = (group.rank,)

    @property
    def gathers_columns(self) -> bool:
        return self.shared_columns

    @property
    def foreign_queries(self) -> bool:
        return self.schedule.circulates == QUERIES

    @property
    def _saves_own_keys(self) -> bool:
        return self.group.size == 1

    def needed_tiles(
        self, *, indexed: bool, forward_only: bool = False
    ) -> set[tuple[Shards, Shards]]:
        named = self.forward_steps if forward_only else (*self.forward_steps, *self.backward_steps)
        steps = {self._tile(step) for step in named if step.keys}
        # Local queries attend to shared columns anywhere in the sequence.
        return steps | {(self.own, WHOLE_SEQUENCE)} if indexed and self.shared_columns else steps

    def _tile(self, step: ScheduleStep) -> tuple[Shards, Shards]:
        return step.queries, step.keys

    def forward(self, q, k, v, shard_tiles, kernel, scale, label=""):
        running = RunningAttention(q)
        with self._transport(label, FORWARD) as transport:
            with transport.span(ARRANGE):
                packed = torch.stack([k, v])
            columns = _Columns.make(self, shard_tiles, transport.pass_name)
            if columns is not None:
                with transport.span(ARRANGE):
                    columns.start_gather(packed, transport)
            # Backward starts where forward ends, so its first shard stays on this rank.
            (last,) = self.schedule.keeps[self.group.rank]
            own = {self.group.rank: packed}
            shards = CirculatingShards(
                self.buffers, transport, self.forward_steps, own, KV, keep=last
            )
            for at, step in enumerate(self.forward_steps):
                transport.begin_step(at)
                keys = shards.begin_step(at)
                tiles = shard_tiles.for_pair(
                    *self._tile(step), self._part(step), columns=columns is None
                )
                if not tiles.empty:
                    with transport.span(ATTENTION):
                        part = kernel.forward(q, keys[0], keys[1], tiles, scale)
                    with transport.span(MERGE):
                        running.add(*part)
                    del part  # free it before the next kernel allocates its outputs
                # The first step's kernel overlaps with the gather of the columns.
                if at == 0 and columns is not None:
                    packed_columns = columns.wait(transport)
                    with transport.span(COLUMNS):
                        partial = kernel.forward_columns(
                            q, packed_columns, columns.shared, scale, running.partial()
                        )
                        running.replace_partial(*partial)
                        del partial
                shards.end_step(at)
            kept = shards.kept_shard()
            with transport.span(ARRANGE):
                out, lse = running.result()
        return out, lse, (q, kept, out, lse, *(() if columns is None else (columns.result(),)))

    def backward(self, dout, saved, shard_tiles, kernel, scale, label=""):
        q, kept, out, lse, *gathered_columns = saved
        high = accumulation_dtype(q.dtype)
        columns = _Columns.make(self, shard_tiles, f"{self.name}, {label}, backward")
        with self._transport(label, BACKWARD) as transport:
            with transport.span(ARRANGE):
                delta = None if kernel.needs_out and columns is None else row_delta(out, dout)
            if columns is None:
                dq = torch.zeros(q.shape, dtype=high, device=q.device)
            else:
                assert delta is not None
                with transport.span(COLUMNS):
                    dq, column_gradients = kernel.backward_columns(
                        dout, q, gathered_columns[0], lse, delta, columns.shared, scale
                    )
                columns.start_gradient_sum(column_gradients, transport)
            run = (
                self._backward_of_queries
                if self.schedule.circulates == QUERIES
                else self._backward_of_keys
            )
            rows = q, dout, out, lse, delta
            with_columns = columns is None
            gradient = run(
                transport, rows, kept, dq, shard_tiles, kernel, scale, with_columns=with_columns
            )
            if columns is not None:
                columns.wait(transport)
                with transport.span(COLUMNS):
                    columns.add_to(gradient)
            with transport.span(ARRANGE):
                dk, dv = gradient.to(kept.dtype, copy=True)
                dq = dq.to(q.dtype)
        self.buffers.release(gradient)
        return dq, dk, dv

    def _backward_of_keys(
        self, transport, rows, kept, dq, shard_tiles, kernel, scale, *, with_columns
    ):
        """Circulate KV and its gradient. Returns this rank's [dk, dv]; adds to dq in place.

        The gradient of a shard follows one step behind the shard itself.
        """
        q, dout, out, lse, delta = rows
        steps = self.backward_steps
        (start,) = self.schedule.keeps[self.group.rank]
        shards = CirculatingShards(self.buffers, transport, steps, {start: kept}, KV)
        gradients = CirculatingGradients(self.buffers, transport)
        for at, step in enumerate(steps):
            transport.begin_step(at)
            packed = shards.begin_step(at)
            tiles = shard_tiles.for_pair(*self._tile(step), self._part(step), columns=with_columns)
            gradient = gradients.new_part(step.keys[0], packed.shape, dq.dtype, packed.device)
            if tiles.empty:
                gradient.zero_()
            else:
                with transport.span(ATTENTION):
                    part_q, part_k, part_v = kernel.backward(
                        dout, q, packed[0], packed[1], out, lse, delta, tiles, scale
                    )
                with transport.span(MERGE):
                    dq += part_q
                    gradient[0].copy_(part_k)
                    gradient[1].copy_(part_v)
                # Free these before the next step's kernel allocates its own.
                del part_q, part_k, part_v
            gradients.collect_and_send(step)
            shards.end_step(at)
        return gradients.take_complete(self.group.rank)

    def _backward_of_queries(
        self, transport, rows, kept, dq, shard_tiles, kernel, scale, *, with_columns
    ):
        """Circulate queries and their gradient. Returns this rank's [dk, dv]; adds to dq in place.

        The gradient of a query shard follows one hop behind it; steps without queries close it.
        """
        steps = self.backward_steps
        with transport.span(ARRANGE):
            message = QueryMessage(rows, needs_out=kernel.needs_out)
        shards = CirculatingShards(
            self.buffers, transport, steps, {self.group.rank: message.packed}, QUERIES
        )
        gradients = CirculatingGradients(self.buffers, transport)
        gradient = self.buffers.take_like(kept, dq.dtype).zero_()
        for at, step in enumerate(steps):
            transport.begin_step(at)
            bundle = shards.begin_step(at)
            if step.queries:
                tiles = shard_tiles.for_pair(
                    *self._tile(step), self._part(step), columns=with_columns
                )
                part_of_dq = gradients.new_part(step.queries[0], dq.shape, dq.dtype, dq.device)
                if tiles.empty:
                    part_of_dq.zero_()
                else:
                    q, dout, out, lse, delta = message.unpack(bundle)
                    with transport.span(ATTENTION):
                        part_q, part_k, part_v = kernel.backward(
                            dout, q, kept[0], kept[1], out, lse, delta, tiles, scale
                        )
                    with transport.span(MERGE):
                        part_of_dq.copy_(part_q)
                        gradient[0] += part_k
                        gradient[1] += part_v
                    del part_q, part_k, part_v
            gradients.collect_and_send(step)
            shards.end_step(at)
        own_dq = gradients.take_complete(self.group.rank)
        dq += own_dq
        self.buffers.release(own_dq)
        return gradient


class _Columns:
    """The shared columns of one layer (`SharedColumns`), gathered from all ranks by an all-reduce.

    Each rank fills in the columns whose keys it owns and leaves zeros elsewhere. An all-reduce also
    sums the gradients of the columns in backward.

    label: for messages.
    """

    def __init__(self, shared: SharedColumns, group: ContextGroup, label: str) -> None:
        self.shared = shared
        self._group = group
        self._label = f"{label}, shared columns"
        self._tensor: torch.Tensor | None = None
        self._work: dist.Work | None = None

    @staticmethod
    def make(exchange: RingExchange, shard_tiles: ShardTiles, label: str) -> _Columns | None:
        """Return None if the steps compute the columns themselves, or if there are none."""
        if not exchange.shared_columns or shard_tiles.index is None:
            return None
        whole, own = (
            shard_tiles.for_pair(exchange.own, keys, exchange.part)
            for keys in (WHOLE_SEQUENCE, exchange.own)
        )
        shared = SharedColumns.make(whole, own)
        return None if shared is None else _Columns(shared, exchange.group, label)

    def start_gather(self, packed: torch.Tensor, transport: Transport) -> None:
        """Start to gather the columns of all ranks. packed: this rank's [k, v]."""
        self._start(self.shared.pack(packed[0], packed[1]), transport)

    def start_gradient_sum(self, gradients: torch.Tensor, transport: Transport) -> None:
        """Start to sum the column gradients of all ranks."""
        self._start(gradients, transport)

    def _start(self, tensor: torch.Tensor, transport: Transport) -> None:
        self._tensor = tensor
        self._work = transport.start_all_reduce(tensor, CONTEXT, COLUMNS, self._group.whole)

    def wait(self, transport: Transport) -> torch.Tensor:
        """Wait for the all-reduce and return its result."""
        assert self._tensor is not None
        if self._work is not None:
            peer_errors = explain_peer_loss(
                self._label,
                f"waits for {self._group.size} ranks",
                f"the all-reduce among {self._group.size} ranks did not complete",
                progress_record.SEVERAL,
            )
            with peer_errors:
                transport.wait_all_reduce(self._work)
            self._work = None
        return self._tensor

    def result(self) -> torch.Tensor:
        """Return the columns, or their gradients, once `wait` has been called."""
        assert self._tensor is not None
        assert self._work is None
        return self._tensor

    def add_to(self, gradient: torch.Tensor) -> None:
        """Add the summed column gradients to this rank's [2, batch, tokens, kv_heads, head_dim]."""
        self.shared.add_gradients(gradient[0], gradient[1], self.result())
