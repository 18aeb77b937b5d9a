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
from mtrain_cli.parallel.transport import Transport, naming


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
    def _keys_are_own(self) -> bool:
        return self.group.size == 1

    def named_tiles(
        self, *, indexed: bool, forward_only: bool = False
    ) -> set[tuple[Shards, Shards]]:
        named = self.forward_steps if forward_only else (*self.forward_steps, *self.backward_steps)
        steps = {self._tile(step) for step in named if step.keys}
        # Shared columns are seen by the queries at hand among all keys.
        return steps | {(self.own, WHOLE_SEQUENCE)} if indexed and self.shared_columns else steps

    def _tile(self, step: ScheduleStep) -> tuple[Shards, Shards]:
        return step.queries, step.keys

    def forward(self, q, k, v, work, kernel, scale, what=""):
        total = RunningAttention(q)
        with self._mail(what, FORWARD) as mail:
            with mail.span(ARRANGE):
                packed = torch.stack([k, v])
            columns = _Columns.make(self, work, mail.what)
            if columns is not None:
                with mail.span(ARRANGE):
                    columns.gather(packed, mail)
            (last,) = self.schedule.keeps[self.group.rank]
            travel = CirculatingShards(
                self.buffers, mail, self.forward_steps, {self.group.rank: packed}, KV, keep=last
            )
            for at, step in enumerate(self.forward_steps):
                mail.begin(at)
                keys = travel.begin(at)
                tiles = work.of(*self._tile(step), self._part(step), columns=columns is None)
                if not tiles.empty:
                    with mail.span(ATTENTION):
                        part = kernel.forward(q, keys[0], keys[1], tiles, scale)
                    with mail.span(MERGE):
                        total.add(*part)
                    del part
                if at == 0 and columns is not None:
                    packed_columns = columns.awaited(mail)
                    with mail.span(COLUMNS):
                        total.continued(
                            *kernel.forward_columns(
                                q, packed_columns, columns.shared, scale, total.partial()
                            )
                        )
                travel.end(at)
            kept = travel.kept()
            with mail.span(ARRANGE):
                out, lse = total.result()
        return out, lse, (q, kept, out, lse, *(() if columns is None else (columns.packed(),)))

    def backward(self, dout, saved, work, kernel, scale, what=""):
        q, kept, out, lse, *gathered = saved
        high = accumulation_dtype(q.dtype)
        columns = _Columns.make(self, work, f"{self.name}, {what}, backward")
        with self._mail(what, BACKWARD) as mail:
            with mail.span(ARRANGE):
                delta = None if kernel.needs_out and columns is None else row_delta(out, dout)
            if columns is None:
                dq = torch.zeros(q.shape, dtype=high, device=q.device)
            else:
                assert delta is not None
                with mail.span(COLUMNS):
                    dq, of_columns = kernel.backward_columns(
                        dout, q, gathered[0], lse, delta, columns.shared, scale
                    )
                columns.give_back(of_columns, mail)
            run = (
                self._backward_of_queries
                if self.schedule.circulates == QUERIES
                else self._backward_of_keys
            )
            gradient = run(
                mail,
                (q, dout, out, lse, delta),
                kept,
                dq,
                work,
                kernel,
                scale,
                with_columns=columns is None,
            )
            if columns is not None:
                columns.awaited(mail)
                with mail.span(COLUMNS):
                    columns.add_to(gradient)
            with mail.span(ARRANGE):
                dk, dv = gradient.to(kept.dtype, copy=True)
                dq = dq.to(q.dtype)
        self.buffers.give(gradient)
        return dq, dk, dv

    def _backward_of_keys(self, mail, rows, kept, dq, work, kernel, scale, *, with_columns):
        """-> gradient of this rank's keys and values; adds to dq."""
        q, dout, out, lse, delta = rows
        steps = self.backward_steps
        (start,) = self.schedule.keeps[self.group.rank]
        travel = CirculatingShards(self.buffers, mail, steps, {start: kept}, KV)
        sums = CirculatingGradients(self.buffers, mail)
        for at, step in enumerate(steps):
            mail.begin(at)
            packed = travel.begin(at)
            tiles = work.of(*self._tile(step), self._part(step), columns=with_columns)
            gradient = sums.fresh(step.keys[0], packed.shape, dq.dtype, packed.device)
            if tiles.empty:
                gradient.zero_()
            else:
                with mail.span(ATTENTION):
                    part_q, part_k, part_v = kernel.backward(
                        dout, q, packed[0], packed[1], out, lse, delta, tiles, scale
                    )
                with mail.span(MERGE):
                    dq += part_q
                    gradient[0].copy_(part_k)
                    gradient[1].copy_(part_v)
                del part_q, part_k, part_v  # or they would live on through the next step's kernel
            sums.exchange(step)
            travel.end(at)
        return sums.only(self.group.rank)

    def _backward_of_queries(self, mail, rows, kept, dq, work, kernel, scale, *, with_columns):
        """-> gradient of this rank's keys and values; adds to dq."""
        steps = self.backward_steps
        with mail.span(ARRANGE):
            message = QueryMessage(rows, needs_out=kernel.needs_out)
        travel = CirculatingShards(
            self.buffers, mail, steps, {self.group.rank: message.packed}, QUERIES
        )
        sums = CirculatingGradients(self.buffers, mail)
        gradient = self.buffers.like(kept, dq.dtype).zero_()
        for at, step in enumerate(steps):
            mail.begin(at)
            bundle = travel.begin(at)
            if step.queries:
                tiles = work.of(*self._tile(step), self._part(step), columns=with_columns)
                their = sums.fresh(step.queries[0], dq.shape, dq.dtype, dq.device)
                if tiles.empty:
                    their.zero_()
                else:
                    q, dout, out, lse, delta = message.unpack(bundle)
                    with mail.span(ATTENTION):
                        part_q, part_k, part_v = kernel.backward(
                            dout, q, kept[0], kept[1], out, lse, delta, tiles, scale
                        )
                    with mail.span(MERGE):
                        their.copy_(part_q)
                        gradient[0] += part_k
                        gradient[1] += part_v
                    del part_q, part_k, part_v
            sums.exchange(step)
            travel.end(at)
        mine = sums.only(self.group.rank)
        dq += mine
        self.buffers.give(mine)
        return gradient


class _Columns:
    """The shared columns of one layer on their way between the ranks (`SharedColumns`). what: for messages."""

    def __init__(self, shared: SharedColumns, group: ContextGroup, what: str) -> None:
        self.shared = shared
        self._group = group
        self._what = f"{what}, shared columns"
        self._tensor: torch.Tensor | None = None
        self._work: dist.Work | None = None

    @staticmethod
    def make(exchange: RingExchange, work: ShardTiles, what: str) -> _Columns | None:
        """None where steps compute the columns themselves, or there are none."""
        if not exchange.shared_columns or work.index is None:
            return None
        whole, own = (
            work.of(exchange.own, keys, exchange.part) for keys in (WHOLE_SEQUENCE, exchange.own)
        )
        shared = SharedColumns.make(whole, own)
        return None if shared is None else _Columns(shared, exchange.group, what)

    def gather(self, packed: torch.Tensor, mail: Transport) -> None:
        """Begins to bring the columns of all ranks together. packed: this rank's keys and values."""
        self._start(self.shared.pack(packed[0], packed[1]), mail)

    def give_back(self, gradients: torch.Tensor, mail: Transport) -> None:
        """Begins to add up the gradients of all ranks."""
        self._start(gradients, mail)

    def _start(self, tensor: torch.Tensor, mail: Transport) -> None:
        self._tensor, self._work = tensor, mail.add_up(tensor, CONTEXT, COLUMNS, self._group.whole)

    def awaited(self, mail: Transport) -> torch.Tensor:
        """What was begun, complete."""
        assert self._tensor is not None
        if self._work is not None:
            come = naming(
                self._what,
                f"waits for {self._group.size} ranks",
                "they did not come together",
                progress_record.SEVERAL,
            )
            with come:
                mail.wait_for(self._work)
            self._work = None
        return self._tensor

    def packed(self) -> torch.Tensor:
        """The columns of all ranks, or their gradients, as they were awaited."""
        assert self._tensor is not None
        assert self._work is None
        return self._tensor

    def add_to(self, gradient: torch.Tensor) -> None:
        """gradient [2, batch, tokens, kv_heads, head_dim] of this rank's keys and values."""
        self.shared.add_gradients(gradient[0], gradient[1], self.packed())
