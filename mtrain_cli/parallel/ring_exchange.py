"""Shards of keys and values, or of queries, that circulate in rings."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mtrain_cli.attention.kernel import accumulation_dtype, row_delta
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
    """Shards circulate in rings; compute may be skipped where nothing is seen, communication never is.

    shared_columns: single columns of an index are gathered once, and leave block diagonals alone to the steps.
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
        # Shared columns are seen by the queries at hand among all keys.
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
            (last,) = self.schedule.keeps[self.group.rank]
            shards = CirculatingShards(
                self.buffers,
                transport,
                self.forward_steps,
                {self.group.rank: packed},
                KV,
                keep=last,
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
                    del part
                if at == 0 and columns is not None:
                    packed_columns = columns.wait(transport)
                    with transport.span(COLUMNS):
                        running.replace_partial(
                            *kernel.forward_columns(
                                q, packed_columns, columns.shared, scale, running.partial()
                            )
                        )
                shards.end_step(at)
            kept = shards.kept_shard()
            with transport.span(ARRANGE):
                out, lse = running.result()
        return out, lse, (q, kept, out, lse, *(() if columns is None else (columns.result(),)))

    def backward(self, dout, saved, shard_tiles, kernel, scale, label=""):
        q, kept, out, lse, *gathered = saved
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
                        dout, q, gathered[0], lse, delta, columns.shared, scale
                    )
                columns.start_gradient_sum(column_gradients, transport)
            run = (
                self._backward_of_queries
                if self.schedule.circulates == QUERIES
                else self._backward_of_keys
            )
            gradient = run(
                transport,
                (q, dout, out, lse, delta),
                kept,
                dq,
                shard_tiles,
                kernel,
                scale,
                with_columns=columns is None,
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
        """-> gradient of this rank's keys and values; adds to dq."""
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
                del part_q, part_k, part_v  # or they would live on through the next step's kernel
            gradients.collect_and_send(step)
            shards.end_step(at)
        return gradients.take_complete(self.group.rank)

    def _backward_of_queries(
        self, transport, rows, kept, dq, shard_tiles, kernel, scale, *, with_columns
    ):
        """-> gradient of this rank's keys and values; adds to dq."""
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
        mine = gradients.take_complete(self.group.rank)
        dq += mine
        self.buffers.release(mine)
        return gradient


class _Columns:
    """The shared columns of one layer on part_of_dq way between the ranks (`SharedColumns`). what: for messages."""

    def __init__(self, shared: SharedColumns, group: ContextGroup, label: str) -> None:
        self.shared = shared
        self._group = group
        self._label = f"{label}, shared columns"
        self._tensor: torch.Tensor | None = None
        self._work: dist.Work | None = None

    @staticmethod
    def make(exchange: RingExchange, shard_tiles: ShardTiles, label: str) -> _Columns | None:
        """None where steps compute the columns themselves, or there are none."""
        if not exchange.shared_columns or shard_tiles.index is None:
            return None
        whole, own = (
            shard_tiles.for_pair(exchange.own, keys, exchange.part)
            for keys in (WHOLE_SEQUENCE, exchange.own)
        )
        shared = SharedColumns.make(whole, own)
        return None if shared is None else _Columns(shared, exchange.group, label)

    def start_gather(self, packed: torch.Tensor, transport: Transport) -> None:
        """Begins to bring the columns of all ranks together. packed: this rank's keys and values."""
        self._start(self.shared.pack(packed[0], packed[1]), transport)

    def start_gradient_sum(self, gradients: torch.Tensor, transport: Transport) -> None:
        """Begins to add up the gradients of all ranks."""
        self._start(gradients, transport)

    def _start(self, tensor: torch.Tensor, transport: Transport) -> None:
        self._tensor, self._work = (
            tensor,
            transport.start_all_reduce(tensor, CONTEXT, COLUMNS, self._group.whole),
        )

    def wait(self, transport: Transport) -> torch.Tensor:
        """What was begun, complete."""
        assert self._tensor is not None
        if self._work is not None:
            peer_errors = explain_peer_loss(
                self._label,
                f"waits for {self._group.size} ranks",
                "they did not peer_errors together",
                progress_record.SEVERAL,
            )
            with peer_errors:
                transport.wait_all_reduce(self._work)
            self._work = None
        return self._tensor

    def result(self) -> torch.Tensor:
        """The columns of all ranks, or part_of_dq gradients, as they were wait."""
        assert self._tensor is not None
        assert self._work is None
        return self._tensor

    def add_to(self, gradient: torch.Tensor) -> None:
        """gradient [2, batch, tokens, kv_heads, head_dim] of this rank's keys and values."""
        self.shared.add_gradients(gradient[0], gradient[1], self.result())
