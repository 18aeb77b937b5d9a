"""Run the program of a pass on tensors.

`Executor.tensors` holds one tensor per live buffer. `Executor.run` calls one method per operation,
such as `_compute` for `Compute`, then drops the buffers that the operation frees. Pooled buffers
return to the pool. A method must not keep a tensor after its operation, because the tensor would
add to the next kernel's peak memory.

k and v travel as one message [2, batch, tokens, kv_heads, head_dim]. Partial outputs and gradients
are summed in float32 (float64 for float64 inputs). Gradients also travel in the dtype of the sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from mtrain_cli.attention.kernel import Kernel
from mtrain_cli.attention.partials import accumulation_dtype, row_delta
from mtrain_cli.attention.shared_columns import SharedColumns
from mtrain_cli.parallel import arrangements, buffers, head_parts
from mtrain_cli.parallel.buffers import Buffer, Kind
from mtrain_cli.parallel.head_parts import part_of_heads
from mtrain_cli.parallel.program import (
    AddColumns,
    Arrange,
    Begin,
    Compute,
    ComputeColumns,
    Merge,
    Operation,
    Post,
    Program,
    Reduce,
    Wait,
    Whole,
)
from mtrain_cli.parallel.query_message import QueryMessage
from mtrain_cli.parallel.recording import ARRANGE, ATTENTION, COLUMNS, MERGE
from mtrain_cli.parallel.running_attention import RunningAttention
from mtrain_cli.parallel.schedule import GROUP_CAST, GROUP_REDUCE, SUM
from mtrain_cli.parallel.transport import Transport
from mtrain_cli.parallel.wide_copy import contiguous

if TYPE_CHECKING:
    from mtrain_cli.parallel.cast_rows import CastRows
    from mtrain_cli.parallel.exchange import Exchange, ShardTiles


class Executor:
    """Runs the program of one pass of one layer's attention on this rank.

    exchange: provides the ranks and the pool of buffers.
    transport: runs the transfers and records times.
    columns: the single columns of the index that are gathered once per pass; None if no columns
        are gathered.
    tensors: the live buffers. At first these are the program's inputs.
    """

    def __init__(
        self,
        exchange: Exchange,
        program: Program,
        transport: Transport,
        tiles: ShardTiles,
        columns: SharedColumns | None,
        kernel: Kernel,
        scale: float,
        tensors: dict[Buffer, Any],
    ) -> None:
        self.exchange, self.program, self.transport = exchange, program, transport
        self.tiles, self.columns, self.kernel, self.scale = tiles, columns, kernel, scale
        self.tensors = tensors
        self.buffers = exchange.buffers
        self._high = accumulation_dtype(next(iter(tensors.values())).dtype)
        shapes = (tensor.shape for buffer, tensor in tensors.items() if buffer.kind is Kind.KV)
        self._keys_shape = next(shapes, None)
        self._message: QueryMessage | None = None
        self._widths: list[int] = []  # heads of the tensors that are traded together

    def run(self, operations: Iterable[Operation]) -> None:
        for op in operations:
            _RUN[type(op)](self, op)
            for name in op.frees:
                # A step without pairs has no results.
                tensor = self.tensors.pop(name, None)
                if tensor is not None and name in self.program.pooled:
                    self.buffers.release(tensor)
                del tensor

    def _begin(self, op: Begin) -> None:
        self.transport.begin_step(op.step)

    def _wait(self, op: Wait) -> None:
        self.transport.wait(op.number)

    def _post(self, op: Post) -> None:
        transfer, tensor = op.transfer, self.tensors[op.reads[0]]
        if transfer.kind in (GROUP_CAST, GROUP_REDUCE):
            self._post_rows(op)
            return
        if transfer.kind == SUM:
            self.transport.start_all_reduce(transfer, tensor)
            return
        if transfer.kind == "p2p":
            arriving = self.buffers.take_like(tensor)
            self.transport.start_hop(transfer, tensor, arriving)
        elif transfer.kind == "all_gather":
            own = contiguous(part_of_heads(tensor, op.piece, 3))
            self.tensors.update(dict.fromkeys(op.writes[1:], own))
            arriving = self.transport.start_gather(transfer, own)
        elif transfer.kind == "reduce_scatter":
            arriving = self.transport.start_scatter(transfer, tensor)
        else:
            arriving = self.transport.all_to_all(transfer, tensor)
        self.tensors[op.writes[0]] = arriving

    def _post_rows(self, op: Post) -> None:
        """Send rows of keys to the ranks that need them, or rows of gradients to their owners."""
        sources = self._read(op)
        sent, received = self.cast_rows.casts[op.cast].sent, self.cast_rows.casts[op.cast].received
        if op.transfer.kind == GROUP_REDUCE:
            sent, received = received, sent

        def leaving() -> torch.Tensor:
            if op.transfer.kind == GROUP_CAST:
                own = part_of_heads(sources[0], op.piece, 3)
                return self.cast_rows.picked(op.cast, own, sources[1:])
            if len(sources) > 1:
                # The earlier transfer returned what the last cast forwarded.
                self.cast_rows.add_returned(len(self.cast_rows.casts) - 1, *sources)
            return sources[0][self.cast_rows.arriving(op.cast)]

        row = sources[0][:, :, 0] if op.transfer.kind == GROUP_CAST else sources[0][0]
        sending, arriving = self.transport.start_rows(
            op.transfer, leaving, row.nbytes // op.piece[1], sent, received
        )
        self.tensors.update(zip(op.writes, (arriving, sending), strict=False))

    @property
    def cast_rows(self) -> CastRows:
        assert self.tiles.rows is not None, "a group cast needs a plan of its rows"
        return self.tiles.rows

    def _compute(self, op: Compute) -> None:
        tiles = self.tiles.for_pair(op.queries, op.keys, op.part, columns=op.with_columns)
        if tiles.empty and not isinstance(op.keys, Whole):
            return
        keys = self.tensors[op.reads[-1]]
        if len(op.writes) == 1:
            q = part_of_heads(self.tensors[buffers.Q], op.piece, 2)
            with self.transport.span(ATTENTION):
                part = self.kernel.forward(q, keys[0], keys[1], tiles, self.scale)
            self.tensors[op.writes[0]] = part
            return
        q, dout, out, lse, delta = self._query_rows(op)
        with self.transport.span(ATTENTION):
            dq, dk, dv = self.kernel.backward(
                dout, q, keys[0], keys[1], out, lse, delta, tiles, self.scale
            )
        self.tensors[op.writes[0]], self.tensors[op.writes[1]] = dq, (dk, dv)

    def _query_rows(self, op: Compute) -> tuple[Any, ...]:
        """Return q, dout, out, lse and delta of the queries that a kernel call computes."""
        if len(op.reads) == 2:
            assert self._message is not None
            return self._message.unpack(self.tensors[op.reads[0]])
        q, dout, out = (part_of_heads(self.tensors[n], op.piece, 2) for n in op.reads[:3])
        return q, dout, out, self.tensors[op.reads[3]], self.tensors.get(buffers.DELTA)

    def _compute_columns(self, op: ComputeColumns) -> None:
        assert self.columns is not None
        tensors = self.tensors
        if len(op.writes) == 1:
            total = tensors.setdefault(buffers.TOTAL, RunningAttention(tensors[buffers.Q]))
            with self.transport.span(COLUMNS):
                partial = self.kernel.forward_columns(
                    tensors[buffers.Q],
                    tensors[buffers.COLUMNS],
                    self.columns,
                    self.scale,
                    total.partial(),
                )
                total.replace_partial(*partial)
            return
        rows = (
            tensors[buffers.DOUT],
            tensors[buffers.Q],
            tensors[buffers.COLUMNS],
            tensors[buffers.LSE],
            tensors[buffers.DELTA],
        )
        with self.transport.span(COLUMNS):
            made = self.kernel.backward_columns(*rows, self.columns, self.scale)
        tensors[op.writes[0]], tensors[op.writes[1]] = made

    def _add_columns(self, op: AddColumns) -> None:
        assert self.columns is not None
        gradient = self.tensors[op.writes[0]]
        with self.transport.span(COLUMNS):
            self.columns.add_gradients(gradient[0], gradient[1], self.tensors[op.reads[0]])

    def _merge(self, op: Merge) -> None:
        if len(op.writes) == 1:
            if op.reads[0] in self.tensors:
                empty = RunningAttention(self.tensors[buffers.Q])
                total = self.tensors.setdefault(op.writes[0], empty)
                with self.transport.span(MERGE):
                    total.add(*self.tensors[op.reads[0]])
            return
        if op.reads[0] not in self.tensors:
            for name in op.begins:
                self.tensors[name].zero_()
            return
        dq, keys = (self.tensors[name] for name in op.reads)
        sums, key_sums = (self.tensors[name] for name in op.writes)
        begins, keys_begin = (name in op.begins for name in op.writes)
        with self.transport.span(MERGE):
            _add(sums, dq, begins)
            _add(key_sums[0], keys[0], keys_begin)
            _add(key_sums[1], keys[1], keys_begin)

    def _reduce(self, op: Reduce) -> None:
        total, arrived = self.tensors[op.writes[0]], self.tensors[op.reads[0]]
        if op.cast is None:
            total += arrived
        else:
            self.cast_rows.add_returned(op.cast, total, arrived)

    def _arrange(self, op: Arrange) -> None:
        with self._arrange_span(op):
            made = _ARRANGE[op.what](self, op)
        for name, tensor in zip(op.writes, made, strict=True):
            self.tensors[name] = tensor

    def _arrange_span(self, op: Arrange) -> AbstractContextManager[None]:
        # FROM_HEADS only makes views. ADD_HEADS copies them; a profile shows that time as a gap.
        timed = op.timed and op.what != arrangements.FROM_HEADS
        return self.transport.span(ARRANGE) if timed else nullcontext()

    def _read(self, op: Operation) -> list[Any]:
        return [self.tensors[name] for name in op.reads]

    # One method per `Arrange.what`. Each returns the tensors that the operation writes.

    def _pack(self, op: Arrange) -> Sequence[Any]:
        return (torch.stack(self._read(op)),)

    def _pick(self, op: Arrange) -> Sequence[Any]:
        assert self.columns is not None
        (packed,) = self._read(op)
        return (self.columns.pack(packed[0], packed[1]),)

    def _delta(self, op: Arrange) -> Sequence[Any]:
        q, dout, out = self._read(op)
        made = [row_delta(out, dout)] if buffers.DELTA in op.writes else []
        if buffers.DQ_SUM in op.writes:
            made.append(torch.zeros(q.shape, dtype=self._high, device=q.device))
        return made

    def _make_message(self, op: Arrange) -> Sequence[Any]:
        q, dout, out, lse, *delta = self._read(op)
        rows = q, dout, out, lse, delta[0] if delta else None
        self._message, packed = QueryMessage.pack(rows, needs_out=self.kernel.needs_out)
        return (packed,)

    def _zero(self, op: Arrange) -> Sequence[Any]:
        (kept,) = self._read(op)
        return (self.buffers.take_like(kept, self._high).zero_(),)

    def _take_sum(self, op: Arrange) -> Sequence[Any]:
        q = self.tensors[buffers.Q]
        shape = q.shape if op.writes[0].kind is Kind.DQUERIES else self._keys_shape
        assert shape is not None
        return (self.buffers.take(shape, self._high, q.device),)

    def _result(self, op: Arrange) -> Sequence[Any]:
        q, total = self.tensors[op.reads[0]], self.tensors.get(op.reads[1])
        result = (total or RunningAttention(part_of_heads(q, op.piece, 2))).result()
        return result if len(op.writes) == 2 else (result,)

    def _gradients(self, op: Arrange) -> Sequence[Any]:
        q, dq, keys = self._read(op)
        dk, dv = keys.to(q.dtype, copy=True)
        return dq.to(q.dtype), dk, dv

    def _take(self, op: Arrange) -> Sequence[Any]:
        (packed,) = self._read(op)
        return ([part_of_heads(packed[i], op.piece, 2).contiguous() for i in (0, 1)],)

    def _order(self, op: Arrange) -> Sequence[Any]:
        shards = self.tensors.pop(op.reads[0])
        if op.among:
            # [ranks of the node, nodes, ...] -> [ranks in order, ...]
            shards = shards.transpose(0, 1).flatten(0, 1)
        return ([self.tiles.placement.inside.to_sequence(shards[:, i]) for i in (0, 1)],)

    def _merge_rows(self, op: Arrange) -> Sequence[Any]:
        arrived, own = self._read(op), None
        if op.stage is None:
            own = part_of_heads(arrived.pop(0), op.piece, 3)
        return (self.cast_rows.merged(own, arrived, op.stage),)

    def _zero_rows(self, op: Arrange) -> Sequence[Any]:
        (own,) = self._read(op)
        return (self.cast_rows.zeros(part_of_heads(own, op.piece, 3), self._high),)

    def _split_rows(self, op: Arrange) -> Sequence[Any]:
        # A step without pairs has no gradients.
        made, rows = self.tensors.get(op.reads[0]), self.tensors.get(op.writes[0])
        if made is not None:
            dk, dv = made
            rows = self.cast_rows.split(dk, dv, self._high, rows, op.stage)
        return (rows,)

    def _own_rows(self, op: Arrange) -> Sequence[Any]:
        total, of_own = self.tensors[op.reads[0]], self.tensors.get(op.reads[-1])
        own = total[: self.cast_rows.own].permute(1, 2, 0, 3, 4).contiguous()
        if len(op.reads) == 2 and of_own is not None:
            own[0] += of_own[0]
            own[1] += of_own[1]
        return (own,)

    def _add_dq(self, op: Arrange) -> Sequence[Any]:
        q, parts = (
            self.tensors[buffers.Q],
            [self.tensors[n] for n in op.reads[1:] if n in self.tensors],
        )
        if not parts:
            return (torch.zeros_like(part_of_heads(q, op.piece, 2)).contiguous(),)
        total = parts[0].to(self._high)
        for part in parts[1:]:
            total += part
        return (total.to(q.dtype),)

    def _cut(self, op: Arrange) -> Sequence[Any]:
        (lse,) = self._read(op)
        # With more than one sequence a part of the heads is not contiguous.
        return (part_of_heads(lse, op.piece, 1).contiguous(),)

    def _place(self, op: Arrange) -> Sequence[Any]:
        q, packed, dq, keys = self._read(op)
        alone = op.piece[1] == 1
        whole = self.tensors.get(buffers.DQ, dq if alone else None)
        whole = torch.empty_like(q) if whole is None else whole
        whole_keys = self.tensors.get(buffers.DKV_OF_PARTS)
        whole_keys = torch.empty_like(packed) if whole_keys is None else whole_keys
        if not alone:
            part_of_heads(whole, op.piece, 2).copy_(dq)
        for target, part in zip(part_of_heads(whole_keys, op.piece, 3), keys, strict=True):
            target.copy_(part)
        return whole, whole_keys

    def _shards(self, op: Arrange) -> Sequence[Any]:
        ((dk, dv),) = self._read(op)
        layout = self.tiles.placement.inside
        shape = (layout.workers, 2, dk.shape[0], layout.tokens_per_worker, *dk.shape[2:])
        shards = torch.empty(shape, dtype=self._high, device=dk.device)
        layout.copy_to_shards(dk, shards[:, 0])
        layout.copy_to_shards(dv, shards[:, 1])
        if op.among:
            # [ranks in order, ...] -> [ranks of the node, nodes, ...]
            shards = contiguous(shards.unflatten(0, (-1, op.among)).transpose(0, 1))
        return (shards,)

    def _own(self, op: Arrange) -> Sequence[Any]:
        packed, n = self.tensors[op.reads[0]], len(op.reads) - 1
        if n == 1:
            whole = self.tensors[op.reads[1]].to(packed.dtype)
            return whole[0], whole[1]
        whole = torch.empty_like(packed)
        for i, name in enumerate(op.reads[1:]):
            # Free each part after it is copied.
            part_of_heads(whole, (i, n), 3).copy_(self.tensors.pop(name))
        return whole[0], whole[1]

    def _join(self, op: Arrange) -> Sequence[Any]:
        return (head_parts.concatenate(self._read(op), 2),)

    def _join_out(self, op: Arrange) -> Sequence[Any]:
        outs, lses = zip(*self._read(op), strict=True)
        return head_parts.concatenate(outs, 2), head_parts.concatenate(lses, 1)

    def _to_heads(self, op: Arrange) -> Sequence[Any]:
        """Return the heads for each rank: [ranks, batch, tokens, heads per rank, head_dim]."""
        parts = [head_parts.split_heads(t, self.program.sharing) for t in self._read(op)]
        self._widths = [part.shape[3] for part in parts]
        return (torch.cat(parts, 3),)

    def _from_tokens(self, op: Arrange) -> Sequence[Any]:
        """Sort the received tokens: [batch, tokens of all ranks, heads per rank, head_dim]."""
        (arrived,) = self._read(op)
        order, _ = self.tiles.placement.token_order(self.exchange.own.number, arrived.device)
        whole = arrived.transpose(0, 1).flatten(1, 2).index_select(1, order)
        return [t.contiguous() for t in whole.split(self._widths, 2)]

    def _to_tokens(self, op: Arrange) -> Sequence[Any]:
        """Return the tokens for each rank: [ranks, batch, tokens, heads per rank, head_dim]."""
        parts = self._read(op)
        self._widths = [part.shape[2] for part in parts]
        _, back = self.tiles.placement.token_order(self.exchange.own.number, parts[0].device)
        together = torch.cat(parts, 2).index_select(1, back)
        return (together.unflatten(1, (self.program.sharing, -1)).transpose(0, 1).contiguous(),)

    def _from_heads(self, op: Arrange) -> Sequence[Any]:
        """View the received heads as [batch, tokens, ranks, heads per rank, head_dim]."""
        (arrived,) = self._read(op)
        return arrived.permute(1, 2, 0, 3, 4).split(self._widths, 3)

    def _add_heads(self, op: Arrange) -> Sequence[Any]:
        rows, *keys = self._read(op)
        kv_heads = self.exchange.kv_heads
        return rows.flatten(2, 3), *(head_parts.sum_repeated_heads(t, kv_heads) for t in keys)


def _add(total: torch.Tensor, part: torch.Tensor, begins: bool) -> None:
    if begins:
        total.copy_(part)
    else:
        total += part


_RUN: dict[type[Operation], Callable[[Executor, Any], None]] = {
    Begin: Executor._begin,
    Wait: Executor._wait,
    Post: Executor._post,
    Compute: Executor._compute,
    ComputeColumns: Executor._compute_columns,
    AddColumns: Executor._add_columns,
    Merge: Executor._merge,
    Reduce: Executor._reduce,
    Arrange: Executor._arrange,
}
_ARRANGE: dict[str, Callable[[Executor, Arrange], Sequence[Any]]] = {
    arrangements.PACK: Executor._pack,
    arrangements.PICK: Executor._pick,
    arrangements.DELTA: Executor._delta,
    arrangements.MESSAGE: Executor._make_message,
    arrangements.ZERO: Executor._zero,
    arrangements.TAKE_SUM: Executor._take_sum,
    arrangements.RESULT: Executor._result,
    arrangements.GRADIENTS: Executor._gradients,
    arrangements.TAKE: Executor._take,
    arrangements.ORDER: Executor._order,
    arrangements.CUT: Executor._cut,
    arrangements.PLACE: Executor._place,
    arrangements.SHARDS: Executor._shards,
    arrangements.MERGE_ROWS: Executor._merge_rows,
    arrangements.SPLIT_ROWS: Executor._split_rows,
    arrangements.ZERO_ROWS: Executor._zero_rows,
    arrangements.OWN_ROWS: Executor._own_rows,
    arrangements.ADD_DQ: Executor._add_dq,
    arrangements.OWN: Executor._own,
    arrangements.JOIN: Executor._join,
    arrangements.JOIN_OUT: Executor._join_out,
    arrangements.TO_HEADS: Executor._to_heads,
    arrangements.FROM_TOKENS: Executor._from_tokens,
    arrangements.TO_TOKENS: Executor._to_tokens,
    arrangements.FROM_HEADS: Executor._from_heads,
    arrangements.ADD_HEADS: Executor._add_heads,
}
